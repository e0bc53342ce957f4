"""FP8 in blocks of 128 x 128 (DeepSeek, Qwen3-FP8). Despite its name, ``weight_scale_inv`` multiplies."""

from reprlib import repr

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.convention import DATA, INPUT, SCALE, Config, Convention, Modules
from nvfp4_cute.models.checkpoints.stored import Scheme

SUFFIXES = {"weight": DATA, "weight_scale_inv": SCALE, "input_scale": INPUT}
BLOCK = [128, 128]


def convention(quantization: Config) -> Convention:
    """Returns the convention of a checkpoint whose ``quant_method`` is fp8.

    Raises:
        CheckpointError: blocks have another size, or activations are scaled by stored numbers.
    """
    block, activations = (
        quantization.get("weight_block_size"),
        quantization.get("activation_scheme", "dynamic"),
    )
    if block not in (BLOCK, tuple(BLOCK)):
        raise CheckpointError(f"weight_block_size is {repr(block)}; this reader takes {BLOCK}: export it so")
    if activations != "dynamic":
        raise CheckpointError(
            f"activation_scheme is {repr(activations)}; blocks go with 'dynamic' (a scale for 128 values)"
        )
    lists = ("modules_to_not_convert", "ignored_layers")
    excluded = [Modules(quantization.get(key) or ()) for key in lists]
    found = Scheme("fp8", "fp8_128x128", "fp8_1x128")

    def scheme(prefix: str) -> Scheme | None:
        return None if any(prefix in modules for modules in excluded) else found

    return Convention("fp8", SUFFIXES, {}, False, (found,), scheme)

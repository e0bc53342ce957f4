"""Checkpoints of AutoGPTQ and GPTQModel: int4 weights with one zero point per block."""

from functools import partial
from reprlib import repr

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.convention import DATA, ORDER, SCALE, ZERO, Config, Convention, flag_of
from nvfp4_cute.models.checkpoints.int4 import of_gptq
from nvfp4_cute.models.checkpoints.stored import INT4, Scheme

SUFFIXES = {"qweight": DATA, "scales": SCALE, "qzeros": ZERO, "g_idx": ORDER}
LAYOUTS = ("gptq", "gptq_v2")


def convention(quantization: Config) -> Convention:
    """Returns the convention of a checkpoint whose ``quant_method`` is gptq.

    Raises:
        CheckpointError: the weights do not have 4 bits, the layout is another one, or settings differ per module.
    """
    layout = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    for name, value, known in (
        ("bits", quantization.get("bits"), (4,)),
        ("checkpoint_format", layout, LAYOUTS),
    ):
        if value not in known:
            raise CheckpointError(f"{name} is {repr(value)}; this reader takes {', '.join(map(str, known))}")
    if quantization.get("dynamic"):
        raise CheckpointError(
            "dynamic has settings by module, which this reader does not follow; export the model without"
        )
    is_symmetric = flag_of(quantization, "sym", True)
    # A row that is a single block has one scale, so its order does not matter.
    has_order = flag_of(quantization, "desc_act", False) and quantization.get("group_size", -1) != -1
    found = Scheme("gptq", INT4, None, has_zero_points=not is_symmetric, has_order=has_order)
    unpack = partial(of_gptq, is_symmetric=is_symmetric, is_v2=layout == "gptq_v2")
    return Convention("gptq", SUFFIXES, {}, False, (found,), lambda prefix: found, unpack, names_layers=False)

"""gpt-oss as released: experts in MXFP4 with alternating rows of gate and up, everything else in 16 bits."""

from nvfp4_cute.models.checkpoints.convention import BIAS, DATA, SCALE, Config, Convention, Modules
from nvfp4_cute.models.checkpoints.names import expert_of
from nvfp4_cute.models.checkpoints.stored import Scheme

FUSED = {"_blocks": DATA, "_scales": SCALE, "_bias": BIAS}


def convention(quantization: Config) -> Convention:
    """Returns the convention of a checkpoint whose ``quant_method`` is mxfp4, except its ``modules_to_not_convert``."""
    excluded = Modules(quantization.get("modules_to_not_convert") or ())
    found = Scheme("mxfp4", "mxfp4", None)

    def scheme(prefix: str) -> Scheme | None:
        return None if expert_of(prefix) is None or prefix in excluded else found

    return Convention("mxfp4", {}, FUSED, False, (found,), scheme)

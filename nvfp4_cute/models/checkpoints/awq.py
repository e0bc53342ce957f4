"""Checkpoints of AutoAWQ: int4 weights with one zero point per block."""

from reprlib import repr

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.convention import DATA, SCALE, ZERO, Config, Convention, flag_of
from nvfp4_cute.models.checkpoints.int4 import of_awq
from nvfp4_cute.models.checkpoints.stored import INT4, Scheme

SUFFIXES = {"qweight": DATA, "scales": SCALE, "qzeros": ZERO}


def convention(quantization: Config) -> Convention:
    """Returns the convention of a checkpoint whose ``quant_method`` is awq.

    Raises:
        CheckpointError: the weights do not have 4 bits, or their columns are not in the order of version gemm.
    """
    # GPTQModel stores the version under "format".
    version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    bits = quantization.get("bits", 4)
    for name, value, known in (("bits", bits, 4), ("version", version, "gemm")):
        if value != known:
            raise CheckpointError(
                f"{name} is {repr(value)}; this reader takes {known!r}: export the model with {name}={known!r}"
            )
    found = Scheme("awq", INT4, None, has_zero_points=flag_of(quantization, "zero_point", True))
    return Convention("awq", SUFFIXES, {}, False, (found,), lambda prefix: found, of_awq, names_layers=False)

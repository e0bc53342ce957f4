"""The least time of a definition, and SOL-ExecBench's score, which is computed from it."""

import math
from collections.abc import Mapping

from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.problems.trace_schema import DTYPES, Definition
from nvfp4_cute.roofline.speed_of_light import Floor, Product, Traffic, Work, physical_floor

# Narrowest element of the inputs -> format whose rate applies to the products.
MATH = {"float4_e2m1": "nvfp4", "float4_e2m1fn_x2": "nvfp4", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


def floor(definition: Definition, sizes: Mapping[str, int], flops: int, target: Target) -> Floor:
    """Returns the least time of a definition.

    Every input and output moves once, and the reference's products run at the rate of the narrowest input.

    Args:
        sizes: size of every axis.
        flops: operations of the matrix products that the reference computed.
    """

    def moved(name: str, written: bool) -> Traffic:
        spec = (definition.outputs if written else definition.inputs)[name]
        return Traffic(name, math.prod(definition.shape(spec, sizes)) * DTYPES[spec.dtype].itemsize, written)

    operands = [moved(name, False) for name, spec in definition.inputs.items() if spec.shape is not None]
    operands += [moved(name, True) for name in definition.outputs]
    formats = {MATH.get(spec.dtype, "fp16") for spec in definition.inputs.values()}
    narrowest = next(name for name in ("nvfp4", "fp8", "fp16") if name in formats | {"fp16"})
    return physical_floor(Work(tuple(operands), (Product("reference", flops),), narrowest), target)


def score(us: float, base_us: float, sol_us: float) -> float:
    """Computes S = 1 / (1 + (t - t_SOL) / (t_base - t_SOL)): 1 at the speed of light, 0.5 at the baseline.

    arXiv 2603.19173, sol_score.py of NVIDIA/SOL-ExecBench. If the baseline is not slower than the speed of light, the
    score is 1 for a time that is not slower either, and 0 otherwise.
    """
    if base_us <= sol_us:
        return 1.0 if us <= sol_us else 0.0
    return 1 / (1 + (us - sol_us) / (base_us - sol_us))

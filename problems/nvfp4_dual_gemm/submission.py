"""The entry point as a competition server calls it: what `nvfp4-cute export nvfp4_dual_gemm` puts into one file."""

import torch

from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.grouped_submission import GroupTensors, Sizes, frozen_configs, launch
from nvfp4_cute.problems.submission_parts import sendable_errors

from .spec import BENCHMARKS

# The size -> config, for the shapes that are timed, where the export freezes what `select` chooses; every other shape
# takes one of them, the default.
CONFIGS: dict[Sizes, KernelConfig] = {}
DEFAULT_CONFIG = sm100.DEFAULT_CONFIG
# Of the operands where they are not NVFP4, as in an export for others.
FORMATS: Formats | None = None
ACTIVATION = "silu"


def frozen_constants(config: KernelConfig | None = None, formats: Formats = NVFP4_PAIR) -> dict[str, str]:
    """What an export writes in the place of constants: name to Python expression. ``config``: for every shape."""
    sizes = [((case.m, case.n, case.k),) for case in BENCHMARKS]
    problems = (GroupedProblem(size, out_dtype=torch.float16, activation=ACTIVATION) for size in sizes)
    return frozen_configs(problems, config, formats)


@sendable_errors
def custom_kernel(data):
    """Compute C = silu(A @ B1^T) * (A @ B2^T) into the C that the input carries.

    Args:
        data: (a, b1, b2, scales of the three, permuted scales of the three, c): A [M, K/2, 1], B1 and B2 [N, K/2, 1]
            float4_e2m1fn_x2; the permuted scales float8_e4m3fn [32, 4, rm, 4, rk, 1], a view of contiguous
            [1, rm, rk, 32, 4, 4], whose memory is used as it lies; C [M, N, 1] float16.

    Returns:
        C.
    """
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = data
    launch([GroupTensors(a, b1, sfa, sfb1, c, b2, sfb2)], CONFIGS, DEFAULT_CONFIG, ACTIVATION, FORMATS)
    return c

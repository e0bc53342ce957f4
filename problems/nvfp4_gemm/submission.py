"""The entry point that a competition server calls, which `nvfp4-cute export nvfp4_gemm` writes into one file."""

import torch

from nvfp4_cute.formats.block_format import NVFP4_PAIR, Formats
from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.grouped_submission import GroupTensors, Sizes, frozen_configs, launch
from nvfp4_cute.problems.submission_parts import sendable_errors

from .spec import BENCHMARKS

# The size -> config, for the timed shapes, where the export stores the choice of `select`. Other shapes use the default, which
# is one of them.
CONFIGS: dict[Sizes, KernelConfig] = {}
DEFAULT_CONFIG = sm100.DEFAULT_CONFIG
# Formats of the operands in exports for formats other than NVFP4.
FORMATS: Formats | None = None


def frozen_constants(config: KernelConfig | None = None, formats: Formats = NVFP4_PAIR) -> dict[str, str]:
    """Returns an export's values of constants: name -> Python expression. ``config``: for every shape."""
    sizes = [((case.m, case.n, case.k),) for case in BENCHMARKS]
    problems = (GroupedProblem(size, out_dtype=torch.float16) for size in sizes)
    return frozen_configs(problems, config, formats)


@sendable_errors
def custom_kernel(data):
    """Computes C = A @ B^T into the C in the input.

    Args:
        data: (a, b, scales of both, permuted scales of both, c): A [M, K/2, 1] and B [N, K/2, 1] float4_e2m1fn_x2; the permuted
            scales float8_e4m3fn [32, 4, rm, 4, rk, 1], a view of contiguous [1, rm, rk, 32, 4, 4], whose memory is used in
            place; C [M, N, 1] float16.

    Returns:
        C.
    """
    a, b, _, _, sfa, sfb, c = data
    launch([GroupTensors(a, b, sfa, sfb, c)], CONFIGS, DEFAULT_CONFIG, formats=FORMATS)
    return c

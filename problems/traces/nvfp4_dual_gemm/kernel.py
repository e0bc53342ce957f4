"""The solution in one file: the grouped GEMM kernel with one group and two B."""

import torch

from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.grouped_submission import GroupTensors, Sizes, frozen_configs, launch
from nvfp4_cute.problems.submission_parts import permuted_scale

# The size -> config, where the export stores the choice of `select` for the workloads. Other sizes use the default.
CONFIGS: dict[Sizes, KernelConfig] = {}
DEFAULT_CONFIG = sm100.DEFAULT_CONFIG
ACTIVATION = "silu"


def frozen_constants(workloads) -> dict[str, str]:
    """Returns an export's values of constants. `workloads`: every axis of each."""
    sizes = [((axes["M"], axes["N"], axes["K"]),) for axes in workloads]
    return frozen_configs(
        GroupedProblem(size, out_dtype=torch.float16, activation=ACTIVATION) for size in sizes
    )


def run(a, b1, b2, a_scale, b1_scale, b2_scale, c):
    """Writes C [M, N] float16."""
    scales = [permuted_scale(scale) for scale in (a_scale, b1_scale, b2_scale)]
    group = GroupTensors(a, b1, scales[0], scales[1], c, b2, scales[2])
    launch([group], CONFIGS, DEFAULT_CONFIG, ACTIVATION)

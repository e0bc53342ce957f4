"""The solution in one file: the grouped GEMM kernel with two groups."""

import torch

from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.grouped_submission import GroupTensors, Sizes, frozen_configs, launch
from nvfp4_cute.problems.submission_parts import permuted_scale

# Sizes of both groups -> config, where the export stores the choice of `select` for the workloads. Others use the default.
CONFIGS: dict[Sizes, KernelConfig] = {}
DEFAULT_CONFIG = sm100.DEFAULT_CONFIG


def frozen_constants(workloads) -> dict[str, str]:
    """Returns an export's values of constants. `workloads`: every axis of each."""
    sizes = [tuple((axes[m], axes["N"], axes["K"]) for m in ("M_0", "M_1")) for axes in workloads]
    return frozen_configs(GroupedProblem(size, out_dtype=torch.float16) for size in sizes)


def run(a_0, a_1, b_0, b_1, a_scale_0, a_scale_1, b_scale_0, b_scale_1, c_0, c_1):
    """Writes C [M_g, N] float16 of both groups."""
    groups = [
        GroupTensors(a_0, b_0, permuted_scale(a_scale_0), permuted_scale(b_scale_0), c_0),
        GroupTensors(a_1, b_1, permuted_scale(a_scale_1), permuted_scale(b_scale_1), c_1),
    ]
    launch(groups, CONFIGS, DEFAULT_CONFIG)

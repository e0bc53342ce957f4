"""speed_of_light: the formula gives every published time."""

import pytest
import torch

from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.nvfp4_group_gemm import spec
from nvfp4_cute.speed_of_light import (
    COMPETITION_FP4_FLOPS_PER_S,
    COMPETITION_HBM_BYTES_PER_S,
    competition_us,
    dual_gemm_us,
    gemm_us,
    gemv_us,
    grouped_gemm_us,
)

GEMM_TOLERANCE, GEMV_TOLERANCE = 5e-4, 4e-3

PUBLISHED = [
    *((grouped_gemm_us, (case.sizes,), case.sol_us, GEMM_TOLERANCE) for case in spec.BENCHMARKS),
    (gemm_us, (128, 7168, 16384), 8.994, GEMM_TOLERANCE),
    (gemm_us, (128, 4096, 7168), 2.354, GEMM_TOLERANCE),
    (gemm_us, (128, 7168, 2048), 1.333, GEMM_TOLERANCE),
    (dual_gemm_us, (256, 4096, 7168), 4.708, GEMM_TOLERANCE),
    (dual_gemm_us, (512, 4096, 7168), 8.714, GEMM_TOLERANCE),
    (dual_gemm_us, (256, 3072, 4096), 2.125, GEMM_TOLERANCE),
    (dual_gemm_us, (512, 3072, 7168), 6.535, GEMM_TOLERANCE),
    (gemv_us, (7168, 16384, 1), 8.622, GEMV_TOLERANCE),
    (gemv_us, (4096, 7168, 8), 17.275, GEMV_TOLERANCE),
    (gemv_us, (7168, 2048, 4), 4.317, GEMV_TOLERANCE),
]


def test_all_published_rows_are_here():
    assert len(PUBLISHED) == 14


@pytest.mark.parametrize("function, shape, published_us, tolerance", PUBLISHED)
def test_published_time(function, shape, published_us, tolerance):
    assert function(*shape) == pytest.approx(published_us, rel=tolerance)


def test_the_longer_of_memory_and_math_counts():
    assert competition_us(int(COMPETITION_HBM_BYTES_PER_S), 0) == 1e6
    assert competition_us(1, int(COMPETITION_FP4_FLOPS_PER_S)) == 1e6


def test_dual_gemm_with_many_rows_is_bound_by_math():
    assert dual_gemm_us(512, 4096, 7168) == competition_us(0, 4 * 512 * 4096 * 7168)


def test_a_batch_is_as_many_groups():
    assert gemm_us(128, 256, 512, l=3) == grouped_gemm_us([(128, 256, 512)] * 3)
    problem = GroupedProblem(((128, 256, 512),) * 3, out_dtype=torch.float16)
    assert gemm_us(128, 256, 512, l=3) == competition_us(problem.bytes, problem.flops)

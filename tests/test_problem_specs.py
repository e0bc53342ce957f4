"""problems/: the specifications of three competition problems, side by side."""

import pytest

from nvfp4_cute.problems.nvfp4_dual_gemm import spec as dual_gemm
from nvfp4_cute.problems.nvfp4_gemm import spec as gemm
from nvfp4_cute.problems.nvfp4_gemv import spec as gemv

SPECS = {"nvfp4_gemv": gemv, "nvfp4_gemm": gemm, "nvfp4_dual_gemm": dual_gemm}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@EACH
def test_counts_seeds_tolerances(spec):
    assert (len(spec.TESTS), len(spec.BENCHMARKS)) == (10, 4 if spec is dual_gemm else 3)
    assert {case.seed for case in spec.TESTS + spec.BENCHMARKS} == {1111}
    assert spec.RTOL == spec.ATOL == 1e-3
    assert all(case.sol_us is None for case in spec.TESTS)
    assert all(case.sol_us > 1 for case in spec.BENCHMARKS)


@EACH
def test_repeated_shapes_are_those_of_the_official_lists(spec):
    names = [case.name for case in spec.TESTS]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == {gemv: {"m256_k7168_l1"}, gemm: set(), dual_gemm: {"m1536_n512_k7168"}}[spec]
    assert len({case.name for case in spec.BENCHMARKS}) == len(spec.BENCHMARKS)


def test_sizes_are_legal():
    for case in gemv.TESTS + gemv.BENCHMARKS:
        assert case.m % 128 == 0 and case.k % 64 == 0 and case.l >= 1
    for case in gemm.TESTS + gemm.BENCHMARKS + dual_gemm.TESTS + dual_gemm.BENCHMARKS:
        assert case.m % 128 == case.n % 128 == case.k % 256 == 0


@pytest.mark.parametrize(
    "spec, gflop",
    [
        (gemv, (0.2349, 0.4698, 0.1174)),
        (gemm, (30.06, 7.52, 3.76)),
        (dual_gemm, (30.06, 60.13, 12.88, 45.10)),
    ],
    ids=SPECS,
)
def test_benchmark_totals(spec, gflop):
    """Operations of every case, computed apart from the speed of light."""
    for case, expected in zip(spec.BENCHMARKS, gflop, strict=True):
        columns = 1 if spec is gemv else case.n * (2 if spec is dual_gemm else 1)
        batch = case.l if spec is gemv else 1
        assert 2 * case.m * columns * case.k * batch / 1e9 == pytest.approx(expected, rel=3e-3)


def test_vectors_arrive_padded_to_a_scale_atom():
    assert gemv.PADDED_N == 128

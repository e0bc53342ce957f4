"""problems/: specifications, inputs, references of gemv, gemm and dual_gemm, and properties of all problems."""

import dataclasses

import pytest
import torch

from nvfp4_cute.formats.codecs import decode_e4m3, decode_packed_e2m1
from nvfp4_cute.problems import registry
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
    """Operations of every case, computed independently of the speed of light."""
    for case, expected in zip(spec.BENCHMARKS, gflop, strict=True):
        columns = 1 if spec is gemv else case.n * (2 if spec is dual_gemm else 1)
        batch = case.l if spec is gemv else 1
        assert 2 * case.m * columns * case.k * batch / 1e9 == pytest.approx(expected, rel=3e-3)


def test_vectors_arrive_padded_to_a_scale_atom():
    assert gemv.PADDED_N == 128


# ---- inputs and references ---------------------------------------------------------------------------------------

SMALL = {
    "nvfp4_gemv": gemv.GemvCase(128, 192, 3),
    "nvfp4_gemm": gemm.GemmCase(128, 256, 256),
    "nvfp4_dual_gemm": dual_gemm.DualGemmCase(128, 128, 256),
}
SMALL_CASES = pytest.mark.parametrize("name", SMALL)


def dense(values, scale, l):
    """float64 [rows, K] from packed values and row-major scales."""
    scales = decode_e4m3(scale[:, :, l]).double().repeat_interleave(16, 1)
    return decode_packed_e2m1(values[:, :, l]).double() * scales


@SMALL_CASES
def test_reference_from_row_major_scales(name):
    """The references read the permuted scales, so this also compares both layouts."""
    problem = registry.load(name)
    data = problem.make_inputs(SMALL[name])
    got = problem.reference(data)
    count = 3 if name == "nvfp4_dual_gemm" else 2
    a, *b = [[dense(data[i], data[count + i], l) for l in range(got.shape[2])] for i in range(count)]
    products = [torch.stack([x @ y.T for x, y in zip(a, side, strict=True)], -1).float() for side in b]
    if name == "nvfp4_dual_gemm":
        want = torch.nn.functional.silu(products[0]) * products[1]
    else:
        want = products[0][:, :1] if name == "nvfp4_gemv" else products[0]
    assert got.shape == problem.output(data)[0].shape
    assert torch.equal(got, want.half())
    assert problem.check(got, problem.reference(data)) == (True, "")
    assert not problem.check(got + 1, got)[0]


@SMALL_CASES
def test_input_layouts(name):
    case, problem = SMALL[name], registry.load(name)
    data = problem.make_inputs(case)
    count = 3 if name == "nvfp4_dual_gemm" else 2
    for values, plain, permuted in zip(data[:count], data[count:], data[2 * count :], strict=False):
        rows, k_bytes, l = values.shape
        rm, rk = -(-rows // 128), -(-k_bytes // 32)
        assert values.stride() == (k_bytes, 1, rows * k_bytes) and values.dtype == torch.float4_e2m1fn_x2
        assert plain.shape == (rows, k_bytes // 8, l)
        assert permuted.shape == (32, 4, rm, 4, rk, l)
        assert permuted.stride() == (16, 4, 512 * rk, 1, 512, 512 * rk * rm)
    assert data[-1].dtype == torch.float16


def test_value_ranges_of_gemv():
    data = registry.load("nvfp4_gemv").make_inputs(SMALL["nvfp4_gemv"])
    a = decode_packed_e2m1(data[0][:, :, 0])
    assert set(a[:, 0::2].flatten().tolist()) == {0, 0.5, 1, 1.5} and not a[:, 1::2].any()


# ---- properties of all problems --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
def test_arguments_name_a_case(name):
    problem = registry.load(name)
    for case in problem.tests + problem.benchmarks:
        again = problem.case_type.from_arguments(**case.arguments)
        assert dataclasses.replace(again, sol_us=case.sol_us) == case


def test_every_folder_is_a_problem():
    assert set(registry.names()) == {*SPECS, "nvfp4_group_gemm"}
    with pytest.raises(ValueError, match="nvfp4_gemmm.*unknown"):
        registry.load("nvfp4_gemmm")

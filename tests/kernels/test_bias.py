"""The launch of the product adds a bias once, in float32, after alpha and before the rounding. Every bit is the reference's."""

import flat_parts as parts
import pytest
import torch
from int8_check import some as some_int8
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ALPHA = 0.3
K = 256


def some(rows, k=K, format=nv.NVFP4, lead=()):
    """An operand with sums of products that float32 represents exactly."""
    generator = torch.Generator().manual_seed(rows + k)
    values = torch.randint(-2, 3, (*lead, rows, k), generator=generator).bfloat16()
    if format == nv.INT8:
        return some_int8(rows, k)
    made = nv.quantize(values, format=format)
    if format in FP8_PAIR:
        made.data.view(torch.float8_e4m3fn).copy_(values)
        made.scale.fill_(0.5)
    return made


def some_bias(n, dtype=BF16):
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def named(name):
    return KernelConfig.from_name(name)


NVFP4_PAIR, INT8_PAIR, FP8_PAIR = (nv.NVFP4, nv.NVFP4), (nv.INT8, nv.INT8), (nv.FP8_1x128, nv.FP8_128x128)
# Architecture, config, formats, rows, columns, dtypes of results and of the bias.
CASES = [
    ("sm_100a", named("t128x64x256_s0a2_swap_p2"), NVFP4_PAIR, 40, 136, BF16, BF16),
    # Output columns along the MMA's N side, slices of each accumulator two at a time; fp32 stores; a pair.
    ("sm_100a", named("t128x128x256_s0a2_p3"), NVFP4_PAIR, 150, 300, F16, F32),
    ("sm_100a", named("t128x256x256_s0a2_p2"), NVFP4_PAIR, 150, 300, F32, BF16),
    ("sm_100a", named("t128x64x256_s0a2_2cta_swap_p4"), NVFP4_PAIR, 70, 300, BF16, F16),
    ("sm_100a", named("t128x64x256_s0a2_k2"), NVFP4_PAIR, 40, 136, BF16, F32),
    ("sm_100a", None, NVFP4_PAIR, 40, 160, "nvfp4", F32),
    ("sm_100a", named("t128x128x256_s0a2"), NVFP4_PAIR, 140, 160, "nvfp4", BF16),
    ("sm_100a", None, FP8_PAIR, 40, 256, BF16, F32),
    ("sm_100a", None, FP8_PAIR, 150, 256, F32, BF16),
    ("sm_100a", None, INT8_PAIR, 40, 200, F16, BF16),
    ("sm_100a", None, INT8_PAIR, 150, 200, F32, F32),
    ("sm_120a", None, NVFP4_PAIR, 40, 136, BF16, BF16),
    ("sm_120a", None, NVFP4_PAIR, 150, 301, F32, F16),
    ("sm_120a", None, NVFP4_PAIR, 40, 160, "nvfp4", F32),
    ("sm_120a", None, FP8_PAIR, 40, 256, BF16, F32),
    ("sm_120a", None, INT8_PAIR, 40, 200, BF16, F32),
    ("sm_90a", named("t128x64x128_s0a1_swap"), NVFP4_PAIR, 40, 137, BF16, BF16),
    ("sm_90a", named("t128x16x128_s0a1_swap_k2"), NVFP4_PAIR, 20, 300, F32, F16),
    ("sm_90a", named("t128x256x128_s0a1_swap_pre_sk"), NVFP4_PAIR, 300, 600, F16, F32),
    ("sm_90a", None, NVFP4_PAIR, 40, 160, "nvfp4", F32),
    ("sm_90a", None, FP8_PAIR, 40, 256, BF16, F32),
    ("sm_90a", named("t128x128x128_s0a1_p2"), FP8_PAIR, 150, 300, BF16, F32),
    ("sm_90a", None, INT8_PAIR, 40, 201, F16, BF16),
    # Kernels of few rows, and of one row.
    ("sm_90a", None, NVFP4_PAIR, 1, 137, BF16, BF16),
    ("sm_90a", None, NVFP4_PAIR, 3, 137, F32, F16),
    # 16-bit rows: the kernel for CUDA cores, and sm_90a tiles.
    ("sm_90a", None, (None, nv.NVFP4), 3, 137, BF16, F32),
    ("sm_90a", None, (None, nv.INT8), 12, 137, F32, BF16),
    ("sm_90a", None, (None, nv.NVFP4), 80, 200, BF16, BF16),
    ("sm_120a", None, (None, nv.FP8_128x128), 3, 256, F16, F16),
]  # fmt: skip


def label(value):
    """Part of a test name for a case."""
    if isinstance(value, KernelConfig):
        return value.to_name()
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def operands(formats, m, n):
    a_format, b_format = formats
    left = some(m).dequantize(BF16) if a_format is None else some(m, format=a_format)
    return left, some(n, format=b_format)


def check(arch, config, formats, m, n, out_dtype, bias_dtype):
    """Checks two biases with one compiled kernel, which does not depend on the bias."""
    a, b = operands(formats, m, n)
    for sign in (1, -1):
        options = {"alpha": ALPHA, "bias": sign * some_bias(n, bias_dtype), "out_dtype": out_dtype}
        with observe(check=True):
            got = parts.gemm(a, b, config=config, backend=f"emulator:{arch}", **options)
        want = parts.gemm(a, b, **options)
        if out_dtype == "nvfp4":
            assert torch.equal(got.data, want.data)
            got, want = got.dequantize(), want.dequantize()
        assert_bitwise_equal(got, want)


def cases_of(arch, *, first_are_fast=False):
    """A mark with the arguments of ``check`` for an architecture. ``first_are_fast``: all but the first of each pair are slow."""
    cases, names = [], ("arch", "config", "formats", "m", "n", "out_dtype", "bias_dtype")
    for case in (case for case in CASES if case[0] == arch):
        is_slow = first_are_fast and any(other.values[2] == case[2] for other in cases)
        cases.append(pytest.param(*case, marks=pytest.mark.slow if is_slow else ()))
    return pytest.mark.parametrize(names, cases, ids=label)


@cases_of("sm_100a", first_are_fast=True)
def test_bits_on_sm100(arch, config, formats, m, n, out_dtype, bias_dtype):
    check(arch, config, formats, m, n, out_dtype, bias_dtype)


@cases_of("sm_120a", first_are_fast=True)
def test_bits_on_sm120(arch, config, formats, m, n, out_dtype, bias_dtype):
    check(arch, config, formats, m, n, out_dtype, bias_dtype)


@pytest.mark.sampled(1)
@cases_of("sm_90a")
def test_bits_on_sm90(arch, config, formats, m, n, out_dtype, bias_dtype):
    check(arch, config, formats, m, n, out_dtype, bias_dtype)


@pytest.mark.gpu("sm_90a")
@cases_of("sm_90a")
def test_bits_on_the_gpu(arch, config, formats, m, n, out_dtype, bias_dtype):
    a, b = operands(formats, m, n)
    for sign in (1, -1, 2):  # prepared from the second one on
        bias = sign * some_bias(n, bias_dtype)
        options = {"alpha": ALPHA, "out_dtype": out_dtype}
        got = parts.gemm(a.cuda(), b.cuda(), bias=bias.cuda(), config=config, **options)
        want = parts.gemm(a, b, bias=bias, **options)
        if out_dtype == "nvfp4":
            got, want = got.to("cpu").dequantize(), want.dequantize()
        assert_bitwise_equal(got.cpu(), want)


@SLOW
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_batches_and_results_in_columns(arch):
    """All batches use the same bias."""
    a, b, bias = some(20, lead=(3,)), some(72, lead=(3,)), some_bias(72)
    backend = f"emulator:{arch}"
    assert_bitwise_equal(*(nv.gemm(a, b, bias=bias, backend=one) for one in (backend, "reference")))
    if arch == "sm_90a":
        return
    outs = [torch.empty(72, 20).T for _ in range(2)]
    for out, one in zip(outs, (backend, "reference"), strict=True):
        nv.gemm(some(20), some(72), alpha=ALPHA, bias=bias, out=out, out_dtype=F32, backend=one)
    assert_bitwise_equal(*outs)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("bias_dtype", [F16, BF16, F32], ids=str)
def test_roundings(dtype, bias_dtype):
    """Roundings to float32, times alpha, plus the bias, then to the result's type, also for sums that float32 does not hold."""
    a, b, bias = nv.quantize(torch.randn(5, K)), nv.quantize(torch.randn(24, K)), some_bias(24, bias_dtype)
    sums = (a.dequantize(torch.float64) @ b.dequantize(torch.float64).T).float()
    got = nv.gemm(a, b, alpha=ALPHA, bias=bias, out_dtype=dtype)
    assert_bitwise_equal(got, (sums * torch.tensor(ALPHA) + bias.float()).to(dtype))


A, B = some(8), some(24)
REFUSED = [
    (dict(bias=torch.ones(8)), ValueError, r"bias has shape \[8\]; expected \[N\] = \[24\]"),
    (dict(bias=torch.ones(1, 24)), ValueError, r"bias has shape \[1, 24\]"),
    (dict(bias=torch.ones(24).double()), TypeError, "bias has dtype float64; expected float16 or bfloat16 or float32"),
    (dict(bias=torch.ones(24, device="meta")), ValueError, "bias is on meta and a on cpu"),
    (dict(bias=torch.ones(48)[::2]), ValueError, "bias has stride 2; it has to be contiguous"),
    (dict(bias=torch.ones(24, requires_grad=True)), nv.UnsupportedProblem, "bias has requires_grad=True"),
    (dict(bias=0.5), TypeError, "bias is a float"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "emulator:sm_90a", "emulator:sm_100a"])
@pytest.mark.parametrize("a", [A, A.dequantize(BF16)], ids=["packed", "16-bit"])
def test_refusals(a, backend):
    out = torch.full((8, 24), 7.0)
    for options, error, message in REFUSED:
        with pytest.raises(error, match=message):
            parts.gemm(a, B, out=out, out_dtype=F32, backend=backend, **options)
    with pytest.raises(ValueError, match="out overlaps bias in memory"):
        nv.gemm(a, B, bias=out[3], out=out, out_dtype=F32, backend=backend)
    assert (out == 7).all()


def test_sums_of_integers_have_none():
    with pytest.raises(ValueError, match="bias is given and out_dtype=torch.int32"):
        nv.gemm(some_int8(8, 32), some_int8(24, 32), bias=torch.ones(24), out_dtype=torch.int32)


def test_a_traced_graph_has_it():
    bias = some_bias(24)
    traced = torch.compile(lambda x, bias: nv.gemm(x, B, bias=bias) + 1, backend="eager", fullgraph=True)
    for rows in (A, A.dequantize(BF16)):
        assert_bitwise_equal(traced(rows, bias), nv.gemm(rows, B, bias=bias) + 1)

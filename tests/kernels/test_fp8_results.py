"""Results in FP8 by blocks of 128 columns, which the next product reads as rows: the bits of ``quantize`` of float32 results."""

import math

import flat_parts as parts
import pytest
import torch
from fp8_check import ENDS, relu2_of, tokens_of, weights_of
from oracle import assert_bitwise_equal, bits

import nvfp4_cute as nv
from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.arch import sm90_fp8
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
NAME = nv.FP8_1x128.name
FORMATS = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
PRODUCTS = [
    ("t128x16x128_s0a1_swap_p3", "random:1"),
    pytest.param("t128x128x128_s0a1_p2", "lazy", marks=SLOW),
    pytest.param("t256x64x128_s0a1_swap_p2", "lazy", marks=SLOW),
    pytest.param("t128x128x128_s0a1_swap_m2_p2", "eager", marks=SLOW),
    pytest.param("t128x32x128_s0a1_swap_k2_p4", "random:2", marks=SLOW),
    pytest.param("t128x256x128_s0a1_m2_p2", "random:3", marks=SLOW),
    pytest.param(None, "lazy", marks=SLOW),
]
SM100_PRODUCTS = [
    ("t128x128x128_s0a4_p2", "random:1"),
    pytest.param("t128x64x128_s0a4_swap_p3", "lazy", marks=SLOW),
    pytest.param("t128x128x128_s0a4_2cta_p2", "random:2", marks=SLOW),
    pytest.param("t128x128x128_s0a4_2cta_swap_p2", "eager", marks=SLOW),
]
SM100_DUALS = [
    ("t128x64x128_s0a4_swap_p2", "random:1"),
    pytest.param("t128x64x128_s0a4_2cta_swap_p2", "lazy", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]
DUALS = [
    ("t128x128x128_s0a1_p2", "random:1"),
    pytest.param("t128x32x128_s0a1_swap_p2", "lazy", marks=SLOW),
    pytest.param("t128x96x128_s0a1_swap_m2_p2", "random:2", marks=SLOW),
    pytest.param("t128x128x128_s0a1_m2_p2", "lazy", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


def config_of(name):
    return None if name is None else KernelConfig.from_name(name)


def check(data, scale, exact, rows=slice(None)):
    """Compares with quantized exact float32 results of these rows."""
    want = nv.quantize(exact, format=nv.FP8_1x128)
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert torch.equal(bits(data[rows]), bits(want.data[rows]))
    assert_bitwise_equal(scale[rows], want.scale[rows])


def check_ragged(name, mode, dual, device="cpu", backend=EMULATED):
    """Checks empty groups, groups that end inside a tile, and rows of no group, which stay unchanged."""
    x, gate, up = (
        tokens_of(120, 384),
        weights_of(len(ENDS), 256, 384),
        weights_of(len(ENDS), 256, 384, seed=3),
    )
    alpha, offs = torch.tensor([0.5, -2.0, 0.0, 3.0, 0.25]), torch.tensor(ENDS, dtype=torch.int32)
    exact = nv.grouped_gemm(x, gate, offs=offs, alpha=alpha, out_dtype=torch.float32)
    if dual:
        exact = relu2_of(exact, nv.grouped_gemm(x, up, offs=offs, out_dtype=torch.float32), torch.float32)
    x, gate, up, offs, alpha = (t.to(device) for t in (x, gate, up, offs, alpha))
    out = (
        torch.full((120, 256), 7.0, device=device).to(torch.float8_e4m3fn),
        torch.full((120, 2), 7.0, device=device),
    )
    options = {"offs": offs, "out": out, "out_dtype": NAME, "config": config_of(name), "backend": backend}
    with observe(mode=mode, check=True):
        if dual:
            data, scale = parts.grouped_dual_gemm(x, gate, up, alpha1=alpha, activation="relu2", **options)
        else:
            data, scale = parts.grouped_gemm(x, gate, alpha=alpha, **options)
    assert data.data_ptr() == out[0].data_ptr() and scale.data_ptr() == out[1].data_ptr()
    last = ENDS[-1]
    check(data.cpu()[:last], scale.cpu()[:last], exact[:last])
    assert (data[last:].float() == 7).all() and (scale[last:] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), PRODUCTS)
def test_ragged(name, mode):
    check_ragged(name, mode, dual=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), DUALS)
def test_dual_ragged(name, mode):
    check_ragged(name, mode, dual=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), SM100_PRODUCTS)
def test_ragged_on_sm100(name, mode):
    check_ragged(name, mode, dual=False, backend="emulator:sm_100a")


@pytest.mark.parametrize(("name", "mode"), SM100_DUALS)
def test_dual_ragged_on_sm100(name, mode):
    check_ragged(name, mode, dual=True, backend="emulator:sm_100a")


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(x, marks=SLOW) for x in (EMULATED, "emulator:sm_100a"))]
)
def test_list_masked_and_batched(backend):
    """New results in every form; the next product takes them unchanged."""
    a = [tokens_of(m, k) for m, k in ((40, 256), (0, 128), (66, 128))]
    b = [weights_of(n, x.shape[1], seed=n) for n, x in zip((128, 128, 384), a, strict=True)]
    got = nv.grouped_gemm(a, b, out_dtype=NAME, backend=backend)
    for result, exact in zip(got, nv.grouped_gemm(a, b, out_dtype=torch.float32), strict=True):
        assert result.format == nv.FP8_1x128 and result.scale_layout == "rowmajor"
        if len(exact):
            check(result.data, result.scale, exact)
    down = weights_of(128, 384, seed=5)
    assert nv.gemm(got[2], down, backend=backend).shape == (66, 128)
    x, w, sizes = tokens_of(3, 50, 256), weights_of(3, 256, 256), torch.tensor([3, 0, 50], dtype=torch.int32)
    made = nv.grouped_gemm(x, w, masked_m=sizes, out_dtype=NAME, backend=backend)
    data, scale = made.data, made.scale
    exact = nv.grouped_gemm(x, w, masked_m=sizes, out_dtype=torch.float32)
    for g, size in enumerate(sizes.tolist()):
        check(data[g, :size], scale[g, :size], exact[g, :size])
    a, b = ([t.movedim(0, -1) for t in (y.data, y.scale)] for y in (x, w))
    given = (a[0], b[0], a[1], b[1])
    result = parts.gemm(*given, **FORMATS, out_dtype=NAME, backend=backend)
    exact = parts.gemm(*given, **FORMATS, out_dtype=torch.float32).movedim(-1, 0)
    for g in range(3):
        check(result.data[g], result.scale[g], exact[g].contiguous())
    options = {"activation": "relu2", "backend": backend}
    one = parts.dual_gemm(x[0], w[0], w[1], out_dtype=NAME, **options)
    check(one.data, one.scale, parts.dual_gemm(x[0], w[0], w[1], out_dtype=torch.float32, **options))


@pytest.mark.parametrize("name", ["t128x16x128_s0a1_swap", pytest.param("t128x256x128_s0a1", marks=SLOW)])
def test_hostile_results(name):
    """Zeros, infinities, NaN, subnormals and overflow reach the blocks through alpha."""
    alphas = (math.inf, -math.inf, math.nan, 1e-42, 3e38, -0.0, 2.0**-13, 1e-30, 2.0**-140, 1e37)
    a = [tokens_of(18, 128, seed=g) for g in range(len(alphas))]
    b = [weights_of(128, 128, seed=g) for g in range(len(alphas))]
    for x in a:  # rows whose sums are zero: infinity times zero is NaN
        x.data.view(torch.uint8)[5:9] = 0
    options = {"alpha": torch.tensor(alphas), "config": config_of(name), "backend": EMULATED}
    sums = parts.grouped_gemm(a, b, out_dtype=torch.float32, **options)
    for got, exact in zip(parts.grouped_gemm(a, b, out_dtype=NAME, **options), sums, strict=True):
        want = nv.quantize(exact, format=nv.FP8_1x128)
        assert torch.equal(bits(got.scale), bits(want.scale))
        assert torch.equal(bits(got.data), bits(want.data))


def test_refusals():
    x, w = tokens_of(8, 128), weights_of(192, 128)
    with pytest.raises(ValueError, match="N=192 is not a positive multiple of 128"):
        nv.gemm(x, w, out_dtype=NAME)
    x4, w4 = (nv.quantize(torch.randn(128, 256)) for _ in range(2))
    calls = [
        lambda: nv.gemm(x4, w4, out_dtype=NAME),
        lambda: nv.grouped_gemm([x4], [w4], out_dtype=NAME),
        lambda: parts.dual_gemm(x4, w4, w4, out_dtype=NAME),
    ]
    for call in calls:
        with pytest.raises(
            UnsupportedProblem, match="only products of FP8_1X128 and FP8_128X128.*not of NVFP4"
        ):
            call()
    for chosen in (None, KernelConfig((128, 64, 128), num_acc_stage=1, swap_ab=True)):
        with pytest.raises(
            UnsupportedProblem, match="sm_120a: no kernel writes FP8_1X128.*one for sm_90a, sm_100a"
        ):
            parts.gemm(x, weights_of(128, 128), out_dtype=NAME, config=chosen, backend="emulator:sm_120a")
    for name, fix in (
        ("t128x64x128_s0a4", "use swap_ab=True"),
        ("t128x64x128_s0a4_swap_k2", "use split_k=1"),
    ):
        with pytest.raises(nv.ConfigError, match=f"blocks of .*{fix}"):
            parts.gemm(
                x, weights_of(128, 128), out_dtype=NAME, config=config_of(name), backend="emulator:sm_100a"
            )
    w, offs = weights_of(1, 256, 128), torch.tensor([8], dtype=torch.int32)
    out = torch.zeros(8, 256, dtype=torch.float8_e4m3fn), torch.zeros(2, 8).T
    with pytest.raises(ValueError, match=r"scale of out has strides .*rows without gaps"):
        nv.grouped_gemm(x, w, offs=offs, out=out, out_dtype=NAME)
    assert not out[0].float().any()


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    ("dual", "name"), [(d, c.to_name()) for d in (0, 1) for c in sm90_fp8.candidates(1 + d)]
)
def test_on_the_gpu(dual, name):
    check_ragged(name, "eager", bool(dual), "cuda", "cuda")

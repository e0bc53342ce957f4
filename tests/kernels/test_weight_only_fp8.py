"""16-bit activations times FP8 weights with fp32 scales on the emulator: where sums are exact, every bit is the reference's."""

import flat_parts as on_parts
import pytest
import torch
from fp8_check import weights_of
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.arch import simt

SLOW = pytest.mark.slow
DTYPES = (torch.float16, torch.bfloat16)


def rows_of(*shape, dtype=torch.bfloat16, seed=0):
    """Integers that both types represent."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-7, 8, shape, generator=generator).to(dtype)


def batch_of(m, n, k, dtype=torch.bfloat16):
    """x [M, K, 2] and weights [2, N, K]."""
    return rows_of(2, m, k, dtype=dtype).permute(1, 2, 0), weights_of(2, n, k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", simt.ARCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k"), [(3, 384), (13, 1280), (40, 128)])
def test_gemm(arch, dtype, m, k):
    """Partial tiles in every direction, fewer and more chunks than warps, and two batches in one launch."""
    (x, w), alpha = batch_of(m, 300, k, dtype), torch.tensor([0.5, -2.0])
    with observe(mode="random:1" if m % 2 else "lazy", check=True) as observer:
        got = nv.gemm(x, w, alpha=alpha, out_dtype=torch.float32, backend=f"emulator:{arch}")
    assert_bitwise_equal(got, nv.gemm(x, w, alpha=alpha, out_dtype=torch.float32))
    assert len(observer.stats) == 1


def test_gemv_and_parts():
    x, w = rows_of(256), weights_of(130, 256)
    want = nv.gemv(w, x, out_dtype=torch.float32)
    assert_bitwise_equal(nv.gemv(w, x, out_dtype=torch.float32, backend="emulator"), want)
    parts = (w.data, x, w.scale.T.contiguous().T, None)
    got = on_parts.gemv(*parts, a_format=nv.FP8_128x128, out_dtype=torch.float32, backend="emulator")
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_and_any_scale(dtype):
    """All codes, one per column, times scales that no 16-bit type holds, with one rounding."""
    w = torch.arange(256, dtype=torch.uint8).repeat(128, 1).view(torch.float8_e4m3fn)
    scale = torch.tensor([[1e-30, 3e30]])
    x = torch.eye(256, dtype=dtype) * 2.0**-3
    w_finite = torch.where(w.float().isnan(), 0.0, w.float()).to(torch.float8_e4m3fn)
    got = on_parts.gemm(
        x, w_finite, None, scale, b_format=nv.FP8_128x128, out_dtype=torch.float32, backend="emulator:sm_90a"
    )
    want = (w_finite.float() * 2.0**-3).double() * scale.double().repeat_interleave(128, 1)
    assert_bitwise_equal(got, (want.float() + 0.0).T.contiguous())


@SLOW
def test_not_a_number_stays_in_its_row_or_column():
    x, w = rows_of(8, 256), weights_of(300, 256)
    w.scale[1, 0], x[5, 200] = torch.nan, torch.inf
    w.data.view(torch.uint8)[7, 3] = 0x7F
    with observe(check=True):
        got = nv.gemm(x, w, out_dtype=torch.float32, backend="emulator:sm_90a")
    want = nv.gemm(x, w, out_dtype=torch.float32)
    assert want[:, 128:256].isnan().all() and want[:, 7].isnan().all() and not want[5].isfinite().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def test_what_is_refused():
    x, w = rows_of(8, 256), weights_of(128, 256)
    options = {"backend": "emulator:sm_90a"}
    with pytest.raises(
        nv.UnsupportedProblem, match="16-bit a x fp8_1x128 .*there is one for.*16-bit a x fp8_128x128"
    ):
        on_parts.gemm(x, nv.quantize(torch.ones(8, 256), format=nv.FP8_1x128), **options)
    with pytest.raises(nv.UnsupportedProblem, match="with 16-bit a: call quantize on the result"):
        on_parts.grouped_gemm([x], [w], out_dtype="nvfp4", **options)
    with pytest.raises(ValueError, match="K=160 is not a positive multiple of 128"):
        on_parts.gemm(x[:, :160], w.data[:, :160], None, w.scale, b_format=nv.FP8_128x128, **options)
    with pytest.raises(TypeError, match="^b_format='fp8' is not a BlockFormat"):
        on_parts.gemm(x, w.data, None, w.scale, b_format="fp8", **options)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 1152), (20, 136, 4096), (300, 520, 2944)])
def test_gpu_equals_the_reference_where_sums_are_exact(m, n, k, dtype):
    x, w = batch_of(m, n, k, dtype)
    got = nv.gemm(x.cuda(), w.to("cuda"), out_dtype=torch.float32)
    assert_bitwise_equal(got.cpu(), nv.gemm(x, w, out_dtype=torch.float32))

"""16-bit rows times INT8 weights: the reference's bits where float32 holds every sum, for any scales."""

import flat_parts as on_parts
import pytest
import torch
from int8_check import some
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.arch import simt

SLOW = pytest.mark.slow
DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)]


def rows(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-6, 7, shape, generator=generator) / 2).to(dtype)


def check(m, n, k, dtype, arch="sm_90a"):
    x, w = rows(m, k, dtype=dtype), some(n, k)
    options = {"alpha": 0.3, "out_dtype": torch.float32}
    with observe(check=True):
        got = on_parts.gemm(x, w, backend=f"emulator:{arch}", **options)
    want = (x.double() @ w.data.double().T).float() * w.scale.T * 0.3
    assert_bitwise_equal(got, want)
    assert_bitwise_equal(on_parts.gemm(x, w, **options), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm(dtype):
    check(5, 70, 160, dtype)


@SLOW
@pytest.mark.parametrize("arch", simt.ARCHS)
@pytest.mark.parametrize("m", [1, 9, 40])
def test_every_architecture(arch, m):
    check(m, 130, 416, torch.bfloat16, arch)


@SLOW
def test_batches_and_gemv():
    x, w = rows(2, 7, 96, dtype=torch.bfloat16), some(2, 40, 96)
    sides = x.permute(1, 2, 0), w.data.permute(1, 2, 0), None, w.scale.permute(1, 2, 0)
    got, want = (
        on_parts.gemm(*sides, b_format=nv.INT8, out_dtype=torch.float32, backend=backend)
        for backend in ("emulator:sm_90a", "reference")
    )
    assert_bitwise_equal(got, want)
    one = w[0]
    parts = one.data, x[0, 0], one.scale, None
    options = {"a_format": nv.INT8, "out_dtype": torch.float32}
    assert_bitwise_equal(
        on_parts.gemv(*parts, backend="emulator:sm_90a", **options), on_parts.gemv(*parts, **options)
    )

"""The quantize kernels for fp32 scales of 128 values or of a row return the bits of block_scaled.quantize."""

import pytest
import torch
from quantize_inputs import assert_same, hostile, spread

from nvfp4_cute import INT8, FP8_1x128, FP8_1xK, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.planning.arch import simt

DTYPES = (torch.bfloat16, torch.float16)
EMULATED = "emulator:sm_90a"


def inputs(dtype):
    """Blocks of 128 at all magnitudes, and blocks whose first 16 values are special values of one kind."""
    special = hostile(dtype).view(-1, 16)
    rows = spread((len(special), 128), dtype)
    rows[:, :16] = special
    alone = torch.zeros(len(special), 128, dtype=dtype)
    alone[:, 112:] = special
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    least = torch.tensor([0.0, tiny, -tiny, 300 * tiny]).repeat(32)[None].to(dtype)
    return torch.cat([rows, alone, least, spread((3, 128), dtype, seed=1)])


def check(x, backend=EMULATED, up=None, mode="eager", format=FP8_1x128):
    """Checks one launch for the bits of the specification and no hazard."""
    with observe(mode=mode, check=True) as observer:
        got = quantize(x, format=format, up=up, backend=backend)
    assert len(observer.stats) == 1
    values = x if up is None else silu_mul(x, up)
    assert_same(got, block_scaled.quantize(values, format=format))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_blocks(dtype):
    check(inputs(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(128,), (1, 128), (2, 384), (65, 256), (2, 3, 5, 128), (40, 1152)])
def test_shapes(shape):
    check(spread(shape, torch.bfloat16))


def test_rows_apart_and_two_inputs():
    x, up = (spread((2, 9, 640), torch.float16, seed=seed)[:, :, 128:512] for seed in (0, 1))
    check(x, mode="random:1")
    check(x, up=up, mode="lazy")


@pytest.mark.parametrize("format", [FP8_1xK, INT8], ids=str)
def test_whole_rows(format):
    check(inputs(torch.bfloat16), format=format)
    check(spread((2, 8464), torch.float16), format=format)  # more than the threads hold


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_rows_of_any_length(dtype):
    """Rows shorter and longer than a CTA's threads hold at once, with gaps, and with two inputs."""
    check(inputs(dtype), format=INT8)
    check(spread((16,), dtype), format=INT8)
    x, up = (spread((2, 3, 4976), dtype, seed=seed)[:, :, 128:4752] for seed in (0, 1))
    check(x, mode="random:1", format=INT8)
    check(x, up=up, mode="lazy", format=INT8)


@pytest.mark.slow
@pytest.mark.parametrize("format", [FP8_1x128, FP8_1xK, INT8], ids=str)
@pytest.mark.parametrize("arch", simt.ARCHS)
def test_every_architecture(arch, format):
    check(inputs(torch.bfloat16), f"emulator:{arch}", format=format)


def test_refusals():
    for backend in ("reference", EMULATED):
        with pytest.raises(ValueError, match='scale_layout="blocked": scales of FP8_1X128 are row-major'):
            quantize(torch.ones(2, 128).half(), format=FP8_1x128, scale_layout="blocked", backend=backend)
        with pytest.raises(ValueError, match="K=64 is not a positive multiple of 128"):
            quantize(torch.ones(2, 64).half(), format=FP8_1x128, backend=backend)
        with pytest.raises(ValueError, match="FP8_1X128 has no global scale"):
            quantize(torch.ones(2, 128).half(), format=FP8_1x128, global_scale=0.5, backend=backend)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(dtype):
    for x in (inputs(dtype), spread((513, 1152), dtype)):
        for format in (FP8_1x128, FP8_1xK, INT8):
            got = quantize(x.cuda(), format=format)
            assert_same(got.cpu(), block_scaled.quantize(x, format=format))

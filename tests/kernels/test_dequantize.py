"""The dequantize kernel returns the bits of block_scaled.dequantize for every format with 8-bit scales."""

import pytest
import torch

from nvfp4_cute import dequantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.scale_layout import to_blocked

FORMATS = (NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2)
DTYPES = (torch.bfloat16, torch.float16)


def every_code(format, shape, scale_layout="blocked", global_scale=None, seed=0):
    """A tensor with random codes, including NaN, as elements and scales."""
    generator = torch.Generator().manual_seed(seed)
    *batches, rows, k = shape
    data = torch.randint(
        0, 256, (*batches, rows, format.row_bytes(k)), generator=generator, dtype=torch.uint8
    )
    scale = torch.randint(
        0, 256, (*batches, rows, format.num_k_blocks(k)), generator=generator, dtype=torch.uint8
    )
    scale[..., 0, 0] = 0
    scale[..., -1, -1] = 255
    if scale_layout == "blocked":
        scale = to_blocked(scale)
    data = data.view(getattr(torch, format.element.quantized_dtype))
    scale = scale.view(getattr(torch, format.scale.quantized_dtype))
    return BlockScaledTensor(data, scale, global_scale, shape, scale_layout, format=format)


def check(t, dtype, backend):
    """Checks one launch: the values of the specification, with the same NaNs and signs of zeros."""
    with observe(check=True) as observer:
        got = dequantize(t, dtype, backend=backend)
    want = block_scaled.dequantize(t, dtype)
    assert len(observer.stats) == 1
    assert got.dtype == dtype and got.shape == t.shape
    is_nan = want.isnan()
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got.view(torch.int16)[~is_nan], want.view(torch.int16)[~is_nan])


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "backend",
    [
        "emulator:sm_80",
        *(pytest.param(f"emulator:{arch}", marks=pytest.mark.slow) for arch in ("sm_89", "sm_90a")),
        "emulator:sm_100a",
    ],
)
def test_every_format(format, backend):
    for dtype in DTYPES:
        check(every_code(format, (37, 288)), dtype, backend)


@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (3, 130, 544), (2, 2, 7, 96)], ids=str)
@pytest.mark.parametrize("scale_layout", ["blocked", "rowmajor"])
def test_shapes_and_layouts(shape, scale_layout):
    check(every_code(NVFP4, shape, scale_layout), torch.bfloat16, "emulator:sm_90a")


@pytest.mark.parametrize("factor", [0.3, 2.0**-126, 3e38])
def test_global_scale(factor):
    t = every_code(NVFP4, (19, 80), global_scale=torch.tensor(factor))
    for dtype in DTYPES:
        check(t, dtype, "emulator:sm_90a")


def test_a_factor_per_batch():
    factors = torch.tensor([0.3, -2.0, 5e-3])
    check(every_code(NVFP4, (3, 21, 96), global_scale=factors), torch.bfloat16, "emulator:sm_90a")


@pytest.mark.parametrize("batches", [(), (3,)])
def test_gaps_between_rows(batches):
    t = every_code(NVFP4, (*batches, 19, 96))
    wide = torch.full((*batches, 24, 64), 0xFF, dtype=torch.uint8)
    rows = wide[..., :19, :48].copy_(t.data)
    check(
        BlockScaledTensor(rows, t.scale, None, t.shape, t.scale_layout, format=NVFP4),
        torch.bfloat16,
        "emulator:sm_90a",
    )


def test_what_the_kernel_does_not_read_takes_the_specification():
    """The specification computes odd addresses, odd gaps and wide results: the same values without a launch."""
    t = every_code(NVFP4, (8, 64))
    odd = torch.zeros(t.data.numel() + 1, dtype=torch.uint8)[1:].view(t.data.shape).copy_(t.data)
    wide = torch.zeros(8, 36, dtype=torch.uint8)
    wide[:, :32] = t.data
    with observe(check=True) as observer:
        for data in (odd, wide[:, :32]):
            same = BlockScaledTensor(data, t.scale, None, t.shape, t.scale_layout, format=NVFP4)
            got = dequantize(same, torch.bfloat16, backend="emulator:sm_90a")
            assert torch.equal(got.nan_to_num(), block_scaled.dequantize(t, torch.bfloat16).nan_to_num())
        assert dequantize(t, backend="emulator:sm_90a").dtype == torch.float32
    assert not observer.stats


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_on_a_gpu(format):
    for dtype in DTYPES:
        for shape in ((1, 32), (257, 1056), (3, 40, 64)):
            t = every_code(format, shape, global_scale=torch.tensor(0.37) if format == NVFP4 else None)
            got = dequantize(t.cuda(), dtype).cpu()
            want = block_scaled.dequantize(t, dtype)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))

"""Int4 weights: records, codes, scales, zero points and quantization against arithmetic written out here."""

import pickle

import pytest
import torch

from nvfp4_cute import dequantize, int4_format, int4_tensor, quantize
from nvfp4_cute.formats.block_format import FP32, INT4_FORMATS, INT8, format_named
from nvfp4_cute.formats.int4 import int4_scale

FORMATS = list(INT4_FORMATS.values())
# Relative rounding error of a scale in its dtype, half a step.
SCALE_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def codes_of(t):
    return torch.stack((t.data & 15, t.data >> 4), -1).flatten(-2).int()


def test_records_have_the_sizes_of_hand():
    """Checks bytes per row of 384, blocks, and the shape of blocked scales of 200 rows."""
    expected = {
        "int4_32_bfloat16": (192, 12, (2, 6, 32, 4, 2)),
        "int4_64_float16": (192, 6, (2, 3, 32, 4, 2)),
        "int4_128_bfloat16": (192, 3, (2, 2, 32, 4, 2)),
        "int4_128_float32": (192, 3, (2, 3, 32, 4, 1)),
        "uint4_32_float16": (192, 12, (2, 12, 32, 4, 1)),
        "uint4_128_bfloat16": (192, 3, (2, 3, 32, 4, 1)),
    }
    for name, (row_bytes, blocks, shape) in expected.items():
        f = format_named(name)
        assert (f.row_bytes(384), f.num_k_blocks(384), f.scale_shape(200, 384)) == (row_bytes, blocks, shape)
        assert f.scale_bytes(200, 384) == 512 * shape[0] * shape[1]
        assert pickle.loads(pickle.dumps(f)) == f
    assert int4_format(64, torch.float16, zero_points=True).name == "uint4_64_float16"
    for wrong in (
        {"block_k": 48},
        {"scale_dtype": "float64"},
        {"scale_dtype": "float32", "zero_points": True},
    ):
        with pytest.raises(
            ValueError, match="is not a format; blocks have 32, 64, 128 values, scales are bfloat16"
        ):
            int4_format(**wrong)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_quantize_and_back(f, layout):
    """Each value is off by at most half a step plus the errors of clamping and of rounding the scale and the zero point."""
    x = torch.randn(2, 200, 384, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 3, :128] = 0, x[1, 3, :128].abs() + 1
    t = quantize(x, format=f, scale_layout=layout)
    scale, zero = int4_scale(t)
    steps, points = (part.double().repeat_interleave(f.block_k, -1) for part in (scale, zero))
    want = (codes_of(t) - points) * steps
    assert torch.equal(dequantize(t, torch.float64), want)
    assert torch.equal(t.dequantize(), want.float()) and torch.equal(
        t.dequantize(torch.bfloat16), want.bfloat16()
    )
    # Without zero points the eighth step up is clamped to the seventh; with them both ends and zero are rounded.
    slack = (15 if f.has_zero_points else 7.5) * SCALE_ROUNDING[f.name.split("_")[-1]]
    bound = steps * ((1 if f.has_zero_points else 0.5) + 1.001 * slack)
    assert ((want - x).abs() <= bound).all()
    assert (want[0, 0] == 0).all() and (zero == 8).all() != f.has_zero_points
    again = pickle.loads(pickle.dumps(t)).to("cpu", copy=True)
    assert torch.equal(again[1, 128:].dequantize(), want[1, 128:].float())


def test_scales_are_the_largest_magnitude_over_seven_and_a_half():
    x = torch.tensor([[7.5, -7.5, 1.0, 0.5, 1.5] + [0.0] * 123])
    t = quantize(x, format=int4_format(128, "float16"))
    assert int4_scale(t)[0].item() == 1.0
    assert codes_of(t)[0, :6].tolist() == [15, 0, 9, 8, 10, 8]  # ties to even; 8 is clamped to 7


def test_zero_points_shift():
    x = torch.linspace(3, 33, 128)[None]
    t = quantize(x, format=int4_format(128, zero_points=True))
    scale, zero = int4_scale(t)
    assert (scale.item(), zero.item()) == (torch.tensor(33 / 15).bfloat16().item(), 0)
    t = quantize(-x, format=int4_format(128, zero_points=True))
    assert int4_scale(t)[1].item() == 15 and (t.dequantize() + x).abs().max() <= 1.2


@pytest.mark.parametrize("f", [FORMATS[0], FORMATS[-1]], ids=str)
def test_not_a_number_makes_its_block_one(f):
    x = torch.ones(2, 256)
    x[1, 200] = torch.nan
    got = quantize(x, format=f).dequantize().isnan()
    assert got[1].sum() == f.block_k and got[1, 200] and not got[0].any()


def test_tensors_of_parts():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 40, 256), generator=generator)
    scale, zero = (
        torch.rand(3, 40, 2, generator=generator).half(),
        torch.randint(0, 17, (3, 40, 2), generator=generator),
    )
    t = int4_tensor(codes, scale, zero)
    want = (codes - zero.repeat_interleave(128, -1)) * scale.repeat_interleave(128, -1).double()
    assert t.format == int4_format(128, "float16", zero_points=True)
    assert torch.equal(t.dequantize(torch.float64), want)
    # Zero points that are all 8 are not stored; one scale per row is repeated for blocks of 128.
    plain = int4_tensor(codes, scale[..., :1], torch.full((3, 40, 1), 8))
    assert plain.format == int4_format(128, "float16")
    assert torch.equal(plain.dequantize(torch.float64), (codes - 8) * scale[..., :1].double())
    with pytest.raises(ValueError, match=r"scale has shape \[3, 41, 2\]; expected \[3, 40\] and K / block"):
        int4_tensor(codes, torch.zeros(3, 41, 2).half())
    with pytest.raises(ValueError, match="codes are -8 to 7; expected 0 to 15: add 8"):
        int4_tensor(torch.arange(-8, 8).repeat(2, 8), torch.ones(2, 1).half())
    with pytest.raises(ValueError, match="zero points are 0 to 17; expected 0 to 16"):
        int4_tensor(codes, scale, torch.where(zero == 16, 17, zero))
    with pytest.raises(TypeError, match="codes is torch.float32; expected integers"):
        int4_tensor(codes + 0.5, scale)
    with pytest.raises(TypeError, match="zero_points is torch.float32; expected integers"):
        int4_tensor(codes, scale, zero + 0.5)
    with pytest.raises(TypeError, match="scale is a list; pass a torch.Tensor"):
        int4_tensor(codes, [1.0])
    with pytest.raises(ValueError, match=r"codes has shape \[256\]; expected \[..., N, K\]"):
        int4_tensor(codes[0, 0], scale[0, 0])


def test_scales_of_another_format_are_refused():
    with pytest.raises(ValueError, match="t is INT8; expected int4 weights"):
        int4_scale(quantize(torch.ones(2, 128), format=INT8))


def test_float32_scales_take_two_roundings():
    """They are rounded to float32, then to 16 bits; float64 results are not rounded."""
    t = int4_tensor(torch.full((1, 32), 15), torch.tensor([[1 / 3]]))
    assert t.format.scale == FP32
    assert t.dequantize(torch.float64)[0, 0] == 7 * torch.tensor(1 / 3).double()
    assert t.dequantize()[0, 0] == 7 * torch.tensor(1 / 3)

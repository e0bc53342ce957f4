"""MXFP4 weights in MXFP4_FP8 and FP8_128x128: equal values, or a refusal."""

import pytest
import torch

from nvfp4_cute import BlockScaledTensor, QuantizedLinear, UnsupportedProblem, gemm, quantize
from nvfp4_cute.formats import exact_fp8
from nvfp4_cute.formats.block_format import MXFP4, MXFP4_FP8, FP8_1xK, FP8_128x128
from nvfp4_cute.formats.exact_fp8 import mxfp4_as_fp8, mxfp4_for_fp8


def mxfp4(codes, exponents):
    """Bytes [..., N, K/2] and exponents [..., N, K/32] as a tensor."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return BlockScaledTensor(codes, scale, None, shape, "rowmajor", format=MXFP4)


def some(*lead, spread=14, least=-20):
    """Any codes, and scales whose exponents span ``spread`` binades."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (*lead, 192), dtype=torch.uint8, generator=generator)
    return mxfp4(codes, torch.randint(least, least + spread + 1, (*lead, 12), generator=generator))


@pytest.mark.parametrize("lead", [(300,), (2, 140)])
@pytest.mark.parametrize("least", [-110, -20, 90])
def test_values_are_equal(lead, least, monkeypatch):
    """Signs of zeros too; in several pieces, with a part of a block of rows at the end."""
    monkeypatch.setattr(exact_fp8, "MOST_VALUES", 128 * 384)
    weight = some(*lead, least=least)
    found = mxfp4_as_fp8(weight.with_scale_layout("blocked"))
    assert found.format == FP8_128x128 and found.shape == weight.shape
    exact = weight.dequantize(torch.float64)
    assert torch.equal(found.dequantize(torch.float64), exact)
    assert torch.equal(found.dequantize(torch.float64).signbit(), exact.signbit())


def test_zeros_and_nan():
    """Scales of zeros do not count, and a NaN scale stays NaN."""
    codes = torch.zeros(128, 192, dtype=torch.uint8)
    codes[5, 3] = 0x7
    exponents = torch.full((128, 12), -120)
    exponents[5], exponents[7, 11] = 100, 128
    found = mxfp4_as_fp8(mxfp4(codes, exponents)).dequantize()
    assert found[5, 6] == 6 * 2.0**100 and found[7, 352:].isnan().all()
    assert found.nan_to_num(0).count_nonzero() == 1


def test_what_e4m3_has_no_room_for_is_refused():
    codes, exponents = (
        torch.full((256, 192), 0x77, dtype=torch.uint8),
        torch.zeros(256, 12, dtype=torch.int64),
    )
    codes[200, 16:32], exponents[200, 1] = 0x11, -14
    assert torch.equal(
        mxfp4_as_fp8(mxfp4(codes, exponents)).dequantize(), mxfp4(codes, exponents).dequantize()
    )
    exponents[200, 1] = -15
    with pytest.raises(UnsupportedProblem, match=r"rows 128 on, K 0 on.*more binades"):
        mxfp4_as_fp8(mxfp4(codes, exponents))
    with pytest.raises(TypeError, match="weight is NVFP4; pass an MXFP4"):
        mxfp4_as_fp8(quantize(torch.randn(128, 128)))
    with pytest.raises(ValueError, match="K=160"):
        mxfp4_as_fp8(quantize(torch.randn(128, 160), format=MXFP4))


def test_a_layer_multiplies_on_fp8_tensor_cores():
    weight, x = quantize(torch.randn(128, 256), format=MXFP4), torch.randn(5, 256).bfloat16()
    layer = QuantizedLinear.from_quantized(weight, activations="fp8")
    assert layer.format == MXFP4_FP8 and layer.mode == "fp8"
    assert torch.equal(layer(x), gemm(quantize(x, format=FP8_1xK), mxfp4_for_fp8(weight)))
    assert torch.equal(layer.weight, weight.dequantize(layer.dtype))
    again = QuantizedLinear(256, 128, bias=False, format=MXFP4_FP8)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match="use 'fp8'"):
        QuantizedLinear(256, 128, format=MXFP4_FP8, activations="16bit")
    other = QuantizedLinear.from_quantized(weight, activations="fp8", backend="emulator:sm_100a")
    assert other.format == FP8_128x128
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert (layer(x) - exact).norm() < 0.04 * exact.norm()


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_weights_for_fp8_rows_have_equal_values(lead):
    """Rows whose largest scales are anywhere, each with 15 powers of two, and blocks of zeros with any scale."""
    generator = torch.Generator().manual_seed(len(lead))
    codes = torch.randint(0, 256, (*lead, 140, 208), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 15, (*lead, 140, 13), generator=generator)
    exponents = exponents + torch.randint(-127, 114, (*lead, 140, 1), generator=generator)
    codes[..., 5, 16:32], exponents[..., 5, 1] = 0x80, -127
    weight = mxfp4(codes, exponents)
    found = mxfp4_for_fp8(weight.with_scale_layout("blocked"))
    assert found.format == MXFP4_FP8 and found.data.nbytes == codes.nbytes
    assert torch.equal(found.dequantize(torch.float64), weight.dequantize(torch.float64))
    part = slice(0, 128) if lead == () else 0
    assert torch.equal(found[part].dequantize(), weight[part].dequantize())

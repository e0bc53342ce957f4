"""Weights in slabs of eight rows: every reader sees the same values or refuses them by name."""

import pytest
import torch

from nvfp4_cute import BlockScaledTensor, UnsupportedProblem, dequantize, gemm, quantize
from nvfp4_cute.formats.block_format import INT8, MXFP4, NVFP4
from nvfp4_cute.formats.slabs import from_slabs, to_slabs


@pytest.mark.parametrize("shape", [(16, 64), (24, 160), (3, 8, 32), (2, 8, 176)])
def test_to_and_fro(shape):
    data = torch.arange(torch.Size(shape).numel()).view(shape).to(torch.uint8)
    made = to_slabs(data)
    assert made.shape == data.shape and torch.equal(from_slabs(made), data)
    assert torch.equal(made.flatten()[:32], data.flatten()[:32])


def test_a_slab_is_whole():
    with pytest.raises(ValueError, match="12 rows are not whole slabs of 8"):
        to_slabs(torch.zeros(12, 64, dtype=torch.uint8))


@pytest.mark.parametrize("format", [NVFP4, MXFP4, INT8], ids=str)
def test_values_are_those_of_rows(format):
    w = quantize(torch.randn(256, 512), format=format)
    slabs = BlockScaledTensor.from_parts(to_slabs(w.data), w.scale, w.global_scale, format=format.in_slabs)
    assert slabs.format.in_rows == format and slabs.format.in_slabs is slabs.format
    assert torch.equal(dequantize(slabs), dequantize(w))
    x = torch.randn(3, 512).bfloat16()
    assert torch.equal(gemm(x, slabs), gemm(x, w))
    with pytest.raises(UnsupportedProblem, match="slabs"):
        gemm(quantize(x, format=format), slabs, backend="emulator:B200")

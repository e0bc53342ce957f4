"""Comparison of NVFP4 results with what ``formats.quantize`` makes of float32 ones."""

import torch
from oracle import assert_bitwise_equal

from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.scale_layout import from_blocked


def assert_quantized(data, scale, x, global_scale, poison=None):
    """Data and blocked scales are those of ``x`` [M, N]; padding columns are zero, padding rows hold the poison."""
    m, n = x.shape
    want = block_scaled.quantize(x, global_scale=global_scale)
    assert_bitwise_equal(data, want.data)
    padded_n = -(-n // 64) * 4
    scale = scale.view(torch.uint8)
    assert_bitwise_equal(
        from_blocked(scale, m, padded_n), from_blocked(want.scale.view(torch.uint8), m, padded_n)
    )
    if poison is not None:
        assert (from_blocked(scale, -(-m // 128) * 128, padded_n)[m:] == poison).all()

"""Output tensors for quantized results, and their comparison with ``formats.quantize`` of float32 results."""

import torch
from oracle import assert_bitwise_equal

from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.scale_layout import from_blocked

POISON = 0x5A


def poisoned_out(sizes, format: BlockFormat = NVFP4):
    """Returns a poisoned output tensor per group, whose row pitch is a multiple of 16 bytes."""
    outs = []
    for m, n, _ in sizes:
        data = torch.full((m, format.pitch_bytes(n) + 16), POISON, dtype=torch.uint8)[
            :, : format.row_bytes(n)
        ]
        scale = torch.full(format.scale_shape(m, n), POISON, dtype=torch.uint8)
        outs.append(block_scaled.quantized_tensor(data, scale, None, (m, n), format))
    return outs


def assert_quantized(data, scale, x, global_scale, poison=None, format: BlockFormat = NVFP4):
    """Checks data and blocked scales of ``x`` [M, N]: padding columns are zero, and padding rows keep the poison."""
    m, n = x.shape
    want = block_scaled.quantize(x, format=format, global_scale=global_scale)
    assert_bitwise_equal(data.view(torch.uint8), want.data.view(torch.uint8))
    _, columns = format.padded_scale_shape(m, n)
    scale = scale.view(torch.uint8)
    assert_bitwise_equal(
        from_blocked(scale, m, columns), from_blocked(want.scale.view(torch.uint8), m, columns)
    )
    if poison is not None:
        assert (from_blocked(scale, -(-m // 128) * 128, columns)[m:] == poison).all()

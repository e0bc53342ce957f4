"""Inputs for tests of quantization, and comparisons of their results."""

import math

import torch
from oracle import assert_bitwise_equal, bits


def assert_same(got, want):
    assert_bitwise_equal(got.data, want.data)
    assert_bitwise_equal(got.scale, want.scale)
    assert got.shape == want.shape and got.scale_layout == want.scale_layout
    if want.global_scale is None:
        assert got.global_scale is None
    else:
        assert torch.equal(bits(got.global_scale), bits(want.global_scale))


def spread(shape, dtype, seed=0):
    """Blocks of different magnitudes, from far below the smallest scale to above the largest."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(*shape[:-1], shape[-1] // 16, 16, generator=generator)
    exponents = torch.randint(-16, 12, (*blocks.shape[:-1], 1), generator=generator)
    return (blocks * torch.exp2(exponents)).flatten(-2).to(dtype)


def hostile(dtype):
    """Blocks with special values: zeros and NaN of both signs, infinities, subnormals, ties, largest values."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    blocks = [
        [0.0, -0.0] * 8,
        [math.nan] + [1.0, -2.0, 0.0] * 5,
        [-math.nan] * 16,
        [math.inf] + [3.0, -1e4, -0.0] * 5,
        [-math.inf] + [1.0] * 15,
        [math.inf, -math.inf, math.nan, 1.0] * 4,
        [tiny, -tiny, 3 * tiny, 0.0] * 4,
        [info.smallest_normal, -info.smallest_normal] * 8,
        [info.max, -info.max, info.max / 2, 1.0] * 4,
        [-info.max] * 16,
        ties + [-t for t in ties],
        [t * 448 for t in ties] + [-t * 448 for t in ties],
        [t / 512 for t in ties] + [-t / 512 for t in ties],
        [2688.0, -2689.0, 1344.0, 448.0] * 4,
        [1.0, -0.0, 0.0, -1e-7] * 4,
        [6 * 2.0**-10, 2.0**-11] * 8,
        [6 * 2.0**-10 * 1.01, -(2.0**-11)] * 8,
    ]
    return torch.tensor(blocks).reshape(1, -1).to(dtype)

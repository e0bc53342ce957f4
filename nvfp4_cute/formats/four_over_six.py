"""4over6: NVFP4 whose blocks end at 6 or at 4, whichever loses less (Cook et al., arXiv 2512.02010).

e2m1 has nothing between 4 and 6: in a block whose largest value becomes 6, values near 5/6 of it lose most. A scale 1.5 times
as large maps the largest value to 4. Every block is quantized both ways, and the smaller squared error decides; at equal errors
the largest value is 6. For a block with the largest magnitude ``amax``, every line is one float32 operation of IEEE 754, rounded
to nearest even, subnormals kept; ``g`` is the global scale, 1 where there is none::

    1  q = amax / 6;  q = q / g;  the other candidate: q = q * 1.5
    2  scale = e4m3(q)                                nearest even, at most 448
    3  d = scale * g;  r = min(1 / d, 3.4e38)         0 where d is 0 or infinite
    4  y = x * r;  v = e2m1(y)                        at most 6
    5  e = fma(v * scale * 2^-14, g * 2^14, -x)       the first product is exact
    6  s[j] = e[4j]^2;  s[j] = fma(e[4j + i], e[4j + i], s[j]) for i = 1, 2, 3
    7  error = (s[0] + s[1]) + (s[2] + s[3])

A NaN error is not smaller: a block with a NaN is NaN as in ``quantize``, and one with an infinity has scale 448. Lines 3 and 4
multiply by the reciprocal, as fouroversix does; ``quantize`` divides.

Compared with fouroversix 1.0.5 (PyTorch backend, rule "mse") at its global scale amax / 1536, on six tensors of 262,144 blocks:
blocks with equal scales have equal elements. Scales of 0 to 35 blocks differ, where both errors agree to float32's precision:
fouroversix sums them in another order, and scales by amax / 1536 in two roundings.
"""

import torch

from nvfp4_cute.formats.codecs import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3

# From a scale that maps the largest value to 6 to one that maps it to 4.
EXPANSION = 1.5
# Kernels dequantize to fp16 numbers that lack this factor (``kernels.common.decode``).
HALF_FACTOR = 2.0**14
CHAIN = 4
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def choose(
    blocks: torch.Tensor, quotient: torch.Tensor, g: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks by both scales and keep the better one of each.

    Args:
        blocks: float32 [..., 16]. quotient: float32 [...], amax / 6 / g.
        g: float32, the global scale without dimensions, or one that broadcasts over ``quotient``; or None.

    Returns:
        uint8 codes of elements [..., 16], and of scales [...].
    """
    six, four = (_candidate(blocks, q, g) for q in (quotient, quotient * EXPANSION))
    is_four = four[2] < six[2]
    return torch.where(is_four[..., None], four[0], six[0]), torch.where(is_four, four[1], six[1])


def _candidate(
    x: torch.Tensor, quotient: torch.Tensor, g: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of elements and scales, and the squared errors, by lines 2 to 7."""
    scale_codes = encode_e4m3(quotient)
    scale = decode_e4m3(scale_codes)
    g = torch.ones((), device=x.device) if g is None else g
    divisor = scale * g
    inverse = (torch.ones_like(divisor) / divisor).clamp(max=LARGEST_FLOAT32)
    inverse = inverse.masked_fill(divisor == 0, 0.0)[..., None]
    codes = encode_e2m1(x * inverse)
    small = decode_e2m1(codes) * scale[..., None] * (1 / HALF_FACTOR)
    e = fma(small, (g * HALF_FACTOR)[..., None].expand_as(x), -x).unflatten(-1, (-1, CHAIN))
    sums = e[..., 0] * e[..., 0]
    for i in range(1, CHAIN):
        sums = fma(e[..., i], e[..., i], sums)
    return codes, scale_codes, (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32, rounded once.

    float64 holds the product exactly. Its sum with ``c`` is rounded to odd (Boldo and Melquiond, 2008), so that rounding to
    float32 sees on which side of a tie it lies.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    # Toward the lost part, which has the sign of the sum where it lies further from zero.
    is_further = (lost > 0) == (total > 0)
    odd = bits + torch.where(is_further, 1, -1)
    inexact = (lost != 0) & (bits % 2 == 0) & total.isfinite() & lost.isfinite()
    return torch.where(inexact, odd.view(torch.float64), total).float()

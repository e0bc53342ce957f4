"""4over6: encodes a block with its largest value at 6 and at 4, and keeps the better encoding (``formats.four_over_six``).

Per element and candidate, after one reciprocal per block: a product, the conversion to e2m1, a product of value and scale,
and two FMAs for the squared error. ``fma(v * scale, g, -x)`` rounds only once: an e2m1 value times an e4m3
scale is exact in float32, and in fp16 once 2^-14 is a factor, which the global scale undoes. Signs are added to the better
candidate.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.four_over_six import CHAIN, EXPANSION, HALF_FACTOR

from . import fp8, ptx
from .encode import LARGEST_FLOAT32, Encoding, without_signs_of_nan
from .select import select

# prmt: the low half twice; fp16 bits of 2^-14, twice.
LOW_TWICE = 0x1010
LEAST_NORMAL_HALVES = 0x04000400
# The code of an e2m1 magnitude, shifted to the exponent of a float32, reads as the magnitude times 2^-126.
CODE_SHIFT = 22
# Factor from 2^-126 to 2^-14.
FROM_SHIFTED = 2.0**112


@dataclass(frozen=True)
class Candidate:
    """A thread's part of a block, encoded with one of two scales.

    Attributes:
        words: words of elements, of magnitudes if ``encode`` is not signed.
        code: code of the scale.
        inverse: factor of the values before they are rounded.
        error: squared error of the part.
    """

    words: list
    code: Uint32
    inverse: Float32
    error: Float32


def encode_better(
    x: list,
    signs: list | None,
    amax: Float32,
    quotient: Float32,
    global_scale: Float32 | None,
    encode: Encoding,
) -> tuple[list, Uint32]:
    """Encodes a block, or a part of one whose other parts the next lanes have. All lanes must call it.

    Args:
        x: Float32 values, a multiple of eight; magnitudes if ``encode`` is not signed.
        signs: words of two 16-bit floats with the signs of ``x``, if ``encode`` is not signed.
        amax: largest magnitude of the whole block.
        quotient: scale that maps it to 6, not rounded.
        global_scale: the factor that dequantizing multiplies by, or None.

    Returns:
        Words of elements, and the code of the scale.
    """
    factor = Float32(HALF_FACTOR) if global_scale is None else ptx.mul_f32(global_scale, Float32(HALF_FACTOR))
    six, four = (
        encode_candidate(x, q, global_scale, factor, encode)
        for q in (quotient, ptx.mul_f32(quotient, Float32(EXPANSION)))
    )
    lanes = encode.format.block_k // len(x)
    is_four = over_lanes_sum(four.error, lanes) < over_lanes_sum(six.error, lanes)
    words = [select(is_four, *pair) for pair in zip(four.words, six.words, strict=True)]
    if not encode.signed:
        inverse = select(is_four, four.inverse, six.inverse)
        signs = encode.element.signs(without_signs_of_nan([value * inverse for value in x], signs, amax))
        words = [word | sign for word, sign in zip(words, signs, strict=True)]
    return words, select(is_four, four.code, six.code)


def over_lanes_sum(part: Float32, lanes: int) -> Float32:
    """Returns the sum over ``lanes`` neighbouring lanes, a power of two, added up in pairs. All lanes must call it."""
    for step in range(lanes.bit_length() - 1):
        part = ptx.add_f32(part, cute.arch.shuffle_sync_bfly(part, 1 << step))
    return part


@cute.jit
def encode_candidate(
    x: list, quotient: Float32, global_scale: Float32 | None, factor: Float32, encode: cutlass.Constexpr
) -> Candidate:
    """Encodes with the scale next to ``quotient``. factor: the global scale times 2^14."""
    code = fp8.e4m3_code(quotient)
    halves = ptx.prmt(fp8.scales_to_f16x2(code), Uint32(0), Uint32(LOW_TWICE))
    scale = ptx.unpack_f16x2(halves)[0]
    divisor = scale if cutlass.const_expr(global_scale is None) else ptx.mul_f32(scale, global_scale)
    inverse = ptx.min_nan(ptx.rcp_f32(divisor), Float32(LARGEST_FLOAT32))
    inverse = Float32(0.0) if divisor == 0.0 else inverse
    values = [ptx.mul_f32(value, inverse) for value in x]
    if cutlass.const_expr(encode.signed):
        words = encode.element.pack(values, [])
        small = ptx.scale_x2(halves, LEAST_NORMAL_HALVES, "f16")
        pairs = [ptx.mul_f16x2(pair, small) for word in words for pair in ptx.e2m1x8_to_f16x2(word)]
        products = [value for pair in pairs for value in ptx.unpack_f16x2(pair)]
    else:
        rounded = encode.element.rounded(values)
        words = encode.element.codes(rounded)
        small = ptx.mul_f32(scale, Float32(FROM_SHIFTED))
        products = [ptx.mul_f32(ptx.float_of(word << CODE_SHIFT), small) for word in rounded]
    errors = [ptx.fma_f32(product, factor, -value) for product, value in zip(products, x, strict=True)]
    return Candidate(words, code, inverse, sum_of_squares(errors))


def sum_of_squares(errors: list) -> Float32:
    """Returns the sum of squares: of chains of four, added up in pairs."""
    sums = []
    for first in range(0, len(errors), CHAIN):
        total = ptx.mul_f32(errors[first], errors[first])
        for error in errors[first + 1 : first + CHAIN]:
            total = ptx.fma_f32(error, error, total)
        sums.append(total)
    while len(sums) > 1:
        sums = [ptx.add_f32(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]

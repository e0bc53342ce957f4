"""4over6: encodes a block twice, with its largest value at 6 and at 4, and keeps what loses less (``formats.four_over_six``).

Per element and candidate, after one reciprocal per block: a product, the conversion to e2m1 and back to fp16, half a product with
the scale, the conversion to float32, and two FMAs for the squared error. ``fma(v * scale, g, -x)`` needs no rounding but its own:
an e2m1 value times an e4m3 scale is exact in fp16 once 2^-14 is a factor, which the global scale undoes.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.four_over_six import CHAIN, EXPANSION, HALF_FACTOR

from . import fp8, ptx
from .decode import SIGN_BITS, decode_word
from .encode import LARGEST_FLOAT32, Encoding, without_signs_of_nan
from .select import select

# prmt: the low half twice; fp16 bits of 2^-14, twice.
LOW_TWICE = 0x1010
LEAST_NORMAL_HALVES = 0x04000400


@dataclass(frozen=True)
class Candidate:
    """A thread's part of a block, encoded with one of two scales.

    Attributes:
        words: words of elements.
        code: code of the scale.
        error: squared error of the part.
    """

    words: list
    code: Uint32
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
        encode_candidate(x, signs, amax, q, global_scale, factor, encode)
        for q in (quotient, ptx.mul_f32(quotient, Float32(EXPANSION)))
    )
    lanes = encode.format.block_k // len(x)
    is_four = over_lanes_sum(four.error, lanes) < over_lanes_sum(six.error, lanes)
    words = [select(is_four, *pair) for pair in zip(four.words, six.words, strict=True)]
    return words, select(is_four, four.code, six.code)


def over_lanes_sum(part: Float32, lanes: int) -> Float32:
    """Returns the sum over ``lanes`` neighbouring lanes, a power of two, added up in pairs. All lanes must call it."""
    for step in range(lanes.bit_length() - 1):
        part = ptx.add_f32(part, cute.arch.shuffle_sync_bfly(part, 1 << step))
    return part


@cute.jit
def encode_candidate(
    x: list,
    signs: list | None,
    amax: Float32,
    quotient: Float32,
    global_scale: Float32 | None,
    factor: Float32,
    encode: cutlass.Constexpr,
) -> Candidate:
    """Encodes with the scale next to ``quotient``. factor: the global scale times 2^14."""
    size = len(x)
    code = fp8.e4m3_code(quotient)
    halves = ptx.prmt(fp8.scales_to_f16x2(code), Uint32(0), Uint32(LOW_TWICE))
    scale = ptx.unpack_f16x2(halves)[0]
    divisor = scale if cutlass.const_expr(global_scale is None) else ptx.mul_f32(scale, global_scale)
    inverse = ptx.min_nan(ptx.rcp_f32(divisor), Float32(LARGEST_FLOAT32))
    inverse = Float32(0.0) if divisor == 0.0 else inverse
    values = cute.make_rmem_tensor(size, Float32)
    for i in cutlass.range_constexpr(size):
        values[i] = ptx.mul_f32(x[i], inverse)
    if cutlass.const_expr(not encode.signed):
        signs = without_signs_of_nan(values, signs, amax)
    words = encode.element.pack([values[i] for i in range(size)], signs)
    errors = []
    for i in cutlass.range_constexpr(size // 8):
        word = words[i] if cutlass.const_expr(encode.signed) else words[i] & Uint32(~SIGN_BITS & 0xFFFFFFFF)
        for j, half in enumerate(dequantized(word, halves, encode)):
            errors.append(ptx.fma_f32(half, factor, -x[8 * i + j]))
    return Candidate(words, code, sum_of_squares(errors))


def dequantized(word: Uint32, scales: Uint32, encode: Encoding) -> list:
    """Returns eight e2m1 values times a scale times 2^-14, in order. scales: the scale as two fp16."""
    if encode.signed:
        small = ptx.scale_x2(scales, LEAST_NORMAL_HALVES, "f16")
        pairs = [ptx.mul_f16x2(pair, small) for pair in ptx.e2m1x8_to_f16x2(word)]
        return [value for pair in pairs for value in ptx.unpack_f16x2(pair)]
    (v0, v2), (v4, v6), (v1, v3), (v5, v7) = (
        ptx.unpack_f16x2(pair) for pair in decode_word(word, scales, False, Uint32(SIGN_BITS))
    )
    return [v0, v1, v2, v3, v4, v5, v6, v7]


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

"""Quantizes the float32 values of a block to elements and a scale, bit for bit as ``formats.quantize`` specifies.

e4m3 scales (NVFP4) and float32 scales (FP8_1x128) need the correctly rounded quotient x / d. With r = RN(1 / d), q = RN(x r)
and e = q d - x (exact, an FMA), RN(q - e r) is that quotient (Markstein, 1990): three instructions per element instead of a
division. -0 stays -0, which it would not with e = x - q d. Where d is outside 2^-98 ... 2^98 (for e4m3 elements, whose smallest
quotients are smaller, also below 2^-90), a term might leave the normal range, so x and d are first multiplied by a power of
two. If the block has an infinity, magnitudes are first clamped to 8 d for e2m1, which ends at 6, or to 512 d for e4m3, which
ends at 448. If the scale is 0 or d is infinite, d = 1 and r = 0 give signed zeros. NaN needs no special case, because d is NaN.

ue8m0 scales (MXFP4, MXFP8) are powers of two: the quotient is the value times the inverse power, rounded once where it is
subnormal.

4over6 (``four_over_six``) multiplies by the reciprocal and encodes a block twice.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.block_format import E2M1, FP32, UE8M0

from . import fp8, ptx
from .encode import LARGEST_FLOAT32, Encoding, without_signs_of_nan
from .four_over_six import encode_better
from .select import select

LEAST_DIVISOR, LEAST_FP8_DIVISOR, MOST_DIVISOR = 2.0**-98, 2.0**-90, 2.0**98
RESCALE = 2.0**110
# prmt selector: the upper halves of two words.
UPPER_HALVES = 0x7632
# float32: lowest exponent bit, and the bits of infinity, a NaN and 2^-127.
EXPONENT_BIT = 23
INFINITY_BITS, NAN_BITS, LEAST_POWER_BITS = 0x7F800000, 0x7FFFFFFF, 0x00400000
INFINITY = float("inf")
# The NaN that torch's amax returns.
TORCH_NAN_BITS = 0x7FC00000
# ue8m0 codes of the largest power of two and of NaN.
MOST_POWER, NAN_POWER = 254, 255


def encode_block(x: list, global_scale: Float32 | None, encode: Encoding) -> tuple[list, Uint32]:
    """Quantizes a block. Returns words of elements and the code of the scale.

    Args:
        x: Float32 values of a block, or of a part of one whose other parts are in the next lanes; then all lanes must call it.
        global_scale: the factor that dequantizing multiplies by, or None.
        encode: encoding of the format.
    """
    magnitudes = [ptx.abs_f32(value) for value in x]
    lanes = encode.format.block_k // len(x)
    scale = scale_of_part(x, magnitudes, over_lanes(largest(magnitudes), lanes), global_scale, encode)
    return encode_part(x, magnitudes, scale, encode), scale.code


def largest(magnitudes: list) -> Float32:
    """Returns the largest of a power-of-two number of magnitudes; NaN if any is NaN."""
    while len(magnitudes) > 1:
        magnitudes = [ptx.max_nan(*pair) for pair in zip(magnitudes[::2], magnitudes[1::2], strict=True)]
    return magnitudes[0]


def over_lanes(amax: Float32, lanes: int, distance: int = 1) -> Float32:
    """Returns the largest over ``lanes`` lanes, ``distance`` apart; NaN if any is NaN. All lanes must call it.

    lanes, distance: powers of two.
    """
    for step in range(lanes.bit_length() - 1):
        amax = ptx.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, distance << step))
    return amax


@dataclass(frozen=True)
class BlockScale:
    """Scale of a block, see :func:`find_scale`.

    Attributes:
        amax: largest magnitude of the block; None for ue8m0 scales, which do not need it.
        code, factor: code and factor of the scale; for float32 scales, its bits and the scale itself.
        words: words of elements of the thread's part of the block, where they decided about the scale; else None.
    """

    amax: Float32 | None
    code: Uint32
    factor: Float32 | None
    words: list | None = None


def scale_of_part(
    x: list, magnitudes: list, amax: Float32, global_scale: Float32 | None, encode: Encoding
) -> BlockScale:
    """Returns the scale of a block. ``x`` is this lane's part of the block; other lanes have the rest. All lanes must call it.

    With 4over6, which compares sums over the whole block, the next lanes must have the rest.

    Args:
        x, magnitudes: Float32 values and their magnitudes.
        amax: largest magnitude of the whole block.
        global_scale, encode: see :func:`encode_block`.
    """
    if encode.format.scaling == "four_over_six":
        values, signs = (x, None) if encode.signed else (magnitudes, signs_of(x))
        quotient = scale_quotient(amax, global_scale, encode)
        words, code = encode_better(values, signs, amax, quotient, global_scale, encode)
        return BlockScale(amax, code, None, words)
    return BlockScale(amax, *find_scale(amax, global_scale, encode))


def signs_of(x: list) -> list:
    """Returns words of two 16-bit floats with the signs of ``x``."""
    words = [ptx.bits_of(value) for value in x]
    return [
        ptx.prmt(low, high, Uint32(UPPER_HALVES)) for low, high in zip(words[::2], words[1::2], strict=True)
    ]


def encode_part(x: list, magnitudes: list, scale: BlockScale, encode: Encoding) -> list:
    """Quantizes a block or a part of one to words of elements.

    Args:
        x, magnitudes: Float32 values and their magnitudes.
        scale: scale of the whole block.
        encode: encoding of the format.
    """
    if scale.words is not None:
        return scale.words
    if encode.signed:
        return encode_values(x, None, scale.amax, scale.code, scale.factor, encode)
    return encode_values(magnitudes, signs_of(x), scale.amax, scale.code, scale.factor, encode)


def find_scale(amax: Float32, global_scale: Float32 | None, encode: Encoding) -> tuple[Uint32, Float32]:
    """Returns the scale's code of a block with largest magnitude ``amax``, and the factor for :func:`encode_values`.

    The factor divides the block's values; with ue8m0 scales it multiplies them.
    """
    if encode.format.scale == FP32:
        scale = scale_of(amax, encode.format.element.max)
        return ptx.bits_of(scale), scale
    if encode.format.scale == UE8M0:
        return power_scale(amax, encode)
    return block_scale(amax, global_scale, encode)


def encode_values(
    x: list, signs: list | None, amax: Float32, code: Uint32, factor: Float32, encode: Encoding
) -> list:
    """Returns words of elements: ``x`` over the scale, rounded.

    Args:
        x: Float32 values of a block, or a multiple of eight of them; magnitudes if ``encode`` is not signed.
        signs: words of two 16-bit floats with the signs of ``x``, if ``encode`` is not signed.
        amax, code, factor: see :func:`find_scale`.
        encode: encoding of the format.
    """
    if encode.format.scale == UE8M0:
        return encode_products(x, signs, code, factor, encode)
    return encode_quotients(x, signs, amax, code, factor, encode)


def block_scale(amax: Float32, global_scale: Float32 | None, encode: Encoding) -> tuple[Uint32, Float32]:
    """Returns the e4m3 scale's code of a block with largest magnitude ``amax``, and the divisor of its values."""
    quotient = scale_quotient(amax, global_scale, encode)
    code = fp8.e4m3_code(quotient)
    divisor = ptx.unpack_f16x2(fp8.scales_to_f16x2(code))[0]
    return code, divisor if global_scale is None else divisor * global_scale


def scale_quotient(amax: Float32, global_scale: Float32 | None, encode: Encoding) -> Float32:
    """Returns the scale of a block with largest magnitude ``amax`` before it is rounded."""
    quotient = ptx.div_f32(amax, Float32(encode.format.element.max))
    return quotient if global_scale is None else ptx.div_f32(quotient, global_scale)


@cute.jit
def encode_quotients(
    x: list,
    signs: list | None,
    amax: Float32,
    code: Uint32,
    divisor: Float32,
    encode: cutlass.Constexpr,
) -> list:
    """Implements :func:`encode_values` for e4m3 and float32 scales."""
    size = len(x)
    values = cute.make_rmem_tensor(size, Float32)
    for i in cutlass.range_constexpr(size):
        values[i] = x[i]
    only_zeros = code == 0 or divisor > LARGEST_FLOAT32
    divisor = Float32(1.0) if only_zeros else divisor
    # Elements saturate below this power of two, so clamping to it changes no result.
    most = 2.0 ** (encode.format.element.max_exponent + 1)
    least = LEAST_DIVISOR if encode.format.element == E2M1 else LEAST_FP8_DIVISOR
    is_unusual = amax > LARGEST_FLOAT32 or divisor < least or divisor > MOST_DIVISOR
    if is_unusual and not only_zeros:
        factor = Float32(1.0 / RESCALE) if divisor > MOST_DIVISOR else Float32(1.0)
        factor = Float32(RESCALE) if divisor < least else factor
        divisor = divisor * factor
        for i in cutlass.range_constexpr(size):
            values[i] = ptx.least(cutlass.max(values[i] * factor, -most * divisor), most * divisor)
    inverse = Float32(0.0) if only_zeros else ptx.rcp_f32(divisor)
    for i in cutlass.range_constexpr(size):
        estimate = values[i] * inverse
        error = ptx.fma_f32(estimate, divisor, -values[i])
        values[i] = ptx.fma_f32(-error, inverse, estimate)
    if cutlass.const_expr(not encode.signed):
        signs = without_signs_of_nan([values[i] for i in range(size)], signs, amax)
    return encode.element.pack([values[i] for i in range(size)], signs)


@cute.jit
def scale_of(amax: Float32, most: cutlass.Constexpr[float]) -> Float32:
    """Returns the float32 scale of values with largest magnitude ``amax``. most: the largest element."""
    scale = ptx.div_f32(ptx.min_nan(amax, Float32(LARGEST_FLOAT32)), Float32(most))
    return scale if amax == amax else ptx.float_of(Uint32(TORCH_NAN_BITS))


@cute.jit
def divisor_of(scale: Float32) -> Float32:
    """Returns the divisor of a scale: infinity for a scale of 0, so that quotients are 0."""
    return Float32(INFINITY) if scale == 0.0 else scale


def power_scale(amax: Float32, encode: Encoding) -> tuple[Uint32, Float32]:
    """Returns the ue8m0 scale's code of a block with largest magnitude ``amax``, and one over the scale."""
    code = power_code(amax, encode)
    return code, inverse_power(code)


def power_code(amax: Float32, encode: Encoding) -> Uint32:
    """Returns the ue8m0 scale's code of a block with largest magnitude ``amax``.

    Rounding "up" takes the smallest power of two not below RN(amax / largest element), which needs no division. Rounding "down"
    takes the exponent of amax minus that of the largest element (OCP Microscaling Formats v1.0, section 6.3).
    """
    element, bits = encode.format.element, ptx.bits_of(amax)
    least = element.max_exponent << EXPONENT_BIT
    exponent = bits >> EXPONENT_BIT
    if encode.scale_rounding == "up":
        # A mantissa above the largest element's carries into the exponent, except in the float after (largest element) * 2^-127,
        # whose quotient rounds to 2^-127.
        mantissa = int(element.max * 2.0 ** (EXPONENT_BIT - element.max_exponent)) - (1 << EXPONENT_BIT)
        exponent = (bits + Uint32((1 << EXPONENT_BIT) - 1 - mantissa)) >> EXPONENT_BIT
        least += mantissa + 1
    exponent = select(bits > least, exponent - element.max_exponent, Uint32(0))
    code = select(exponent < MOST_POWER, exponent, Uint32(MOST_POWER))
    code = select(bits < INFINITY_BITS, code, Uint32(MOST_POWER))
    return select(bits > INFINITY_BITS, Uint32(NAN_POWER), code)


def inverse_power(code: Uint32) -> Float32:
    """Returns one over the ue8m0 scale of a code."""
    inverse = select(code < MOST_POWER, (Uint32(MOST_POWER) - code) << EXPONENT_BIT, Uint32(LEAST_POWER_BITS))
    return ptx.float_of(select(code > MOST_POWER, Uint32(NAN_BITS), inverse))


def encode_products(x: list, signs: list | None, code: Uint32, inverse: Float32, encode: Encoding) -> list:
    """Implements :func:`encode_values` for ue8m0 scales."""
    words = []
    # e2m1 has no NaN; all elements of a NaN block become +6.
    kept = None if encode.signed else select(code > MOST_POWER, Uint32(0), Uint32(0xFFFFFFFF))
    for first in range(0, len(x), 8):  # eight at a time, for fewer registers
        values = [ptx.mul_f32(value, inverse) for value in x[first : first + 8]]
        some = None if kept is None else [word & kept for word in signs[first // 2 : first // 2 + 4]]
        words += encode.element.pack(values, some)
    return words

"""The fp32 values of a block to its elements and its scale, bit for bit what ``formats.quantize`` specifies.

Scales of e4m3 (NVFP4) and of fp32 (FP8_1x128). The quotient x / d is needed correctly rounded. With r = RN(1 / d), q = RN(x r),
e = q d - x (exact, an FMA), the sum RN(q - e r) is that (Markstein, 1990), and -0 stays -0 (with e = x - q d it would not):
three instructions an element instead of a division. Where d is outside 2^-98 ... 2^98, so that a term might leave the normal
range, both x and d are first multiplied by a power of two; of e4m3 elements, whose least quotients are smaller, below 2^-90.
Where the block has an infinity, magnitudes are first cut to 8 d, or 512 d: e2m1 ends at 6, e4m3 at 448. Where the scale is 0, or
d infinite, d = 1 and r = 0 give the signed zeros. NaN needs nothing: it is in d.

Scales of ue8m0 (MXFP4, MXFP8) are powers of two: a value times the inverse power is the quotient, rounded once where it is
subnormal.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.block_format import E2M1, FP32, UE8M0

from . import ptx
from .encode import Encoding
from .select import select

LEAST_DIVISOR, LEAST_FP8_DIVISOR, MOST_DIVISOR = 2.0**-98, 2.0**-90, 2.0**98
RESCALE = 2.0**110
LARGEST_FLOAT32 = 3.4028234663852886e38
# Byte permutation of two words: their upper halves.
UPPER_HALVES = 0x7632
# Bits of a float32: where its exponent begins, infinity, a NaN, 2^-127.
EXPONENT_BIT = 23
INFINITY_BITS, NAN_BITS, LEAST_POWER_BITS = 0x7F800000, 0x7FFFFFFF, 0x00400000
INFINITY = float("inf")
# The NaN that torch's largest magnitude is.
TORCH_NAN_BITS = 0x7FC00000
# Codes of ue8m0: the largest power of two, NaN.
MOST_POWER, NAN_POWER = 254, 255


def encode_block(x: list, global_scale: Float32 | None, encode: Encoding) -> tuple[list, Uint32]:
    """Words of elements and the code of the scale.

    Args:
        x: Float32, as many as a block has, or a part of it, whose other parts the next lanes have: a whole warp calls this then.
        global_scale: the factor one multiplies by to dequantize, or None.
        encode: of the format.
    """
    magnitudes = [ptx.abs_f32(value) for value in x]
    amax = over_lanes(largest(magnitudes), encode.format.block_k // len(x))
    code, factor = find_scale(amax, global_scale, encode)
    return encode_part(x, magnitudes, BlockScale(amax, code, factor), encode), code


def largest(magnitudes: list) -> Float32:
    """Of as many as a power of two; NaN where there is one."""
    while len(magnitudes) > 1:
        magnitudes = [ptx.max_nan(*pair) for pair in zip(magnitudes[::2], magnitudes[1::2], strict=True)]
    return magnitudes[0]


def over_lanes(amax: Float32, lanes: int) -> Float32:
    """The largest of so many neighbouring lanes, a power of two; NaN where one is. A whole warp calls this."""
    for step in range(lanes.bit_length() - 1):
        amax = ptx.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
    return amax


@dataclass(frozen=True)
class BlockScale:
    """The scale of a block, as of :func:`find_scale`.

    Attributes:
        amax: largest magnitude of the block; None of powers of two, for which nothing asks it.
        code, factor: of the scale; of an fp32 scale its bits and itself.
    """

    amax: Float32 | None
    code: Uint32
    factor: Float32


def encode_part(x: list, magnitudes: list, scale: BlockScale, encode: Encoding) -> list:
    """Words of elements of a block, or of a part of one.

    Args:
        x, magnitudes: Float32, and what they are without signs.
        scale: of the whole block. encode: of the format.
    """
    if encode.signed:
        return encode_values(x, None, scale.amax, scale.code, scale.factor, encode)
    words = [ptx.bits_of(value) for value in x]
    signs = [
        ptx.prmt(low, high, Uint32(UPPER_HALVES)) for low, high in zip(words[::2], words[1::2], strict=True)
    ]
    return encode_values(magnitudes, signs, scale.amax, scale.code, scale.factor, encode)


def find_scale(amax: Float32, global_scale: Float32 | None, encode: Encoding) -> tuple[Uint32, Float32]:
    """Code of the scale of a block whose largest magnitude is ``amax``, and a factor for :func:`encode_values`: what the block's
    values are divided by, and where scales are powers of two what they are multiplied by."""
    if encode.format.scale == FP32:
        scale = scale_of(amax, encode.format.element.max)
        return ptx.bits_of(scale), scale
    if encode.format.scale == UE8M0:
        return power_scale(amax, encode)
    return block_scale(amax, global_scale, encode)


def encode_values(
    x: list, signs: list | None, amax: Float32, code: Uint32, factor: Float32, encode: Encoding
) -> list:
    """Words of elements: ``x`` over the scale, rounded.

    Args:
        x: Float32, as many as a block has, or a multiple of eight of them; magnitudes where ``encode`` is not signed.
        signs: then words of two 16-bit floats with the signs of ``x``.
        amax, code, factor: as of :func:`find_scale`.
        encode: of the format.
    """
    if encode.format.scale == UE8M0:
        return encode_products(x, signs, code, factor, encode)
    return encode_quotients(x, signs, amax, code, factor, encode)


def block_scale(amax: Float32, global_scale: Float32 | None, encode: Encoding) -> tuple[Uint32, Float32]:
    """Code of the e4m3 scale of a block whose largest magnitude is ``amax``, and what its values are divided by."""
    quotient = ptx.div_f32(amax, Float32(encode.format.element.max))
    if global_scale is not None:
        quotient = ptx.div_f32(quotient, global_scale)
    code = ptx.f32_to_e4m3(quotient)
    divisor = ptx.unpack_f16x2(ptx.ue4m3x2_to_f16x2(code))[0]
    return code, divisor if global_scale is None else divisor * global_scale


@cute.jit
def encode_quotients(
    x: list,
    signs: list | None,
    amax: Float32,
    code: Uint32,
    divisor: Float32,
    encode: cutlass.Constexpr,
) -> list:
    """:func:`encode_values` where scales are e4m3 or fp32."""
    size = len(x)
    values = cute.make_rmem_tensor(size, Float32)
    for i in cutlass.range_constexpr(size):
        values[i] = x[i]
    only_zeros = code == 0 or divisor > LARGEST_FLOAT32
    divisor = Float32(1.0) if only_zeros else divisor
    # From a power of two on, elements saturate.
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
        cleared = cute.make_rmem_tensor(size // 2, Uint32)
        for i in cutlass.range_constexpr(size // 2):
            cleared[i] = signs[i]
        if not amax <= LARGEST_FLOAT32:
            # e2m1 has no NaN: it becomes +6, whatever its sign.
            for i in cutlass.range_constexpr(size):
                other_half = Uint32(0xFFFF << 16 * ((i + 1) % 2))
                cleared[i // 2] = cleared[i // 2] if values[i] == values[i] else cleared[i // 2] & other_half
        signs = [cleared[i] for i in range(size // 2)]
    return encode.element.pack([values[i] for i in range(size)], signs)


@cute.jit
def scale_of(amax: Float32, most: cutlass.Constexpr[float]) -> Float32:
    """The fp32 scale of values with this largest magnitude. most: the largest element."""
    scale = ptx.div_f32(ptx.min_nan(amax, Float32(LARGEST_FLOAT32)), Float32(most))
    return scale if amax == amax else ptx.float_of(Uint32(TORCH_NAN_BITS))


@cute.jit
def divisor_of(scale: Float32) -> Float32:
    """What values are divided by: zeros by infinity."""
    return Float32(INFINITY) if scale == 0.0 else scale


def power_scale(amax: Float32, encode: Encoding) -> tuple[Uint32, Float32]:
    """Code of the ue8m0 scale of a block whose largest magnitude is ``amax``, and one over the scale."""
    code = power_code(amax, encode)
    return code, inverse_power(code)


def power_code(amax: Float32, encode: Encoding) -> Uint32:
    """Code of the ue8m0 scale of a block whose largest magnitude is ``amax``.

    Rounded "up": the least power of two that is not under RN(amax / largest element); "down": that of amax itself, the exponent
    of the largest element taken off (OCP Microscaling Formats v1.0, section 6.3).
    """
    element = encode.format.element
    if encode.scale_rounding == "up":
        bits = ptx.bits_of(ptx.div_f32(amax, Float32(element.max)))
        # Any bit of a mantissa carries into the exponent. Subnormal numbers up to 2^-127 have code 0.
        exponent = (bits + Uint32((1 << EXPONENT_BIT) - 1)) >> EXPONENT_BIT
        exponent = select(bits > LEAST_POWER_BITS, exponent, Uint32(0))
    else:
        bits = ptx.bits_of(amax)
        exponent = bits >> EXPONENT_BIT
        least = Uint32(element.max_exponent)
        exponent = select(exponent > least, exponent - least, Uint32(0))
    code = select(exponent < MOST_POWER, exponent, Uint32(MOST_POWER))
    code = select(bits < INFINITY_BITS, code, Uint32(MOST_POWER))
    return select(bits > INFINITY_BITS, Uint32(NAN_POWER), code)


def inverse_power(code: Uint32) -> Float32:
    """One over the ue8m0 scale of a code."""
    inverse = select(code < MOST_POWER, (Uint32(MOST_POWER) - code) << EXPONENT_BIT, Uint32(LEAST_POWER_BITS))
    return ptx.float_of(select(code > MOST_POWER, Uint32(NAN_BITS), inverse))


def encode_products(x: list, signs: list | None, code: Uint32, inverse: Float32, encode: Encoding) -> list:
    """:func:`encode_values` where scales are powers of two."""
    values = [ptx.mul_f32(value, inverse) for value in x]
    if not encode.signed:
        # e2m1 has no NaN: all of such a block becomes +6.
        kept = select(code > MOST_POWER, Uint32(0), Uint32(0xFFFFFFFF))
        signs = [word & kept for word in signs]
    return encode.element.pack(values, signs)

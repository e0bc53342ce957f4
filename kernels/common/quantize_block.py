"""Sixteen fp32 values to one NVFP4 block, bit for bit what ``formats.quantize`` specifies.

The quotient x / d is needed correctly rounded. With r = RN(1 / d), q = RN(x r), e = q d - x (exact, an FMA), the sum
RN(q - e r) is that (Markstein, 1990), and -0 stays -0 (with e = x - q d it would not): three instructions an element
instead of a division. Where d is outside 2^-98 ... 2^98, so that a term might leave the normal range, both x and d are
first multiplied by a power of two. Where the block has an infinity, magnitudes are first cut to 8 d: e2m1 ends at 6.
Where the scale is 0, or d infinite, d = 1 and r = 0 give the signed zeros. NaN needs nothing: it is in d.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_cute.formats.scale_layout import SF_VEC_SIZE

from . import ptx

LEAST_DIVISOR, MOST_DIVISOR = 2.0**-98, 2.0**98
RESCALE = 2.0**110
LARGEST_FLOAT32 = 3.4028234663852886e38
# Byte permutation of two words: their upper halves.
UPPER_HALVES = 0x7632


def encode_block(x: list, global_scale: Float32 | None, encode: type) -> tuple[list, Uint32]:
    """Two words of e2m1 and the code of the scale.

    Args:
        x: sixteen Float32. global_scale: the factor one multiplies by to dequantize, or None.
        encode: ``ConvertE2M1`` or ``RoundE2M1``.
    """
    magnitudes = [ptx.abs_f32(value) for value in x]
    maxima = magnitudes
    while len(maxima) > 1:
        maxima = [ptx.max_nan(*pair) for pair in zip(maxima[::2], maxima[1::2], strict=True)]
    amax = maxima[0]
    code, divisor = block_scale(amax, global_scale)
    if encode.signed:
        return encode_values(x, None, amax, code, divisor, encode), code
    words = [ptx.bits_of(value) for value in x]
    signs = [
        ptx.prmt(low, high, Uint32(UPPER_HALVES)) for low, high in zip(words[::2], words[1::2], strict=True)
    ]
    return encode_values(magnitudes, signs, amax, code, divisor, encode), code


def block_scale(amax: Float32, global_scale: Float32 | None) -> tuple[Uint32, Float32]:
    """Code of the scale of a block whose largest magnitude is ``amax``, and what its values are divided by."""
    quotient = ptx.div_f32(amax, Float32(6.0))
    if global_scale is not None:
        quotient = ptx.div_f32(quotient, global_scale)
    code = ptx.f32_to_e4m3(quotient)
    divisor = ptx.unpack_f16x2(ptx.ue4m3x2_to_f16x2(code))[0]
    return code, divisor if global_scale is None else divisor * global_scale


@cute.jit
def encode_values(
    x: list, signs: list | None, amax: Float32, code: Uint32, divisor: Float32, encode: cutlass.Constexpr
) -> list:
    """Two words of e2m1: ``x`` over ``divisor``, rounded.

    Args:
        x: sixteen Float32; magnitudes where ``encode`` is not signed.
        signs: then eight words of two 16-bit floats with the signs of ``x``.
        amax, code, divisor: as of :func:`block_scale`.
        encode: ``ConvertE2M1`` or ``RoundE2M1``.
    """
    values = cute.make_rmem_tensor(SF_VEC_SIZE, Float32)
    for i in cutlass.range_constexpr(SF_VEC_SIZE):
        values[i] = x[i]
    only_zeros = code == 0 or divisor > LARGEST_FLOAT32
    divisor = Float32(1.0) if only_zeros else divisor
    is_unusual = amax > LARGEST_FLOAT32 or divisor < LEAST_DIVISOR or divisor > MOST_DIVISOR
    if is_unusual and not only_zeros:
        factor = Float32(1.0 / RESCALE) if divisor > MOST_DIVISOR else Float32(1.0)
        factor = Float32(RESCALE) if divisor < LEAST_DIVISOR else factor
        divisor = divisor * factor
        for i in cutlass.range_constexpr(SF_VEC_SIZE):
            values[i] = ptx.least(cutlass.max(values[i] * factor, -8 * divisor), 8 * divisor)
    inverse = Float32(0.0) if only_zeros else ptx.rcp_f32(divisor)
    for i in cutlass.range_constexpr(SF_VEC_SIZE):
        estimate = values[i] * inverse
        error = ptx.fma_f32(estimate, divisor, -values[i])
        values[i] = ptx.fma_f32(-error, inverse, estimate)
    if cutlass.const_expr(not encode.signed):
        cleared = cute.make_rmem_tensor(SF_VEC_SIZE // 2, Uint32)
        for i in cutlass.range_constexpr(SF_VEC_SIZE // 2):
            cleared[i] = signs[i]
        if not amax <= LARGEST_FLOAT32:
            # e2m1 has no NaN: it becomes +6, whatever its sign.
            for i in cutlass.range_constexpr(SF_VEC_SIZE):
                other_half = Uint32(0xFFFF << 16 * ((i + 1) % 2))
                cleared[i // 2] = cleared[i // 2] if values[i] == values[i] else cleared[i // 2] & other_half
        signs = [cleared[i] for i in range(SF_VEC_SIZE // 2)]
    return encode.pack([values[i] for i in range(SF_VEC_SIZE)], signs)

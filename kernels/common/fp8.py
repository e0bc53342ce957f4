"""Floats to e4m3 and e5m2 and back: by instructions from sm_89 on (PTX ISA 9.7.9.21, cvt), else by arithmetic with the same bits.

The upper byte of a half is an e5m2 value. An e4m3 value, moved to the exponent and mantissa bits of a half, reads as the value
times 2^-8, subnormal values too: a product with 2^8 is exact. Values are encoded by an addition that carries from the bits that
are dropped, ties to even; subnormal ones by the addition of a power of two whose last bit counts what the least code does.
"""

from cutlass import Float32, Uint32

from . import ptx
from .select import select
from .versions import compiles_for

CONVERTS_FROM = 89
# prmt: bytes 0 and 1, or 2 and 3, as the upper bytes of two halves.
UPPER_BYTES = (0x1404, 0x3424)
SIGNS, MAGNITUDES, ONES, TWO_8 = 0x80008000, 0x7F007F00, 0x01000100, 0x5C005C00
# Mantissa bits, exponent bias, the largest value.
SHAPES = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}
NAN_CODE = 0x7F
FLOAT_MANTISSA, FLOAT_BIAS = 23, 127


def to_f16x2(word: Uint32, element: str) -> list:
    """Four e4m3 or e5m2 codes as two fp16 pairs, in order."""
    if compiles_for(CONVERTS_FROM):
        return ptx.fp8x4_to_f16x2(word, element)
    return [_pair(ptx.prmt(word, Uint32(0), Uint32(selector)), element) for selector in UPPER_BYTES]


def scales_to_f16x2(word: Uint32) -> Uint32:
    """The two e4m3 block scales in the low half of ``word`` as two halves; their sign bits are ignored."""
    if compiles_for(CONVERTS_FROM):
        return ptx.ue4m3x2_to_f16x2(word)
    return _pair(ptx.prmt(word, Uint32(0), Uint32(UPPER_BYTES[0])) & Uint32(MAGNITUDES), "e4m3")


def codes_of(values: list, element: str) -> Uint32:
    """Nearest e4m3 or e5m2 codes of four floats, ties to even, saturating, the first in the lowest byte; NaN gives 0x7F."""
    if compiles_for(CONVERTS_FROM):
        return ptx.f32x4_to_fp8(values, element)
    codes = [_code(value, element) for value in values]
    return codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24


def e4m3_code(value: Float32) -> Uint32:
    """Nearest e4m3 code, ties to even, saturating at 448; NaN gives 0x7F."""
    return ptx.f32_to_e4m3(value) if compiles_for(CONVERTS_FROM) else _code(value, "e4m3")


def _pair(upper: Uint32, element: str) -> Uint32:
    """Two codes, each the upper byte of a half whose lower byte is 0, as two halves."""
    if element == "e5m2":
        return upper
    magnitudes = upper & Uint32(MAGNITUDES)
    values = ptx.scale_x2(upper & Uint32(SIGNS) | magnitudes >> 1, TWO_8, "f16")
    is_nan = magnitudes + Uint32(ONES) & Uint32(SIGNS)
    return values | is_nan - (is_nan >> 15)


def _code(value: Float32, element: str) -> Uint32:
    mantissa, bias, largest = SHAPES[element]
    dropped = FLOAT_MANTISSA - mantissa
    magnitude = ptx.least(ptx.abs_f32(value), Float32(largest))
    word = ptx.bits_of(magnitude)
    rounded = word + Uint32((1 << dropped - 1) - 1) + (word >> dropped & 1) >> dropped
    last_is_least = Float32(2.0 ** (1 - bias + dropped))
    subnormal = ptx.bits_of(ptx.add_f32(magnitude, last_is_least)) - ptx.bits_of(last_is_least)
    normal = rounded - Uint32(FLOAT_BIAS - bias << mantissa)
    code = select(magnitude < Float32(2.0 ** (1 - bias)), subnormal, normal)
    code = code | ptx.bits_of(value) >> 24 & Uint32(0x80)
    return select(value == value, code, Uint32(NAN_CODE))

"""Converts ue8m0 scales to bf16 and multiplies values by them:

exact for e2m1, and for e4m3 and e5m2 but for the smallest products.

The bits of an e2m1 value, put into a bf16 as sign, two low exponent bits and top mantissa bit, read as the value times 2^-126.
Times ``LIFT``, that is the value times 2^-2. A scale is 2^-127 to 2^127. Both products are exact: the second one is between
2^-130 and 1.5 * 2^127, a multiple of 2^-130, and has two significant bits.

A product with e4m3 or e5m2 has up to four significant bits and carries no such factor. bf16 represents multiples of 2^-133, so
all products with scales of at least 2^-124 (e5m2: 2^-117) are exact, and with smaller scales those that are large enough;
others are rounded to such a multiple. Infinities, and products of at least 2^128, which the format leaves open, are infinite.
"""

from cutlass import Float32, Uint32

from . import fp8, ptx
from .select import select
from .versions import inline_ptx

# log2 of the factor that the epilogue undoes.
OPERAND_EXPONENT = 2
# float32: lowest exponent bit, bits of 2^-127 and of a NaN; and the ue8m0 code of NaN.
EXPONENT_BIT, LEAST_POWER_BITS, NAN_BITS, NAN_CODE = 23, 0x00400000, 0x7FC00000, 255
# Pairs of bf16: 2^124, 2^-127.
LIFT = 0x7D807D80
LEAST_POWERS = 0x00400040
# Multiplying a nibble in the low byte of a bf16 by E2M1_MOVES moves its magnitude to bits 8 to 6 and its sign to bit 15.
E2M1_MOVES, E2M1_BITS = 1 << 6 | 1 << 12, 0x81C081C0
LOW_NIBBLES = 0x0F0F0F0F
# prmt selector: the upper halves of two words.
UPPER_HALVES = 0x7632
# prmt selectors: bytes 0 and 1, or 2 and 3, as the lower bytes of two halves.
LOWER_BYTES = (0x4140, 0x4342)
# prmt selectors: the first or the last two of four scales as the upper bytes of two halves; BOTH_UPPER selects one scale for both
# after its number is added to both digits.
UPPER_BYTES = (0x1404, 0x3424)
BOTH_UPPER, BOTH_UPPER_STEP = 0x0404, 0x1010


def powers(codes: Uint32) -> Uint32:
    """Converts two ue8m0 codes to two bf16. codes: each in the upper byte of a half; lower bytes are 0."""
    # Code 255 reads as infinity, and infinity times 0 is NaN. (PTX takes no literals here.)
    return inline_ptx(
        f"{{\n.reg .b32 zero, least;\nmov.b32 zero, 0;\nmov.b32 least, {LEAST_POWERS:#010x};\n"
        "max.bf16x2 least, {$r0}, least;\nfma.rn.bf16x2 {$w0}, {$r0}, zero, least;\n}",
        write_only_types=[Uint32],
        read_only_args=[codes >> 1],
    )


def fp8_pairs(word: Uint32, element: str) -> list:
    """Converts four e4m3 or e5m2 values, exactly, to the bf16 pairs (0, 2) and (1, 3). Infinities and NaN are kept."""
    pairs = [ptx.unpack_f16x2(half) for half in fp8.to_f16x2(word, element)]
    # A float32 with this few significant bits equals its upper half.
    return [_upper_halves(*both) for both in zip(*pairs, strict=True)]


def fp8_pair(word: Uint32, element: str) -> Uint32:
    """Converts the two e4m3 or e5m2 values in the low half of a word to a pair of bf16; see :func:`fp8_pairs`."""
    return _upper_halves(*ptx.unpack_f16x2(fp8.to_f16x2(word, element)[0]))


def fp8_halves(words: list, scales: Uint32, uppers: tuple[int, int], element: str) -> list:
    """Returns eight e4m3 or e5m2 values of two words times their scales as pairs of bf16.

    The order is that of ``decode.decode_halves``. scales, uppers: see :func:`decode_halves`.
    """
    even, odd = zip(*(fp8_pairs(word, element) for word in words), strict=True)
    return [
        times_one_of(pair, scales, upper)
        for pairs in (even, odd)
        for pair, upper in zip(pairs, uppers, strict=True)
    ]


def _upper_halves(low: Float32, high: Float32) -> Uint32:
    return ptx.prmt(ptx.bits_of(low), ptx.bits_of(high), Uint32(UPPER_HALVES))


def power_over(code: Uint32, exponent: int) -> Float32:
    """Returns 2^(code - 127 - exponent), exactly, also if it is subnormal; NaN for code 255."""
    is_normal = code > exponent
    subnormal = Uint32(LEAST_POWER_BITS) >> select(is_normal, Uint32(0), Uint32(exponent) - code)
    bits = select(is_normal, (code - Uint32(exponent)) << EXPONENT_BIT, subnormal)
    return ptx.float_of(select(code == NAN_CODE, Uint32(NAN_BITS), bits))


def lifted(pair: Uint32) -> Uint32:
    """Turns two e2m1 values times 2^-126 into two times 2^-2."""
    return ptx.scale_x2(pair, LIFT, "bf16")


def times_one_of(pair: Uint32, scales: Uint32, upper: int) -> Uint32:
    """Multiplies both values of a pair by one of two bf16."""
    half = "lh"[upper]
    return inline_ptx(
        "{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, {$r1}; mov.b32 s, {"
        + f"{half}, {half}"
        + f"}}; {ptx.mul_text('{$w0}', '{$r0}', 's', 'bf16')} }}",
        write_only_types=[Uint32],
        read_only_args=[pair, scales],
    )


def decode_halves(word: Uint32, scales: Uint32, uppers: tuple[int, int]) -> list:
    """Returns eight e2m1 values times their scales and 2^-2 as pairs of bf16, in the order of ``decode.decode_halves``.

    Args:
        word: nibble i is value i.
        scales: two bf16, result of ``powers``.
        uppers: whether values 0 to 3, and 4 to 7, use the upper scale.
    """
    pairs = []
    for nibbles in (word & Uint32(LOW_NIBBLES), word >> 4 & Uint32(LOW_NIBBLES)):
        for selector, upper in zip(LOWER_BYTES, uppers, strict=True):
            bits = ptx.prmt(nibbles, Uint32(0), Uint32(selector)) * Uint32(E2M1_MOVES) & Uint32(E2M1_BITS)
            pairs.append(times_one_of(lifted(bits), scales, upper))
    return pairs

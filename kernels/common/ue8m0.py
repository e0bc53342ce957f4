"""Scales of ue8m0 as bf16, and values times them: e2m1 without rounding, e4m3 and e5m2 all but the least.

The bits of an e2m1 value, put into a bf16 as sign, two low exponent bits and top mantissa bit, read as the value times 2^-126.
Times ``LIFT`` that is the value times 2^-2. A scale is 2^-127 to 2^127: both products are exact, for the second one lies
between 2^-130 and 1.5 * 2^127, is a multiple of 2^-130, and has two significant bits.

Of e4m3 and e5m2 a product has up to four significant bits. bf16 has its multiples of 2^-133, as it is, without such a factor: all
products with scales from 2^-124 on (e5m2: 2^-117), of smaller scales those that are large enough; others are rounded to such a
multiple. Infinities, and products from 2^128 on, which the format leaves open, are infinite.
"""

from cutlass import Float32, Uint32

from . import ptx
from .select import select
from .versions import inline_ptx

# log2 of what products carry, which the epilogue takes out again.
OPERAND_EXPONENT = 2
# Of float32: where exponents begin, 2^-127, NaN; and the code of a scale that is NaN.
EXPONENT_BIT, LEAST_POWER_BITS, NAN_BITS, NAN_CODE = 23, 0x00400000, 0x7FC00000, 255
# Pairs of bf16: 2^124, 2^-127.
LIFT = 0x7D807D80
LEAST_POWERS = 0x00400040
# A nibble in the low byte of a bf16: a product moves it to both places, magnitude to bits 8 to 6, sign to bit 15.
E2M1_MOVES, E2M1_BITS = 1 << 6 | 1 << 12, 0x81C081C0
LOW_NIBBLES = 0x0F0F0F0F
# prmt: the upper halves of two words.
UPPER_HALVES = 0x7632
# prmt: bytes 0 and 1, or 2 and 3, as the lower bytes of two halves.
LOWER_BYTES = (0x4140, 0x4342)
# Of four scales the first two, or the last two, as the upper bytes of two halves; one as both, when its number is added to both
# digits.
UPPER_BYTES = (0x1404, 0x3424)
BOTH_UPPER, BOTH_UPPER_STEP = 0x0404, 0x1010


def powers(codes: Uint32) -> Uint32:
    """Two ue8m0 codes as two bf16. codes: each in the upper byte of a half, the lower byte 0."""
    # Infinity, which code 255 reads as, times 0 is NaN. (PTX takes no literals here.)
    return inline_ptx(
        f"{{\n.reg .b32 zero, least;\nmov.b32 zero, 0;\nmov.b32 least, {LEAST_POWERS:#010x};\n"
        "max.bf16x2 least, {$r0}, least;\nfma.rn.bf16x2 {$w0}, {$r0}, zero, least;\n}",
        write_only_types=[Uint32],
        read_only_args=[codes >> 1],
    )


def fp8_pairs(word: Uint32, element: str) -> list:
    """Four e4m3 or e5m2 values as pairs of bf16, exactly: (0, 2) and (1, 3). Infinities and NaN stay what they are."""
    pairs = [ptx.unpack_f16x2(half) for half in ptx.fp8x4_to_f16x2(word, element)]
    # A float32 with so few significant bits is its upper half.
    return [_upper_halves(*both) for both in zip(*pairs, strict=True)]


def fp8_pair(word: Uint32, element: str) -> Uint32:
    """The two e4m3 or e5m2 values in the low half of a word as a pair of bf16, as of :func:`fp8_pairs`."""
    return _upper_halves(*ptx.unpack_f16x2(ptx.fp8x4_to_f16x2(word, element)[0]))


def fp8_halves(words: list, scales: Uint32, uppers: tuple[int, int], element: str) -> list:
    """Eight e4m3 or e5m2 values in two words times their scales, in the order of ``decode.decode_halves``, as pairs of bf16.

    scales, uppers: as of :func:`decode_halves`.
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
    """A scale over a power of two, exactly: 2^(code - 127 - exponent), subnormal where it is; NaN of code 255."""
    is_normal = code > exponent
    subnormal = Uint32(LEAST_POWER_BITS) >> select(is_normal, Uint32(0), Uint32(exponent) - code)
    bits = select(is_normal, (code - Uint32(exponent)) << EXPONENT_BIT, subnormal)
    return ptx.float_of(select(code == NAN_CODE, Uint32(NAN_BITS), bits))


def lifted(pair: Uint32) -> Uint32:
    """Two e2m1 values times 2^-126 as two of them times 2^-2."""
    return ptx.scale_x2(pair, LIFT, "bf16")


def times_one_of(pair: Uint32, scales: Uint32, upper: int) -> Uint32:
    """Both of a pair times one of two bf16."""
    half = "lh"[upper]
    return inline_ptx(
        "{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, {$r1}; mov.b32 s, {"
        + f"{half}, {half}"
        + "}; mul.rn.bf16x2 {$w0}, {$r0}, s; }",
        write_only_types=[Uint32],
        read_only_args=[pair, scales],
    )


def decode_halves(word: Uint32, scales: Uint32, uppers: tuple[int, int]) -> list:
    """Eight e2m1 values times their scales, and times 2^-2, in the order of ``decode.decode_halves``, as pairs of bf16.

    Args:
        word: nibble i is value i.
        scales: two bf16: ``powers``.
        uppers: of values 0 to 3, and of 4 to 7, whether the scale is the upper one.
    """
    pairs = []
    for nibbles in (word & Uint32(LOW_NIBBLES), word >> 4 & Uint32(LOW_NIBBLES)):
        for selector, upper in zip(LOWER_BYTES, uppers, strict=True):
            bits = ptx.prmt(nibbles, Uint32(0), Uint32(selector)) * Uint32(E2M1_MOVES) & Uint32(E2M1_BITS)
            pairs.append(times_one_of(lifted(bits), scales, upper))
    return pairs

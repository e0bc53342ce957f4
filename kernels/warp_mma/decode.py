"""Weights as ``mma.sync`` takes them beside 16-bit tokens: eight of a word as four pairs, in few instructions.

The order of K in a product is free as long as both operands agree. The pairs of a 32-bit word of e2m1 are its nibbles
(0, 4), (1, 5), (2, 6), (3, 7): both halves of a word are then treated alike, and no byte has to move. Bits of e2m1, put into a
16-bit float as sign, two low exponent bits and top mantissa bit, read as the value times 2^-14 (fp16) or 2^-126 (bf16).
One instruction puts the magnitudes of two nibbles of each half in place beside signs that are there already; the other two
nibbles of that word are 4 or 8 bits to the right of theirs. So eight weights take 6 ``lop3``, 5 shifts, 4 products.
"""

import cutlass
from cutlass import Float32, Uint32

from ..common import ptx
from ..common.versions import inline_ptx

# log2 of what sums are multiplied with.
EXPONENTS = {"f16": 14, "bf16": 7}
# bf16: scales take all but 2 ** 7 of the 2 ** 126 that are missing; e4m3 as fp16 by a shift lacks 2 ** 8.
BF16_SCALE, SHIFTED_SCALE = 2.0**119, 2.0**8
# A pair: sign, two exponent bits, a mantissa bit.
PAIR_BITS = {"f16": 0x8E008E00, "bf16": 0x81C081C0}
# Where magnitudes of two pairs go: of the second pair that many bits to the right.
MAGNITUDES = {"f16": 0x0E0E0E0E, "bf16": 0x01DC01DC}
SECOND_PAIR_SHIFT = {"f16": 8, "bf16": 4}
# prmt: one half twice; bytes 0 and 1 as the low bytes of two halves.
BOTH_HALVES, LOW_BYTES = (0x1010, 0x3232), 0x4140


def decode_e2m1(word: Uint32, scale: Uint32, type_name: str) -> list:
    """Eight weights times their scale as pairs of nibbles (0, 4), (1, 5), (2, 6), (3, 7). ``scale``: twice, in a word."""
    if type_name == "f16":
        # Nibbles 0 and 2, of which the second lies in upper bytes, then 1 and 3.
        first, second = _merged(word << 1, word << 4, type_name), _merged(word >> 3, word, type_name)
        words = (first, second, first, second)
    else:
        first, second = _merged(word << 2, word << 8, type_name), _merged(word >> 6, word, type_name)
        words = (first, first, second, second)
    shift, is_low = SECOND_PAIR_SHIFT[type_name], (0, 1) if type_name == "f16" else (0, 2)
    placed = [w << shift if i in is_low else w for i, w in enumerate(words)]
    bits = Uint32(PAIR_BITS[type_name])
    return [_times(w & bits, scale, type_name) for w in placed]


def _times(pair: Uint32, scale: Uint32, type_name: str) -> Uint32:
    """A product of pairs. sm_80 multiplies bf16 only where it adds: -0, which changes nothing."""
    if type_name == "f16":
        return ptx.mul_x2(pair, scale, type_name)
    return inline_ptx(
        "{ .reg .b32 zeros; mov.b32 zeros, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, zeros; }",
        write_only_types=[Uint32],
        read_only_args=[pair, scale],
    )


def _merged(magnitudes: Uint32, signs: Uint32, type_name: str) -> Uint32:
    """Bits ``MAGNITUDES`` of one word, all others of another."""
    return inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MAGNITUDES[type_name]:#x}, 0xE4;",
        write_only_types=[Uint32],
        read_only_args=[magnitudes, signs],
    )


def decode_e4m3_scales(codes: Uint32, type_name: str, has_convert: bool) -> list:
    """The two scales in the low half of a word, each twice; their sign says nothing, NaN stays NaN.

    Args:
        has_convert: whether the architecture turns e4m3 into fp16, as those from sm_89 on do.
    """
    if has_convert:
        pair, missing = ptx.ue4m3x2_to_f16x2(codes), 1.0
    else:
        magnitudes = codes & Uint32(0x7F7F)
        # NaN is the one code that a carry reaches the sign from: as the top bit of an exponent it makes that infinite.
        marked = (magnitudes + Uint32(0x0101)) & Uint32(0x8080) | magnitudes
        pair, missing = ptx.prmt(marked, Uint32(0), Uint32(LOW_BYTES)) << 7, SHIFTED_SCALE
    if type_name == "bf16":
        factor = Float32(BF16_SCALE * missing)
        return [ptx.pair_of(ptx.mul_f32(s, factor), type_name) for s in ptx.unpack_f16x2(pair)]
    if cutlass.const_expr(missing != 1.0):
        pair = ptx.scale_x2(pair, 0x5C005C00, "f16")
    return [ptx.prmt(pair, Uint32(0), Uint32(selector)) for selector in BOTH_HALVES]

"""Converts int8 to pairs of fp16 or bf16, exactly.

The lowest mantissa bit of a bf16 of 128 counts ones, so its 7 mantissa bits can hold the lower bits of an integer. The
integer's sign, used as the lowest exponent bit, turns 128 into 256. The integer is therefore ``(128 + lower bits) - (128 or
256)``: -128 to 127.
"""

from cutlass import Uint32

from . import ptx

# Both halves of a word: 128 as bf16, the lower bits of an integer, its sign.
BIAS, LOWER_BITS, SIGNS = 0x43004300, 0x007F007F, 0x00800080
# prmt selector: bytes 0 and 1 as the lower bytes of two halves; zero bytes of a second word as the upper ones.
LOWER_BYTES = 0x4140


def integer_pair(word: Uint32, is_bf16: bool) -> Uint32:
    """Returns the two integers in the low half of a word as a pair of bf16 or fp16."""
    if not is_bf16:
        return ptx.s8x4_to_f16x2(word)[0]
    both = ptx.prmt(word, Uint32(0), Uint32(LOWER_BYTES))
    return ptx.sub_x2(both & Uint32(LOWER_BITS) | Uint32(BIAS), both & Uint32(SIGNS) | Uint32(BIAS), "bf16")

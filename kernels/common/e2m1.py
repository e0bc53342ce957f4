"""Converts eight e2m1 values to 16-bit floats divided by a power of two, as four pairs, in few instructions.

The bits of an e2m1 value become the sign, the two low exponent bits and the top mantissa bit of a 16-bit float, which is the
value times 2^-14 (fp16) or 2^-126 (bf16). One ``lop3`` places the magnitudes of two pairs in a word that already has their signs.
The second pair lies 8 or 4 bits to the right of the first. So eight values take 6 ``lop3`` and 5 shifts. Two ``lop3`` per pair
would need 8 and 7 shifts; pairs of neighbours need 6 ``lop3``, 4 ``prmt`` and 3 shifts.
"""

from cutlass import Uint32

from .versions import inline_ptx

# Bits of a pair: sign, two exponent bits and a mantissa bit in each half.
PAIR_BITS = {"f16": 0x8E008E00, "bf16": 0x81C081C0}
# Bits of the magnitudes of both pairs in a word, and the distance in bits from the first pair to the second.
MAGNITUDES = {"f16": 0x0E0E0E0E, "bf16": 0x01DC01DC}
SECOND_PAIR_SHIFT = {"f16": 8, "bf16": 4}


def e2m1_pairs(word: Uint32, type_name: str) -> list:
    """Returns eight values divided by a power of two, as pairs of the values of nibbles (0, 4), (1, 5), (2, 6), (3, 7)."""
    if type_name == "f16":
        # One word has pairs 0 and 2, with pair 0 to the right; the other has pairs 1 and 3.
        first, second = _merged(word << 1, word << 4, type_name), _merged(word >> 3, word, type_name)
        words, are_second = (first, second, first, second), (True, True, False, False)
    else:
        first, second = _merged(word << 2, word << 8, type_name), _merged(word >> 6, word, type_name)
        words, are_second = (first, first, second, second), (True, False, True, False)
    shift, bits = SECOND_PAIR_SHIFT[type_name], Uint32(PAIR_BITS[type_name])
    placed = [w << shift if is_second else w for w, is_second in zip(words, are_second, strict=True)]
    return [w & bits for w in placed]


def _merged(magnitudes: Uint32, signs: Uint32, type_name: str) -> Uint32:
    """Returns a word with the bits ``MAGNITUDES`` of ``magnitudes``, and all other bits of ``signs``."""
    return inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MAGNITUDES[type_name]:#x}, 0xE4;",
        write_only_types=[Uint32],
        read_only_args=[magnitudes, signs],
    )

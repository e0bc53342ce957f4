"""Exact dot products of e2m1 blocks, in two ways that give the same number: by conversion to fp16 and by bytes.

``HalfDot`` (sm_100a and later) converts to fp16. Products of e2m1 values are multiples of 1/4 up to 36; one half of a
word adds the 8 even or odd k of a block: at most 288, and fp16 holds every multiple of 1/4 up to 512. The two halves
meet in fp32.

``ByteDot`` (any architecture) looks doubled values (integers up to 12) up in a table of eight bytes and multiplies
bytes into int32. Its result is 4 times the dot product, and so is that of ``HalfDot``: e2m1 times 4 is exact, too.
"""

from cutlass import Float32, Int32, Uint32

from ..common import ptx

WORDS_PER_BLOCK = 2
# Twice the magnitudes 0, 0.5, 1, 1.5 | 2, 3, 4, 6, a byte each.
DOUBLED_LOW, DOUBLED_HIGH = 0x03020100, 0x0C080604
NIBBLE_SIGNS = 0x88888888
BYTE_SIGNS = 0x80808080
FOUR_F16X2 = 0x44004400


class HalfDot:
    """Operands as fp16 pairs: 4 words for 8 values."""

    words_per_packed = 4

    @staticmethod
    def decode_vector(word: Uint32) -> list:
        """Eight values of the vector, times 4."""
        return [ptx.scale_f16x2(pair, FOUR_F16X2) for pair in ptx.e2m1x8_to_f16x2(word)]

    @staticmethod
    def block(row: list, vector: list) -> Float32:
        """4 times the dot product of one block: two packed words of a row, eight decoded words of the vector."""
        pairs = [pair for word in row for pair in ptx.e2m1x8_to_f16x2(word)]
        acc = ptx.mul_f16x2(pairs[0], vector[0])
        for pair, other in zip(pairs[1:], vector[1:], strict=True):
            acc = ptx.fma_f16x2(pair, other, acc)
        low, high = ptx.unpack_f16x2(acc)
        return low + high


class ByteDot:
    """Operands as signed bytes: 2 words for 8 values."""

    words_per_packed = 2

    @staticmethod
    def _magnitudes(word: Uint32) -> list:
        """Doubled values of the nibbles whose sign is clear; the others are 0, the copied sign of a table entry."""
        low, high = Uint32(DOUBLED_LOW), Uint32(DOUBLED_HIGH)
        return [ptx.prmt(low, high, word), ptx.prmt(low, high, word >> 16)]

    @classmethod
    def decode_vector(cls, word: Uint32) -> list:
        """Eight doubled values of the vector. Positive minus negative a byte; the guard bit stops the borrow."""
        positive, negative = cls._magnitudes(word), cls._magnitudes(word ^ Uint32(NIBBLE_SIGNS))
        guard = Uint32(BYTE_SIGNS)
        return [((p | guard) - n) ^ guard for p, n in zip(positive, negative, strict=True)]

    @classmethod
    def block(cls, row: list, vector: list) -> Float32:
        """4 times the dot product of one block: two packed words of a row, four decoded words of the vector."""
        positive, negative = Int32(0), Int32(0)
        for i, word in enumerate(row):
            plus, minus = cls._magnitudes(word), cls._magnitudes(word ^ Uint32(NIBBLE_SIGNS))
            for j in range(2):
                positive = ptx.dp4a(plus[j], vector[2 * i + j], positive)
                negative = ptx.dp4a(minus[j], vector[2 * i + j], negative)
        return Float32(positive - negative)

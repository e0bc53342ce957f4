"""Exact dot products of e2m1 blocks, in two equal ways: by conversion to fp16 and by bytes.

``HalfDot`` (sm_100a and later) converts to fp16. Products of e2m1 values are multiples of 1/4 up to 36. Each half of a
word adds the 8 even or odd k of a block: at most 288, and fp16 holds every multiple of 1/4 up to 512. The two halves
are added in fp32.

``ByteDot`` (any architecture) looks up doubled values (integers up to 12) in a table of eight bytes and multiplies
bytes into int32. Its result is 4 times the dot product. ``HalfDot`` returns the same multiple, because e2m1 times 4 is
also exact.
"""

from dataclasses import dataclass

from cutlass import Float32, Int32, Uint32

from ..common import ptx

WORDS_PER_BLOCK = 2
# Twice the magnitudes 0, 0.5, 1, 1.5 | 2, 3, 4, 6, one per byte.
DOUBLED_LOW, DOUBLED_HIGH = 0x03020100, 0x0C080604
NIBBLE_SIGNS = 0x88888888
BYTE_SIGNS = 0x80808080
FOUR_F16X2 = 0x44004400
# A float whose unit in the last place is 1, and its bits: adding a small integer to the bits adds it to the float.
ONE_ULP, ONE_ULP_BITS = 12582912.0, 0x4B400000


@dataclass(frozen=True)
class HalfDot:
    """Operands as fp16 pairs: 4 words for 8 values."""

    @classmethod
    def make(cls, zero: Uint32) -> "HalfDot":
        """Returns the operand decoder; see ``ByteDot.make`` for ``zero``."""
        return cls()

    @staticmethod
    def decode_vector(word: Uint32) -> list:
        """Returns eight values of the vector, times 4."""
        return [ptx.scale_x2(pair, FOUR_F16X2, "f16") for pair in ptx.e2m1x8_to_f16x2(word)]

    @staticmethod
    def block(row: list, vector: list) -> Float32:
        """Returns 4 times the dot product of one block: two packed words of a row, eight decoded words of the vector."""
        pairs = [pair for word in row for pair in ptx.e2m1x8_to_f16x2(word)]
        acc = ptx.mul_f16x2(pairs[0], vector[0])
        for pair, other in zip(pairs[1:], vector[1:], strict=True):
            acc = ptx.fma_f16x2(pair, other, acc)
        low, high = ptx.unpack_f16x2(acc)
        return low + high


@dataclass(frozen=True)
class ByteDot:
    """Operands as signed bytes: 2 words for 8 values.

    Attributes:
        low: the first half of the table, in a register.
    """

    low: Uint32

    @classmethod
    def make(cls, zero: Uint32) -> "ByteDot":
        """Returns the operand decoder.

        ``zero``: 0 in a form unknown to the compiler that differs by lane. The compiler recomputes constants before
        every look-up, with one move each.
        """
        return cls(Uint32(DOUBLED_LOW) + zero)

    def _magnitudes(self, word: Uint32) -> list:
        """Returns doubled values of the nibbles with a clear sign; the others are 0, the copied sign of a table entry."""
        high = Uint32(DOUBLED_HIGH)
        return [ptx.prmt(self.low, high, word), ptx.prmt(self.low, high, word >> 16)]

    def decode_vector(self, word: Uint32) -> list:
        """Returns eight doubled values of the vector.

        Subtracts negatives from positives per byte; the guard bit stops the borrow.
        """
        positive, negative = self._magnitudes(word), self._magnitudes(word ^ Uint32(NIBBLE_SIGNS))
        guard = Uint32(BYTE_SIGNS)
        return [((p | guard) - n) ^ guard for p, n in zip(positive, negative, strict=True)]

    def block(self, row: list, vector: list) -> Float32:
        """Returns 4 times the dot product of one block: two packed words of a row, four decoded words of the vector.

        An addition turns the sum into a float, because a conversion would use the pipe of the look-ups.
        """
        positive, negative = Int32(ONE_ULP_BITS), Int32(0)
        for i, word in enumerate(row):
            plus, minus = self._magnitudes(word), self._magnitudes(word ^ Uint32(NIBBLE_SIGNS))
            for j in range(2):
                positive = ptx.dp4a(plus[j], vector[2 * i + j], positive)
                negative = ptx.dp4a(minus[j], vector[2 * i + j], negative)
        return ptx.float_of(Uint32(positive - negative)) - Float32(ONE_ULP)

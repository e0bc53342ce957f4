"""Integers of 4 bits to pairs of fp16 or bf16 without rounding, and times their scale with one.

A code, 0 to 15, is put into the lowest mantissa bits of the number ``BIAS``: 1024 in fp16, 128 in bf16, where a mantissa counts
in ones. The bits then read as ``BIAS + code``. A zero point put there reads as ``BIAS + zero point``. The difference of both is
the integer ``code - zero point``, -16 to 15, exactly. That takes two instructions for two values; converting integers takes one
for each value, and another one to pack them.

The integer times a scale of the same type is rounded once, to nearest even. A scale of another type is multiplied in fp32,
exactly if it has 16 bits, and the product is rounded to the operand's type. Both are what ``formats.dequantize`` gives. The
integers are bf16 then, whatever the operand is: a bf16 is the upper half of a float.
"""

from dataclasses import dataclass

from cutlass import Float32, Uint32

from nvfp4_cute.formats.block_format import (
    BF16,
    FP16,
    FP32,
    INT4_ZERO_POINT,
    BlockFormat,
)

from . import ptx

# Both halves: 128 as bf16, 1024 as fp16, whose lowest mantissa bit counts one.
BIAS = {"bf16": 0x43004300, "f16": 0x64006400}
BOTH = 0x00010001
# A nibble of either half of a word.
LOW_NIBBLE_OF_HALVES = 0x000F000F
LOW_NIBBLES = 0x0F0F0F0F
# prmt: the lower half of a word twice, and what makes it the upper one; the same as the upper half of a float.
LOWER_TWICE, UPPER_STEP = 0x1010, 0x2222
LOWER_AS_FLOAT, UPPER_FLOAT_STEP = 0x1044, 0x2200
# prmt: byte 0 of either word as a half, whose upper byte is a copy of the byte's sign, which is 0; what makes it the next byte.
BYTE_OF_BOTH, NEXT_BYTE = 0xC480, 0x1111


@dataclass(frozen=True)
class BlockScale:
    """Of a block of weights.

    Attributes:
        zero: ``BIAS`` plus the zero point, twice.
        factor: the scale in the type of the operand, twice, or as a float.
    """

    zero: Uint32
    factor: Uint32 | Float32


@dataclass(frozen=True)
class Int4Decoding:
    """From which format, into bf16 or fp16."""

    format: BlockFormat
    is_bf16: bool

    @property
    def type_name(self) -> str:
        """In PTX."""
        return "bf16" if self.is_bf16 else "f16"

    @property
    def is_same_type(self) -> bool:
        """Whether scales have the type of the operand."""
        return self.format.scale_float == (BF16 if self.is_bf16 else FP16)

    @property
    def integer_type(self) -> str:
        """Of integers before they are scaled, in PTX."""
        return self.type_name if self.is_same_type else "bf16"

    @property
    def blocks_per_word(self) -> int:
        """Scales in a word of the blocked layout."""
        return self.format.atom_shape[-1]

    def block_scale(self, word: Uint32, index: int | Uint32) -> BlockScale:
        """A block's, from the word that has it.

        Args:
            index: of 16-bit scales which half: a number, or the lowest bit of a word.
        """
        bias, half = BIAS[self.integer_type], index & 1 if self.blocks_per_word == 2 else 0
        zero = Uint32(bias + INT4_ZERO_POINT * BOTH)
        if self.format.has_zero_points:
            zero = ptx.prmt(word, Uint32(0), Uint32(LOWER_TWICE + UPPER_STEP)) | Uint32(bias)
        if self.format.scale == FP32:
            return BlockScale(zero, ptx.float_of(word))
        twice = ptx.prmt(word, Uint32(0), Uint32(LOWER_TWICE + half * UPPER_STEP))
        if self.is_same_type:
            return BlockScale(zero, twice)
        if self.is_bf16:
            return BlockScale(zero, ptx.unpack_f16x2(twice)[0])
        upper = ptx.prmt(word, Uint32(0), Uint32(LOWER_AS_FLOAT + half * UPPER_FLOAT_STEP))
        return BlockScale(zero, ptx.float_of(upper))

    def weights(self, codes: Uint32, scale: BlockScale) -> Uint32:
        """Two weights from two codes, in the low bits of the halves of a word, all else of which is 0."""
        biased = codes | Uint32(BIAS[self.integer_type])
        integers = ptx.sub_x2(biased, scale.zero, self.integer_type)
        if self.is_same_type:
            return ptx.mul_x2(integers, scale.factor, self.type_name)
        low, high = (ptx.mul_f32(value, scale.factor) for value in ptx.unpack_bf16x2(integers))
        return ptx.pack_16x2(low, high, self.is_bf16)


def codes_four_apart(word: Uint32) -> list:
    """Eight codes as pairs: (0, 4), (1, 5), (2, 6), (3, 7)."""
    return [word >> 4 * i & Uint32(LOW_NIBBLE_OF_HALVES) for i in range(4)]


def codes_of_bytes(word: Uint32) -> list:
    """Eight codes as pairs, each of a byte: (0, 1), (2, 3), (4, 5), (6, 7)."""
    low, high = word & Uint32(LOW_NIBBLES), word >> 4 & Uint32(LOW_NIBBLES)
    return [ptx.prmt(low, high, Uint32(BYTE_OF_BOTH + NEXT_BYTE * byte)) for byte in range(4)]

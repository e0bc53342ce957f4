"""Dequantizes int4: to pairs of fp16 or bf16 without rounding, then times their scale with one rounding.

A code, 0 to 15, goes into the lowest mantissa bits of ``BIAS``: 1024 in fp16, 128 in bf16, where the lowest mantissa bit counts
ones. The bits then read as ``BIAS + code``, and a zero point placed there reads as ``BIAS + zero point``. Their difference is
exactly the integer ``code - zero point``, -16 to 15. This takes two instructions for two values; integer conversions take one
per value and one to pack.

The integer times a scale of the operand's dtype is rounded once, to nearest even. A scale of another dtype is multiplied in
float32, exactly if it has 16 bits, and the product is rounded to the operand's dtype; the integers are bf16 then, because a
bf16 is the upper half of a float. Both equal ``formats.dequantize``.
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

# Pairs of 128 as bf16 and of 1024 as fp16, whose lowest mantissa bit counts ones.
BIAS = {"bf16": 0x43004300, "f16": 0x64006400}
BOTH = 0x00010001
# The low nibble of each half of a word.
LOW_NIBBLE_OF_HALVES = 0x000F000F
LOW_NIBBLES = 0x0F0F0F0F
# prmt selectors: the lower half of a word twice, and the step to the upper half; a half as the upper half of a float.
LOWER_TWICE, UPPER_STEP = 0x1010, 0x2222
LOWER_AS_FLOAT, UPPER_FLOAT_STEP = 0x1044, 0x2200
# prmt selectors: byte 0 of each word as a half, filled with copies of the byte's sign, which is 0; the step to the next byte.
BYTE_OF_BOTH, NEXT_BYTE = 0xC480, 0x1111


@dataclass(frozen=True)
class BlockScale:
    """Zero point and scale of a block of weights.

    Attributes:
        zero: ``BIAS`` plus the zero point, twice.
        factor: the scale in the operand's dtype, twice, or as a float.
    """

    zero: Uint32
    factor: Uint32 | Float32


@dataclass(frozen=True)
class Int4Decoding:
    """Compile-time description of a conversion from an int4 format to bf16 or fp16."""

    format: BlockFormat
    is_bf16: bool

    @property
    def type_name(self) -> str:
        """Name of the operand's type in PTX."""
        return "bf16" if self.is_bf16 else "f16"

    @property
    def is_same_type(self) -> bool:
        """Whether scales have the operand's dtype."""
        return self.format.scale_float == (BF16 if self.is_bf16 else FP16)

    @property
    def integer_type(self) -> str:
        """PTX type of the integers before they are scaled."""
        return self.type_name if self.is_same_type else "bf16"

    @property
    def blocks_per_word(self) -> int:
        """Scales per word of the blocked layout."""
        return self.format.atom_shape[-1]

    def block_scale(self, word: Uint32, index: int | Uint32) -> BlockScale:
        """Extracts the scale and zero point of a block from the word that holds them.

        Args:
            index: half of the word with 16-bit scales: a number, or the lowest bit of a word.
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
        """Returns two weights from two codes in the low bits of a word's halves. All other bits of the word must be 0."""
        biased = codes | Uint32(BIAS[self.integer_type])
        integers = ptx.sub_x2(biased, scale.zero, self.integer_type)
        if self.is_same_type:
            return ptx.mul_x2(integers, scale.factor, self.type_name)
        low, high = (ptx.mul_f32(value, scale.factor) for value in ptx.unpack_bf16x2(integers))
        return ptx.pack_16x2(low, high, self.is_bf16)


def codes_four_apart(word: Uint32) -> list:
    """Returns eight codes as the pairs (0, 4), (1, 5), (2, 6), (3, 7)."""
    return [word >> 4 * i & Uint32(LOW_NIBBLE_OF_HALVES) for i in range(4)]


def codes_of_bytes(word: Uint32) -> list:
    """Returns eight codes as the pairs of each byte: (0, 1), (2, 3), (4, 5), (6, 7)."""
    low, high = word & Uint32(LOW_NIBBLES), word >> 4 & Uint32(LOW_NIBBLES)
    return [ptx.prmt(low, high, Uint32(BYTE_OF_BOTH + NEXT_BYTE * byte)) for byte in range(4)]

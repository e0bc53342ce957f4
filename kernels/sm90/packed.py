"""What packed operands are, and what MMAs multiply: NVFP4 becomes fp16, MXFP4 and MXFP8 bf16."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import UE8M0, BlockFormat
from nvfp4_cute.planning.arch.sm90 import SLABS, TILE_K

from ..common import decode, ptx, ue8m0
from .operands import UNIT_BYTES, sf_atoms, tile_row_bytes

# Blocks of 32 values in a K tile, of which a lane has one of a row. Values that are decoded at a time: four pairs, of two MMAs.
BLOCKS, BLOCK_VALUES = 4, TILE_K // 4
EIGHT = 8
# prmt: of two words the lower halves, or the first one; and what is added for the upper halves, or the second one.
HALVES = ((0x5410, 0x2222), (0x3210, 0x4444))
# prmt: of a unit's two e4m3 scales in each of four units, those of the first slab; the second slab's are one further.
SLAB_SCALES, NEXT_SLAB = 0x6420, 0x1111


@dataclass(frozen=True)
class Packed:
    """An operand of e2m1, e4m3 or e5m2 in one format: compile-time.

    A row of a K tile has four blocks of 32 values, a half of each for either slab: two scales of e4m3, or one of ue8m0.
    """

    format: BlockFormat

    @property
    def has_powers(self) -> bool:
        """Whether scales are ue8m0; then decoded operands are bf16, else fp16."""
        return self.format.scale == UE8M0

    @property
    def atoms(self) -> int:
        """Of scales along a K tile: words a row."""
        return sf_atoms(self.format)

    @property
    def atom_values(self) -> int:
        """Of K that a word of scales is for."""
        return TILE_K // self.atoms

    @property
    def exponent(self) -> int:
        """log2 of what a decoded value must be multiplied with."""
        if self.words == 2:
            return 0
        return ue8m0.OPERAND_EXPONENT if self.has_powers else decode.OPERAND_EXPONENT

    @property
    def words(self) -> int:
        """Of eight values."""
        return EIGHT * self.format.element.bits // 32

    @property
    def row_bytes(self) -> int:
        """Of a row of a K tile."""
        return tile_row_bytes(self.format)

    @property
    def block_bytes(self) -> int:
        """Of a block's 32 values: one or two 16-byte units."""
        return self.row_bytes // BLOCKS

    @property
    def slabs_of_unit(self) -> int:
        """Slabs for which a 16-byte unit has values."""
        return SLABS * UNIT_BYTES // self.block_bytes

    def bytes_of(self, values: Int32 | Int64):
        """Bytes of so many values, a whole number."""
        return values if self.words == 2 else values >> 1

    def half_selector(self, half: Uint32) -> Uint32:
        """Of :meth:`halves`: the lower half of eight values, 0, or the upper one, 1."""
        first, step = HALVES[self.words - 1]
        return first + half * step

    def halves(self, one: list, other: list, selector: Uint32) -> list:
        """Eight values: a half of eight of one row, and the same of eight others. selector: :meth:`half_selector`."""
        if self.words == 2:
            return [ptx.prmt(*words, selector) for words in (one, other)]
        return [Uint32(cute.arch.prmt(*one, *other, selector))]

    def slab_scales(self, codes: list, selector: Uint32) -> list:
        """Scales that a slab has in units 0 and 1, and in 2 and 3, as pairs of floats.

        Args:
            codes: a row's words of scales of a K tile.
            selector: of e4m3 the slab's: ``SLAB_SCALES``, or ``NEXT_SLAB`` more.
        """
        if self.has_powers:
            return [ue8m0.powers(ptx.prmt(codes[0], Uint32(0), Uint32(s))) for s in ue8m0.UPPER_BYTES]
        chosen = Uint32(cute.arch.prmt(*codes, selector))
        return [decode.decode_scales(chosen), decode.decode_scales(chosen >> 16)]

    def decode_halves(self, words: list, scales: Uint32, uppers: tuple, sign_bits: Uint32) -> list:
        """``common.decode.decode_halves``, of every format. words: ``self.words``."""
        if self.words == 2:
            return ue8m0.fp8_halves(words, scales, uppers, self.format.element.name)
        if self.has_powers:
            return ue8m0.decode_halves(*words, scales, uppers)
        return decode.decode_halves(*words, scales, uppers, sign_bits)

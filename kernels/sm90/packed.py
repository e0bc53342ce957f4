"""Layout of packed operands in a K tile, and their dequantization: NVFP4 to fp16, MXFP4 and MXFP8 to bf16."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import UE8M0, BlockFormat
from nvfp4_cute.planning.arch.sm90 import SLABS, TILE_K

from ..common import decode, ptx, ue8m0
from .operands import UNIT_BYTES, sf_atoms, tile_row_bytes

# A K tile has four blocks of 32 values; a lane has one block of a row. Eight values, four pairs for two MMAs, are
# dequantized at a time.
BLOCKS, BLOCK_VALUES = 4, TILE_K // 4
EIGHT = 8
# prmt selectors (first, step): the lower halves of two words, or the first word; plus step for the upper halves, or the second.
HALVES = ((0x5410, 0x2222), (0x3210, 0x4444))
# prmt selector that picks the first slab's e4m3 scale of each of four units. Add NEXT_SLAB for the second slab's.
SLAB_SCALES, NEXT_SLAB = 0x6420, 0x1111


@dataclass(frozen=True)
class Packed:
    """Compile-time description of an operand of e2m1, e4m3 or e5m2 elements.

    A row of a K tile has four blocks of 32 values. Each slab uses one half of every block, with one e4m3 scale per half or one
    ue8m0 scale per block.
    """

    format: BlockFormat

    @property
    def has_powers(self) -> bool:
        """Whether scales are ue8m0. Operands are then dequantized to bf16, otherwise to fp16."""
        return self.format.scale == UE8M0

    @property
    def atoms(self) -> int:
        """Words of scales per row of a K tile."""
        return sf_atoms(self.format)

    @property
    def atom_values(self) -> int:
        """Values of K that one word of scales covers."""
        return TILE_K // self.atoms

    @property
    def exponent(self) -> int:
        """log2 of the factor that a dequantized value still lacks."""
        if self.words == 2:
            return 0
        return ue8m0.OPERAND_EXPONENT if self.has_powers else decode.OPERAND_EXPONENT

    @property
    def words(self) -> int:
        """Words that hold eight values."""
        return EIGHT * self.format.element.bits // 32

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a K tile."""
        return tile_row_bytes(self.format)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 values: one or two 16-byte units."""
        return self.row_bytes // BLOCKS

    @property
    def slabs_of_unit(self) -> int:
        """Slabs that one 16-byte unit has values for."""
        return SLABS * UNIT_BYTES // self.block_bytes

    def bytes_of(self, values: Int32 | Int64):
        """Returns the bytes of ``values`` values, which must be a whole number."""
        return values if self.words == 2 else values >> 1

    def half_selector(self, half: Uint32) -> Uint32:
        """Returns the selector of :meth:`halves`. half: 0 for the lower half of eight values, 1 for the upper one."""
        first, step = HALVES[self.words - 1]
        return first + half * step

    def halves(self, one: list, other: list, selector: Uint32) -> list:
        """Returns eight values: one half of ``one`` and the corresponding half of ``other``. selector: :meth:`half_selector`."""
        if self.words == 2:
            return [ptx.prmt(*words, selector) for words in (one, other)]
        return [Uint32(cute.arch.prmt(*one, *other, selector))]

    def slab_scales(self, codes: list, selector: Uint32) -> list:
        """Returns a slab's scales in units 0 and 1, and in units 2 and 3, as pairs of 16-bit floats.

        Args:
            codes: words of scales of one row of a K tile.
            selector: ``SLAB_SCALES`` for the first slab, plus ``NEXT_SLAB`` for the second. Only e4m3 scales use it.
        """
        if self.has_powers:
            return [ue8m0.powers(ptx.prmt(codes[0], Uint32(0), Uint32(s))) for s in ue8m0.UPPER_BYTES]
        chosen = Uint32(cute.arch.prmt(*codes, selector))
        return [decode.decode_scales(chosen), decode.decode_scales(chosen >> 16)]

    def decode_halves(self, words: list, scales: Uint32, uppers: tuple, sign_bits: Uint32) -> list:
        """Calls ``decode_halves`` of the format. words: list of ``self.words`` words."""
        if self.words == 2:
            return ue8m0.fp8_halves(words, scales, uppers, self.format.element.name)
        if self.has_powers:
            return ue8m0.decode_halves(*words, scales, uppers)
        return decode.decode_halves(*words, scales, uppers, sign_bits)

"""What packed operands are, and what MMAs multiply: NVFP4 becomes fp16, MXFP4 bf16."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Uint32

from nvfp4_cute.formats.block_format import UE8M0, BlockFormat
from nvfp4_cute.planning.arch.sm90 import TILE_K

from ..common import decode, ptx, ue8m0
from .operands import sf_atoms

# prmt: of a unit's two e4m3 scales in each of four units, those of the first slab; the second slab's are one further.
SLAB_SCALES, NEXT_SLAB = 0x6420, 0x1111


@dataclass(frozen=True)
class Packed:
    """Operands of e2m1 in one format: compile-time.

    A K tile has four units of 32 values a row, a unit a half for each slab: two scales of e4m3, or one of ue8m0.
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
        """log2 of what sums of decoded products must be multiplied with."""
        return 2 * (ue8m0.OPERAND_EXPONENT if self.has_powers else decode.OPERAND_EXPONENT)

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

    def decode_halves(self, word: Uint32, scales: Uint32, uppers: tuple, sign_bits: Uint32) -> list:
        """``common.decode.decode_halves``, of either format."""
        if self.has_powers:
            return ue8m0.decode_halves(word, scales, uppers)
        return decode.decode_halves(word, scales, uppers, sign_bits)

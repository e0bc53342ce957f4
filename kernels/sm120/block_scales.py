"""Scales of 16 or 32 values that the MMA applies itself: words of a 128x4 block in registers.

A lane loads the scale word of one row of a strip; the MMA selects the lanes of a quad by its thread selectors (``warp_tile``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.formats.block_format import ATOM_COLS, Formats
from nvfp4_cute.planning.arch.sm120 import MMA, SF_ATOM_ROWS, SmemPlan

from .instructions import block_scaled_mma, load_scale_word
from .operands import StageBuffers
from .warp_tile import BAND, BANDS_M, STRIP, WarpTile

# In a 128x4 block, rows of neighbouring bands are one word apart, neighbouring rows four words.
SF_WORD_BYTES = 4
SF_ROW_BYTES = 16
SF_ATOM_BYTES = 512


@dataclass(frozen=True)
class BlockScales:
    """Scales of a K block in registers. They are needed until its end, so there are two buffers.

    Attributes:
        sfa: (OPERAND x STRIP_M, BUFFER). sfb: (OPERAND x STRIP_N, BUFFER).
        formats: formats on the M side and on the N side.
    """

    sfa: cute.Tensor
    sfb: cute.Tensor
    formats: Formats
    warp_tile: WarpTile

    @classmethod
    def of(cls, warp_tile: WarpTile, formats: Formats) -> "BlockScales":
        """Allocates registers for a warp's tile."""
        counts = warp_tile.num_m * warp_tile.strips_m, warp_tile.num_n * warp_tile.strips_n
        return cls(*[cute.make_rmem_tensor((count, 2), Int32) for count in counts], formats, warp_tile)

    def lane_offsets(self, first_row: Int32, first_col: Int32, tile_col: Int32) -> tuple[Int32, Int32]:
        """Returns the byte offsets of a lane's scales of both sides in a stage. See ``mma._lane_offsets`` for the arguments."""
        sfa = _scale_offset(first_row, BANDS_M)
        # A small tile uses only part of a scale block.
        return sfa, _scale_offset(first_col + tile_col % SF_ATOM_ROWS, self.warp_tile.bands_n)

    def load(self, stage: StageBuffers, k_block_idx: int, plan: SmemPlan) -> None:
        """Loads the scales of all strips of every operand: per row the one, two or four that an MMA takes of an atom's four."""
        parts = MMA[self.formats].per_atom(self.formats[0])
        atom, part = divmod(k_block_idx, parts)
        count = ATOM_COLS // parts
        for scales, address, num_strip, stage_bytes in (
            (self.sfa, stage.sf_m, self.warp_tile.strips_m, plan.sfa_stage_bytes),
            (self.sfb, stage.sf_n, self.warp_tile.strips_n, plan.sfb_stage_bytes),
        ):
            for i in range(cute.size(scales, mode=[0])):
                operand, strip = divmod(i, num_strip)
                offset = operand * plan.num_ab_stage * stage_bytes + strip * STRIP * SF_ROW_BYTES
                word = load_scale_word(address + (atom * SF_ATOM_BYTES + part * count + offset), count)
                scales[i, k_block_idx % 2] = word

    def words(self, k_block_idx: int) -> list:
        """Returns one word of every read of a K block."""
        buffer = k_block_idx % 2
        return [
            scales[i, buffer] for scales in (self.sfa, self.sfb) for i in range(cute.size(scales, mode=[0]))
        ]

    def multiply(self, sums: list, a: list, b: list, i: int, j: int, k_block_idx: int) -> list:
        """Returns ``sums`` plus the products of MMA ``i`` along M and ``j`` along N of a K block."""
        tile, buffer = self.warp_tile, k_block_idx % 2
        (operand_m, strip_m, pair), (operand_n, strip_n, band) = tile.mma_m[i], tile.mma_n[j]
        sfa = self.sfa[operand_m * tile.strips_m + strip_m, buffer]
        sfb = self.sfb[operand_n * tile.strips_n + strip_n, buffer]
        return block_scaled_mma(sums, a, b, sfa, pair, sfb, band, self.formats)

    def sums_of_k_tile(self, acc: cute.Tensor) -> cute.Tensor:
        """Returns the destination of the MMAs: the tile's accumulators ``acc``."""
        return acc

    def promote(self, acc: cute.Tensor, i: int) -> None:
        """Does nothing after a K tile: its products are in ``acc`` already."""

    @property
    def outlive_stage(self) -> bool:
        """Whether scales are still used after their stage has been released."""
        return False


@cute.jit
def _scale_offset(first_row: Int32, num_band: cutlass.Constexpr) -> Int32:
    """Returns the byte offset of a lane's scale word in a 128x4 block.

    Lane 4g + t has row g of the strip in band t of ``num_band`` bands.
    """
    lane = cute.arch.lane_idx()
    row = first_row % BAND + lane // 4
    band = first_row // BAND + lane % num_band
    return row * SF_ROW_BYTES + band * SF_WORD_BYTES

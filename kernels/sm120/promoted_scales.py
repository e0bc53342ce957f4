"""Float32 scales of 128 values of K, one K tile: its products are multiplied by both scales and added to float32 sums.

Uses the MXFP8 MMA with scales of 1. GeForce GPUs compute them at twice the rate of plain FP8 MMAs with fp32 sums: 202 and 102
TFLOP/s on an RTX 5060 Ti (FlashInfer issue 3628).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from nvfp4_cute.formats.block_format import MXFP8_E4M3, Formats
from nvfp4_cute.planning.arch.sm120 import SmemPlan

from ..common.fp32_scales import SCALE_BYTES, promote
from ..common.shared_access import load_shared
from .instructions import block_scaled_mma
from .operands import StageBuffers
from .warp_tile import BAND, STRIP, WarpTile

MMA_FORMATS: Formats = (MXFP8_E4M3, MXFP8_E4M3)
# Four ue8m0 codes of 1.
ONES = 0x7F7F7F7F
# K block with which scales are read: after the promotion of the previous K tile, whose scales use the same registers.
READ_WITH_K_BLOCK = 2


@dataclass(frozen=True)
class PromotedScales:
    """Scales and products of a K tile in registers; same interface as ``BlockScales``.

    Attributes:
        products: (REGISTER, MMA_M, MMA_N).
        values: words of the scale of the tile's 128 weights of every operand, then of a lane's two columns of every MMA along N.
    """

    products: cute.Tensor
    values: cute.Tensor
    warp_tile: WarpTile

    @classmethod
    def of(cls, warp_tile: WarpTile) -> "PromotedScales":
        """Allocates registers for a warp's tile."""
        m, n = len(warp_tile.mma_m), len(warp_tile.mma_n)
        products = cute.make_rmem_tensor((4, m, n), Float32)
        return cls(products, cute.make_rmem_tensor(warp_tile.num_m + 2 * n, Uint32), warp_tile)

    def lane_offsets(self, first_row: Int32, first_col: Int32, tile_col: Int32) -> tuple[Int32, Int32]:
        """Returns the byte offsets of a lane's scales: weights have one scale per operand, tokens one each."""
        return Int32(0), (first_col + cute.arch.lane_idx() % 4 * 2) * SCALE_BYTES

    def load(self, stage: StageBuffers, k_block_idx: int, plan: SmemPlan) -> None:
        """Loads the scales of the K tile along with K block ``READ_WITH_K_BLOCK``."""
        if k_block_idx == READ_WITH_K_BLOCK:
            words = load_shared(stage.sf_m, self.warp_tile.num_m, True)
            for _, strip, band in self.warp_tile.mma_n:
                words += load_shared(stage.sf_n + (strip * STRIP + band * BAND) * SCALE_BYTES, 2, True)
            for i, word in enumerate(words):
                self.values[i] = word

    def words(self, k_block_idx: int) -> list:
        """Returns one word of every read: the weights' scale, and the tokens' of every MMA along N."""
        return [Int32(self.values[i]) for i in range(0, cute.size(self.values), 2)]

    def multiply(self, sums: list, a: list, b: list, i: int, j: int, k_block_idx: int) -> list:
        """Returns ``sums`` plus the products of one MMA. The first K block starts new sums."""
        sums = sums if k_block_idx > 0 else [Float32(0.0)] * 4
        return block_scaled_mma(sums, a, b, Int32(ONES), 0, Int32(ONES), 0, MMA_FORMATS)

    def sums_of_k_tile(self, acc: cute.Tensor) -> cute.Tensor:
        """Returns the destination of the MMAs: the products of a K tile."""
        return self.products

    def promote(self, acc: cute.Tensor, i: int) -> None:
        """Adds the K tile's products of MMA ``i`` along M, times both scales, to ``acc``."""
        num_m, (operand, _, _) = self.warp_tile.num_m, self.warp_tile.mma_m[i]
        words = [self.values[k] for k in (operand, *range(num_m, cute.size(self.values)))]
        columns = range(len(self.warp_tile.mma_n))
        products = [self.products[register, i, j] for j in columns for register in range(4)]
        promote(acc[None, i, None], products, words)

    @property
    def outlive_stage(self) -> bool:
        """Whether scales are used after their stage has been released: yes, products are promoted during the next K tile."""
        return True

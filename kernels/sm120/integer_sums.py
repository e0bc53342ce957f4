"""INT8 products: int32 sums over all of K are exact, and row scales multiply the results (``common.row_scales``)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm120 import SmemPlan

from ..common.fp32_scales import ScalePair
from ..common.group_table import WorkTile
from ..common.row_scales import RowScales, Scales, load_row_scales
from ..common.sides import mma_sides
from .instructions import integer_mma
from .operands import StageBuffers
from .warp_tile import BAND, STRIP, WarpTile


@dataclass(frozen=True)
class IntegerSums:
    """Implements the interface of ``BlockScales`` for integers, which have no scales per K block."""

    def lane_offsets(self, first_row: Int32, first_col: Int32, tile_col: Int32) -> tuple[Int32, Int32]:
        """Returns zero offsets: there are no scales."""
        return Int32(0), Int32(0)

    def load(self, stage: StageBuffers, k_block_idx: int, plan: SmemPlan) -> None:
        """Does nothing: there are no scales."""

    def words(self, k_block_idx: int) -> list:
        """Returns no words: nothing is read."""
        return []

    def multiply(self, sums: list, a: list, b: list, i: int, j: int, k_block_idx: int) -> list:
        """Returns ``sums`` plus the products of one MMA."""
        return integer_mma(sums, a, b)

    def sums_of_k_tile(self, acc: cute.Tensor) -> cute.Tensor:
        """Returns the destination of the MMAs: the tile's accumulators ``acc``."""
        return acc

    def promote(self, acc: cute.Tensor, i: int) -> None:
        """Does nothing: there are no scales."""

    @property
    def outlive_stage(self) -> bool:
        """Whether scales are still used after their stage has been released: never."""
        return False


def rows_of_lane(warp_tile: WarpTile, first_row: Int32) -> list:
    """Returns a lane's rows of the tile, two per MMA along M. first_row: first row of the warp."""
    row = first_row + cute.arch.lane_idx() // 4
    return [
        row + strip * STRIP + (2 * pair + half) * BAND
        for _, strip, pair in warp_tile.mma_m
        for half in (0, 1)
    ]


def columns_of_lane(warp_tile: WarpTile, first_col: Int32) -> list:
    """Returns a lane's columns of the tile, two per MMA along N. first_col: first column of the warp."""
    column = first_col + cute.arch.lane_idx() % 4 * 2
    return [column + strip * STRIP + band * BAND + e for _, strip, band in warp_tile.mma_n for e in (0, 1)]


def scales_of_a(
    scales: Scales, warp_tile: WarpTile, tile: WorkTile, config, first_row: Int32, first_col: Int32
) -> list:
    """Loads the global scales of a lane's rows of ``a``; arguments as for :func:`row_scales_of_tile`."""
    m_side, n_side = mma_sides(config, tile)
    if config.swap_ab:
        return load_row_scales(scales, tile, n_side, columns_of_lane(warp_tile, first_col))
    return load_row_scales(scales, tile, m_side, rows_of_lane(warp_tile, first_row))


def row_scales_of_tile(
    scales: ScalePair, warp_tile: WarpTile, tile: WorkTile, config, first_row: Int32, first_col: Int32
) -> RowScales:
    """Loads the row scales of a lane's rows and columns.

    Args:
        scales: scales of the M side and of the N side.
        first_row, first_col: first row and column of the warp in the tile.
    """
    m_side, n_side = mma_sides(config, tile)
    return RowScales(
        load_row_scales(scales.weights, tile, m_side, rows_of_lane(warp_tile, first_row)),
        load_row_scales(scales.tokens, tile, n_side, columns_of_lane(warp_tile, first_col)),
        config.swap_ab,
    )


def results_of(acc: cute.Tensor, scales: RowScales | None, warp_tile: WarpTile) -> cute.Tensor:
    """Returns float32 results of sums (REGISTER, MMA_M, MMA_N); without scales, the bits of the sums."""
    if scales is None:
        return cute.recast_tensor(acc, Float32)
    m, n = len(warp_tile.mma_m), len(warp_tile.mma_n)
    results = cute.make_rmem_tensor((4, m, n), Float32)
    for j in range(n):
        for i in range(m):
            for register in range(4):
                half, e = divmod(register, 2)
                results[register, i, j] = scales.scaled(acc[register, i, j], 2 * i + half, 2 * j + e)
    return results

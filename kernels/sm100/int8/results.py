"""What the EPILOGUE makes of accumulators that are int32: sums, or fp32 results by the scales of rows."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N, MMA_CTA_M

from ...common import ptx
from ...common.fp32_scales import ScalePair
from ...common.group_table import WorkTile, select_slot
from ...common.row_scales import RowScales, load_row_scales
from ...common.sides import TileSide
from ...common.warp_schedule import WARP_SIZE


@dataclass(frozen=True)
class IntegerResults:
    """Told to the epilogue, not imported by it, so that a file of what another kernel needs goes without it.

    Attributes:
        scales: of rows, in global memory, of the M side and of the N side; None: sums are results.
        tile_n: columns of a tile.
        b_on_m: whether ``b`` is on the M side.
    """

    scales: ScalePair | None
    tile_n: int
    b_on_m: bool

    def of_tile(self, tile: WorkTile, m_side: TileSide, n_side: TileSide, m_rank: Int32) -> RowScales | None:
        """Scales of the thread's row, and of one column a lane of every slice; they are asked for here."""
        if self.scales is None:
            return None
        tidx, _, _ = cute.arch.thread_idx()
        columns = [tidx % WARP_SIZE + first for first in range(0, self.tile_n, EPI_TILE_N)]
        return RowScales(
            load_row_scales(self.scales.weights, tile, m_side, [m_rank * MMA_CTA_M + tidx]),
            load_row_scales(self.scales.tokens, tile, n_side, columns),
            self.b_on_m,
        )

    def sums(self, registers: list) -> list:
        """Accumulators in registers as what they are."""
        return [cute.recast_tensor(accumulator, Int32) for accumulator in registers]

    @cute.jit
    def results(self, accumulator: cute.Tensor, scales: RowScales | None, slice_idx: Int32, alpha: Float32):
        """In fp32, of a slice; without scales the bits of its sums."""
        sums, results = cute.recast_tensor(accumulator, Int32), cute.make_rmem_tensor(EPI_TILE_N, Float32)
        if cutlass.const_expr(scales is None):
            for i in cutlass.range_constexpr(EPI_TILE_N):
                results[i] = ptx.float_of(sums[i].to(Uint32))
        else:
            of_lane = select_slot(scales.of_n, slice_idx)
            for i in cutlass.range_constexpr(EPI_TILE_N):
                of_column = RowScales(scales.of_m, [cute.arch.shuffle_sync(of_lane, i)], scales.b_on_m)
                results[i] = of_column.scaled(sums[i], 0, 0) * alpha
        return results.load()

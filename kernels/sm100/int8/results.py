"""Results of int32 accumulators in the EPILOGUE: the sums, or float32 results after row scales."""

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
    """Conversion of int32 accumulators.

    Passed to the epilogue rather than imported by it, so that other kernels' exports can omit it.

    Attributes:
        scales: row scales in global memory, M side and N side; None if the sums are the results.
        tile_n: columns of a tile.
        b_on_m: whether ``b`` is on the M side.
    """

    scales: ScalePair | None
    tile_n: int
    b_on_m: bool

    def of_tile(self, tile: WorkTile, m_side: TileSide, n_side: TileSide, m_rank: Int32) -> RowScales | None:
        """Issues the loads of the scales of the thread's row and of one column per lane and slice."""
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
        """Returns accumulator registers reinterpreted as int32."""
        return [cute.recast_tensor(accumulator, Int32) for accumulator in registers]

    @cute.jit
    def results(self, accumulator: cute.Tensor, scales: RowScales | None, slice_idx: Int32, alpha: Float32):
        """Returns float32 results of a slice; without scales, the bits of its sums."""
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

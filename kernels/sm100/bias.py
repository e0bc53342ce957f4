"""Bias of a thread's slices: one number for its row, or one per lane and slice if columns of the slices have one each."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N

from ..common import ptx
from ..common.bias import load_bias
from ..common.group_table import WorkTile, select_slot
from ..common.output_table import OutputTable


def bias_of_slices(
    outputs: OutputTable, tile: WorkTile, row: Int32, first_column: Int32, num_slices: int, b_on_m: bool
) -> list:
    """Issues the loads of the bias that :func:`slice_plus_bias` adds.

    Args:
        row: the thread's row of the MMA's M side.
        first_column: first column of the first slice on the N side.
        b_on_m: whether rows of the M side are columns of the output.
    """
    lane = cute.arch.lane_idx()
    columns = [row] if b_on_m else [first_column + s * EPI_TILE_N + lane for s in range(num_slices)]
    return load_bias(outputs.bias, columns, tile.n)


@cute.jit
def slice_plus_bias(results, bias: list, slice_idx: Int32 | int, b_on_m: cutlass.Constexpr):
    """Returns the results of a slice plus the bias. All lanes of a warp must call it.

    Args:
        results: EPI_TILE_N float32 results.
        bias: result of :func:`bias_of_slices`.
        slice_idx: index of the slice in ``bias``.
    """
    values = cute.make_rmem_tensor(EPI_TILE_N, Float32)
    of_lane = [value.to(Float32) for value in bias]
    own = of_lane[0] if b_on_m else select_slot(of_lane, slice_idx)
    for i in cutlass.range_constexpr(EPI_TILE_N):
        values[i] = ptx.add_f32(results[i], own if b_on_m else cute.arch.shuffle_sync(own, i))
    return values.load()

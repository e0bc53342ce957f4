"""Bias of a thread's slices: one number for its row, or one per lane and slice if columns of the slices have one each."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.planning.arch.sm100.limits import EPI_TILE_N

from ..common import ptx
from ..common.bias import load_bias
from ..common.group_table import WorkTile, select_slot
from ..common.output_table import OutputTable, caller_index, group_bias, load_dual_bias


def bias_of_slices(
    outputs: OutputTable,
    tile: WorkTile,
    row: Int32,
    first_column: Int32,
    num_slices: int,
    b_on_m: bool,
    weight_layout: str | None = None,
) -> list:
    """Issues the loads of the bias that :func:`slice_plus_bias` adds. Returns one list per product in a dual GEMM.

    Args:
        row: the thread's row of the MMA's M side.
        first_column: first column of the output in the first slice on the N side.
        num_slices: slices of the output on the N side.
        b_on_m: whether rows of the M side are columns of the output.
        weight_layout: of a dual GEMM; None for one product.
    """
    lane = cute.arch.lane_idx()
    columns = [row] if b_on_m else [first_column + s * EPI_TILE_N + lane for s in range(num_slices)]
    if weight_layout is None:
        return load_bias(outputs.bias, columns, tile.n)
    num_columns = tile.n // 2 if weight_layout in INTERLEAVE else tile.n
    of_group = group_bias(outputs, caller_index(outputs, tile.slot), num_columns)
    return load_dual_bias(of_group, columns, num_columns, weight_layout)


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


@cute.jit
def slices_plus_biases(
    accumulators: list, alphas: list, biases: list, slice_idx: Int32 | int, b_on_m: cutlass.Constexpr
) -> list:
    """Returns the slices of both products times alpha, plus the bias. All lanes of a warp must call it."""
    sums = [cute.make_rmem_tensor(EPI_TILE_N, Float32) for _ in accumulators]
    for which in cutlass.range_constexpr(len(accumulators)):
        scaled = accumulators[which].load().reshape(EPI_TILE_N) * alphas[which]
        sums[which].store(slice_plus_bias(scaled, biases[which], slice_idx, b_on_m))
    return sums

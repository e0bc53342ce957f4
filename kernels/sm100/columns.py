"""Number of columns of a tile that are computed and read, at run time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm100.limits import MMA_N_STEP, least_columns

from ..common.group_table import ceil_div
from ..common.sides import TileSide


@cute.jit
def mma_columns(config: cutlass.Constexpr, n_side: TileSide) -> Int32:
    """Returns the columns that the MMA computes: ``arch.sm100.limits.mma_columns``, but at least ``least_columns``."""
    columns = used_columns(config, n_side, MMA_N_STEP) | n_side.first_row & MMA_N_STEP
    if cutlass.const_expr(least_columns(config) > MMA_N_STEP):
        columns = cutlass.max(columns, least_columns(config))
    return columns


@cute.jit
def used_columns(config: cutlass.Constexpr, n_side: TileSide, step: cutlass.Constexpr[int]) -> Int32:
    """Returns the columns that the epilogue reads: those of the group, rounded up to a multiple of ``step``."""
    columns = ceil_div(n_side.extent - n_side.first_row, step) * step
    return cutlass.min(columns, config.cta_tile_shape_mnk[1])

"""How many columns the MMA of a tile computes: a run-time value of its N side."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.arch.sm100 import MMA_N_STEP

from ..common.group_table import ceil_div
from ..common.sides import TileSide


@cute.jit
def mma_columns(config: cutlass.Constexpr, n_side: TileSide) -> Int32:
    """Columns that the MMA computes: those of the group, rounded up to a whole slice of the epilogue."""
    columns = ceil_div(n_side.extent - n_side.first_row, MMA_N_STEP) * MMA_N_STEP
    return cutlass.min(columns, config.cta_tile_shape_mnk[1])

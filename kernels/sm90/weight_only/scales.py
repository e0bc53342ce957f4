"""Float32 scales of weights, applied to sums: 128 x 128 scales (FP8) to the sums of a K tile, row scales (INT8) to complete sums.

Weights are then exact in 16 bits, and sums round as in the reference: once to float32 and once by the scale. Scales are read
from global memory. A K tile has only one, because a tile's rows of weights start at a block of 128.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import FP8_128x128
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.fp32_scales import SCALE_BYTES, Scales, fma
from ...common.global_access import KEEP, load_words
from ...common.group_table import WorkTile, ceil_div
from ...common.output_kind import OutputKind
from ...common.row_scales import load_row_scales
from ..math import LANE_ROWS
from ..tile_walk import sides_of_cta
from ..weight_rows import output_column
from ..wgmma import finish

# Rows between a lane's two rows of an MMA, and neighbouring accumulators of one row.
LANE_ROWS_APART, ROW_SUMS = 8, 2


def tile_scales(scales: Scales, config: KernelConfig, tile: WorkTile) -> Int64:
    """Returns the global address of the scale of a tile's first K tile. Rows after the group's last one use the last block."""
    weights, _ = sides_of_cta(config, tile)
    rows = FP8_128x128.block_rows
    block = cutlass.min(weights.first_row // rows, ceil_div(weights.extent, rows) - 1)
    return scales.row(tile.slot, weights.origin.batch, Int32(block), tile.k_tile_cnt)


def load_tile_scale(address: Int64, k_tile: Int32) -> Uint32:
    """Loads the scale of a K tile as a word. address: result of ``tile_scales``."""
    return load_words(address + k_tile * SCALE_BYTES, 1, KEEP)[0]


def promote_sums(sums: cute.Tensor, products: cute.Tensor, scale: Uint32 | None) -> None:
    """Waits for products, adds them times the scale to ``sums`` with one rounding (FMA), and zeroes them. No scale means 1."""
    finish(products)
    factor = None if scale is None else ptx.float_of(scale)
    for i in range(cute.size(sums)):
        sums[i] = sums[i] + products[i] if factor is None else fma(products[i], factor, sums[i])
    products.fill(0.0)


def load_scales_of_rows(scales: Scales, config: KernelConfig, kind: OutputKind, tile: WorkTile) -> list:
    """Issues the loads of the scales of the lane's rows of weights; returns their words."""
    weights, _ = sides_of_cta(config, tile)
    column = output_column(kind)
    return load_row_scales(scales, tile, weights, [column + i * LANE_ROWS_APART for i in range(LANE_ROWS)])


def scale_sums(sums: cute.Tensor, words: list) -> None:
    """Multiplies complete sums by the scales of their rows."""
    factors = [Float32(ptx.float_of(word)) for word in words]
    for i in range(cute.size(sums)):
        sums[i] = sums[i] * factors[i // ROW_SUMS % LANE_ROWS]

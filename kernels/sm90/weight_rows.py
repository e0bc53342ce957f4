"""Which rows of packed weights a lane decodes: of a dual GEMM, one of each product, so that it gets both sums.

A lane has the rows g and g + 8 of every MMA. With one product they are those rows of the warp's sixteen; with two they
are one and the same column of the output: of the gate, and of what it is multiplied by.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, TILE_WEIGHTS

from ..common.group_table import WorkTile
from ..common.output_kind import OutputKind
from .operands import SF_ATOM_BYTES, scale_offset, unit_offset
from .warp_schedule import WARP_SIZE

# Within 32 rows, scales are so many bytes from row to row; groups of 32 rows follow each other in the words between.
SF_ROW_BYTES, SF_GROUP_BYTES = 16, 4
# Rows of the gate, counted from those of the other product: interleaved_64_up_first, interleaved_32_gate_first.
UP_FIRST_ROWS, GATE_FIRST_ROWS = 64, 32


@dataclass(frozen=True)
class LaneRows:
    """Byte offsets in a stage of packed weights, and in one of their scales.

    Attributes:
        data, scale: of the first row.
        data_step, scale_step: from there to the second one.
    """

    data: Int32
    scale: Int32
    data_step: int
    scale_step: int


def tile_columns(kind: OutputKind) -> int:
    """Columns of the output in a work tile: half of them are of either warpgroup."""
    return TILE_WEIGHTS // kind.num_products


def output_column(kind: OutputKind) -> Int32:
    """Column of the output in the tile that the lane's first row belongs to."""
    tidx = cute.arch.thread_idx()[0]
    return tidx // WARP_SIZE * (16 // kind.num_products) + tidx % WARP_SIZE // 4


def lane_rows(kind: OutputKind, tile: WorkTile, unit: Int32, row_bytes: int, atoms: int) -> LaneRows:
    """Rows whose 16-byte unit ``unit`` a lane decodes first. row_bytes: of a row of a K tile. atoms: of scales in a K tile."""
    column = output_column(kind)
    if kind.num_products == 1:
        return LaneRows(
            unit_offset(column, unit, row_bytes),
            scale_offset(column, atoms),
            8 * row_bytes,
            8 * SF_ROW_BYTES,
        )
    if kind.weight_layout == "separate":
        # A tile need not begin a scale block.
        sf_row = tile.tile_n_idx * tile_columns(kind) % SF_BLOCK_ROWS + column
        return LaneRows(
            unit_offset(column, unit, row_bytes),
            scale_offset(sf_row, atoms),
            tile_columns(kind) * row_bytes,
            atoms * SF_ATOM_BYTES,
        )
    if kind.weight_layout == "interleaved_64_up_first":
        row, step = column + UP_FIRST_ROWS, -UP_FIRST_ROWS
    else:
        row = column // GATE_FIRST_ROWS * (2 * GATE_FIRST_ROWS) + column % GATE_FIRST_ROWS
        step = GATE_FIRST_ROWS
    return LaneRows(
        unit_offset(row, unit, row_bytes),
        scale_offset(row, atoms),
        step * row_bytes,
        step // 32 * SF_GROUP_BYTES,
    )

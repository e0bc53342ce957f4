"""Rows of packed weights that a lane dequantizes. In a dual GEMM, one row of each product, so that a lane has both sums.

A lane has the rows g and g + 8 of every MMA. With one product these are rows of the warp's sixteen. With two products they are
the same output column, once of the gate and once of the up projection.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, TILE_WEIGHTS

from ..common.group_table import WorkTile
from ..common.output_kind import OutputKind
from .operands import SF_ATOM_BYTES, scale_offset, unit_offset
from .warp_schedule import WARP_SIZE

# Bytes between the scales of neighbouring rows within 32 rows, and between groups of 32 rows, whose words are interleaved.
SF_ROW_BYTES, SF_GROUP_BYTES = 16, 4
# Distance in rows from up to gate (interleaved_64_up_first) and from gate to up (interleaved_32_gate_first).
UP_FIRST_ROWS, GATE_FIRST_ROWS = 64, 32


@dataclass(frozen=True)
class LaneRows:
    """Byte offsets of a lane's rows in a stage of packed weights and in a stage of scales.

    Attributes:
        data, scale: offsets of the first row.
        data_step, scale_step: distances to the second row.
    """

    data: Int32
    scale: Int32
    data_step: int
    scale_step: int


def tile_columns(kind: OutputKind) -> int:
    """Returns the output columns of a work tile. Each warpgroup has half of them."""
    return TILE_WEIGHTS // kind.num_products


def output_column(kind: OutputKind, row: Int32 | None = None) -> Int32:
    """Returns the output column, within the tile, of the first of a lane's rows.

    row: number of the row among the eight of its warp; None for the lane's own.
    """
    tidx = cute.arch.thread_idx()[0]
    own = tidx % WARP_SIZE // 4 if row is None else row
    return tidx // WARP_SIZE * (16 // kind.num_products) + own


def matrix_rows(kind: OutputKind, tile: WorkTile, row_bytes: int, atoms: int) -> LaneRows:
    """Returns the offsets of a lane's scales, and of the 16 bytes that it addresses for ``ldmatrix`` of four matrices.

    The matrices hold the first rows of the warp's lanes, then their second rows, then both 16 bytes of K further. See
    :func:`lane_rows` for the arguments.
    """
    lane = cute.arch.thread_idx()[0] % WARP_SIZE
    own = lane_rows(kind, tile, Int32(0), row_bytes, atoms)
    addressed = lane_rows(kind, tile, lane // 16, row_bytes, atoms, lane % 8)
    return replace(own, data=addressed.data + lane // 8 % 2 * own.data_step)


def lane_rows(
    kind: OutputKind, tile: WorkTile, unit: Int32, row_bytes: int, atoms: int, row: Int32 | None = None
) -> LaneRows:
    """Returns the offsets of a lane's rows.

    Args:
        unit: 16-byte unit of the rows that the lane dequantizes first.
        row_bytes: bytes per row of a K tile.
        atoms: scale atoms per K tile.
        row: see :func:`output_column`.
    """
    column = output_column(kind, row)
    if kind.num_products == 1:
        return LaneRows(
            unit_offset(column, unit, row_bytes),
            scale_offset(column, atoms),
            8 * row_bytes,
            8 * SF_ROW_BYTES,
        )
    if kind.weight_layout == "separate":
        # A tile need not start at a scale block.
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

"""Stores a slice of float32 results to an output of either order.

If the output is contiguous along the MMA's N side, a thread stores a run of its row at once. If it is contiguous along the M
side, the 32 lanes of a warp store a run of a column together. Nothing beyond the group's extents is written.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..common.group_table import WorkTile
from ..common.output_table import OutputTable, group_output
from ..common.sides import TileSide

# Widest store of a thread: sm_100 writes a whole 32-byte sector at once. Rows of odd pitches start within a sector.
WIDE_STORE_BYTES = 32
STORE_BYTES = 16


@dataclass(frozen=True)
class RowTarget:
    """Destination of a thread's row of a tile: one row of the MMA's M side.

    Attributes:
        address: address of the row's first element.
        step_bytes: bytes between elements.
        num_valid: remaining elements of the group from there.
        is_row: whether the group has the row.
    """

    address: Int64
    step_bytes: Int64
    num_valid: Int32
    is_row: Boolean


@cute.jit
def row_target(
    outputs: OutputTable,
    tile: WorkTile,
    row: Int32,
    m_side: TileSide,
    n_side: TileSide,
    dtype: cutlass.Constexpr,
    out_m_major: cutlass.Constexpr,
    swap_ab: cutlass.Constexpr,
) -> RowTarget:
    """Returns the destination of ``row`` of the M side."""
    item_bytes = dtype.width // 8
    origin, row_pitch, column_pitch = group_output(outputs, tile, dtype, out_m_major)
    pitch_m, pitch_n = (column_pitch, row_pitch) if swap_ab else (row_pitch, column_pitch)
    address = origin + (Int64(row) * pitch_m + Int64(n_side.first_row) * pitch_n) * item_bytes
    step_bytes = pitch_n * item_bytes
    return RowTarget(address, step_bytes, n_side.extent - n_side.first_row, row < m_side.extent)


@cute.jit
def store_slice(
    values: cute.Tensor, target: RowTarget, first_element: Int32, across_lanes: cutlass.Constexpr
):
    """Stores consecutive elements of the row from ``first_element`` on.

    Args:
        values: float32 results.
        target: destination of the row.
        across_lanes: whether the output is contiguous along the MMA's M side, across the lanes of a warp.
    """
    address = target.address + Int64(first_element) * target.step_bytes
    num_valid = target.num_valid - first_element
    if cutlass.const_expr(across_lanes):
        if target.is_row:
            _store_column_elements(values, address, target.step_bytes, num_valid)
    elif target.is_row:
        _store_run(values, address, num_valid)


@cute.jit
def _store_column_elements(values: cute.Tensor, address: Int64, pitch_bytes: Int64, num_valid: Int32):
    """Stores the first ``num_valid`` values, each in a column of its own."""
    for i in cutlass.range_constexpr(cute.size(values)):
        if i < num_valid:
            ptr = cute.make_ptr(values.element_type, address + i * pitch_bytes, cute.AddressSpace.gmem)
            cute.make_tensor(ptr, cute.make_layout(1))[0] = values[i]


@cute.jit
def _store_run(values: cute.Tensor, address: Int64, num_valid: Int32):
    """Stores the first ``num_valid`` values at ``address``, as wide as its alignment allows."""
    if num_valid >= cute.size(values) and address % WIDE_STORE_BYTES == 0:
        _store_vectors(values, address, WIDE_STORE_BYTES)
    elif num_valid >= cute.size(values) and address % STORE_BYTES == 0:
        _store_vectors(values, address, STORE_BYTES)
    else:
        ptr = cute.make_ptr(values.element_type, address, cute.AddressSpace.gmem)
        out = cute.make_tensor(ptr, values.layout)
        for i in cutlass.range_constexpr(cute.size(values)):
            if i < num_valid:
                out[i] = values[i]


@cute.jit
def _store_vectors(values: cute.Tensor, address: Int64, align_bytes: cutlass.Constexpr):
    ptr = cute.make_ptr(values.element_type, address, cute.AddressSpace.gmem, assumed_align=align_bytes)
    cute.autovec_copy(values, cute.make_tensor(ptr, values.layout))

"""Epilogue of the MMA warps: from accumulators in registers to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common.group_table import select_slot
from ..common.output_table import OutputTable, load_alphas
from ..common.sides import TileSide
from .warp_tile import BAND, STRIP


@dataclass(frozen=True)
class OutputTile:
    """Where a lane's first element goes, and which elements exist. Rows and columns are those of the MMA's sides.

    Attributes:
        address: of the lane's first row and first column.
        pitch_m, pitch_n: bytes from row to row and from column to column; one of them is an element's.
        rows, columns: those that exist from the lane's first one on.
    """

    address: Int64
    dtype: type
    alpha: Float32
    pitch_m: Int64 | int
    pitch_n: Int64 | int
    rows: Int32
    columns: Int32
    runs_along_n: bool


@cute.jit
def locate_output(
    outputs: OutputTable,
    dtype: cutlass.Constexpr,
    slot: Int32,
    m_side: TileSide,
    n_side: TileSide,
    first_row: Int32,
    first_col: Int32,
    swap_ab: cutlass.Constexpr,
) -> OutputTile:
    """A lane's part of a tile: row g and columns 2t and 2t + 1 of every MMA, with lane = 4g + t."""
    lane = cute.arch.lane_idx()
    row = m_side.first_row + first_row + lane // 4
    col = n_side.first_row + first_col + 2 * (lane % 4)
    element_bytes = dtype.width // 8
    pitch = select_slot(outputs.pitches, slot) * element_bytes
    pitch_m, pitch_n = (element_bytes, pitch) if swap_ab else (pitch, element_bytes)
    return OutputTile(
        address=select_slot(outputs.addresses, slot) + Int64(row) * pitch_m + Int64(col) * pitch_n,
        dtype=dtype,
        alpha=load_alphas(outputs, slot, 1)[0],
        pitch_m=pitch_m,
        pitch_n=pitch_n,
        rows=m_side.extent - row,
        columns=n_side.extent - col,
        runs_along_n=not swap_ab,
    )


@cute.jit
def store_tile(acc: cute.Tensor, out: OutputTile, warp_tile: cutlass.Constexpr):
    """Scale, convert and store a warp's (REGISTER, MMA_M, MMA_N) sums; what lies beyond the group is kept."""
    for i in cutlass.range_constexpr(len(warp_tile.mma_m)):
        strip, pair_of_bands = warp_tile.mma_m[i]
        for half in cutlass.range_constexpr(2):
            row = strip * STRIP + (2 * pair_of_bands + half) * BAND
            if row < out.rows:
                for j in cutlass.range_constexpr(len(warp_tile.mma_n)):
                    col = warp_tile.mma_n[j][0] * STRIP + warp_tile.mma_n[j][1] * BAND
                    pair = cute.make_rmem_tensor(2, out.dtype)
                    for k in cutlass.range_constexpr(2):
                        pair[k] = (acc[2 * half + k, i, j] * out.alpha).to(out.dtype)
                    address = out.address + row * out.pitch_m + col * out.pitch_n
                    _store_pair(pair, address, out.pitch_n, out.columns - col, out.runs_along_n)


@cute.jit
def _store_pair(pair: cute.Tensor, address: Int64, pitch, num_valid: Int32, is_contiguous: cutlass.Constexpr):
    """Store the first ``num_valid`` of two values, ``pitch`` bytes apart, at once where their addresses allow."""
    if cutlass.const_expr(is_contiguous):
        pair_bytes = 2 * pair.element_type.width // 8
        if num_valid >= 2 and address % pair_bytes == 0:
            ptr = cute.make_ptr(pair.element_type, address, cute.AddressSpace.gmem, assumed_align=pair_bytes)
            cute.autovec_copy(pair, cute.make_tensor(ptr, pair.layout))
        else:
            _store_elements(pair, address, pitch, num_valid)
    else:
        _store_elements(pair, address, pitch, num_valid)


@cute.jit
def _store_elements(pair: cute.Tensor, address: Int64, pitch, num_valid: Int32):
    for i in cutlass.range_constexpr(2):
        if i < num_valid:
            ptr = cute.make_ptr(pair.element_type, address + i * pitch, cute.AddressSpace.gmem)
            cute.make_tensor(ptr, cute.make_layout(1))[0] = pair[i]

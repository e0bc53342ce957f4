"""Epilogue of the MMA warps: from accumulators in registers to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common.activation import gate
from ..common.group_table import WorkTile
from ..common.output_table import OutputTable, group_output, load_alphas
from ..common.sides import mma_sides
from .warp_tile import BAND, STRIP


@dataclass(frozen=True)
class OutputKind:
    """What is written: element type, whether columns are contiguous, and a dual GEMM's activation."""

    dtype: type
    m_major: bool
    activation: str | None

    @property
    def num_products(self) -> int:
        """Products that an element combines."""
        return 1 if self.activation is None else 2


@dataclass(frozen=True)
class OutputTile:
    """Where a lane's first element goes, and which elements exist. Rows and columns are those of the MMA's sides.

    Attributes:
        address: of the lane's first row and first column.
        alphas: the group's factor of every product.
        activation: of a dual GEMM's first product (``common.activation``); None where there is one product.
        pitch_m, pitch_n: bytes from row to row and from column to column; one of them is an element's.
        rows, columns: those that exist from the lane's first one on.
        runs_along_n: whether neighbouring columns are neighbours in memory.
    """

    address: Int64
    dtype: type
    alphas: list
    activation: str | None
    pitch_m: Int64
    pitch_n: Int64
    rows: Int32
    columns: Int32
    runs_along_n: bool


@cute.jit
def locate_output(
    outputs: OutputTable,
    kind: cutlass.Constexpr,
    tile: WorkTile,
    config: cutlass.Constexpr,
    first_row: Int32,
    first_col: Int32,
) -> OutputTile:
    """A lane's part of a tile: row g and columns 2t and 2t + 1 of every MMA, with lane = 4g + t.

    Args:
        kind: ``OutputKind``.
        first_row, first_col: of the warp, counted from the tile's.
    """
    m_side, n_side = mma_sides(config, tile)
    lane = cute.arch.lane_idx()
    row = m_side.first_row + first_row + lane // 4
    col = n_side.first_row + first_col + 2 * (lane % 4)
    origin, row_pitch, column_pitch = group_output(outputs, tile, kind.dtype, kind.m_major)
    pitch_m, pitch_n = (column_pitch, row_pitch) if config.swap_ab else (row_pitch, column_pitch)
    element_bytes = kind.dtype.width // 8
    return OutputTile(
        address=origin + (Int64(row) * pitch_m + Int64(col) * pitch_n) * element_bytes,
        dtype=kind.dtype,
        alphas=load_alphas(outputs, tile.slot, kind.num_products),
        activation=kind.activation,
        pitch_m=pitch_m * element_bytes,
        pitch_n=pitch_n * element_bytes,
        rows=m_side.extent - row,
        columns=n_side.extent - col,
        runs_along_n=kind.m_major == config.swap_ab,
    )


@cute.jit
def store_tile(acc: cute.Tensor, out: OutputTile, warp_tile: cutlass.Constexpr):
    """Scale, convert and store a warp's (REGISTER, MMA_M, MMA_N) sums; what lies beyond the group is kept."""
    # 16 columns of 2 bytes are a sector of memory.
    joined = out.runs_along_n and out.dtype.width == 16 and warp_tile.strips_n == 2
    for i in cutlass.range_constexpr(warp_tile.out_m):
        _, strip, pair_of_bands = warp_tile.mma_m[i]
        for half in cutlass.range_constexpr(2):
            row = strip * STRIP + (2 * pair_of_bands + half) * BAND
            if cutlass.const_expr(joined):
                _store_joined_strips(acc, i, half, row, out, warp_tile)
            elif row < out.rows:
                for j in cutlass.range_constexpr(warp_tile.out_n):
                    col = warp_tile.mma_n[j][1] * STRIP + warp_tile.mma_n[j][2] * BAND
                    address = out.address + row * out.pitch_m + col * out.pitch_n
                    pair = _pair(acc, i, half, j, out, warp_tile)
                    _store_run(pair, address, out.pitch_n, out.columns - col, out.runs_along_n)


@cute.jit
def _store_joined_strips(
    acc: cute.Tensor,
    i: cutlass.Constexpr,
    half: cutlass.Constexpr,
    row: cutlass.Constexpr,
    out: OutputTile,
    warp_tile: cutlass.Constexpr,
):
    """Store a row's columns of two strips side by side, four a lane, so that a quad writes a whole sector at once.

    Lanes 2i and 2i + 1 exchange pairs: then the one has four columns of the first strip, the other of the second one.
    """
    is_odd = cute.arch.lane_idx() % 2
    for band in cutlass.range_constexpr(warp_tile.bands_n):
        first, second = [
            cute.recast_tensor(_pair(acc, i, half, j, out, warp_tile), Int32)[0]
            for j in (band, band + warp_tile.bands_n)
        ]
        received = cute.arch.shuffle_sync_bfly(first if is_odd == 1 else second, 1)
        words = cute.make_rmem_tensor(2, Int32)
        words[0] = received if is_odd == 1 else first
        words[1] = second if is_odd == 1 else received
        # From the lane's own pair of the first strip, 2 (lane % 4), to 8 is_odd + 4 (lane % 4 / 2).
        col = band * BAND + 6 * is_odd
        if row < out.rows:
            address = out.address + row * out.pitch_m + col * out.pitch_n
            _store_run(cute.recast_tensor(words, out.dtype), address, out.pitch_n, out.columns - col, True)


@cute.jit
def _pair(
    acc: cute.Tensor,
    i: cutlass.Constexpr,
    half: cutlass.Constexpr,
    j: cutlass.Constexpr,
    out: OutputTile,
    warp_tile: cutlass.Constexpr,
) -> cute.Tensor:
    """A lane's two results of an MMA's upper or lower ``half``, converted."""
    pair = cute.make_rmem_tensor(2, out.dtype)
    for k in cutlass.range_constexpr(2):
        pair[k] = _result(acc, 2 * half + k, i, j, out, warp_tile).to(out.dtype)
    return pair


@cute.jit
def _result(
    acc: cute.Tensor,
    register: cutlass.Constexpr,
    i: cutlass.Constexpr,
    j: cutlass.Constexpr,
    out: OutputTile,
    warp_tile: cutlass.Constexpr,
) -> Float32:
    """One element: of a dual GEMM, of both products, whose sums the same lane has."""
    result = acc[register, i, j] * out.alphas[0]
    if cutlass.const_expr(out.activation is not None):
        other = acc[
            register, i + (warp_tile.num_m - 1) * warp_tile.out_m, j + (warp_tile.num_n - 1) * warp_tile.out_n
        ]
        result = gate(result, other * out.alphas[1], out.activation, None)
    return result


@cute.jit
def _store_run(
    values: cute.Tensor, address: Int64, pitch, num_valid: Int32, is_contiguous: cutlass.Constexpr
):
    """Store the first ``num_valid`` of some values, ``pitch`` bytes apart, at once where their addresses allow."""
    if cutlass.const_expr(is_contiguous):
        run_bytes = cute.size(values) * values.element_type.width // 8
        if num_valid >= cute.size(values) and address % run_bytes == 0:
            ptr = cute.make_ptr(values.element_type, address, cute.AddressSpace.gmem, assumed_align=run_bytes)
            cute.autovec_copy(values, cute.make_tensor(ptr, values.layout))
        else:
            _store_elements(values, address, pitch, num_valid)
    else:
        _store_elements(values, address, pitch, num_valid)


@cute.jit
def _store_elements(values: cute.Tensor, address: Int64, pitch, num_valid: Int32):
    for i in cutlass.range_constexpr(cute.size(values)):
        if i < num_valid:
            ptr = cute.make_ptr(values.element_type, address + i * pitch, cute.AddressSpace.gmem)
            cute.make_tensor(ptr, cute.make_layout(1))[0] = values[i]

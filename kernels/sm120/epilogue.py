"""Epilogue of the MMA warps: from accumulators in registers to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.group_table import WorkTile, select_slot
from ..common.output_table import OutputTable, load_alpha
from .warp_tile import NUM_MMA_M, STRIP, STRIP_PITCH


@cute.jit
def store_tile(
    acc: cute.Tensor,
    outputs: OutputTable,
    out_dtype: cutlass.Constexpr,
    tile: WorkTile,
    cta_tile_shape_mnk: cutlass.Constexpr,
    warp_tile: cutlass.Constexpr,
    warp_m: Int32,
    first_col: Int32,
):
    """Scale, convert and store a warp's (REGISTER, MMA_N, MMA_M) sums; rows and columns beyond the group are kept."""
    tile_m, tile_n, _ = cta_tile_shape_mnk
    lane = cute.arch.lane_idx()
    alpha = load_alpha(outputs, tile.slot)
    pitch = select_slot(outputs.pitches, tile.slot)
    base = select_slot(outputs.addresses, tile.slot)
    element_bytes = out_dtype.width // 8
    col = tile.tile_n_idx * tile_n + first_col + 2 * (lane % 4)
    for strip in cutlass.range_constexpr(2 * NUM_MMA_M):
        row = tile.tile_m_idx * tile_m + warp_m * STRIP + strip * STRIP_PITCH + lane // 4
        if row < tile.m:
            address = base + (Int64(row) * pitch + col) * element_bytes
            for j in cutlass.range_constexpr(warp_tile.num_mma_n):
                offset = warp_tile.n_offsets[j]
                pair = cute.make_rmem_tensor(2, out_dtype)
                for i in cutlass.range_constexpr(2):
                    pair[i] = (acc[strip % 2 * 2 + i, j, strip // 2] * alpha).to(out_dtype)
                _store_pair(pair, address + offset * element_bytes, tile.n - col - offset)


@cute.jit
def _store_pair(pair: cute.Tensor, address: Int64, num_valid: Int32):
    """Store the first ``num_valid`` of two values, at once where the address allows."""
    pair_bytes = 2 * pair.element_type.width // 8
    if num_valid >= 2 and address % pair_bytes == 0:
        ptr = cute.make_ptr(pair.element_type, address, cute.AddressSpace.gmem, assumed_align=pair_bytes)
        cute.autovec_copy(pair, cute.make_tensor(ptr, pair.layout))
    else:
        ptr = cute.make_ptr(pair.element_type, address, cute.AddressSpace.gmem)
        out = cute.make_tensor(ptr, pair.layout)
        for i in cutlass.range_constexpr(2):
            if i < num_valid:
                out[i] = pair[i]

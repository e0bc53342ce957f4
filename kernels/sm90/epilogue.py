"""Accumulators in registers -> scaled, converted, turned, stored.

The accumulators are C transposed: a lane has tokens side by side, memory has weights side by side. Results of 16 bits
are turned in shared memory, 32 tokens at a time, each warpgroup its own 64 columns: written by stmatrix, which
transposes, read back and stored in 16-byte pieces of rows. Results of 32 bits are stored as they are: eight lanes fill
a 32-byte sector.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ..common.group_table import WorkTile
from ..common.output_table import OutputTable, group_output, load_alphas
from .decode import OPERAND_EXPONENT
from .operands import load_shared, tokens_of_tile
from .warp_schedule import GROUP_THREADS, WARP_SIZE

# One pass: 32 tokens x 64 columns of 16 bits, 128 bytes a token, 16-byte units swizzled by the token.
PASS_TOKENS = 32
ROW_BYTES = 128
UNIT_BYTES = 16
UNIT_VALUES = 8
STAGING_BYTES = PASS_TOKENS * ROW_BYTES
GROUP_COLUMNS = 64
# Named barrier 0 is __syncthreads; each warpgroup has one of its own.
FIRST_BARRIER_ID = 1


@cute.jit
def store_tile(
    acc: cute.Tensor,
    outputs: OutputTable,
    out_dtype: cutlass.Constexpr,
    tile: WorkTile,
    work_tile_mnk: cutlass.Constexpr,
    staging_address: Int32,
):
    """Write the elements inside the group's extents.

    Args:
        acc: value 4i + 2h + e is weight row 16 * warp + lane / 4 + 8h, token 8i + 2 * (lane % 4) + e of the tile.
        staging_address: ``STAGING_BYTES`` of shared memory a warpgroup.
    """
    tile_m, tile_n, _ = work_tile_mnk
    (alpha,) = load_alphas(outputs, tile.slot, 1)
    bytes_per_value = out_dtype.width // 8
    row, column = tile.tile_m_idx * tile_m, tile.tile_n_idx * tile_n
    origin, pitch, _ = group_output(outputs, tile, out_dtype, False)
    origin += (Int64(row) * pitch + column) * bytes_per_value
    rows, columns = tokens_of_tile(tile, tile_m), tile.n - column
    if cutlass.const_expr(bytes_per_value == 4):
        _store_words(acc, alpha, origin, pitch, rows, columns)
    else:
        for first in cutlass.range_constexpr(0, tile_m, PASS_TOKENS):
            if first < rows:
                _store_pass(acc, alpha, first, out_dtype, origin, pitch, rows, columns, staging_address)


@cute.jit
def _scaled(value: Float32, alpha: Float32) -> Float32:
    """Without the factors of decoding. Exact but for overflow, which then is the result's; then times alpha."""
    return value * Float32(2.0 ** (2 * OPERAND_EXPONENT)) * alpha


@cute.jit
def _store_words(acc: cute.Tensor, alpha: Float32, origin: Int64, pitch: Int64, rows: Int32, columns: Int32):
    tidx = cute.arch.thread_idx()[0]
    token, column = 2 * (tidx % 4), tidx // WARP_SIZE * 16 + tidx % WARP_SIZE // 4
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        for e in cutlass.range_constexpr(2):
            for h in cutlass.range_constexpr(2):
                if token + 8 * i + e < rows and column + 8 * h < columns:
                    address = origin + (Int64(token + 8 * i + e) * pitch + column + 8 * h) * 4
                    out = cute.make_tensor(
                        cute.make_ptr(Float32, address, cute.AddressSpace.gmem), cute.make_layout(1)
                    )
                    out[0] = _scaled(acc[4 * i + 2 * h + e], alpha)


@cute.jit
def _store_pass(
    acc: cute.Tensor,
    alpha: Float32,
    first: cutlass.Constexpr,
    out_dtype: cutlass.Constexpr,
    origin: Int64,
    pitch: Int64,
    rows: Int32,
    columns: Int32,
    staging_address: Int32,
):
    """Turn and store the tokens ``first`` to ``first + PASS_TOKENS`` of one warpgroup's columns."""
    tidx = cute.arch.thread_idx()[0]
    group, thread = tidx // GROUP_THREADS, tidx % GROUP_THREADS
    lane, warp = tidx % WARP_SIZE, thread // WARP_SIZE
    staging = staging_address + group * STAGING_BYTES
    # Lane l gives the address of row l % 8 of matrix l / 8: tokens, then column halves.
    token, unit = lane // 16 * 8 + lane % 8, warp * 2 + lane // 8 % 2
    # The passes before have been read.
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    for block in cutlass.range_constexpr(PASS_TOKENS // 16):
        start = (first + block * 16) // 2
        if cutlass.const_expr(start < cute.size(acc)):
            address = staging + (block * 16 + token) * ROW_BYTES + (unit ^ (token % 8)) * UNIT_BYTES
            _store_matrices(address, acc, alpha, start, out_dtype)
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    unit, column = thread % 8, group * GROUP_COLUMNS + thread % 8 * UNIT_VALUES
    for block in cutlass.range_constexpr(PASS_TOKENS // 16):
        token = block * 16 + thread // 8
        if first + token < rows and column < columns:
            words = load_shared(staging + token * ROW_BYTES + (unit ^ (token % 8)) * UNIT_BYTES, 4)
            _store_unit(
                words, out_dtype, origin + (Int64(first + token) * pitch + column) * 2, columns - column
            )


@cute.jit
def _store_matrices(
    address: Int32, acc: cute.Tensor, alpha: Float32, start: cutlass.Constexpr, out_dtype: cutlass.Constexpr
):
    """Four 8 x 8 blocks (two of tokens x two of weights) from the accumulators ``start`` on, transposed."""
    values = cute.make_rmem_tensor(8, Float32)
    for i in cutlass.range_constexpr(8):
        values[i] = Float32(0.0)
        if cutlass.const_expr(start + i < cute.size(acc)):
            values[i] = _scaled(acc[start + i], alpha)
    converted = cute.make_rmem_tensor(8, out_dtype)
    converted.store(values.load().to(out_dtype))
    words = cute.recast_tensor(converted, Uint32)
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, words[0], words[1], words[2], words[3]],
    )


@cute.jit
def _store_unit(words: list, out_dtype: cutlass.Constexpr, address: Int64, num_valid: Int32):
    """Store up to eight results of a row, at once where they are all there and aligned."""
    values = cute.make_rmem_tensor(UNIT_VALUES, out_dtype)
    as_words = cute.recast_tensor(values, Uint32)
    for i in cutlass.range_constexpr(4):
        as_words[i] = words[i]
    if num_valid >= UNIT_VALUES and address % UNIT_BYTES == 0:
        aligned = cute.make_ptr(out_dtype, address, cute.AddressSpace.gmem, assumed_align=UNIT_BYTES)
        cute.autovec_copy(values, cute.make_tensor(aligned, values.layout))
    else:
        out = cute.make_tensor(cute.make_ptr(out_dtype, address, cute.AddressSpace.gmem), values.layout)
        for i in cutlass.range_constexpr(UNIT_VALUES):
            if i < num_valid:
                out[i] = values[i]

"""Sums of a tile whose tokens are on MMA-M -> scaled, converted, stored: lanes have columns of a row side by side, as memory has.

Of 16-bit results four lanes exchange theirs, so that each has eight columns of a row: one store of 16 bytes, 64 bytes of a row
from the four. Results of 32 bits are stored as they are: four lanes fill a 32-byte sector.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.planning.arch.sm90 import TILE_WEIGHTS
from nvfp4_cute.planning.arch.sm90_fp8 import extents
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.bias import load_bias
from ...common.global_access import store_half, store_words
from ...common.group_table import WorkTile
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable, group_output, load_alphas
from ...common.transpose import exchange_in_warp
from ..token_tiles import first_token, tokens_of_tile
from ..weight_rows import output_column
from .math import LANE_ROWS_APART

# Columns of an MMA of which a lane has two, side by side; columns that four lanes exchange.
STEP_COLUMNS = 8
PASS_COLUMNS = 4 * STEP_COLUMNS
UNIT_BYTES = 16


def set_columns(blocks: int) -> int:
    """Columns of the products that are promoted at a time, of so many blocks of weights: registers hold two such sets beside the
    sums."""
    return TILE_WEIGHTS if blocks == 1 else TILE_WEIGHTS // 2


@cute.jit
def store_rows(
    sums: cute.Tensor,
    outputs: OutputTable,
    kind: cutlass.Constexpr[OutputKind],
    tile: WorkTile,
    config: cutlass.Constexpr[KernelConfig],
    num_columns: cutlass.Constexpr[int],
):
    """Write the elements inside the group's extents.

    Args:
        sums: (VALUE, SET): value 4i + 2h + e of a set: row h * 8 below the lane's first, column 8i + 2 * (lane % 4) + e. Sets
            behind the tile's columns are of no result.
        num_columns: of a set.
    """
    (alpha,) = load_alphas(outputs, tile, 1)
    own_config = replace(config, multicast_n=1)
    column = tile.tile_n_idx * extents(config)[0]
    rows, columns = tokens_of_tile(tile, own_config), tile.n - column
    origin, pitch, _ = group_output(outputs, tile, kind.dtype, False)
    num_bytes = kind.dtype.width // 8
    origin += (Int64(first_token(tile, own_config)) * pitch + column) * num_bytes
    row, lane = output_column(kind), cute.arch.lane_idx() % 4
    is_whole = (origin | pitch * num_bytes | Int64(columns) * num_bytes) % UNIT_BYTES == 0
    for index in cutlass.range_constexpr(extents(config)[0] // num_columns):
        for first in cutlass.range_constexpr(0, num_columns, PASS_COLUMNS):
            across = index * num_columns + first
            results = lane_results(
                sums[None, index], first, alpha, outputs, column + across + 2 * lane, tile.n
            )
            for half in cutlass.range_constexpr(2):
                at = row + half * LANE_ROWS_APART
                address = origin + (at * pitch + across) * num_bytes
                if cutlass.const_expr(num_bytes == 4):
                    _store_words(results[half], kind, address, at < rows, columns - across, lane)
                else:
                    _store_halves(results[half], kind, address, at < rows, columns - across, lane, is_whole)


def lane_results(
    sums: cute.Tensor, first: int, alpha: Float32, outputs: OutputTable, column: Int32, num_columns: Int32
) -> list:
    """Of a lane's two rows, those of the columns from ``first`` on that it has. column: the lane's first, in the output."""
    results: list = [[], []]
    for step in range(0, PASS_COLUMNS, STEP_COLUMNS):
        bias = None
        if outputs.bias is not None:
            bias = load_bias(outputs.bias, [column + step, column + step + 1], num_columns)
        for i in range(4):
            half, e = divmod(i, 2)
            result = sums[(first + step) // STEP_COLUMNS * 4 + i] * alpha
            if bias is not None:
                result = ptx.add_f32(result, bias[e].to(Float32))
            results[half].append(result)
    return results


@cute.jit
def _store_words(
    results: list,
    kind: cutlass.Constexpr[OutputKind],
    address: Int64,
    is_row: bool,
    columns: Int32,
    lane: Int32,
):
    for i in cutlass.range_constexpr(len(results)):
        across = i // 2 * STEP_COLUMNS + 2 * lane + i % 2
        if is_row and across < columns:
            out = cute.make_tensor(
                cute.make_ptr(kind.dtype, address + across * 4, cute.AddressSpace.gmem), cute.make_layout(1)
            )
            out[0] = results[i]


@cute.jit
def _store_halves(
    results: list,
    kind: cutlass.Constexpr[OutputKind],
    address: Int64,
    is_row: bool,
    columns: Int32,
    lane: Int32,
    is_whole: bool,
):
    """Eight columns of the pass for each of four lanes."""
    values = cute.make_rmem_tensor(len(results), Float32)
    for i in cutlass.range_constexpr(len(results)):
        values[i] = results[i]
    converted = cute.make_rmem_tensor(len(results), kind.dtype)
    converted.store(values.load().to(kind.dtype))
    words = cute.recast_tensor(converted, Uint32)
    # Word i of lane j, columns 2j and 2j + 1 of step i, becomes word j of lane i.
    exchange_in_warp(words, ((0, 0), (1, 1)))
    address += lane * UNIT_BYTES
    columns -= lane * STEP_COLUMNS
    if is_whole:
        store_words(address, [words[i] for i in range(4)], is_row and columns > 0)
    else:
        for i in cutlass.range_constexpr(STEP_COLUMNS):
            if is_row and i < columns:
                store_half(address + i * 2, words[i // 2] >> (i % 2 * 16))

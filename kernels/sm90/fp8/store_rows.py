"""Epilogue with tokens on MMA-M: scales, converts and stores. Lanes hold neighbouring columns of a row, as memory wants them.

Four lanes exchange 16-bit results, so that each has eight columns of a row: one 16-byte store per lane, 64 bytes of a row
together. 32-bit results are stored directly: four lanes fill a 32-byte sector.
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

# A lane has two neighbouring columns of every eight; four lanes exchange the columns of a pass.
STEP_COLUMNS = 8
PASS_COLUMNS = 4 * STEP_COLUMNS
UNIT_BYTES = 16


def set_columns(blocks: int) -> int:
    """Returns the columns of a set of products: two sets fit the registers in addition to the sums of ``blocks`` blocks."""
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
    """Stores the elements of a tile that lie inside the group's extents.

    Args:
        sums: (VALUE, SET): value 4i + 2h + e of a set belongs to row (lane's first + 8h) and column 8i + 2 * (lane % 4) + e.
            Sets beyond the tile's columns are ignored.
        num_columns: columns per set.
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
    """Returns the results of a lane's two rows in one pass of columns.

    Args:
        first: first column of the pass within the set.
        column: the lane's first column in the output.
        num_columns: columns of the output.
    """
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
    """Stores a pass of 16-bit results: eight columns from each of four lanes."""
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

"""Epilogue with tokens on MMA-M and FP8_1x128 results: scales, quantizes and stores.

Four lanes hold a row's block of columns. They find its largest magnitude by shuffles and exchange codes, so that each lane
stores 16 bytes, 64 bytes of a row together.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.planning.arch.sm90 import TILE_WEIGHTS
from nvfp4_cute.planning.arch.sm90_fp8 import extents
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.encode import Encoding
from ...common.global_access import store_words
from ...common.group_table import WorkTile
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable, load_alphas
from ...common.quantize_block import encode_values, find_scale, largest, over_lanes
from ...common.quantized_output import QuantizedGroup, quantized_group, store_scale
from ...common.transpose import LOWER_HALVES, UPPER_HALVES, exchange_in_warp
from ..token_tiles import first_token, tokens_of_tile
from ..weight_rows import output_column
from .math import LANE_ROWS_APART
from .store_rows import PASS_COLUMNS, lane_results

# Lanes that share a row, and columns whose codes they exchange at a time: 16 bytes per lane.
ROW_LANES = 4
CODE_COLUMNS = ROW_LANES * 16
# Codes per word.
WORD_CODES = 4


@cute.jit
def store_quantized_rows(
    sums: cute.Tensor,
    outputs: OutputTable,
    kind: cutlass.Constexpr[OutputKind],
    tile: WorkTile,
    config: cutlass.Constexpr[KernelConfig],
    num_columns: cutlass.Constexpr[int],
):
    """Stores the elements and scales that lie inside the group's extents. See ``store_rows`` for the arguments."""
    (alpha,) = load_alphas(outputs, tile, 1)
    own_config = replace(config, multicast_n=1)
    group = quantized_group(outputs, tile, tile.n, kind.dtype)
    rows, row, lane = tokens_of_tile(tile, own_config), output_column(kind), cute.arch.lane_idx() % ROW_LANES
    first_row, column = first_token(tile, own_config), tile.tile_n_idx * extents(config)[0]
    for block in cutlass.range_constexpr(extents(config)[0] // TILE_WEIGHTS):
        results: list = [[], []]
        for across in cutlass.range_constexpr(block * TILE_WEIGHTS, (block + 1) * TILE_WEIGHTS, PASS_COLUMNS):
            own = sums[None, across // num_columns]
            at = column + across + 2 * lane
            parts = lane_results(own, across % num_columns, alpha, outputs, at, tile.n)
            results = [one + more for one, more in zip(results, parts, strict=True)]
        for half in cutlass.range_constexpr(2):
            at = row + half * LANE_ROWS_APART
            has_row = at < rows and column // TILE_WEIGHTS + block < group.blocks
            place = first_row + at, column // TILE_WEIGHTS + block
            _store_block(results[half], group, *place, lane, has_row, kind)


@cute.jit
def _store_block(
    values: list,
    group: QuantizedGroup,
    row: Int32,
    block: Int32,
    lane: Int32,
    has_row: bool,
    kind: cutlass.Constexpr[OutputKind],
):
    """Quantizes and stores a block of a row. All lanes of a warp must call it; ``lane`` has two columns of every eight."""
    encode = Encoding.of(kind.dtype, has_fp4_convert=False)
    amax = over_lanes(largest([ptx.abs_f32(value) for value in values]), ROW_LANES)
    code, divisor = find_scale(amax, None, encode)
    words = encode_values(values, None, amax, code, divisor, encode)
    address = (
        group.data + Int64(row) * group.pitch + block * TILE_WEIGHTS + lane * (CODE_COLUMNS // ROW_LANES)
    )
    per_pass = CODE_COLUMNS // ROW_LANES // WORD_CODES
    for index in cutlass.range_constexpr(TILE_WEIGHTS // CODE_COLUMNS):
        # Word i of lane j, columns 2j and 2j + 1 of steps 2i and 2i + 1, becomes word j of lane i.
        turned = cute.make_rmem_tensor(per_pass, Uint32)
        for i in cutlass.range_constexpr(per_pass):
            turned[i] = words[index * per_pass + i]
        exchange_in_warp(turned, ((0, 0), (1, 1)))
        stored = [
            ptx.prmt(turned[i], turned[i + 1], Uint32(halves))
            for halves in (LOWER_HALVES, UPPER_HALVES)
            for i in (0, 2)
        ]
        store_words(address + index * CODE_COLUMNS, stored, has_row)
    if has_row and lane == 0:
        store_scale(code, group, row, block, kind.dtype)

"""Accumulators in registers -> scaled, combined, converted, turned, stored.

The accumulators are C transposed: a lane has tokens side by side, memory has weights side by side. Results of 16 bits
are turned in shared memory, 32 tokens at a time, each warp its own 16 columns (of a dual GEMM two warps, 8 each), which
are a 32-byte sector of a row: so a warp waits for itself alone. They are written by stmatrix, which transposes, read
back and stored in 16-byte pieces of rows. Results of 32 bits are stored as they are:
eight lanes fill a 32-byte sector. Quantized results are turned in fp32, for a thread to
quantize a part of a block, whose other parts the next lanes have, of 128 columns those of the other warpgroup, too.
Passes are a loop over code of which only what names accumulators is there for each: executed once a tile, it takes longer to
fetch than to run, and longest to compile.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvfp4_cute.planning.arch.sm90 import PAIRED_TILE_TOKENS
from nvfp4_cute.planning.config import KernelConfig

from ..common import ptx
from ..common.activation import gate
from ..common.bias import load_bias
from ..common.encode import Encoding
from ..common.global_access import store_half, store_words
from ..common.group_table import WorkTile
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable, group_output, load_alphas
from ..common.quantize_block import BlockScale, find_scale, largest, over_lanes
from ..common.quantized_output import (
    QuantizedGroup,
    quantized_group,
    store_quantized_part,
)
from ..common.shared_access import load_shared, load_shared_half, store_shared
from ..common.versions import inline_ptx
from .one_of import MOST_IN_TURN, one_of
from .opaque import opaque
from .token_tiles import first_token, tokens_of_tile
from .warp_schedule import GROUP_THREADS, WARP_SIZE, WARPS_PER_GROUP, WarpSchedule
from .weight_rows import output_column, tile_columns

# One pass of a warp, or of two: 32 tokens, 32 bytes each, in 16-byte units.
PASS_TOKENS = 32
UNIT_BYTES = 16
UNIT_VALUES, UNIT_WORDS = 8, 4
ROW_UNITS = 2
ROW_BYTES, ROW_VALUES = ROW_UNITS * UNIT_BYTES, ROW_UNITS * UNIT_VALUES
PASS_BYTES = PASS_TOKENS * ROW_BYTES
STAGING_BYTES = WARPS_PER_GROUP * PASS_BYTES
# Largest magnitudes that warpgroups tell each other of the tokens of a pass, where a block has columns of both.
EXCHANGED_BYTES = 2 * 4
EXCHANGE_BYTES = EXCHANGED_BYTES * PASS_TOKENS
# Columns of a row that a thread quantizes, so that all threads of a warpgroup have some in a pass: a part of a block.
PART_COLUMNS = STAGING_BYTES // (4 * GROUP_THREADS)
# Accumulators of eight tokens: two rows of weights, two tokens each.
BLOCK_TOKENS, BLOCK_VALUES = 8, 4
# From a lane's first column of one product to its second one.
LANE_COLUMNS_APART = 8
# Named barrier 0 is __syncthreads; each warpgroup has one of its own, or each two warps.
FIRST_BARRIER_ID = 1
# That of both warpgroups, behind their own.
BOTH_BARRIER_ID = FIRST_BARRIER_ID + WarpSchedule.num_math_groups


@dataclass(frozen=True)
class Results:
    """A lane's results: one after the other of a column, two tokens of every eight; then those of its next column.

    Attributes:
        acc: value 4i + 2h + e is weight row h of the lane, token 8i + 2 * (lane % 4) + e of the tile.
        alphas: the group's factor of every product.
        limit: of a dual GEMM; None where it has none.
        exponent: log2 of what takes out the factors of decoding.
        factor: that.
        bias: of the lane's two columns, or None.
    """

    acc: cute.Tensor
    kind: OutputKind
    alphas: list
    limit: Float32 | None
    exponent: int
    factor: Float32
    bias: list | None = None

    @property
    def block_values(self) -> int:
        """Results of eight tokens."""
        return BLOCK_VALUES // self.kind.num_products

    @property
    def count(self) -> int:
        """Results of all tokens."""
        return cute.size(self.acc) // self.kind.num_products

    @property
    def num_tokens(self) -> int:
        """Of the tile."""
        return self.count // self.block_values * BLOCK_TOKENS

    def value(self, index: int) -> Float32 | Int32:
        """Result ``index``: column ``index % block_values // 2`` of the lane's, token ``index % 2`` of the block's."""
        if self.kind.num_products == 1:
            result = self._scaled(index, self.alphas[0])
            if self.bias is None:
                return result
            return ptx.add_f32(result, self.bias[index % BLOCK_VALUES // 2].to(Float32))
        first = index // 2 * BLOCK_VALUES + index % 2
        products = [
            self._scaled(at, alpha) for at, alpha in zip((first, first + 2), self.alphas, strict=True)
        ]
        return gate(*products, self.kind.activation, self.limit)

    def _scaled(self, index: int, alpha: Float32) -> Float32 | Int32:
        """Without the factors of decoding. Exact but for overflow, which then is the result's; then times alpha.

        Sums of integers are what they are.
        """
        if self.kind.dtype is Int32:
            return self.acc[index]
        return self.acc[index] * self.factor * alpha

    def here(self) -> "Results":
        """The same, to be found in this pass: the compiler would find those of all passes before the first one, and spill."""
        return replace(self, factor=ptx.float_of(Uint32((127 + self.exponent) << 23)))


@cute.jit
def store_tile(
    acc: cute.Tensor,
    outputs: OutputTable,
    kind: cutlass.Constexpr,
    tile: WorkTile,
    config: cutlass.Constexpr[KernelConfig],
    staging_address: Int32,
    exponent: cutlass.Constexpr,
):
    """Write the elements inside the group's extents.

    Args:
        acc: as of ``Results``.
        kind: ``OutputKind``.
        staging_address: ``STAGING_BYTES`` of shared memory a warpgroup, and ``EXCHANGE_BYTES`` behind where blocks of results
            have columns of both.
        exponent: log2 of the factor that decoding took out of the sums.
    """
    limit = None
    if cutlass.const_expr(outputs.limit is not None):
        limit = ptx.float_of(outputs.limit)
    alphas = load_alphas(outputs, tile, kind.num_products)
    row, column = first_token(tile, config), tile.tile_n_idx * tile_columns(kind)
    bias = None
    if cutlass.const_expr(outputs.bias is not None):
        own = column + output_column(kind)
        bias = load_bias(outputs.bias, [own, own + LANE_COLUMNS_APART], tile.n)
    results = Results(acc, kind, alphas, limit, exponent, Float32(2.0**exponent), bias)
    # Rows of all operands with weights make the columns of the output.
    rows, columns = tokens_of_tile(tile, config), tile.n // (kind.num_products // kind.num_b)
    if cutlass.const_expr(outputs.scales is not None):
        group = quantized_group(outputs, tile, columns, kind.dtype)
        pass_tokens = STAGING_BYTES // (4 * _group_columns(kind))
        if cutlass.const_expr(config.work_tile_mnk[0] > PAIRED_TILE_TOKENS):
            for index in cutlass.range(cute.ceil_div(rows, pass_tokens), unroll=1):
                _store_quantized_pass(results, index, group, row, column, rows, staging_address)
        else:
            # Where two CTAs share an SM, what is done must leave its registers to what follows.
            for index in cutlass.range_constexpr(-(-config.work_tile_mnk[0] // pass_tokens)):
                if index * pass_tokens < rows:
                    _store_quantized_pass(results, index, group, row, column, rows, staging_address)
    else:
        bytes_per_value = kind.dtype.width // 8
        origin, pitch, _ = group_output(outputs, tile, kind.dtype, False)
        origin += (Int64(row) * pitch + column) * bytes_per_value
        if cutlass.const_expr(bytes_per_value == 4):
            _store_words(results, origin, pitch, rows, columns - column)
        else:
            _store_halves(results, origin, pitch, rows, columns - column, staging_address)


def _group_columns(kind: OutputKind) -> int:
    """Columns of the output that a warpgroup has of a tile."""
    return tile_columns(kind) // WarpSchedule.num_math_groups


@cute.jit
def _store_words(results: Results, origin: Int64, pitch: Int64, rows: Int32, columns: Int32):
    tidx = cute.arch.thread_idx()[0]
    token, column = 2 * (tidx % 4), output_column(results.kind)
    for block in cutlass.range_constexpr(results.count // results.block_values):
        for value in cutlass.range_constexpr(results.block_values):
            at, across = token + block * BLOCK_TOKENS + value % 2, column + value // 2 * 8
            if at < rows and across < columns:
                address = origin + (Int64(at) * pitch + across) * 4
                out = cute.make_tensor(
                    cute.make_ptr(results.kind.dtype, address, cute.AddressSpace.gmem), cute.make_layout(1)
                )
                out[0] = results.value(block * results.block_values + value)


@dataclass(frozen=True)
class Team:
    """Warps that turn results of 16 bits together: as many as have the columns of a row's sector.

    Attributes:
        warps: 1, which has a buffer for a pass, or 2, which have two.
        index, thread: of the CTA's teams; of the team's threads.
    """

    warps: int
    index: Int32
    thread: Int32

    @classmethod
    def of(cls, kind: OutputKind) -> "Team":
        """This thread's."""
        # A lane's columns of two products are half as many.
        tidx, threads = cute.arch.thread_idx()[0], kind.num_products * WARP_SIZE
        return cls(kind.num_products, tidx // threads, tidx % threads)

    @property
    def threads(self) -> int:
        """Of a team."""
        return self.warps * WARP_SIZE

    def wait(self) -> None:
        """Until all threads are here."""
        if self.warps == 1:
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + self.index, number_of_threads=self.threads)


@cute.jit
def _store_halves(
    results: Results, origin: Int64, pitch: Int64, rows: Int32, columns: Int32, staging_address: Int32
):
    """Turn and store results of 16 bits, in passes of ``PASS_TOKENS`` tokens of a team's columns.

    Args:
        origin: address of the tile's first result. pitch: elements between rows.
        rows, columns: from there to the ends of the tile and of the output.
    """
    team = Team.of(results.kind)
    origin, columns = origin + team.index * ROW_BYTES, columns - team.index * ROW_VALUES
    staging = staging_address + team.index * (team.warps * PASS_BYTES)
    # A stmatrix has four matrices of 8 x 8, first those of a block of tokens: one unit each. Lane l gives the address of
    # row l % 8 of matrix l / 8.
    lane, warp, warp_units = team.thread % WARP_SIZE, team.thread // WARP_SIZE, ROW_UNITS // team.warps
    token, unit = lane // 8 // warp_units * BLOCK_TOKENS + lane % 8, warp + lane // 8 % warp_units
    written = staging + _unit_offset(token, unit)
    row, unit, step = team.thread // ROW_UNITS, team.thread % ROW_UNITS, team.threads // ROW_UNITS
    read, stored = staging + _unit_offset(row, unit), origin + row * pitch * 2 + unit * UNIT_BYTES
    is_whole = (origin | pitch * 2 | Int64(columns) * 2) % UNIT_BYTES == 0
    whole_rows = rows - row if unit * UNIT_VALUES < columns else Int32(0)
    pass_values = PASS_TOKENS // BLOCK_TOKENS * results.block_values
    if cutlass.const_expr(results.count > MOST_IN_TURN * pass_values):
        # In large tiles they would be worked out again in each pass.
        written, read, whole_rows = opaque(written), opaque(read), opaque(whole_rows)
    if cutlass.const_expr(team.warps > 1):
        team.wait()  # The tile before has been read.
    for first in cutlass.range(0, rows, PASS_TOKENS, unroll=1):
        here, buffer = results.here(), first // PASS_TOKENS % team.warps * PASS_BYTES
        addresses = [buffer + written + at * ROW_BYTES for at in range(0, PASS_TOKENS, 32 // warp_units)]
        if cutlass.const_expr(team.warps == 1):
            team.wait()  # The pass before has been read.
        one_of(
            first // PASS_TOKENS,
            cute.ceil_div(results.num_tokens, PASS_TOKENS),
            lambda i: _store_matrices(addresses, here, i * pass_values),
        )
        team.wait()
        if is_whole:
            # All at once: what is not volatile is read for one store after the other.
            offsets = range(0, min(results.num_tokens, PASS_TOKENS), step)
            units = [load_shared(buffer + read + at * ROW_BYTES, UNIT_WORDS, True) for at in offsets]
            for i in cutlass.range_constexpr(len(units)):
                store_words(stored + offsets[i] * pitch * 2, units[i], first + offsets[i] < whole_rows)
        else:
            _store_elements(team, staging + buffer, origin + first * pitch * 2, pitch, rows - first, columns)
        stored += pitch * (2 * PASS_TOKENS)


@cute.jit
def _store_elements(team: Team, buffer: Int32, origin: Int64, pitch: Int64, rows: Int32, columns: Int32):
    """Store a pass one by one: results whose rows are not aligned, or do not end with a unit.

    Args:
        origin: address of the first one. rows, columns: from there, as far as there are any.
    """
    column = team.thread % ROW_VALUES
    first, step = team.thread // ROW_VALUES, team.threads // ROW_VALUES
    if column < columns:
        for row in cutlass.range(first, cutlass.min(rows, PASS_TOKENS), step, unroll=1):
            at = _unit_offset(row, column // UNIT_VALUES) + column % UNIT_VALUES * 2
            store_half(origin + (row * pitch + column) * 2, load_shared_half(buffer + at))


@cute.jit
def _store_quantized_pass(
    results: Results,
    index: Int32,
    target: QuantizedGroup,
    first_row: Int32,
    first_column: Int32,
    rows: Int32,
    staging_address: Int32,
):
    """Turn, quantize and store pass ``index`` of a tile: as many tokens as the staging buffer holds of a warpgroup's columns.

    Args:
        first_row, first_column: of the tile in the group's output. rows: of the tile.
    """
    results = results.here()
    tidx = cute.arch.thread_idx()[0]
    group, thread = tidx // GROUP_THREADS, tidx % GROUP_THREADS
    group_columns = _group_columns(results.kind)
    staging, row_bytes = staging_address + group * STAGING_BYTES, 4 * group_columns
    # Units are swizzled by the pair of tokens, so that a warp's eight columns of four pairs share no bank. A lane's
    # other tokens are whole blocks away, and its second column, or the second half of a block, is in the other unit pair.
    column, pair = output_column(results.kind) - group * group_columns, thread % 4
    address = staging + 2 * pair * row_bytes + _swizzled(column // UNIT_WORDS, pair) + column % UNIT_WORDS * 4
    encode = Encoding.of(results.kind.dtype, has_fp4_convert=False)
    is_shared = encode.format.block_k > group_columns
    # The passes before have been read.
    if cutlass.const_expr(is_shared):
        _meet_both()
    else:
        cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    pass_tokens = STAGING_BYTES // row_bytes
    pass_values = pass_tokens // BLOCK_TOKENS * results.block_values
    one_of(
        index,
        -(-results.count // pass_values),
        lambda i: _stage_values(address, row_bytes, results, i * pass_values, pass_values),
    )
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    parts = group_columns // PART_COLUMNS
    first, token, part = index * pass_tokens, thread // parts, thread % parts
    values = _staged_part(staging, token, part, row_bytes)
    magnitudes = [ptx.abs_f32(values[i]) for i in range(PART_COLUMNS)]
    amax = over_lanes(largest(magnitudes), min(encode.format.block_k, group_columns) // PART_COLUMNS)
    if cutlass.const_expr(is_shared):
        exchange = staging_address + WarpSchedule.num_math_groups * STAGING_BYTES + token * EXCHANGED_BYTES
        amax = _over_groups(amax, exchange, group, part == 0)
    scale = BlockScale(amax, *find_scale(amax, target.global_scale, encode))
    if first + token < rows:
        store_quantized_part(
            values,
            scale,
            target,
            first_row + first + token,
            first_column + group * group_columns + part * PART_COLUMNS,
            encode,
        )


def _meet_both() -> None:
    """All threads of both warpgroups are here."""
    threads = WarpSchedule.num_math_groups * GROUP_THREADS
    cute.arch.barrier(barrier_id=BOTH_BARRIER_ID, number_of_threads=threads)


@cute.jit
def _over_groups(amax: Float32, address: Int32, group: Int32, tells: Boolean) -> Float32:
    """The larger one of both warpgroups' magnitudes of a token; NaN where one is. tells: one thread of each, for the token."""
    if tells:
        store_shared(address + group * 4, [ptx.bits_of(amax)])
    _meet_both()
    return ptx.max_nan(*(ptx.float_of(word) for word in load_shared(address, 2, True)))


@cute.jit
def _staged_part(staging: Int32, token: Int32, part: Int32, row_bytes: cutlass.Constexpr) -> cute.Tensor:
    """PART_COLUMNS results of a token, from shared memory."""
    address = staging + token * row_bytes + _swizzled(part * (PART_COLUMNS // UNIT_WORDS), token // 2 % 4)
    words = cute.make_rmem_tensor(PART_COLUMNS, Uint32)
    for unit in cutlass.range_constexpr(PART_COLUMNS // UNIT_WORDS):
        loaded = load_shared(address + unit * UNIT_BYTES, UNIT_WORDS)
        for i in cutlass.range_constexpr(UNIT_WORDS):
            words[unit * UNIT_WORDS + i] = loaded[i]
    return cute.recast_tensor(words, Float32)


def _stage_values(address: Int32, row_bytes: int, results: Results, start: int, count: int):
    """Write the results of a pass, from ``start`` on, as far as there are any, each to its token's row and column."""
    for i in range(min(count, results.count - start)):
        token = i // results.block_values * BLOCK_TOKENS + i % 2
        at = (address ^ (i % results.block_values // 2 * 2 * UNIT_BYTES)) + token * row_bytes
        store_shared(at, [ptx.bits_of(results.value(start + i))])


def _swizzled(unit: Int32, pair: Int32) -> Int32:
    """Offset of four words in a token's row."""
    return (unit ^ (2 * pair)) * UNIT_BYTES


def _unit_offset(token: Int32, unit: Int32) -> Int32:
    """Offset of a 16-byte unit of a token's row, so that those of eight consecutive tokens share no bank."""
    return (token * ROW_UNITS + (unit ^ (token // 4 % ROW_UNITS))) * UNIT_BYTES


def _store_matrices(addresses: list, results: Results, start: int):
    """The results of a pass, from ``start`` on, as far as there are any."""
    for address in addresses:
        if start < results.count:
            _store_matrix(address, results, start)
        start += 8


@cute.jit
def _store_matrix(address: Int32, results: Results, start: cutlass.Constexpr):
    """Four 8 x 8 blocks of tokens x weights, the results from ``start`` on, transposed."""
    values = cute.make_rmem_tensor(8, Float32)
    for i in cutlass.range_constexpr(8):
        values[i] = Float32(0.0)
        if cutlass.const_expr(start + i < results.count):
            values[i] = results.value(start + i)
    converted = cute.make_rmem_tensor(8, results.kind.dtype)
    converted.store(values.load().to(results.kind.dtype))
    words = cute.recast_tensor(converted, Uint32)
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, words[0], words[1], words[2], words[3]],
    )

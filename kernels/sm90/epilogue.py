"""Epilogue: scales, combines, converts, transposes and stores the accumulators.

The accumulators are C transposed: a lane holds neighbouring tokens, while memory wants neighbouring columns.

- 16-bit results are transposed in shared memory, 32 tokens at a time. A warp transposes its own 16 columns, a 32-byte sector of
  a row, so it waits only for itself; in a dual GEMM two warps share a sector with 8 columns each. stmatrix transposes on the
  way in; the results are read back and stored in 16-byte pieces of rows.
- 32-bit results are stored directly: eight lanes fill a 32-byte sector.
- Quantized results are transposed in float32. A thread then quantizes a part of a block. The other parts belong to the next
  lanes, and in blocks of 128 columns also to the other warpgroup.

Passes form a loop, and only the code that names accumulators is repeated per pass: code that runs once per tile takes longer to
fetch than to execute, and dominates the compile time.
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
from ..common.output_table import (
    OutputTable,
    caller_index,
    group_bias,
    group_output,
    load_alphas,
    load_dual_bias,
)
from ..common.quantize_block import largest, over_lanes, scale_of_part
from ..common.quantized_output import (
    QuantizedGroup,
    quantized_group,
    store_quantized_part,
)
from ..common.row_scales import load_row_scales, rows_side
from ..common.shared_access import load_shared, load_shared_half, store_shared
from ..common.versions import inline_ptx
from .one_of import MOST_IN_TURN, one_of
from .opaque import opaque
from .token_tiles import first_token, tokens_of_tile
from .warp_schedule import GROUP_THREADS, WARP_SIZE, WARPS_PER_GROUP, WarpSchedule
from .weight_rows import output_column, tile_columns

# One pass of a team of one or two warps: 32 tokens of 32 bytes, in 16-byte units.
PASS_TOKENS = 32
UNIT_BYTES = 16
UNIT_VALUES, UNIT_WORDS = 8, 4
ROW_UNITS = 2
ROW_BYTES, ROW_VALUES = ROW_UNITS * UNIT_BYTES, ROW_UNITS * UNIT_VALUES
PASS_BYTES = PASS_TOKENS * ROW_BYTES
STAGING_BYTES = WARPS_PER_GROUP * PASS_BYTES
# Where a block spans both warpgroups, they exchange the largest magnitude of every token of a pass.
EXCHANGED_BYTES = 2 * 4
EXCHANGE_BYTES = EXCHANGED_BYTES * PASS_TOKENS
# Columns of a row, part of a block, that a thread quantizes: chosen so that every thread of a warpgroup has work in a pass.
PART_COLUMNS = STAGING_BYTES // (4 * GROUP_THREADS)
# Accumulators per lane and eight tokens: two rows of weights times two tokens.
BLOCK_TOKENS, BLOCK_VALUES = 8, 4
# Columns from a lane's first column of a product to its second.
LANE_COLUMNS_APART = 8
# Named barrier 0 is __syncthreads. Each warpgroup, or each team of two warps, has its own.
FIRST_BARRIER_ID = 1
# Barrier of both warpgroups together, numbered after their own.
BOTH_BARRIER_ID = FIRST_BARRIER_ID + WarpSchedule.num_math_groups


@dataclass(frozen=True)
class Results:
    """Results of a lane, ordered by column, then by token: two of every eight tokens.

    Attributes:
        acc: accumulator 4i + 2h + e belongs to weight row h of the lane and token 8i + 2 * (lane % 4) + e of the tile.
        alphas: the group's factor of every product.
        limit: clamp of a dual GEMM's products, or None.
        exponent: log2 of ``factor``.
        factor: undoes the scaling of dequantized operands.
        bias: bias of the lane's two columns, or in a dual GEMM of its column in both products; None without a bias.
        row_scales: global scales of the tile's rows: where they lie, the tile, and the side of ``a``; or None.
    """

    acc: cute.Tensor
    kind: OutputKind
    alphas: list
    limit: Float32 | None
    exponent: int
    factor: Float32
    bias: list | None = None
    row_scales: tuple | None = None

    @property
    def block_values(self) -> int:
        """Results per eight tokens."""
        return BLOCK_VALUES // self.kind.num_products

    @property
    def count(self) -> int:
        """Results of all tokens of the tile."""
        return cute.size(self.acc) // self.kind.num_products

    @property
    def num_tokens(self) -> int:
        """Tokens of the tile."""
        return self.count // self.block_values * BLOCK_TOKENS

    def value(self, index: int) -> Float32 | Int32:
        """Returns result ``index``: the lane's column ``index % block_values // 2``, the block's token ``index % 2``."""
        if self.kind.num_products == 1:
            result = self._scaled(index, self.alphas[0])
            if self.bias is None:
                return result
            return ptx.add_f32(result, self.bias[index % BLOCK_VALUES // 2].to(Float32))
        first = index // 2 * BLOCK_VALUES + index % 2
        products = [
            self._scaled(at, alpha) for at, alpha in zip((first, first + 2), self.alphas, strict=True)
        ]
        if self.bias is not None:
            products = [ptx.add_f32(x, bias.to(Float32)) for x, bias in zip(products, self.bias, strict=True)]
        return gate(*products, self.kind.activation, self.limit)

    def _scaled(self, index: int, alpha: Float32) -> Float32 | Int32:
        """Undoes the scaling of dequantized operands, then multiplies by alpha. Integer sums are returned unchanged.

        The first factor is a power of two: exact, unless the result itself overflows.
        """
        if self.kind.dtype is Int32:
            return self.acc[index]
        result = self.acc[index] * self.factor * alpha
        if self.row_scales is None:
            return result
        # Read where it is used, from L1: registers hold accumulators.
        token = index // BLOCK_VALUES * BLOCK_TOKENS + index % 2 + cute.arch.lane_idx() % 4 * 2
        return result * ptx.float_of(load_row_scales(*self.row_scales, [token])[0])

    def here(self) -> "Results":
        """Returns a copy whose factor is recomputed in this pass.

        With one factor for all passes the compiler scales all results before the first pass, and spills.
        """
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
    """Stores the elements of a tile that lie inside the group's extents.

    Args:
        acc: accumulators, see ``Results``.
        kind: ``OutputKind``.
        staging_address: shared memory, ``STAGING_BYTES`` per warpgroup, then ``EXCHANGE_BYTES`` if blocks span both warpgroups.
        exponent: log2 of the factor that undoes the scaling of dequantized operands.
    """
    limit = None
    if cutlass.const_expr(outputs.limit is not None):
        limit = ptx.float_of(outputs.limit)
    alphas = load_alphas(outputs, tile, kind.num_products)
    row, column = first_token(tile, config), tile.tile_n_idx * tile_columns(kind)
    # Columns of the output come from the rows of all weight operands together.
    rows, columns = tokens_of_tile(tile, config), tile.n // (kind.num_products // kind.num_b)
    bias = None
    if cutlass.const_expr(outputs.bias is not None):
        own = column + output_column(kind)
        if cutlass.const_expr(kind.num_products == 1):
            bias = load_bias(outputs.bias, [own, own + LANE_COLUMNS_APART], tile.n)
        else:
            of_group = group_bias(outputs, caller_index(outputs, tile.slot), columns)
            (of_gate,), (of_up,) = load_dual_bias(of_group, [own], columns, kind.weight_layout)
            bias = [of_gate, of_up]
    row_scales = None
    if cutlass.const_expr(outputs.row_scales is not None):
        row_scales = outputs.row_scales, tile, rows_side(tile, row)
    results = Results(acc, kind, alphas, limit, exponent, Float32(2.0**exponent), bias, row_scales)
    if cutlass.const_expr(outputs.scales is not None):
        group = quantized_group(outputs, tile, columns, kind.dtype)
        pass_tokens = STAGING_BYTES // (4 * _group_columns(kind))
        if cutlass.const_expr(config.work_tile_mnk[0] > PAIRED_TILE_TOKENS):
            for index in cutlass.range(cute.ceil_div(rows, pass_tokens), unroll=1):
                _store_quantized_pass(results, index, group, row, column, rows, staging_address)
        else:
            # Where two CTAs share an SM, registers are scarce: unroll, so that finished accumulators free theirs.
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
    """Returns the output columns of a tile per warpgroup."""
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
    """Warps that transpose 16-bit results together: those that hold the columns of one sector of a row.

    Attributes:
        warps: 1, with one staging buffer, or 2, with two buffers.
        index: the team within the CTA.
        thread: this thread within the team.
    """

    warps: int
    index: Int32
    thread: Int32

    @classmethod
    def of(cls, kind: OutputKind) -> "Team":
        """Returns the team of this thread."""
        # With two products a lane has half the output columns, so a sector takes two warps.
        tidx, threads = cute.arch.thread_idx()[0], kind.num_products * WARP_SIZE
        return cls(kind.num_products, tidx // threads, tidx % threads)

    @property
    def threads(self) -> int:
        """Threads of the team."""
        return self.warps * WARP_SIZE

    def wait(self) -> None:
        """Waits for all threads of the team."""
        if self.warps == 1:
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + self.index, number_of_threads=self.threads)


@cute.jit
def _store_halves(
    results: Results, origin: Int64, pitch: Int64, rows: Int32, columns: Int32, staging_address: Int32
):
    """Transposes and stores 16-bit results, in passes of ``PASS_TOKENS`` tokens of a team's columns.

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
    stored_rows = rows - row if unit * UNIT_VALUES < columns else Int32(0)
    pass_values = PASS_TOKENS // BLOCK_TOKENS * results.block_values
    if cutlass.const_expr(results.count > MOST_IN_TURN * pass_values):
        # In large tiles ptxas would recompute these in each pass.
        written, read, stored_rows = opaque(written), opaque(read), opaque(stored_rows)
    if cutlass.const_expr(team.warps > 1):
        team.wait()  # The previous tile has been read from the buffers.
    for first in cutlass.range(0, rows, PASS_TOKENS, unroll=1):
        here, buffer = results.here(), first // PASS_TOKENS % team.warps * PASS_BYTES
        addresses = [buffer + written + at * ROW_BYTES for at in range(0, PASS_TOKENS, 32 // warp_units)]
        if cutlass.const_expr(team.warps == 1):
            team.wait()  # The previous pass has been read from the buffer.
        one_of(
            first // PASS_TOKENS,
            cute.ceil_div(results.num_tokens, PASS_TOKENS),
            lambda i: _store_matrices(addresses, here, i * pass_values),
        )
        team.wait()
        if is_whole:
            # Volatile, so that all reads are issued before the first store; otherwise the compiler pairs each read with its
            # store.
            offsets = range(0, min(results.num_tokens, PASS_TOKENS), step)
            units = [load_shared(buffer + read + at * ROW_BYTES, UNIT_WORDS, True) for at in offsets]
            for i in cutlass.range_constexpr(len(units)):
                store_words(stored + offsets[i] * pitch * 2, units[i], first + offsets[i] < stored_rows)
        else:
            _store_elements(team, staging + buffer, origin + first * pitch * 2, pitch, rows - first, columns)
        stored += pitch * (2 * PASS_TOKENS)


@cute.jit
def _store_elements(team: Team, buffer: Int32, origin: Int64, pitch: Int64, rows: Int32, columns: Int32):
    """Stores a pass element by element, for rows that are not aligned or do not end with a whole unit.

    Args:
        origin: address of the first element.
        rows, columns: remaining rows and columns from there.
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
    """Transposes, quantizes and stores pass ``index`` of a tile. A pass is the tokens that fit the staging buffer.

    Args:
        first_row, first_column: position of the tile in the group's output.
        rows: tokens of the tile.
    """
    results = results.here()
    tidx = cute.arch.thread_idx()[0]
    group, thread = tidx // GROUP_THREADS, tidx % GROUP_THREADS
    group_columns = _group_columns(results.kind)
    staging, row_bytes = staging_address + group * STAGING_BYTES, 4 * group_columns
    # Swizzle units by the pair of tokens, so that a warp's eight columns of four pairs share no bank. A lane's other tokens are
    # whole blocks away; its second column, or the second half of a block, is in the other pair of units.
    column, pair = output_column(results.kind) - group * group_columns, thread % 4
    address = staging + 2 * pair * row_bytes + _swizzled(column // UNIT_WORDS, pair) + column % UNIT_WORDS * 4
    encode = Encoding.of(results.kind.dtype, has_fp4_convert=False)
    is_shared = encode.format.block_k > group_columns
    # Wait until the previous pass has been read.
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
    part_values = [values[i] for i in range(PART_COLUMNS)]
    scale = scale_of_part(part_values, magnitudes, amax, target.global_scale, encode)
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
    """Synchronizes both warpgroups."""
    threads = WarpSchedule.num_math_groups * GROUP_THREADS
    cute.arch.barrier(barrier_id=BOTH_BARRIER_ID, number_of_threads=threads)


@cute.jit
def _over_groups(amax: Float32, address: Int32, group: Int32, tells: Boolean) -> Float32:
    """Returns the larger of both warpgroups' magnitudes of a token, NaN if either is NaN.

    tells: true in one thread per warpgroup and token, which publishes the magnitude.
    """
    if tells:
        store_shared(address + group * 4, [ptx.bits_of(amax)])
    _meet_both()
    return ptx.max_nan(*(ptx.float_of(word) for word in load_shared(address, 2, True)))


@cute.jit
def _staged_part(staging: Int32, token: Int32, part: Int32, row_bytes: cutlass.Constexpr) -> cute.Tensor:
    """Loads PART_COLUMNS results of a token from shared memory."""
    address = staging + token * row_bytes + _swizzled(part * (PART_COLUMNS // UNIT_WORDS), token // 2 % 4)
    words = cute.make_rmem_tensor(PART_COLUMNS, Uint32)
    for unit in cutlass.range_constexpr(PART_COLUMNS // UNIT_WORDS):
        loaded = load_shared(address + unit * UNIT_BYTES, UNIT_WORDS)
        for i in cutlass.range_constexpr(UNIT_WORDS):
            words[unit * UNIT_WORDS + i] = loaded[i]
    return cute.recast_tensor(words, Float32)


def _stage_values(address: Int32, row_bytes: int, results: Results, start: int, count: int):
    """Writes the results start <= i < start + count of a lane to their rows and columns of the staging buffer."""
    for i in range(min(count, results.count - start)):
        token = i // results.block_values * BLOCK_TOKENS + i % 2
        at = (address ^ (i % results.block_values // 2 * 2 * UNIT_BYTES)) + token * row_bytes
        store_shared(at, [ptx.bits_of(results.value(start + i))])


def _swizzled(unit: Int32, pair: Int32) -> Int32:
    """Returns the swizzled offset of a unit in a token's row."""
    return (unit ^ (2 * pair)) * UNIT_BYTES


def _unit_offset(token: Int32, unit: Int32) -> Int32:
    """Returns the offset of a 16-byte unit, swizzled so that the units of eight consecutive tokens share no bank."""
    return (token * ROW_UNITS + (unit ^ (token // 4 % ROW_UNITS))) * UNIT_BYTES


def _store_matrices(addresses: list, results: Results, start: int):
    """Writes the results of a pass from ``start`` on, as far as there are any, by stmatrix."""
    for address in addresses:
        if start < results.count:
            _store_matrix(address, results, start)
        start += 8


@cute.jit
def _store_matrix(address: Int32, results: Results, start: cutlass.Constexpr):
    """Writes four 8 x 8 blocks of tokens x weights, the results from ``start`` on, transposed."""
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

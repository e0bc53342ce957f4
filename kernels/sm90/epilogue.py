"""Accumulators in registers -> scaled, combined, converted, turned, stored.

The accumulators are C transposed: a lane has tokens side by side, memory has weights side by side. Results of 16 bits
are turned in shared memory, 32 tokens at a time, each warpgroup its own 64 columns (of a dual GEMM 32): written by
stmatrix, which transposes, read back and stored in 16-byte pieces of rows. Results of 32 bits are stored as they are:
eight lanes fill a 32-byte sector. Results that become NVFP4 are turned in fp32, for a thread to quantize a block.
Passes are a loop over code of which only what names accumulators is there for each: executed once a tile, it takes longer to
fetch than to run, and longest to compile.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.arch.sm90 import PAIRED_TILE_TOKENS
from nvfp4_cute.scale_layout import SF_VEC_SIZE

from ..common import ptx
from ..common.activation import gate
from ..common.encode import RoundE2M1
from ..common.group_table import WorkTile
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable, group_output, load_alphas
from ..common.quantized_output import QuantizedGroup, quantized_group, store_quantized_block
from .decode import OPERAND_EXPONENT
from .one_of import one_of
from .operands import load_shared, store_shared, tokens_of_tile
from .warp_schedule import GROUP_THREADS, WARP_SIZE, WarpSchedule
from .weight_rows import output_column, tile_columns

# One pass: 32 tokens, at most 128 bytes each, in 16-byte units.
PASS_TOKENS = 32
UNIT_BYTES = 16
UNIT_VALUES, UNIT_WORDS = 8, 4
STAGING_BYTES = PASS_TOKENS * 128
# Accumulators of eight tokens: two rows of weights, two tokens each.
BLOCK_TOKENS, BLOCK_VALUES = 8, 4
# 2 ** (2 * OPERAND_EXPONENT) as a float.
FACTOR_BITS = (127 + 2 * OPERAND_EXPONENT) << 23
# Named barrier 0 is __syncthreads; each warpgroup has one of its own.
FIRST_BARRIER_ID = 1


@dataclass(frozen=True)
class Results:
    """A lane's results: one after the other of a column, two tokens of every eight; then those of its next column.

    Attributes:
        acc: value 4i + 2h + e is weight row h of the lane, token 8i + 2 * (lane % 4) + e of the tile.
        alphas: the group's factor of every product.
        limit: of a dual GEMM; None where it has none.
        factor: what takes out those of decoding.
    """

    acc: cute.Tensor
    kind: OutputKind
    alphas: list
    limit: Float32 | None
    factor: Float32

    @property
    def block_values(self) -> int:
        """Results of eight tokens."""
        return BLOCK_VALUES // self.kind.num_products

    @property
    def count(self) -> int:
        """Results of all tokens."""
        return cute.size(self.acc) // self.kind.num_products

    def value(self, index: int) -> Float32:
        """Result ``index``: column ``index % block_values // 2`` of the lane's, token ``index % 2`` of the block's."""
        if self.kind.num_products == 1:
            return self._scaled(index, self.alphas[0])
        first = index // 2 * BLOCK_VALUES + index % 2
        products = [
            self._scaled(at, alpha) for at, alpha in zip((first, first + 2), self.alphas, strict=True)
        ]
        return gate(*products, self.kind.activation, self.limit)

    def _scaled(self, index: int, alpha: Float32) -> Float32:
        """Without the factors of decoding. Exact but for overflow, which then is the result's; then times alpha."""
        return self.acc[index] * self.factor * alpha

    def here(self) -> "Results":
        """The same, to be found in this pass: the compiler would find those of all passes before the first one, and spill."""
        return replace(self, factor=ptx.float_of(Uint32(FACTOR_BITS)))


@cute.jit
def store_tile(
    acc: cute.Tensor,
    outputs: OutputTable,
    kind: cutlass.Constexpr,
    tile: WorkTile,
    work_tile_mnk: cutlass.Constexpr,
    staging_address: Int32,
):
    """Write the elements inside the group's extents.

    Args:
        acc: as of ``Results``.
        kind: ``OutputKind``.
        staging_address: ``STAGING_BYTES`` of shared memory a warpgroup.
    """
    tile_m = work_tile_mnk[0]
    limit = None
    if cutlass.const_expr(outputs.limit is not None):
        limit = ptx.float_of(outputs.limit)
    alphas = load_alphas(outputs, tile.slot, kind.num_products)
    results = Results(acc, kind, alphas, limit, Float32(2.0 ** (2 * OPERAND_EXPONENT)))
    row, column = tile.tile_m_idx * tile_m, tile.tile_n_idx * tile_columns(kind)
    # Rows of all operands with weights make the columns of the output.
    rows, columns = tokens_of_tile(tile, tile_m), tile.n // (kind.num_products // kind.num_b)
    if cutlass.const_expr(outputs.scales is not None):
        group = quantized_group(outputs, tile, columns)
        pass_tokens = STAGING_BYTES // (4 * _group_columns(kind))
        if cutlass.const_expr(tile_m > PAIRED_TILE_TOKENS):
            for index in cutlass.range(cute.ceil_div(rows, pass_tokens), unroll=1):
                _store_quantized_pass(results, index, group, row, column, rows, staging_address)
        else:
            # Where two CTAs share an SM, what is done must leave its registers to what follows.
            for index in cutlass.range_constexpr(-(-tile_m // pass_tokens)):
                if index * pass_tokens < rows:
                    _store_quantized_pass(results, index, group, row, column, rows, staging_address)
    else:
        bytes_per_value = kind.dtype.width // 8
        origin, pitch, _ = group_output(outputs, tile, kind.dtype, False)
        origin += (Int64(row) * pitch + column) * bytes_per_value
        if cutlass.const_expr(bytes_per_value == 4):
            _store_words(results, origin, pitch, rows, columns - column)
        else:
            for index in cutlass.range(cute.ceil_div(rows, PASS_TOKENS), unroll=1):
                _store_pass(results, index, origin, pitch, rows, columns - column, staging_address)


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
                    cute.make_ptr(Float32, address, cute.AddressSpace.gmem), cute.make_layout(1)
                )
                out[0] = results.value(block * results.block_values + value)


@cute.jit
def _store_pass(
    results: Results,
    index: Int32,
    origin: Int64,
    pitch: Int64,
    rows: Int32,
    columns: Int32,
    staging_address: Int32,
):
    """Turn and store pass ``index`` of a tile: ``PASS_TOKENS`` tokens of one warpgroup's columns."""
    results = results.here()
    tidx = cute.arch.thread_idx()[0]
    group, thread = tidx // GROUP_THREADS, tidx % GROUP_THREADS
    lane, warp = tidx % WARP_SIZE, thread // WARP_SIZE
    staging = staging_address + group * STAGING_BYTES
    group_columns = _group_columns(results.kind)
    # Matrices of 8 x 8 of a warp, side by side: one unit each.
    warp_units, row_units = results.block_values // 2, group_columns // UNIT_VALUES
    # A stmatrix has four matrices, first those of a block of tokens. Lane l gives the address of row l % 8 of matrix l / 8.
    matrix = lane // 8
    token, unit = matrix // warp_units * BLOCK_TOKENS + lane % 8, warp * warp_units + matrix % warp_units
    # The passes before have been read.
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    # Blocks of 16 or more tokens, which are swizzled alike.
    written, row_bytes = staging + _unit_offset(token, unit, row_units), row_units * UNIT_BYTES
    addresses = [written + at * row_bytes for at in range(0, PASS_TOKENS, 32 // warp_units)]
    pass_values = PASS_TOKENS // BLOCK_TOKENS * results.block_values
    one_of(
        index,
        -(-results.count // pass_values),
        lambda i: _store_matrices(addresses, results, i * pass_values),
    )
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    unit, row = thread % row_units, thread // row_units
    first, column = index * PASS_TOKENS, group * group_columns + unit * UNIT_VALUES
    read = staging + _unit_offset(row, unit, row_units)
    for at in cutlass.range_constexpr(0, PASS_TOKENS, GROUP_THREADS // row_units):
        token = first + at + row
        if token < rows and column < columns:
            words = load_shared(read + at * row_bytes, 4)
            address = origin + (Int64(token) * pitch + column) * 2
            _store_unit(words, results.kind.dtype, address, columns - column)


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
    # The passes before have been read.
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    pass_tokens = STAGING_BYTES // row_bytes
    pass_values = pass_tokens // BLOCK_TOKENS * results.block_values
    one_of(
        index,
        -(-results.count // pass_values),
        lambda i: _stage_values(address, row_bytes, results, i * pass_values, pass_values),
    )
    cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + group, number_of_threads=GROUP_THREADS)
    blocks = group_columns // SF_VEC_SIZE
    first, token, block = index * pass_tokens, thread // blocks, thread % blocks
    if thread < STAGING_BYTES // (4 * SF_VEC_SIZE) and first + token < rows:
        address = staging + token * row_bytes + _swizzled(block * (SF_VEC_SIZE // UNIT_WORDS), token // 2 % 4)
        words = cute.make_rmem_tensor(SF_VEC_SIZE, Uint32)
        for unit in cutlass.range_constexpr(SF_VEC_SIZE // UNIT_WORDS):
            at = (address ^ (unit // 2 * 2 * UNIT_BYTES)) + unit % 2 * UNIT_BYTES
            loaded = load_shared(at, UNIT_WORDS)
            for i in cutlass.range_constexpr(UNIT_WORDS):
                words[unit * UNIT_WORDS + i] = loaded[i]
        store_quantized_block(
            cute.recast_tensor(words, Float32),
            target,
            first_row + first + token,
            first_column + group * group_columns + block * SF_VEC_SIZE,
            RoundE2M1,
        )


def _stage_values(address: Int32, row_bytes: int, results: Results, start: int, count: int):
    """Write the results of a pass, from ``start`` on, as far as there are any, each to its token's row and column."""
    for i in range(min(count, results.count - start)):
        token = i // results.block_values * BLOCK_TOKENS + i % 2
        at = (address ^ (i % results.block_values // 2 * 2 * UNIT_BYTES)) + token * row_bytes
        store_shared(at, [ptx.bits_of(results.value(start + i))])


def _swizzled(unit: Int32, pair: Int32) -> Int32:
    """Offset of four words in a token's row."""
    return (unit ^ (2 * pair)) * UNIT_BYTES


def _unit_offset(token: Int32, unit: Int32, row_units: int) -> Int32:
    """Offset of a 16-byte unit of a token's row, so that those of eight consecutive tokens share no bank."""
    return (token * row_units + (unit ^ (token // (8 // row_units) % row_units))) * UNIT_BYTES


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

"""MMA role: warps that multiply in registers and store what they computed.

Consumes ``ab``. The warps of a team work on one tile; each reads its rows and columns (``warp_tile``) of every stage.
Two teams take turns: one multiplies while the other stores; named barriers keep them in tile order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from nvfp4_cute.formats.block_format import Formats
from nvfp4_cute.planning.arch.sm120 import MMA, MMA_ROW_BYTES, SmemPlan, has_row_scales, promotes
from nvfp4_cute.planning.config import KernelConfig

from ..common.fp32_scales import ScalePair
from ..common.output_kind import OutputKind
from ..common.output_table import OutputTable, load_alphas
from ..common.sides import mma_sides
from ..common.split_k import add_sums, give_room, k_share, send_sums
from ..common.versions import advanced, inline_ptx
from ..common.warp_schedule import WARP_SIZE
from .block_scales import BlockScales
from .epilogue import store_tile
from .instructions import load_matrices, load_padded_matrices
from .integer_sums import IntegerSums, results_of, row_scales_of_tile
from .operands import StageBuffers
from .promoted_scales import MMA_FORMATS, PromotedScales
from .result_tile import ResultTile
from .split_k import Exchange, first_tile_and_stride, wait_until_read
from .warp_tile import BAND, STRIP, WarpTile

CHUNK_BYTES = 16
# One a team; named barrier 0 is __syncthreads.
FIRST_TURN_BARRIER_ID = 1


@dataclass(frozen=True)
class MmaArgs:
    """What the MMA warps read.

    Attributes:
        formats: on the M side and on the N side.
        groups: ``GroupTable`` or ``DeviceGroups``.
        exchange: of split-K.
        codes_address: shared address of what warps that share blocks of results pass each other (``shared_codes``), or None.
        row_scales: of integers, in global memory, of the M side and of the N side; None of other formats, and where results are
            sums.
    """

    buffers: StageBuffers
    smem: SmemPlan
    warp_tile: WarpTile
    formats: Formats
    groups: object
    outputs: OutputTable
    output_kind: OutputKind
    config: KernelConfig
    exchange: Exchange | None
    codes_address: Int32 | None
    row_scales: ScalePair | None
    ab_consumer: pipeline.PipelineConsumer


@dataclass(frozen=True)
class Fragments:
    """Operands of a K block in registers; those of the next block replace each as soon as it was multiplied.

    Attributes:
        a: (REGISTER, MMA_M). b: (REGISTER, MMA_N).
        scales: as the MMA takes them, or as products of a K tile are promoted by them, or none of integers.
        formats: that MMAs take on the M side and on the N side.
    """

    a: cute.Tensor
    b: cute.Tensor
    scales: BlockScales | PromotedScales | IntegerSums
    formats: Formats


@cute.jit
def run_mma(args: MmaArgs):
    """For each tile of the team: sum over its K tiles in registers, then scale, convert and store."""
    # Read here: from before the roles part, the assembler keeps the tile's index in memory.
    first_tile, stride = first_tile_and_stride(args.config.split_k)
    ab_consumer, warp_tile, config, groups = args.ab_consumer, args.warp_tile, args.config, args.groups
    tiler, row_bytes = config.work_tile_mnk, args.smem.row_bytes
    last_block = row_bytes // MMA_ROW_BYTES - 1
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    team, team_warp = warp_idx // warp_tile.team_warps, warp_idx % warp_tile.team_warps
    first_row = team_warp % warp_tile.warps_m * (STRIP * warp_tile.strips_m)
    first_col = team_warp // warp_tile.warps_m * (STRIP * warp_tile.strips_n)
    results = ResultTile(warp_tile, config.swap_ab, args.output_kind.weight_layout)
    fragments = _make_fragments(warp_tile, args.formats)
    # (REGISTER, MMA_M, MMA_N)
    of_integers = has_row_scales(args.formats)
    dtype = Int32 if of_integers else Float32
    acc = cute.make_rmem_tensor((4, len(warp_tile.mma_m), len(warp_tile.mma_n)), dtype)

    turn = Int32(0)
    if cutlass.const_expr(config.split_k > 1):
        receiver, partial = args.exchange.receiver(warp_idx), args.exchange.partial_sums(warp_idx)
        # The other CTAs of the cluster have their barriers.
        cute.arch.cluster_wait()
    cursor = groups.first_cursor(first_tile, tiler)
    if cutlass.const_expr(warp_tile.num_team > 1):
        # The second team passes over the stages of the first tile, and gives the first team its first turn.
        skipped = Int32(0)
        if team == 1:
            _give_turn(team, warp_tile)
            skipped = _k_tile_cnt(groups, cursor, config)
            cursor = groups.next_cursor(cursor, stride, tiler)
        ab_consumer = advanced(ab_consumer, skipped)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, tiler)
        _, n_side = mma_sides(config, tile)
        _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
        offsets = _lane_offsets(fragments.scales, first_row, first_col, n_side.first_row, row_bytes)
        at_lane = args.buffers.plus(offsets)
        # Asked for here, as the epilogue has nothing else to wait for.
        alphas = load_alphas(args.outputs, tile, args.output_kind.num_products)
        row_scales = None
        if cutlass.const_expr(args.row_scales is not None):
            row_scales = row_scales_of_tile(args.row_scales, warp_tile, tile, config, first_row, first_col)
        _clear(acc)
        if cutlass.const_expr(warp_tile.num_team > 1):
            # A stage's barrier tells two rounds of the ring apart, not three: nobody may wait rounds ahead.
            _take_turn(team, warp_tile)
        # The first K tile has no block before it. (A condition in the loop costs a copy of all sums every time.)
        read = ab_consumer.wait_and_advance()
        at_stage = at_lane.at_stage(args.smem, read.index)
        _read_first_block(fragments, at_stage, args.smem, warp_tile)
        _read_other_blocks(acc, fragments, at_stage, args.smem, warp_tile, is_first=True)
        for _ in cutlass.range(1, k_tile_cnt, unroll=1):
            # The matrix pipe works while the warp waits.
            _multiply(acc, fragments, 0, range(len(warp_tile.mma_n)), last_block)
            stage = ab_consumer.wait_and_advance()
            at_stage = at_lane.at_stage(args.smem, stage.index)
            _advance(acc, fragments, at_stage, 0, args.smem, warp_tile, first=1)
            if cutlass.const_expr(fragments.scales.outlive_stage):
                _await_words(fragments.scales.words(last_block), tile.m)
            _release(read)
            _read_other_blocks(acc, fragments, at_stage, args.smem, warp_tile, is_first=False)
            read = stage
        cursor = groups.next_cursor(cursor, stride, tiler)
        if cutlass.const_expr(warp_tile.num_team > 1):
            # Pass over the other team's tile.
            if groups.has_tile(cursor):
                _give_turn(team, warp_tile)
            ab_consumer = advanced(ab_consumer, _k_tile_cnt(groups, cursor, config))
            cursor = groups.next_cursor(cursor, stride, tiler)
        for i in cutlass.range_constexpr(len(warp_tile.mma_m)):
            _multiply(acc, fragments, i, range(len(warp_tile.mma_n)), last_block)
            fragments.scales.promote(acc, i)
        _await_reads(fragments, last_block, tile.k_tile_cnt, warp_tile)
        _release(read)
        if cutlass.const_expr(config.split_k == 1):
            totals = results_of(acc, row_scales, warp_tile) if of_integers else acc
            store_tile(
                totals,
                args.outputs,
                args.output_kind,
                tile,
                config,
                results,
                first_row,
                first_col,
                alphas,
                args.codes_address,
            )
        else:
            if cute.arch.block_idx_in_cluster() == receiver:
                add_sums(partial, acc, cute.arch.lane_idx(), turn)
                totals = results_of(acc, row_scales, warp_tile) if of_integers else acc
                store_tile(
                    totals,
                    args.outputs,
                    args.output_kind,
                    tile,
                    config,
                    results,
                    first_row,
                    first_col,
                    alphas,
                    args.codes_address,
                )
                give_room(partial)
            else:
                send_sums(partial, acc, receiver, turn)
            turn ^= 1
    if cutlass.const_expr(config.split_k > 1):
        wait_until_read(args.exchange, warp_idx, turn)


@cute.jit
def _clear(acc: cute.Tensor):
    """One by one: sums cleared as a whole LLVM keeps as 64-bit pairs, which are moved to the MMA's registers and back."""
    for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for register in cutlass.range_constexpr(4):
                acc[register, i, j] = acc.element_type(0)


@cute.jit
def _k_tile_cnt(groups, cursor: tuple, config: cutlass.Constexpr) -> Int32:
    """This CTA's K tiles of the tile at the cursor, 0 behind the last one."""
    k_tile_cnt = Int32(0)
    if groups.has_tile(cursor):
        _, k_tile_cnt = k_share(groups.tile(cursor, config.work_tile_mnk).k_tile_cnt, config.split_k)
    return k_tile_cnt


@cute.jit
def _take_turn(team: Int32, warp_tile: cutlass.Constexpr):
    """Wait until the other team has read its last stage."""
    cute.arch.barrier(
        barrier_id=FIRST_TURN_BARRIER_ID + team, number_of_threads=WARP_SIZE * warp_tile.num_warps
    )


@cute.jit
def _give_turn(team: Int32, warp_tile: cutlass.Constexpr):
    """Let the other team read the next tile's stages."""
    cute.arch.barrier_arrive(
        barrier_id=FIRST_TURN_BARRIER_ID + 1 - team, number_of_threads=WARP_SIZE * warp_tile.num_warps
    )


def _make_fragments(warp_tile: WarpTile, formats: Formats) -> Fragments:
    shapes = (4, len(warp_tile.mma_m)), (2, len(warp_tile.mma_n))
    a, b = (cute.make_rmem_tensor(shape, Int32) for shape in shapes)
    if promotes(formats):
        return Fragments(a, b, PromotedScales.of(warp_tile), MMA_FORMATS)
    if has_row_scales(formats):
        return Fragments(a, b, IntegerSums(), formats)
    return Fragments(a, b, BlockScales.of(warp_tile, formats), formats)


@cute.jit
def _lane_offsets(
    scales: BlockScales | PromotedScales | IntegerSums,
    first_row: Int32,
    first_col: Int32,
    tile_col: Int32,
    row_bytes: cutlass.Constexpr,
) -> StageBuffers:
    """Bytes from the start of a stage's operands to what a lane addresses for its first MMA."""
    lane = cute.arch.lane_idx()
    # Matrices of A: (strips of two bands) x (first and second chunk). Of B: first and second chunk of one MMA, then of
    # the next one, whose distance ``_load_b`` adds.
    a = _swizzled(first_row + lane % STRIP + lane // 8 % 2 * BAND, lane // 16, row_bytes)
    b = _swizzled(first_col + lane % STRIP, lane // 8 % 2, row_bytes)
    sfa, sfb = scales.lane_offsets(first_row, first_col, tile_col)
    return StageBuffers(a, b, sfa, sfb)


@cute.jit
def _swizzled(row: Int32, chunk: Int32, row_bytes: cutlass.Constexpr) -> Int32:
    """Byte of a 16-byte chunk in rows of 64 or 128 bytes, as TMA swizzles them (PTX ISA 5.5.7)."""
    if cutlass.const_expr(row_bytes == 128):
        return row * 128 + (chunk ^ row % 8) * CHUNK_BYTES
    else:
        return row * 64 + (chunk ^ row // 2 % 4) * CHUNK_BYTES


def _at_k_block(address: Int32, k_block_idx: int) -> Int32:
    """The chunks of another K block are an exclusive or away: buffers are aligned to the swizzle's repeat."""
    return address ^ (2 * k_block_idx * CHUNK_BYTES)


@cute.jit
def _await_reads(
    fragments: Fragments, k_block_idx: cutlass.Constexpr, k_tile_cnt: Int32, warp_tile: cutlass.Constexpr
):
    """Wait until the block in registers has come, before its stage is released. (In the loop over K tiles, MMAs do, and the next
    block's reads need the registers.)
    """
    words = [fragments.a[0, i] for i in range(len(warp_tile.mma_m))]
    words += [fragments.b[0, pair.start] for pair in _column_pairs(warp_tile)]
    _await_words([*words, *fragments.scales.words(k_block_idx)], k_tile_cnt)


def _await_words(words: list, positive: Int32) -> None:
    """Wait until words have come that were read: MMAs and arithmetic do not, for the assembler moves them behind the arrival. It
    does not move a store there, which waits for what it would store. No lane does store it.

    positive: a number of which the compiler does not know that it is: a tile's rows, or K tiles.
    """
    word = words[0]
    for other in words[1:]:
        word = word ^ other
    inline_ptx("st.shared.b32 [{$r0}], {$r0};", read_only_args=[word], predicate=positive == 0)


@cute.jit
def _release(stage):
    """One lane releases the stage for the warp, when what all lanes read of it has come.

    An arrival does not wait for reads that were only issued: on an H200, TMA overtook such reads.
    """
    cute.arch.sync_warp()
    stage.release()


@cute.jit
def _read_first_block(
    fragments: Fragments, stage: StageBuffers, plan: SmemPlan, warp_tile: cutlass.Constexpr
):
    """Load the first block of a tile."""
    fragments.scales.load(stage, 0, plan)
    for i in cutlass.range_constexpr(len(warp_tile.mma_m)):
        _load_a(fragments, stage, i, 0, plan, warp_tile)
    for pair in _column_pairs(warp_tile):
        _load_b(fragments, stage, pair, 0, plan, warp_tile)


@cute.jit
def _read_other_blocks(
    acc: cute.Tensor,
    fragments: Fragments,
    stage: StageBuffers,
    plan: SmemPlan,
    warp_tile: cutlass.Constexpr,
    is_first: cutlass.Constexpr,
):
    """Load the blocks of a stage behind its first one, and multiply the one before each. is_first: stage of the tile."""
    for k_block_idx in cutlass.range_constexpr(1, plan.row_bytes // MMA_ROW_BYTES):
        begins_sums = k_block_idx == 1 and not is_first
        _advance(acc, fragments, stage, k_block_idx, plan, warp_tile, begins_sums=begins_sums)


@cute.jit
def _advance(
    acc: cute.Tensor,
    fragments: Fragments,
    stage: StageBuffers,
    k_block_idx: cutlass.Constexpr,
    plan: SmemPlan,
    warp_tile: cutlass.Constexpr,
    first: cutlass.Constexpr = 0,
    begins_sums: cutlass.Constexpr = False,
):
    """Multiply the block in registers, from its MMAs ``first`` along M on, and load block ``k_block_idx`` in its place.

    begins_sums: whether that block is the first of a K tile behind another one, whose products are promoted before.
    """
    before = (k_block_idx or plan.row_bytes // MMA_ROW_BYTES) - 1
    fragments.scales.load(stage, k_block_idx, plan)
    last = len(warp_tile.mma_m) - 1
    for i in cutlass.range_constexpr(last):
        if cutlass.const_expr(begins_sums):
            fragments.scales.promote(acc, i)
        if cutlass.const_expr(i >= first):
            _multiply(acc, fragments, i, range(len(warp_tile.mma_n)), before)
        _load_a(fragments, stage, i, k_block_idx, plan, warp_tile)
    if cutlass.const_expr(begins_sums):
        fragments.scales.promote(acc, last)
    for pair in _column_pairs(warp_tile):
        _multiply(acc, fragments, last, pair, before)
        _load_b(fragments, stage, pair, k_block_idx, plan, warp_tile)
    _load_a(fragments, stage, last, k_block_idx, plan, warp_tile)


def _column_pairs(warp_tile: WarpTile) -> list[range]:
    """MMAs along N whose columns one ldmatrix loads."""
    count = len(warp_tile.mma_n)
    return [range(first, min(first + 2, count)) for first in range(0, count, 2)]


def _load_a(
    to: Fragments, stage: StageBuffers, i: int, k_block_idx: int, plan: SmemPlan, warp_tile: WarpTile
) -> None:
    """Rows of MMA ``i`` along M."""
    operand, strip, pair = warp_tile.mma_m[i]
    start = (
        operand * plan.num_ab_stage * plan.a_stage_bytes + (strip * STRIP + pair * 2 * BAND) * plan.row_bytes
    )
    for register, word in enumerate(_load_matrices(to, 0, _at_k_block(stage.m, k_block_idx) + start, 4)):
        to.a[register, i] = word


def _load_b(
    to: Fragments, stage: StageBuffers, mmas: range, k_block_idx: int, plan: SmemPlan, warp_tile: WarpTile
) -> None:
    """Columns of one or two MMAs along N."""
    starts = [
        operand * plan.num_ab_stage * plan.b_stage_bytes + (strip * STRIP + band * BAND) * plan.row_bytes
        for operand, strip, band in warp_tile.mma_n[mmas.start : mmas.stop]
    ]
    address = _at_k_block(stage.n, k_block_idx) + starts[0]
    if len(starts) == 2:
        address += cute.arch.lane_idx() // 16 * (starts[1] - starts[0])
    for i, word in enumerate(_load_matrices(to, 1, address, 2 * len(starts))):
        to.b[i % 2, mmas[i // 2]] = word


def _load_matrices(to: Fragments, side: int, address: Int32, count: int) -> list:
    """Words of a side's matrices, an element a byte where TMA padded it. side: 0 is M, 1 N."""
    load = load_padded_matrices if MMA[to.formats].pads(to.formats[side]) else load_matrices
    return load(address, count)


@cute.jit
def _multiply(
    acc: cute.Tensor,
    fragments: Fragments,
    i: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    k_block_idx: cutlass.Constexpr,
):
    """Add the products of the rows of MMA ``i`` and the columns of MMAs ``columns``, in one K block."""
    sums = fragments.scales.sums_of_k_tile(acc)
    a = [fragments.a[register, i] for register in range(4)]
    for j in cutlass.range_constexpr(columns.start, columns.stop):
        before = [sums[register, i, j] for register in range(4)]
        b = [fragments.b[register, j] for register in range(2)]
        after = fragments.scales.multiply(before, a, b, i, j, k_block_idx)
        for register in cutlass.range_constexpr(4):
            sums[register, i, j] = after[register]

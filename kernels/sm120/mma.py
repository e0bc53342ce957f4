"""MMA role: warps multiply in registers and store their results.

Consumes ``ab``. The warps of a team work on one tile; each reads its rows and columns (``warp_tile``) of every stage. Two teams
alternate (ping-pong): one multiplies while the other stores. Named barriers keep them in tile order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from nvfp4_cute.formats.block_format import Formats
from nvfp4_cute.planning.arch.sm120 import MMA, MMA_ROW_BYTES, SmemPlan, promotes
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
from .integer_sums import IntegerSums, results_of, row_scales_of_tile, scales_of_a
from .operands import StageBuffers
from .promoted_scales import MMA_FORMATS, PromotedScales
from .result_tile import ResultTile
from .split_k import Exchange, first_tile_and_stride, wait_until_read
from .warp_tile import BAND, STRIP, WarpTile

CHUNK_BYTES = 16
# One named barrier per team; barrier 0 is __syncthreads.
FIRST_TURN_BARRIER_ID = 1


@dataclass(frozen=True)
class MmaArgs:
    """Inputs of the MMA role.

    Attributes:
        formats: formats on the M side and on the N side.
        groups: ``GroupTable`` or ``DeviceGroups``.
        exchange: split-K exchange.
        codes_address: shared address at which warps that share blocks of results exchange scales (``shared_codes``), or None.
        row_scales: row scales of INT8 operands in global memory, M side and N side; None for other formats and for int32 results.
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
    """Operands of a K block in registers. The next block's operands replace each one as soon as it has been multiplied.

    Attributes:
        a: (REGISTER, MMA_M). b: (REGISTER, MMA_N).
        scales: ``BlockScales``, ``PromotedScales`` or ``IntegerSums``.
        formats: formats of the MMA on the M side and on the N side.
    """

    a: cute.Tensor
    b: cute.Tensor
    scales: BlockScales | PromotedScales | IntegerSums
    formats: Formats


@cute.jit
def run_mma(args: MmaArgs):
    """Accumulates the K tiles of each of the team's tiles in registers, then scales, converts and stores the tile."""
    # Read block_idx here: if read before the role dispatch, ptxas spills it.
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
    of_integers = args.formats[0].is_1xk
    dtype = Int32 if of_integers else Float32
    acc = cute.make_rmem_tensor((4, len(warp_tile.mma_m), len(warp_tile.mma_n)), dtype)

    turn = Int32(0)
    if cutlass.const_expr(config.split_k > 1):
        receiver, partial = args.exchange.receiver(warp_idx), args.exchange.partial_sums(warp_idx)
        # Wait until the other CTAs of the cluster have initialized their barriers.
        cute.arch.cluster_wait()
    cursor = groups.first_cursor(first_tile, tiler)
    if cutlass.const_expr(warp_tile.num_team > 1):
        # The second team skips the stages of the first tile and gives the first team its first turn.
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
        # Issue the load here, so that the epilogue does not wait for it.
        alphas = load_alphas(args.outputs, tile, args.output_kind.num_products)
        row_scales = None
        if cutlass.const_expr(args.row_scales is not None):
            row_scales = row_scales_of_tile(args.row_scales, warp_tile, tile, config, first_row, first_col)
        scales_of_rows = None
        if cutlass.const_expr(args.outputs.row_scales is not None):
            scales_of_rows = scales_of_a(
                args.outputs.row_scales, warp_tile, tile, config, first_row, first_col
            )
        _clear(acc)
        if cutlass.const_expr(warp_tile.num_team > 1):
            # A stage's phase bit distinguishes only two rounds of the ring, so nobody may wait further ahead.
            _take_turn(team, warp_tile)
        # The first K tile is peeled off, because it has no previous block. A condition in the loop would copy all sums in every
        # iteration.
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
            # Skip the other team's tile.
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
                scales_of_rows,
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
                    scales_of_rows,
                )
                give_room(partial)
            else:
                send_sums(partial, acc, receiver, turn)
            turn ^= 1
    if cutlass.const_expr(config.split_k > 1):
        wait_until_read(args.exchange, warp_idx, turn)


@cute.jit
def _clear(acc: cute.Tensor):
    """Clears sums one by one.

    LLVM keeps sums that are cleared as a whole in 64-bit pairs and moves them to and from MMA registers.
    """
    for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for register in cutlass.range_constexpr(4):
                acc[register, i, j] = acc.element_type(0)


@cute.jit
def _k_tile_cnt(groups, cursor: tuple, config: cutlass.Constexpr) -> Int32:
    """Returns this CTA's number of K tiles of the cursor's tile; 0 after the last tile."""
    k_tile_cnt = Int32(0)
    if groups.has_tile(cursor):
        _, k_tile_cnt = k_share(groups.tile(cursor, config.work_tile_mnk).k_tile_cnt, config.split_k)
    return k_tile_cnt


@cute.jit
def _take_turn(team: Int32, warp_tile: cutlass.Constexpr):
    """Waits until the other team has read its last stage."""
    cute.arch.barrier(
        barrier_id=FIRST_TURN_BARRIER_ID + team, number_of_threads=WARP_SIZE * warp_tile.num_warps
    )


@cute.jit
def _give_turn(team: Int32, warp_tile: cutlass.Constexpr):
    """Lets the other team read the next tile's stages."""
    cute.arch.barrier_arrive(
        barrier_id=FIRST_TURN_BARRIER_ID + 1 - team, number_of_threads=WARP_SIZE * warp_tile.num_warps
    )


def _make_fragments(warp_tile: WarpTile, formats: Formats) -> Fragments:
    shapes = (4, len(warp_tile.mma_m)), (2, len(warp_tile.mma_n))
    a, b = (cute.make_rmem_tensor(shape, Int32) for shape in shapes)
    if promotes(formats):
        return Fragments(a, b, PromotedScales.of(warp_tile), MMA_FORMATS)
    if formats[0].is_1xk:
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
    """Returns the byte offsets, in a stage, of the operands that a lane addresses for its first MMA."""
    lane = cute.arch.lane_idx()
    # Matrices of A: (strips of two bands) x (first and second chunk). Matrices of B: both chunks of one MMA, then of
    # the next one, whose distance ``_load_b`` adds.
    a = _swizzled(first_row + lane % STRIP + lane // 8 % 2 * BAND, lane // 16, row_bytes)
    b = _swizzled(first_col + lane % STRIP, lane // 8 % 2, row_bytes)
    sfa, sfb = scales.lane_offsets(first_row, first_col, tile_col)
    return StageBuffers(a, b, sfa, sfb)


@cute.jit
def _swizzled(row: Int32, chunk: Int32, row_bytes: cutlass.Constexpr) -> Int32:
    """Returns the byte offset of a 16-byte chunk in rows of 64 or 128 bytes, as TMA swizzles them (PTX ISA 5.5.7)."""
    if cutlass.const_expr(row_bytes == 128):
        return row * 128 + (chunk ^ row % 8) * CHUNK_BYTES
    else:
        return row * 64 + (chunk ^ row // 2 % 4) * CHUNK_BYTES


def _at_k_block(address: Int32, k_block_idx: int) -> Int32:
    """Returns the address in another K block by XOR, because buffers are aligned to the swizzle's period."""
    return address ^ (2 * k_block_idx * CHUNK_BYTES)


@cute.jit
def _await_reads(
    fragments: Fragments, k_block_idx: cutlass.Constexpr, k_tile_cnt: Int32, warp_tile: cutlass.Constexpr
):
    """Waits until the block's reads have completed, before its stage is released.

    Only needed outside the loop over K tiles: within it, MMAs wait, and the next block's reads need the registers.
    """
    words = [fragments.a[0, i] for i in range(len(warp_tile.mma_m))]
    words += [fragments.b[0, pair.start] for pair in _column_pairs(warp_tile)]
    _await_words([*words, *fragments.scales.words(k_block_idx)], k_tile_cnt)


def _await_words(words: list, positive: Int32) -> None:
    """Waits until reads of ``words`` have completed.

    MMAs and arithmetic do not wait, because ptxas moves them past the arrival. It does not move a store, which waits for its
    operands; the store here has a predicate that is never true.

    positive: a number that is positive, which the compiler cannot know: rows or K tiles of a tile.
    """
    word = words[0]
    for other in words[1:]:
        word = word ^ other
    inline_ptx("st.shared.b32 [{$r0}], {$r0};", read_only_args=[word], predicate=positive == 0)


@cute.jit
def _release(stage):
    """Releases the stage for the warp, by one lane, when the reads of all lanes have completed.

    An arrival does not wait for reads in flight: on an H200, TMA overwrote data before such reads.
    """
    cute.arch.sync_warp()
    stage.release()


@cute.jit
def _read_first_block(
    fragments: Fragments, stage: StageBuffers, plan: SmemPlan, warp_tile: cutlass.Constexpr
):
    """Loads the first block of a tile."""
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
    """Loads the other blocks of a stage and multiplies the block before each. is_first: whether the stage is the tile's first."""
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
    """Multiplies the block in registers, from MMA ``first`` along M on, and loads block ``k_block_idx`` in its place.

    begins_sums: whether the new block starts a K tile, so that the previous K tile's products are promoted first.
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
    """Returns groups of MMAs along N whose columns one ldmatrix loads."""
    count = len(warp_tile.mma_n)
    return [range(first, min(first + 2, count)) for first in range(0, count, 2)]


def _load_a(
    to: Fragments, stage: StageBuffers, i: int, k_block_idx: int, plan: SmemPlan, warp_tile: WarpTile
) -> None:
    """Loads the rows of MMA ``i`` along M."""
    operand, strip, pair = warp_tile.mma_m[i]
    start = (
        operand * plan.num_ab_stage * plan.a_stage_bytes + (strip * STRIP + pair * 2 * BAND) * plan.row_bytes
    )
    for register, word in enumerate(_load_matrices(to, 0, _at_k_block(stage.m, k_block_idx) + start, 4)):
        to.a[register, i] = word


def _load_b(
    to: Fragments, stage: StageBuffers, mmas: range, k_block_idx: int, plan: SmemPlan, warp_tile: WarpTile
) -> None:
    """Loads the columns of one or two MMAs along N."""
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
    """Loads a side's matrices; TMA-padded e2m1 become one byte per element. side: 0 for M, 1 for N."""
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
    """Adds the products of the rows of MMA ``i`` and the columns of MMAs ``columns`` of one K block."""
    sums = fragments.scales.sums_of_k_tile(acc)
    a = [fragments.a[register, i] for register in range(4)]
    for j in cutlass.range_constexpr(columns.start, columns.stop):
        before = [sums[register, i, j] for register in range(4)]
        b = [fragments.b[register, j] for register in range(2)]
        after = fragments.scales.multiply(before, a, b, i, j, k_block_idx)
        for register in cutlass.range_constexpr(4):
            sums[register, i, j] = after[register]

"""MMA role: warps that multiply in registers and store what they computed.

Consumes ``ab``. The warps of a team work on one tile; each reads its rows and columns (``warp_tile``) of every stage.
Two teams take turns: one multiplies while the other stores; named barriers keep them in tile order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from nvfp4_cute.arch.sm120 import SF_ATOM_ROWS, SmemPlan
from nvfp4_cute.config import KernelConfig

from ..common.group_table import GroupTable, locate_tile
from ..common.output_table import OutputTable
from ..common.sides import mma_sides
from ..common.warp_schedule import WARP_SIZE
from .epilogue import locate_output, store_tile
from .instructions import MMA_K, load_matrices, load_word, mma_nvfp4
from .warp_tile import BAND, BANDS_M, STRIP, WarpTile

CHUNK_BYTES = 16
# One a team; named barrier 0 is __syncthreads.
FIRST_TURN_BARRIER_ID = 1
# In a 128x4 block, rows of neighbouring bands are a word apart, neighbouring rows four words.
SF_WORD_BYTES = 4
SF_ROW_BYTES = 16
SF_ATOM_BYTES = 512


@dataclass(frozen=True)
class StageBuffers:
    """Shared-memory addresses of stage 0 of every operand."""

    a: Int32
    b: Int32
    sfa: Int32
    sfb: Int32


@dataclass(frozen=True)
class MmaArgs:
    """What the MMA warps read."""

    buffers: StageBuffers
    smem: SmemPlan
    warp_tile: WarpTile
    groups: GroupTable
    outputs: OutputTable
    out_dtype: type
    config: KernelConfig
    ab_consumer: pipeline.PipelineConsumer


@dataclass(frozen=True)
class LaneOffsets:
    """Bytes from the start of a stage's operands to what a lane addresses for its first MMA."""

    a: Int32
    b: Int32
    sfa: Int32
    sfb: Int32


@dataclass(frozen=True)
class Fragments:
    """Operands of a K block in registers; those of the next block replace each as soon as it was multiplied.

    Attributes:
        a: (REGISTER, MMA_M). b: (REGISTER, MMA_N).
        sfa: (STRIP_M, BUFFER), sfb: (STRIP_N, BUFFER): words, needed to the end of a block, so there are two buffers.
    """

    a: cute.Tensor
    b: cute.Tensor
    sfa: cute.Tensor
    sfb: cute.Tensor


@cute.jit
def run_mma(args: MmaArgs):
    """For each tile of the team: sum over its K tiles in registers, then scale, convert and store."""
    ab_consumer, warp_tile, config = args.ab_consumer, args.warp_tile, args.config
    tiler, tile_k = config.work_tile_mnk, config.cta_tile_shape_mnk[2]
    num_k_block = tile_k // MMA_K
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    team, team_warp = warp_idx // warp_tile.team_warps, warp_idx % warp_tile.team_warps
    first_row = team_warp % warp_tile.warps_m * (STRIP * warp_tile.strips_m)
    first_col = team_warp // warp_tile.warps_m * (STRIP * warp_tile.strips_n)
    fragments = _make_fragments(warp_tile)
    # (REGISTER, MMA_M, MMA_N)
    acc = cute.make_rmem_tensor((4, len(warp_tile.mma_m), len(warp_tile.mma_n)), Float32)

    first_tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    tile_idx = first_tile_idx + team * stride
    if cutlass.const_expr(warp_tile.num_team > 1):
        # The second team passes over the stages of the first tile, and gives the first team its first turn.
        if team == 1:
            _give_turn(team, warp_tile)
        ab_consumer.advance(team * locate_tile(args.groups, tiler, first_tile_idx).k_tile_cnt)
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, tiler, tile_idx)
        m_side, n_side = mma_sides(config, tile)
        offsets = _lane_offsets(first_row, first_col, n_side.first_row, tile_k, warp_tile)
        acc.fill(0.0)
        if cutlass.const_expr(warp_tile.num_team > 1):
            # A stage's barrier tells two rounds of the ring apart, not three: nobody may wait rounds ahead.
            _take_turn(team, warp_tile)
        for k_tile_idx in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_consumer.wait_and_advance()
            addresses = _stage_addresses(args.buffers, args.smem, offsets, stage.index)
            for k_block_idx in cutlass.range_constexpr(num_k_block):
                # There is a block to multiply: the one before this, of the last stage where this is the first.
                follows = True if k_block_idx > 0 else k_tile_idx > 0
                _advance(acc, fragments, addresses, k_block_idx, follows, tile_k // 2, warp_tile)
            # One lane releases the stage for the warp: all lanes must have read it.
            cute.arch.sync_warp()
            stage.release()
        if cutlass.const_expr(warp_tile.num_team > 1):
            if tile_idx + stride < args.groups.num_tiles:
                _give_turn(team, warp_tile)
        for i in cutlass.range_constexpr(len(warp_tile.mma_m)):
            _multiply(acc, fragments, i, range(len(warp_tile.mma_n)), (num_k_block - 1) % 2, warp_tile)
        out = locate_output(
            args.outputs, args.out_dtype, tile.slot, m_side, n_side, first_row, first_col, config.swap_ab
        )
        store_tile(acc, out, warp_tile)
        if cutlass.const_expr(warp_tile.num_team > 1):
            # Pass over the other team's tile; behind the last tile nothing is waited for any more.
            others = cutlass.min(tile_idx + stride, args.groups.num_tiles - 1)
            ab_consumer.advance(locate_tile(args.groups, tiler, others).k_tile_cnt)
        tile_idx += warp_tile.num_team * stride


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


def _make_fragments(warp_tile: WarpTile) -> Fragments:
    shapes = (
        (4, len(warp_tile.mma_m)),
        (2, len(warp_tile.mma_n)),
        (warp_tile.strips_m, 2),
        (warp_tile.strips_n, 2),
    )
    return Fragments(*[cute.make_rmem_tensor(shape, Int32) for shape in shapes])


@cute.jit
def _lane_offsets(
    first_row: Int32,
    first_col: Int32,
    tile_col: Int32,
    tile_k: cutlass.Constexpr,
    warp_tile: cutlass.Constexpr,
) -> LaneOffsets:
    lane = cute.arch.lane_idx()
    # Matrices of A: (strips of two bands) x (first and second chunk). Of B: first and second chunk of one MMA, then of
    # the next one, whose distance ``_load_b`` adds.
    a = _swizzled(first_row + lane % STRIP + lane // 8 % 2 * BAND, lane // 16, tile_k)
    b = _swizzled(first_col + lane % STRIP, lane // 8 % 2, tile_k)
    sfa = _scale_offset(first_row, BANDS_M)
    # A small tile uses a part of a scale block.
    sfb = _scale_offset(first_col + tile_col % SF_ATOM_ROWS, warp_tile.bands_n)
    return LaneOffsets(a, b, sfa, sfb)


@cute.jit
def _swizzled(row: Int32, chunk: Int32, tile_k: cutlass.Constexpr) -> Int32:
    """Byte of a 16-byte chunk in rows of 64 or 128 bytes, as TMA swizzles them (PTX ISA 5.5.7)."""
    if cutlass.const_expr(tile_k == 256):
        return row * 128 + (chunk ^ row % 8) * CHUNK_BYTES
    else:
        return row * 64 + (chunk ^ row // 2 % 4) * CHUNK_BYTES


@cute.jit
def _scale_offset(first_row: Int32, num_band: cutlass.Constexpr) -> Int32:
    """Byte of a lane's scale word in a 128x4 block: lane 4g + t has row g of the strip in band t, of ``num_band``."""
    lane = cute.arch.lane_idx()
    row = first_row % BAND + lane // 4
    band = first_row // BAND + lane % num_band
    return row * SF_ROW_BYTES + band * SF_WORD_BYTES


def _stage_addresses(
    buffers: StageBuffers, plan: SmemPlan, offsets: LaneOffsets, stage_idx: Int32
) -> StageBuffers:
    """What a lane addresses in K block 0 of a stage."""
    return StageBuffers(
        a=buffers.a + stage_idx * plan.a_stage_bytes + offsets.a,
        b=buffers.b + stage_idx * plan.b_stage_bytes + offsets.b,
        sfa=buffers.sfa + stage_idx * plan.sfa_stage_bytes + offsets.sfa,
        sfb=buffers.sfb + stage_idx * plan.sfb_stage_bytes + offsets.sfb,
    )


def _at_k_block(address: Int32, k_block_idx: int) -> Int32:
    """The chunks of another K block are an exclusive or away: buffers are aligned to the swizzle's repeat."""
    return address ^ (2 * k_block_idx * CHUNK_BYTES)


@cute.jit
def _advance(
    acc: cute.Tensor,
    fragments: Fragments,
    stage: StageBuffers,
    k_block_idx: cutlass.Constexpr,
    follows,
    row_bytes: cutlass.Constexpr,
    warp_tile: cutlass.Constexpr,
):
    """Multiply the block in registers, if one is there, and load block ``k_block_idx`` of a stage in its place."""
    buffer = k_block_idx % 2
    _load_scales(fragments, stage, k_block_idx)
    last = len(warp_tile.mma_m) - 1
    for i in cutlass.range_constexpr(last):
        if follows:
            _multiply(acc, fragments, i, range(len(warp_tile.mma_n)), 1 - buffer, warp_tile)
        _load_a(fragments, stage, i, k_block_idx, row_bytes, warp_tile)
    for columns in cutlass.range_constexpr(0, len(warp_tile.mma_n), 2):
        pair = range(columns, min(columns + 2, len(warp_tile.mma_n)))
        if follows:
            _multiply(acc, fragments, last, pair, 1 - buffer, warp_tile)
        _load_b(fragments, stage, pair, k_block_idx, row_bytes, warp_tile)
    _load_a(fragments, stage, last, k_block_idx, row_bytes, warp_tile)


def _load_a(
    to: Fragments, stage: StageBuffers, i: int, k_block_idx: int, row_bytes: int, warp_tile: WarpTile
) -> None:
    """Rows of MMA ``i`` along M."""
    strip, pair = warp_tile.mma_m[i]
    address = _at_k_block(stage.a, k_block_idx) + (strip * STRIP + pair * 2 * BAND) * row_bytes
    for register, word in enumerate(load_matrices(address, 4)):
        to.a[register, i] = word


def _load_b(
    to: Fragments, stage: StageBuffers, mmas: range, k_block_idx: int, row_bytes: int, warp_tile: WarpTile
) -> None:
    """Columns of one or two MMAs along N."""
    starts = [
        (strip * STRIP + band * BAND) * row_bytes for strip, band in warp_tile.mma_n[mmas.start : mmas.stop]
    ]
    address = _at_k_block(stage.b, k_block_idx) + starts[0]
    if len(starts) == 2:
        address += cute.arch.lane_idx() // 16 * (starts[1] - starts[0])
    for i, word in enumerate(load_matrices(address, 2 * len(starts))):
        to.b[i % 2, mmas[i // 2]] = word


def _load_scales(to: Fragments, stage: StageBuffers, k_block_idx: int) -> None:
    for scales, address in ((to.sfa, stage.sfa), (to.sfb, stage.sfb)):
        for strip in range(cute.size(scales, mode=[0])):
            offset = k_block_idx * SF_ATOM_BYTES + strip * STRIP * SF_ROW_BYTES
            scales[strip, k_block_idx % 2] = load_word(address + offset)


@cute.jit
def _multiply(
    acc: cute.Tensor,
    fragments: Fragments,
    i: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    buffer: cutlass.Constexpr,
    warp_tile: cutlass.Constexpr,
):
    """Add the products of the rows of MMA ``i`` and the columns of MMAs ``columns``, in one K block."""
    strip_m, pair = warp_tile.mma_m[i]
    a = [fragments.a[register, i] for register in range(4)]
    for j in cutlass.range_constexpr(columns.start, columns.stop):
        strip_n, band = warp_tile.mma_n[j]
        sums = mma_nvfp4(
            [acc[register, i, j] for register in range(4)],
            a,
            [fragments.b[register, j] for register in range(2)],
            fragments.sfa[strip_m, buffer],
            pair,
            fragments.sfb[strip_n, buffer],
            band,
        )
        for register in cutlass.range_constexpr(4):
            acc[register, i, j] = sums[register]

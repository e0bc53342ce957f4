"""MATH role: two warpgroups dequantize weights into registers, multiply them by 16-bit tokens, and store the result.

Each warpgroup has 64 rows of weights as MMA-M and all tokens of the tile as MMA-N, as in ``..math``. Tokens keep the caller's
order of K, so the lanes of a quad exchange bytes of weights (``decode``). The weights of a slab, 64 values of K, fill 16
registers. Two such sets
alternate: one is dequantized while wgmma reads the other. The weights of a K tile are read while the previous one is multiplied.

Float32 scales multiply sums (``scales``): for FP8 the sums of every K tile, which are then accumulated; for INT8 the sums of
all of K.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from nvfp4_cute.planning.arch.sm90 import SLABS, TILE_K, token_counts
from nvfp4_cute.planning.arch.sm90_weight_only import WeightOnlySmem
from nvfp4_cute.planning.config import KernelConfig

from ...common.fp32_scales import Scales
from ...common.group_table import WorkTile
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable
from ...common.ring import CONSUMER_PHASE, Ring, arrive_lanes, barrier_of_lane, next_stage
from ...common.shared_access import load_shared, load_shared_half
from ...common.split_k import PartialSums
from ..epilogue import store_tile
from ..fixup import Fixup, send
from ..math import LANE_ROWS, add_others, after_reads, finish_tile
from ..opaque import opaque
from ..operands import SF_ATOM_BYTES, tokens_multiplied
from ..scheduler import ScheduledTiles
from ..tile_walk import TilePart, WalkedTiles
from ..warp_schedule import WarpSchedule
from ..weight_rows import LaneRows, lane_rows
from ..wgmma import multiply_slab, slab_matrix
from .decode import SLAB_WORDS, Decoding, Quad, exchange, load_slab, slab_weights
from .scales import load_scales_of_rows, load_tile_scale, promote_sums, scale_sums, tile_scales


@dataclass(frozen=True)
class MathArgs:
    """Inputs of the MATH role.

    Attributes:
        weights, scales, tokens: shared addresses of stage 0, see ``load.LoadArgs``.
        staging_address: shared address where the epilogue transposes results, ``epilogue.STAGING_BYTES`` per warpgroup.
        tiles: work tiles of this CTA.
        partial: split-K exchange, where the first CTA of a cluster receives the partial sums of the others.
        decoding: conversion of the weights to the dtype of the tokens.
        sum_scales: float32 scales of the weights in global memory; None if the scales are in shared memory.
        fixup, sent: see ``..math.MathArgs``.
    """

    weights: Int32
    scales: Int32 | None
    tokens: Int32
    staging_address: Int32
    smem: WeightOnlySmem
    tiles: WalkedTiles | ScheduledTiles
    outputs: OutputTable
    kind: OutputKind
    config: KernelConfig
    schedule: WarpSchedule
    partial: PartialSums
    ring: Ring
    decoding: Decoding
    sum_scales: Scales | None
    fixup: Fixup | None
    sent: cute.Pointer

    @property
    def k_tiles(self) -> int:
        """K tiles of 128 values per stage."""
        return self.config.work_tile_mnk[2] // TILE_K


@dataclass(frozen=True)
class Weights:
    """Packed weights in a lane's registers.

    Attributes:
        words: Uint32 (``Decoding.words``, 2 rows): a K tile of e2m1, eight per word, or a slab of 8-bit elements, two per word.
        codes: Uint32 (words of scales per K tile, 2 rows): one word per slab for e4m3, one for both slabs for ue8m0, half a word
            to four words for int4. (1,) for FP8 with float32 scales. None where one scale covers all of K.
    """

    words: cute.Tensor
    codes: cute.Tensor | None


@cute.jit
def run_math(args: MathArgs):
    """Accumulates the K tiles of each work tile, then scales, converts and stores the tile."""
    tiles, tile_m = args.tiles, args.config.work_tile_mnk[0]
    # Accumulator 4i + 2h + e belongs to weight row (lane's first + 8h) and token 8i + 2 * (lane % 4) + e.
    acc = cute.make_rmem_tensor(tile_m // 2, Float32)
    # Separate sums of one K tile where those are scaled before they are accumulated.
    products = cute.make_rmem_tensor(tile_m // 2, Float32) if args.decoding.promotes else acc
    stage, phase, parity = Int32(0), Int32(CONSUMER_PHASE), Int32(0)
    quad, place = Quad.of_lane(), tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        rows = _lane_rows(args, part.tile)
        of_rows = []
        if cutlass.const_expr(args.decoding.has_scales_of_sums and not args.decoding.promotes):
            of_rows = load_scales_of_rows(args.sum_scales, args.config, args.kind, part.tile)
        tokens = opaque(tokens_multiplied(part.tile, args.config))
        stage, phase = _accumulate(args, acc, products, rows, quad, tokens, part, stage, phase)
        if cutlass.const_expr(args.config.stream_k):
            if part.first > 0:
                send(args.fixup, acc, tokens, args.sent)
            else:
                # Read the part again here rather than keep it: its registers hold accumulators until now.
                add_others(args.fixup, args.config, acc, tokens, tiles.part(place).num_others)
                _store(args, acc, of_rows, tiles.part(place).tile)
            tiles.release(place)
        else:
            parity = finish_tile(args.partial, acc, parity, lambda: _store(args, acc, of_rows, part.tile))
        place = tiles.next(place)


def _lane_rows(args: MathArgs, tile: WorkTile) -> LaneRows:
    """Returns the offsets of a lane's weights: its unit, or for 8-bit elements its first pair in unit 0."""
    decoding, lane = args.decoding, cute.arch.thread_idx()[0] % 4
    unit = Int32(0) if decoding.has_bytes else lane
    rows = lane_rows(args.kind, tile, unit, decoding.row_bytes, decoding.atoms)
    return replace(rows, data=rows.data + lane * 2) if decoding.has_bytes else rows


def _store(args: MathArgs, acc: cute.Tensor, of_rows: list, tile: WorkTile):
    if of_rows:
        scale_sums(acc, of_rows)
    store_tile(acc, args.outputs, args.kind, tile, args.config, args.staging_address, args.decoding.exponent)


@cute.jit
def _accumulate(
    args: MathArgs,
    acc: cute.Tensor,
    products: cute.Tensor,
    rows: LaneRows,
    quad: Quad,
    tokens: Int32,
    part: TilePart,
    stage: Int32,
    phase: Int32,
):
    """Accumulates a part of a work tile. Only the first ``tokens`` columns of ``acc`` are computed; the rest stay 0.

    products: destination of the MMAs: ``acc`` itself, or the sums of one K tile where those are scaled first.
    """
    count = part.count
    tile_m, num_cta = args.config.work_tile_mnk[0], args.config.multicast_n
    acc.fill(0.0)
    if cutlass.const_expr(args.decoding.promotes):
        products.fill(0.0)
    weights = _weights(args.decoding)
    # The first arrival has no stage to release. It goes to a spare barrier after the last stage's, which nobody waits for.
    last_stage, read_stage = Int32(args.ring.num_stages), stage
    emptied = barrier_of_lane(args.ring.empty(Int32(0)), num_cta)
    slabs, sources = args.k_tiles * SLABS, _sources(args, rows, part.tile)
    if count > 0:
        stage, phase = _load_stage(args, weights, sources, stage, phase, part.first)
    for step in cutlass.range(count, unroll=1):
        in_stage = read_stage
        for slab in cutlass.range_constexpr(slabs):
            if cutlass.const_expr(slab % args.decoding.slabs_of_load == 0):
                dealt = [[weights.words[w, i] for w in range(args.decoding.words)] for i in range(LANE_ROWS)]
                if cutlass.const_expr(not args.decoding.has_bytes):
                    dealt = [exchange(row, quad) for row in dealt]
            if cutlass.const_expr(slab % SLABS == 0 and args.decoding.promotes):
                codes, tile_scale = [[] for i in range(LANE_ROWS)], weights.codes[0]
            elif cutlass.const_expr(slab % SLABS == 0):
                codes = [[weights.codes[j, i] for j in range(args.decoding.atoms)] for i in range(LANE_ROWS)]
            if cutlass.const_expr(slab == 0):
                # wgmma reads descriptors from uniform registers. Move the stage there once; otherwise each descriptor is moved
                # by itself.
                uniform_stage = cute.arch.make_warp_uniform(in_stage)
            words, first = dealt, slab % SLABS * SLAB_WORDS
            if cutlass.const_expr(not args.decoding.has_bytes):
                words = [row[first : first + SLAB_WORDS] for row in dealt]
            decoded = slab_weights(words, codes, slab % SLABS, args.decoding)
            matrix = slab_matrix(args.tokens, uniform_stage * slabs + slab, tile_m)
            counts, most = token_counts(tile_m), args.schedule.mma_tokens
            multiply_slab(products, decoded, tokens, counts, most, matrix, args.decoding.is_bf16)
            if cutlass.const_expr(slab == slabs - 1):
                read_stage = stage
                if step + 1 < count:
                    stage, phase = _load_stage(args, weights, sources, stage, phase, part.first + step + 1)
            loads_next = slab < slabs - 1 and (slab + 1) % args.decoding.slabs_of_load == 0
            if cutlass.const_expr(loads_next and slab > 0):
                _load_weights(args, weights, sources, in_stage, slab + 1, part.first + step)
            # Wait for the previous slab's MMAs: their registers are free now, and after a stage's last slab so is the stage.
            if cutlass.const_expr(args.decoding.promotes and slab % SLABS == SLABS - 1):
                promote_sums(acc, products, tile_scale)
            else:
                warpgroup.wait_group(1)
            if cutlass.const_expr(slab == 0):
                arrive_lanes(emptied + last_stage, num_cta)
                # Load after the arrival, so that no read is in flight when a stage is released.
                if cutlass.const_expr(loads_next):
                    _load_weights(args, weights, sources, in_stage, slab + 1, part.first + step)
        last_stage = in_stage
    warpgroup.wait_group(0)
    if count > 0:
        # One 16-byte load covers all words of a row, so its first word is enough; 8-bit elements have a load per word.
        read = range(args.decoding.words) if args.decoding.has_bytes else (0,)
        words = [weights.words[word, i] for word in read for i in range(LANE_ROWS)]
        if cutlass.const_expr(args.decoding.atoms > 0):
            words += [weights.codes[i] for i in range(cute.size(weights.codes))]
        arrive_lanes(emptied + last_stage + after_reads(words, args.outputs), num_cta)
    return stage, phase


def _weights(decoding: Decoding) -> Weights:
    """Allocates registers for packed weights."""
    words = cute.make_rmem_tensor((decoding.words, LANE_ROWS), Uint32)
    if decoding.promotes:
        return Weights(words, cute.make_rmem_tensor((1,), Uint32))
    return Weights(
        words, cute.make_rmem_tensor((decoding.atoms, LANE_ROWS), Uint32) if decoding.atoms else None
    )


def _sources(args: MathArgs, rows: LaneRows, tile: WorkTile) -> LaneRows:
    """Turns the lane's offsets within a stage into shared addresses of stage 0, or into global ones for scales of sums."""
    data = opaque(args.weights + rows.data)
    if args.decoding.promotes:
        return replace(rows, data=data, scale=tile_scales(args.sum_scales, args.config, tile))
    return replace(
        rows, data=data, scale=opaque(args.scales + rows.scale) if args.decoding.atoms else Int32(0)
    )


@cute.jit
def _load_stage(args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, phase: Int32, index: Int32):
    """Waits for stage ``index`` of the tile and reads the weights of its first slab. Returns the next (stage, phase)."""
    cute.arch.mbarrier_wait(args.ring.full(stage), phase)
    _load_weights(args, weights, rows, stage, 0, index)
    return next_stage(args.ring, stage, phase)


@cute.jit
def _load_weights(
    args: MathArgs, weights: Weights, rows: LaneRows, stage: Int32, slab: cutlass.Constexpr, index: Int32
):
    """Reads the lane's weights of a slab, or of a whole K tile, with the scales at the start of a K tile.

    Args:
        rows: result of ``_sources``.
        index: number of the stage within the tile.
    """
    smem, k_tile = args.smem, slab // SLABS
    data_bytes, scale_bytes = smem.num_b * smem.b_stage_bytes, smem.num_b * smem.sfb_stage_bytes
    data = rows.data + stage * data_bytes + k_tile * (data_bytes // args.k_tiles)
    if cutlass.const_expr(args.decoding.atoms > 0):
        scale = rows.scale + stage * scale_bytes + k_tile * (scale_bytes // args.k_tiles)
    if cutlass.const_expr(args.decoding.promotes and slab == 0):
        weights.codes[0] = load_tile_scale(rows.scale, index)
    for i in cutlass.range_constexpr(LANE_ROWS):
        words = load_slab(data + i * rows.data_step, slab % SLABS, args.decoding)
        for word in cutlass.range_constexpr(args.decoding.words):
            weights.words[word, i] = words[word]
        if cutlass.const_expr(slab % SLABS == 0):
            for atom in cutlass.range_constexpr(args.decoding.atoms):
                address = scale + i * rows.scale_step + atom * SF_ATOM_BYTES
                if cutlass.const_expr(args.decoding.has_half_words):
                    half = (index * args.k_tiles + k_tile) % 2
                    weights.codes[atom, i] = load_shared_half(address + half * 2)
                else:
                    weights.codes[atom, i] = load_shared(address, 1)[0]

"""MATH role: two warpgroups dequantize weights into registers, multiply them by tokens, and store the result.

Each warpgroup has 64 rows of weights as MMA-M and all tokens of the tile as MMA-N, as in ``..math``. Tokens keep the caller's
order of K, so the lanes of a quad exchange bytes of weights (``decode``); weights for FP8 tokens are stored in the lanes' order
(``fp8_tokens``). The weights of a slab, ``Decoding.slab_k`` values of K, fill 8 or 16 registers. Two such sets alternate: one is
dequantized while wgmma reads the other. The weights of a K tile are read while the previous one is multiplied.

Float32 scales multiply sums (``scales``): for FP8 the sums of every K tile, which are then accumulated; for INT8 the sums of
all of K.

With FP8 tokens, sums of a stage are promoted: added to accumulators in other registers. In each MMA of e4m3, Hopper's tensor
cores keep 13 bits after the binary point of the largest term and truncate the rest (``emulator/isa/products.py``). A stage has 4
or 8 MMAs. Before the first MMA of a stage, a warp waits for the last one of the previous stage, after converting its weights.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from nvfp4_cute.planning.arch.sm90 import TILE_K, token_counts
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
from ..operands import SF_ATOM_BYTES, tile_row_bytes, tokens_multiplied
from ..scheduler import ScheduledTiles
from ..tile_walk import TilePart, WalkedTiles
from ..warp_schedule import WarpSchedule
from ..weight_rows import LaneRows, lane_rows, matrix_rows
from ..wgmma import STEP_UNITS, multiply_slab, slab_matrix
from . import fp8_tokens
from .decode import Decoding, Quad, exchange, load_slab, slab_weights
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
        sum_scales: float32 scales in global memory, of the weights or of FP8 tokens; None if all scales are in shared memory.
        tables: shared address of ``fp8_tokens.store_tables``; None for 16-bit tokens.
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
    tables: Int32 | None = None

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
        factors: Uint32 (2 rows): with FP8 tokens, the powers of two of the rows of the tile; otherwise None.
    """

    words: cute.Tensor
    codes: cute.Tensor | None
    factors: cute.Tensor | None = None


@cute.jit
def run_math(args: MathArgs):
    """Accumulates the K tiles of each work tile, then scales, converts and stores the tile."""
    tiles, tile_m = args.tiles, args.config.work_tile_mnk[0]
    # Accumulator 4i + 2h + e belongs to weight row (lane's first + 8h) and token 8i + 2 * (lane % 4) + e.
    acc = cute.make_rmem_tensor(tile_m // 2, Float32)
    # Where sums are promoted, MMAs add up a part of K in registers of their own.
    products = cute.make_rmem_tensor(tile_m // 2, Float32) if args.decoding.promotes else acc
    weights = _weights(args.decoding)
    stage, phase, parity = Int32(0), Int32(CONSUMER_PHASE), Int32(0)
    quad, place = Quad.of_lane(), tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        rows = _lane_rows(args, part.tile)
        of_rows = []
        if cutlass.const_expr(args.decoding.has_scales_of_sums and not args.decoding.promotes):
            of_rows = load_scales_of_rows(args.sum_scales, args.config, args.kind, part.tile)
        tokens = opaque(tokens_multiplied(part.tile, args.config))
        stage, phase = _accumulate(args, acc, products, weights, rows, quad, tokens, part, stage, phase)
        if cutlass.const_expr(args.decoding.has_fp8_tokens):
            of_rows = [weights.factors[i] for i in range(LANE_ROWS)]
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
    """Returns the offsets of a lane's weights: its unit, or for 8-bit elements its first pair in unit 0.

    With FP8 tokens, the offset of the 16 bytes whose address this lane passes to ldmatrix.
    """
    decoding, lane = args.decoding, cute.arch.thread_idx()[0] % 4
    if decoding.has_fp8_tokens:
        return matrix_rows(args.kind, tile, decoding.row_bytes, decoding.atoms)
    unit = Int32(0) if decoding.has_bytes else lane
    rows = lane_rows(args.kind, tile, unit, decoding.row_bytes, decoding.atoms)
    return replace(rows, data=rows.data + lane * 2) if decoding.has_bytes else rows


def _store(args: MathArgs, acc: cute.Tensor, of_rows: list, tile: WorkTile):
    if args.decoding.has_fp8_tokens:
        fp8_tokens.scale_sums(acc, of_rows, fp8_tokens.load_token_scales(args.sum_scales, args.config, tile))
    elif of_rows:
        scale_sums(acc, of_rows)
    store_tile(acc, args.outputs, args.kind, tile, args.config, args.staging_address, args.decoding.exponent)


@cute.jit
def _accumulate(
    args: MathArgs,
    acc: cute.Tensor,
    products: cute.Tensor,
    weights: Weights,
    rows: LaneRows,
    quad: Quad,
    tokens: Int32,
    part: TilePart,
    stage: Int32,
    phase: Int32,
):
    """Accumulates a part of a work tile. Only the first ``tokens`` columns of ``acc`` are computed; the rest stay 0.

    products: destination of the MMAs: ``acc`` itself, or sums of part of K where those are promoted.
    """
    count = part.count
    tile_m, num_cta = args.config.work_tile_mnk[0], args.config.multicast_n
    acc.fill(0.0)
    if cutlass.const_expr(args.decoding.promotes):
        products.fill(0.0)
    # The first arrival has no stage to release. It goes to the additional barrier after the last stage's, on which no warp waits.
    last_stage, read_stage = Int32(args.ring.num_stages), stage
    emptied = barrier_of_lane(args.ring.empty(Int32(0)), num_cta)
    decoding, slabs_of_tile = args.decoding, args.decoding.slabs
    slabs, sources = args.k_tiles * slabs_of_tile, _sources(args, rows, part.tile)
    # Slabs whose products are promoted together, and the scale of those that have not been promoted yet.
    promoted = slabs if decoding.has_fp8_tokens else slabs_of_tile
    tile_scale = None if decoding.has_fp8_tokens else Uint32(0)
    if count > 0:
        stage, phase = _load_stage(args, weights, sources, stage, phase, part.first)
        if cutlass.const_expr(decoding.has_fp8_tokens):
            for i in cutlass.range_constexpr(LANE_ROWS):
                weights.factors[i] = fp8_tokens.row_factor(weights.codes[0, i])
    for step in cutlass.range(count, unroll=1):
        in_stage = read_stage
        for slab in cutlass.range_constexpr(slabs):
            if cutlass.const_expr(slab % decoding.slabs_of_load == 0):
                dealt = [[weights.words[w, i] for w in range(decoding.words)] for i in range(LANE_ROWS)]
                if cutlass.const_expr(not (decoding.has_bytes or decoding.has_fp8_tokens)):
                    dealt = [exchange(row, quad) for row in dealt]
            if cutlass.const_expr(slab % slabs_of_tile == 0):
                codes = [[weights.codes[j, i] for j in range(decoding.atoms)] for i in range(LANE_ROWS)]
                if cutlass.const_expr(decoding.has_scales_of_sums and decoding.promotes):
                    next_scale = weights.codes[0]
            if cutlass.const_expr(slab == 0):
                # wgmma reads descriptors from uniform registers. Move the stage there once; otherwise each descriptor is moved
                # by itself.
                uniform_stage = cute.arch.make_warp_uniform(in_stage)
            words, first = dealt, slab % slabs_of_tile * decoding.slab_words
            if cutlass.const_expr(not decoding.has_bytes):
                words = [row[first : first + decoding.slab_words] for row in dealt]
            decoded = slab_weights(words, codes, slab % slabs_of_tile, decoding, args.tables)
            if cutlass.const_expr(decoding.promotes and slab % promoted == 0):
                promote_sums(acc, products, tile_scale)
                if cutlass.const_expr(decoding.has_scales_of_sums):
                    tile_scale = next_scale
            matrix = _matrix(args, uniform_stage, slab)
            counts, most = token_counts(tile_m), args.schedule.mma_tokens
            multiply_slab(products, decoded, tokens, counts, most, matrix, decoding.operands)
            if cutlass.const_expr(slab == slabs - 1):
                read_stage = stage
                if step + 1 < count:
                    stage, phase = _load_stage(args, weights, sources, stage, phase, part.first + step + 1)
            loads_next = slab < slabs - 1 and (slab + 1) % decoding.slabs_of_load == 0
            if cutlass.const_expr(loads_next and slab > 0):
                _load_weights(args, weights, sources, in_stage, slab + 1, part.first + step)
            # Wait for the previous slab's MMAs: their registers are free now, and after a stage's last slab so is the stage.
            warpgroup.wait_group(1)
            if cutlass.const_expr(slab == 0):
                arrive_lanes(emptied + last_stage, num_cta)
                # Load after the arrival, so that no read is in flight when a stage is released.
                if cutlass.const_expr(loads_next):
                    _load_weights(args, weights, sources, in_stage, slab + 1, part.first + step)
        last_stage = in_stage
    if cutlass.const_expr(decoding.promotes):
        promote_sums(acc, products, tile_scale)
    warpgroup.wait_group(0)
    if count > 0:
        # One 16-byte load covers all words of a row, so its first word is enough; 8-bit elements have a load per word, and
        # ldmatrix has one for every two words of both rows.
        read = range(decoding.words) if decoding.has_bytes else (0, 2) if decoding.has_fp8_tokens else (0,)
        words = [weights.words[word, i] for word in read for i in range(LANE_ROWS)]
        if cutlass.const_expr(decoding.atoms > 0):
            words += [weights.codes[i] for i in range(cute.size(weights.codes))]
        arrive_lanes(emptied + last_stage + after_reads(words, args.outputs), num_cta)
    return stage, phase


def _weights(decoding: Decoding) -> Weights:
    """Allocates registers for packed weights."""
    words = cute.make_rmem_tensor((decoding.words, LANE_ROWS), Uint32)
    if decoding.promotes and decoding.has_scales_of_sums:
        return Weights(words, cute.make_rmem_tensor((1,), Uint32))
    codes = cute.make_rmem_tensor((decoding.atoms, LANE_ROWS), Uint32) if decoding.atoms else None
    return Weights(
        words, codes, cute.make_rmem_tensor((LANE_ROWS,), Uint32) if decoding.has_fp8_tokens else None
    )


def _matrix(args: MathArgs, stage: Int32, slab: int) -> Int32:
    """Returns the descriptor word of the tokens of a slab, which may be half of a row of 128 bytes."""
    decoding = args.decoding
    of_row = decoding.row_k // decoding.slab_k
    rows_of_stage = args.config.work_tile_mnk[2] // decoding.row_k
    first = slab_matrix(args.tokens, stage * rows_of_stage + slab // of_row, args.config.work_tile_mnk[0])
    within = slab % of_row * (decoding.slab_k // decoding.operands.k * STEP_UNITS)
    return first + within if within else first


def _sources(args: MathArgs, rows: LaneRows, tile: WorkTile) -> LaneRows:
    """Turns the lane's offsets within a stage into shared addresses of stage 0, or into global ones for scales of sums."""
    data = opaque(args.weights + rows.data)
    if args.decoding.promotes and args.decoding.has_scales_of_sums:
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
    smem, decoding = args.smem, args.decoding
    k_tile = slab // decoding.slabs
    data_bytes, scale_bytes = smem.num_b * smem.b_stage_bytes, smem.num_b * smem.sfb_stage_bytes
    data = rows.data + stage * data_bytes
    if cutlass.const_expr(decoding.has_fp8_tokens):
        # Units of a K tile within a row. XOR is enough because stages start at whole swizzle spans.
        data = data ^ (k_tile * tile_row_bytes(decoding.format))
    else:
        data = data + k_tile * (data_bytes // args.k_tiles)
    if cutlass.const_expr(decoding.atoms > 0):
        scale = rows.scale + stage * scale_bytes + k_tile * (scale_bytes // args.k_tiles)
    if cutlass.const_expr(decoding.promotes and decoding.has_scales_of_sums and slab == 0):
        weights.codes[0] = load_tile_scale(rows.scale, index)
    if cutlass.const_expr(decoding.has_fp8_tokens):
        blocks = fp8_tokens.load_tile_words(data)
    for i in cutlass.range_constexpr(LANE_ROWS):
        if cutlass.const_expr(decoding.has_fp8_tokens):
            words = [block[i] for block in blocks]
        else:
            words = load_slab(data + i * rows.data_step, slab % decoding.slabs, decoding)
        for word in cutlass.range_constexpr(decoding.words):
            weights.words[word, i] = words[word]
        if cutlass.const_expr(slab % decoding.slabs == 0):
            for atom in cutlass.range_constexpr(decoding.atoms):
                address = scale + i * rows.scale_step + atom * SF_ATOM_BYTES
                if cutlass.const_expr(decoding.has_half_words):
                    half = (index * args.k_tiles + k_tile) % 2
                    weights.codes[atom, i] = load_shared_half(address + half * 2)
                else:
                    weights.codes[atom, i] = load_shared(address, 1)[0]

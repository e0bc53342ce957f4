"""MATH role with weights on MMA-M: two warpgroups multiply weights by tokens and store the results.

Each warpgroup has 64 of every 128 rows of weights as MMA-M and all tokens of the tile as MMA-N, so the accumulator is C
transposed. For FP8, tensor cores accumulate at most 128 values of K; the sums are then multiplied by both scales and added to
float32 accumulators, while the tensor cores work for the other warpgroup. For INT8, they accumulate all of K in int32, and row
scales, loaded in advance, multiply the sums.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm90 import TILE_WEIGHTS
from nvfp4_cute.planning.arch.sm90_fp8 import Fp8Smem, blocks_of
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.activation import gate
from ...common.fp32_scales import SCALE_BYTES, ScalePair, promote
from ...common.group_table import WorkTile
from ...common.output_kind import OutputKind
from ...common.output_table import OutputTable, load_alphas
from ...common.ring import CONSUMER_PHASE, Ring, arrive_lanes, barrier_of_lane, next_stage
from ...common.row_scales import RowScales, load_row_scales
from ...common.shared_access import load_shared
from ...common.split_k import PartialSums
from ..epilogue import store_tile
from ..math import after_reads, finish_tile
from ..tile_walk import WalkedTiles, sides_of_cta
from ..warp_schedule import GROUP_THREADS
from ..weight_rows import output_column
from ..wgmma import MMA_M
from .wgmma import Turns, add_products, matrix, multiply, rows_apart, wait

# A lane has two neighbouring tokens of every eight.
STEP_TOKENS = 8
# Rows between a lane's two rows of an MMA.
LANE_ROWS_APART = 8
# Up to this many registers for sums, products and scales, scales are read before the MMAs, so that the reads overlap them.
MOST_HELD = 200


@dataclass(frozen=True)
class MathArgs:
    """Inputs of the MATH role.

    Attributes:
        weights, tokens, scales: shared addresses of stage 0, see ``load.LoadArgs``.
        row_scales: row scales of INT8 operands in global memory; None for FP8 and for int32 results.
        promotes: whether every K tile has scales (FP8).
        staging_address: shared address where the epilogue transposes results, see ``epilogue.store_tile``.
        tiles: work tiles of this CTA.
        kind: kind of the results after the activation.
        activation: activation of a dual GEMM; None for one product.
        partial: split-K exchange, where the first CTA of a cluster receives the partial sums of the others.
    """

    weights: Int32
    tokens: Int32
    scales: Int32 | None
    staging_address: Int32
    smem: Fp8Smem
    tiles: WalkedTiles
    outputs: OutputTable
    kind: OutputKind
    activation: str | None
    config: KernelConfig
    partial: PartialSums
    ring: Ring
    row_scales: ScalePair | None
    promotes: bool

    @property
    def blocks(self) -> int:
        """Blocks of 128 rows of weights per tile: those of the first product, then those of the second."""
        return blocks_of(self.config, 1 if self.activation is None else 2)


@cute.jit
def run_math(args: MathArgs):
    """Accumulates the K tiles of each work tile, then scales, converts and stores the tile."""
    tiles, num_tokens = args.tiles, args.config.work_tile_mnk[0]
    # Accumulator 4i + 2h + e of a block of 128 rows belongs to row (lane's first + 8h) and token 8i + 2 * (lane % 4) + e.
    dtype = Float32 if args.promotes else Int32
    sums = cute.make_rmem_tensor((num_tokens // 2, args.blocks), dtype)
    stage, phase, parity = Int32(0), Int32(CONSUMER_PHASE), Int32(0)
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
    turns = Turns.of(group, num_tokens)
    if cutlass.const_expr(args.promotes):
        turns.begin()
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        scales = _row_scales(args, part.tile)
        if cutlass.const_expr(args.promotes):
            stage, phase = _accumulate(args, sums, group, turns, part.count, stage, phase)
        else:
            stage, phase = _add_up(args, sums, group, part.count, stage, phase)
        parity = finish_tile(args.partial, sums, parity, lambda: _store(args, sums, scales, part.tile))
        place = tiles.next(place)
    if cutlass.const_expr(args.promotes):
        turns.end()


def _row_scales(args: MathArgs, tile: WorkTile) -> RowScales | None:
    """Issues the loads of the row scales of the lane's rows of weights and of its tokens."""
    if args.row_scales is None:
        return None
    weights, tokens = sides_of_cta(args.config, tile)
    row, token = output_column(args.kind), 2 * (cute.arch.thread_idx()[0] % 4)
    rows = [
        row + block * TILE_WEIGHTS + half * LANE_ROWS_APART for block in range(args.blocks) for half in (0, 1)
    ]
    columns = [
        token + step + e for step in range(0, args.config.work_tile_mnk[0], STEP_TOKENS) for e in (0, 1)
    ]
    return RowScales(
        load_row_scales(args.row_scales.weights, tile, weights, rows),
        load_row_scales(args.row_scales.tokens, tile, tokens, columns),
        b_on_m=True,
    )


def _store(args: MathArgs, sums: cute.Tensor, scales: RowScales | None, tile: WorkTile):
    """Stores each block of 128 rows of weights as a tile of its own; a dual GEMM's two blocks become one tile."""
    outputs, tile = combine(sums, args.outputs, tile, args.activation)
    blocks = blocks_of(args.config)
    for block in range(blocks):
        part = replace(tile, tile_n_idx=tile.tile_n_idx * blocks + block)
        acc = sums[None, block]
        if scales is not None:
            acc = scales.results(acc, 2 * block)
        store_tile(acc, outputs, args.kind, part, args.config, args.staging_address, 0)


def combine(
    sums: cute.Tensor, outputs: OutputTable, tile: WorkTile, activation: str | None
) -> tuple[OutputTable, WorkTile]:
    """Applies a dual GEMM's activation, with the results in place of the first product's sums. Does nothing for one product.

    Args:
        sums: (VALUE, SET): the sets of the first product, then those of the second.

    Returns:
        Outputs and tile without the factors that have been applied here.
    """
    if activation is None:
        return outputs, tile
    one, other = load_alphas(outputs, tile, 2)
    limit = None if outputs.limit is None else ptx.float_of(outputs.limit)
    results = cute.size(sums) // 2
    for i in range(results):
        sums[i] = gate(sums[i] * one, sums[results + i] * other, activation, limit)
    return replace(outputs, alphas=None, limit=None), replace(tile, factors=())


@cute.jit
def _add_up(args: MathArgs, sums: cute.Tensor, group: Int32, count: Int32, stage: Int32, phase: Int32):
    """Accumulates ``count`` K tiles of integers. Releases a stage after the MMAs of the next one have been issued."""
    num_tokens, blocks, num_cta = args.config.work_tile_mnk[0], args.blocks, args.config.multicast_n
    sums.fill(0)
    emptied = barrier_of_lane(args.ring.empty(Int32(0)), num_cta)
    weights, tokens = matrix(args.weights) + rows_apart(group * MMA_M), matrix(args.tokens)
    stage_rows, before = args.config.cta_tile_shape_mnk[0], Int32(0)
    for i in cutlass.range(count, unroll=1):
        cute.arch.mbarrier_wait(args.ring.full(stage), phase)
        uniform_stage = cute.arch.make_warp_uniform(stage)
        rows = [
            weights + rows_apart(uniform_stage * stage_rows + block * TILE_WEIGHTS) for block in range(blocks)
        ]
        add_products(sums, rows, tokens + rows_apart(uniform_stage * num_tokens), num_tokens)
        if i > 0:
            arrive_lanes(emptied + before, num_cta)
        before = stage
        stage, phase = next_stage(args.ring, stage, phase)
    wait(sums)
    if count > 0:
        arrive_lanes(emptied + before, num_cta)
    return stage, phase


@cute.jit
def _accumulate(
    args: MathArgs,
    sums: cute.Tensor,
    group: Int32,
    turns: Turns,
    count: Int32,
    stage: Int32,
    phase: Int32,
):
    """Accumulates ``count`` K tiles of a work tile, scaling the sums of each (FP8)."""
    num_tokens, blocks, num_cta = args.config.work_tile_mnk[0], args.blocks, args.config.multicast_n
    sums.fill(0.0)
    emptied = barrier_of_lane(args.ring.empty(Int32(0)), num_cta)
    quarter = cute.arch.thread_idx()[0] % 4
    weights, tokens = matrix(args.weights) + rows_apart(group * MMA_M), matrix(args.tokens)
    stage_rows = blocks * TILE_WEIGHTS
    # Registers of a lane: sums, products, and scales of its tokens.
    reads_ahead = num_tokens // 2 * (blocks + 1) + num_tokens // 4 <= MOST_HELD
    for _ in cutlass.range(count, unroll=1):
        cute.arch.mbarrier_wait(args.ring.full(stage), phase)
        uniform_stage = cute.arch.make_warp_uniform(stage)
        scales = args.scales + stage * args.smem.scale_stage_bytes
        for block in cutlass.range_constexpr(blocks):
            rows = weights + rows_apart(uniform_stage * stage_rows + block * TILE_WEIGHTS)
            words = []
            if cutlass.const_expr(reads_ahead):
                words = _scales(scales, num_tokens, block, quarter)
            products = multiply(rows, tokens + rows_apart(uniform_stage * num_tokens), num_tokens, turns)
            if cutlass.const_expr(not reads_ahead):
                words = _scales(scales, num_tokens, block, quarter)
            if cutlass.const_expr(block == blocks - 1):
                arrive_lanes(emptied + stage + after_reads(words, args.outputs), num_cta)
            promote(sums[None, block], products, words)
        stage, phase = next_stage(args.ring, stage, phase)
    return stage, phase


def _scales(address: Int32, num_tokens: int, block: int, quarter: Int32) -> list:
    """Loads the weights' scale, then the tokens' in the order of a lane's products. address: scales of the stage."""
    words = load_shared(address + (num_tokens + block) * SCALE_BYTES, 1, True)
    for first in range(0, num_tokens, STEP_TOKENS):
        words += load_shared(address + first * SCALE_BYTES + quarter * (2 * SCALE_BYTES), 2, True)
    return words

"""MATH role: two warpgroups that multiply weights by tokens, and store the results.

Each warpgroup has 64 rows of every 128 of the weights as MMA-M, and all tokens of the tile as MMA-N: the result is C
transposed. Of FP8 an MMA adds up 128 values of K at most; then what it has is multiplied by both scales and added to sums in
fp32, while the tensor cores work for the other warpgroup. Integers are added up over all of K; rows' scales, which are asked for
before, multiply the sums.
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

# Tokens of which a lane has two, side by side.
STEP_TOKENS = 8
# From a lane's row of an MMA to its other one.
LANE_ROWS_APART = 8
# Registers that sums, products and scales may take: then scales are read while tensor cores work.
MOST_HELD = 200


@dataclass(frozen=True)
class MathArgs:
    """What the warpgroups read.

    Attributes:
        weights, tokens, scales: shared addresses of stage 0, as of ``load.LoadArgs``.
        row_scales: of integers, in global memory; None where there are none, or results are sums.
        promotes: whether scales are of K tiles.
        staging_address: shared address where results are turned, as of ``epilogue.store_tile``.
        tiles: what the CTA computes.
        kind: of results, once they are one number each.
        activation: of a dual GEMM, which makes them of two; None of one product.
        partial: where the first CTA of a cluster gets the others' sums.
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
        """Blocks of 128 rows of weights of a tile: of one product, then of the other one."""
        return blocks_of(self.config, 1 if self.activation is None else 2)


@cute.jit
def run_math(args: MathArgs):
    """For each tile: add up its K tiles, then scale, convert and store."""
    tiles, num_tokens = args.tiles, args.config.work_tile_mnk[0]
    # Value 4i + 2h + e of a block of 128 rows: row h * 8 below the lane's first, token 8i + 2 * (lane % 4) + e.
    dtype = Float32 if args.promotes else Int32
    sums = cute.make_rmem_tensor((num_tokens // 2, args.blocks), dtype)
    stage, phase, turn = Int32(0), Int32(CONSUMER_PHASE), Int32(0)
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
        turn = finish_tile(args.partial, sums, turn, lambda: _store(args, sums, scales, part.tile))
        place = tiles.next(place)
    if cutlass.const_expr(args.promotes):
        turns.end()


def _row_scales(args: MathArgs, tile: WorkTile) -> RowScales | None:
    """Of the lane's rows of weights and of its tokens."""
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
    """Each block of 128 rows of weights as a tile of its own, of a dual GEMM both blocks as one."""
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
    """Of a dual GEMM, put results where the first product's sums are; of one product, leave them.

    Args:
        sums: (VALUE, SET): the sets of one product, then those of the other one.

    Returns:
        Where results go, and their tile, with the factors that have not been applied.
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
    """Sum so many K tiles of integers. A stage is released when the MMAs of the next one are under way."""
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
    """Sum so many K tiles of one work tile."""
    num_tokens, blocks, num_cta = args.config.work_tile_mnk[0], args.blocks, args.config.multicast_n
    sums.fill(0.0)
    emptied = barrier_of_lane(args.ring.empty(Int32(0)), num_cta)
    quarter = cute.arch.thread_idx()[0] % 4
    weights, tokens = matrix(args.weights) + rows_apart(group * MMA_M), matrix(args.tokens)
    stage_rows = blocks * TILE_WEIGHTS
    # Sums, products, and scales of the tokens in a lane's registers.
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
    """Words of the weights' scale and of the tokens', in the order of a lane's products. address: of the stage's."""
    words = load_shared(address + (num_tokens + block) * SCALE_BYTES, 1, True)
    for first in range(0, num_tokens, STEP_TOKENS):
        words += load_shared(address + first * SCALE_BYTES + quarter * (2 * SCALE_BYTES), 2, True)
    return words

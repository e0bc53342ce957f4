"""MATH role with tokens on MMA-M, for groups of many tokens.

Each warpgroup has 64 tokens as MMA-M; weights are on MMA-N. A lane has two of the tokens, and 128 weights share one scale, so
it reads three scales for 64 products. With weights on MMA-M it would read one scale for two products. Products have two sets of
registers: one is promoted while the MMAs of the other run.

With 128 weights per tile, a K tile's products are one set, and K tiles alternate between the sets. A tile's results are stored
while the next tile's first K tile is multiplied. With 256 weights, a K tile's products are four sets. After the last one,
tensor cores work for the other warpgroup: ptxas cannot see where MMAs end that continue from one iteration of a loop of four
sets into the next, and would wait for each.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_cute.planning.arch.sm90 import TILE_WEIGHTS
from nvfp4_cute.planning.arch.sm90_fp8 import extents
from nvfp4_cute.planning.config import KernelConfig

from ...common import ptx
from ...common.fp32_scales import SCALE_BYTES, fma
from ...common.ring import CONSUMER_PHASE, arrive_lanes, barrier_of_lane, next_stage
from ...common.shared_access import load_shared
from ..math import after_reads, unknown_zero
from ..warp_schedule import GROUP_THREADS
from ..weight_rows import output_column
from ..wgmma import MMA_M
from .math import LANE_ROWS_APART, MathArgs, combine
from .store_quantized_rows import store_quantized_rows
from .store_rows import set_columns, store_rows
from .wgmma import begin_products, matrix, rows_apart, wait


@cute.jit
def run_math_of_rows(args: MathArgs):
    """Accumulates the K tiles of each work tile, then scales, converts and stores the tile."""
    values, num_sets = set_columns(args.blocks) // 2, _num_sets(args)
    # (VALUE, SET): value 4i + 2h + e of a set belongs to row (lane's first + 8h) and column 8i + 2 * (lane % 4) + e.
    sums = cute.make_rmem_tensor((values, num_sets), Float32)
    products = cute.make_rmem_tensor((values, 2), Float32)
    products.fill(0.0)
    if cutlass.const_expr(num_sets == 1):
        _run_in_turns(args, sums, products)
    else:
        _run_by_k_tile(args, sums, products)


@cute.jit
def _run_in_turns(args: MathArgs, sums: cute.Tensor, products: cute.Tensor):
    """Runs tiles whose K tile is one set of products: K tiles alternate between two sets."""
    tiles = args.tiles
    stage, phase, has_sums = Int32(0), Int32(CONSUMER_PHASE), Int32(0)
    place = tiles.first()
    before = place
    while tiles.has_tile(place):
        promoted = stage
        _begin(args, products[None, 0], 0, stage, phase)
        stage, phase = next_stage(args.ring, stage, phase)
        if has_sums == 1:
            _store(args, sums, before)
        sums.fill(0.0)
        count = tiles.part(place).count
        for _ in cutlass.range((count - 1) // 2, unroll=1):
            for parity in cutlass.range_constexpr(2):
                _begin(args, products[None, 1 - parity], 0, stage, phase)
                stage, phase = next_stage(args.ring, stage, phase)
                promoted = _promote_k_tile(args, sums, products[None, parity], 1, promoted)
        if count % 2 == 0:
            _begin(args, products[None, 1], 0, stage, phase)
            stage, phase = next_stage(args.ring, stage, phase)
            promoted = _promote_k_tile(args, sums, products[None, 0], 1, promoted)
            _promote_k_tile(args, sums, products[None, 1], 0, promoted)
        else:
            _promote_k_tile(args, sums, products[None, 0], 0, promoted)
        before, has_sums = place, Int32(1)
        place = tiles.next(place)
    if has_sums == 1:
        _store(args, sums, before)


@cute.jit
def _run_by_k_tile(args: MathArgs, sums: cute.Tensor, products: cute.Tensor):
    """Runs tiles whose K tile has several sets of products: sets alternate within a K tile."""
    tiles, sets = args.tiles, _num_sets(args)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        sums.fill(0.0)
        for _ in cutlass.range(tiles.part(place).count, unroll=1):
            _begin(args, products[None, 0], 0, stage, phase)
            scales = LaneScales.of(args, stage)
            for index in cutlass.range_constexpr(sets - 1):
                _begin(args, products[None, (index + 1) % 2], index + 1, stage, phase)
                wait(products[None, index % 2], 1)
                scales.promote(sums[None, index], products[None, index % 2], index)
            wait(products[None, (sets - 1) % 2])
            scales.release(args, stage)
            scales.promote(sums[None, sets - 1], products[None, (sets - 1) % 2], sets - 1)
            stage, phase = next_stage(args.ring, stage, phase)
        _store(args, sums, place)
        place = tiles.next(place)


def _num_sets(args: MathArgs) -> int:
    """Returns the sets of products of a warpgroup per K tile, over all operands."""
    return args.blocks * TILE_WEIGHTS // set_columns(args.blocks)


def _store(args: MathArgs, sums: cute.Tensor, place: tuple):
    outputs, tile = combine(sums, args.outputs, args.tiles.part(place).tile, args.activation)
    store = store_quantized_rows if args.kind.is_quantized else store_rows
    store(sums, outputs, args.kind, tile, args.config, set_columns(args.blocks))


@cute.jit
def _begin(args: MathArgs, products: cute.Tensor, index: cutlass.Constexpr, stage: Int32, phase: Int32):
    """Issues the MMAs of set ``index`` of a K tile; waits for the K tile's stage before the first set."""
    weights, (_, tokens) = args.blocks * TILE_WEIGHTS, extents(args.config)
    if cutlass.const_expr(index == 0):
        cute.arch.mbarrier_wait(args.ring.full(stage), phase)
    uniform_stage = cute.arch.make_warp_uniform(stage)
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
    rows = matrix(args.tokens) + rows_apart(uniform_stage * tokens + group * MMA_M)
    columns = matrix(args.weights) + rows_apart(uniform_stage * weights + index * set_columns(args.blocks))
    zero = None if _num_sets(args) == 1 else Int32(unknown_zero(args.outputs))
    begin_products(products, rows, columns, zero)


@cute.jit
def _promote_k_tile(
    args: MathArgs, sums: cute.Tensor, products: cute.Tensor, pending: cutlass.Constexpr, stage: Int32
):
    """Promotes a K tile's only set once at most ``pending`` groups of MMAs are in flight. Returns the next stage."""
    scales = LaneScales.of(args, stage)
    wait(products, pending)
    scales.release(args, stage)
    scales.promote(sums[None, 0], products, 0)
    stage, _ = next_stage(args.ring, stage, Int32(0))
    return stage


@dataclass(frozen=True)
class LaneScales:
    """Scales of a lane for one K tile, as words.

    Attributes:
        of_tokens: scales of its two tokens.
        of_weights: one scale per block of 128 weights.
        config: config of the kernel.
    """

    of_tokens: list
    of_weights: list
    config: KernelConfig

    @classmethod
    def of(cls, args: MathArgs, stage: Int32) -> "LaneScales":
        """Issues the loads of the scales of the K tile in a stage."""
        _, tokens = extents(args.config)
        first = args.scales + stage * args.smem.scale_stage_bytes
        own = first + output_column(args.kind) * SCALE_BYTES
        return cls(
            [load_shared(own + row * SCALE_BYTES, 1, True)[0] for row in (0, LANE_ROWS_APART)],
            [load_shared(first + (tokens + block) * SCALE_BYTES, 1, True)[0] for block in range(args.blocks)],
            args.config,
        )

    def release(self, args: MathArgs, stage: Int32) -> None:
        """Releases the stage once the scales have been read. Its MMAs must have completed."""
        emptied = barrier_of_lane(args.ring.empty(Int32(0)), self.config.multicast_n)
        is_read = after_reads([*self.of_tokens, *self.of_weights], args.outputs)
        arrive_lanes(emptied + stage + is_read, self.config.multicast_n)

    def promote(self, sums: cute.Tensor, products: cute.Tensor, index: int) -> None:
        """Adds set ``index`` of products times the rounded product of both scales, with one rounding per sum (FMA)."""
        weights = ptx.float_of(self.of_weights[index * set_columns(len(self.of_weights)) // TILE_WEIGHTS])
        factors = [ptx.float_of(word) * weights for word in self.of_tokens]
        for i in range(cute.size(products)):
            sums[i] = fma(products[i], factors[i % 4 // 2], sums[i])

"""MATH role where tokens are on MMA-M: for groups of many tokens.

Each warpgroup has 64 tokens as MMA-M, and weights are on MMA-N. A lane has two of the tokens, and its products of 128 weights
have one scale of these: it reads three scales for 64 products, where with weights on MMA-M it reads one for two. It has two sets
of products: one is promoted while the MMAs of the other are under way.

Beside 128 weights a K tile's products are one set, and K tiles take turns. A tile's results are stored while the next one's first
K tile is multiplied. Beside 256 weights a K tile's products are four sets. Behind the last one tensor cores work for the other
warpgroup: of MMAs that go on from one pass of a loop of four sets to the next the assembler does not know where they end, and
waits for each.
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
    """For each tile: add up its K tiles, then scale, convert and store."""
    values, num_sets = set_columns(args.blocks) // 2, _num_sets(args)
    # (VALUE, SET): value 4i + 2h + e of a set: row h * 8 below the lane's first, column 8i + 2 * (lane % 4) + e.
    sums = cute.make_rmem_tensor((values, num_sets), Float32)
    products = cute.make_rmem_tensor((values, 2), Float32)
    products.fill(0.0)
    if cutlass.const_expr(num_sets == 1):
        _run_in_turns(args, sums, products)
    else:
        _run_by_k_tile(args, sums, products)


@cute.jit
def _run_in_turns(args: MathArgs, sums: cute.Tensor, products: cute.Tensor):
    """The same where a K tile's products are one set."""
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
            for turn in cutlass.range_constexpr(2):
                _begin(args, products[None, 1 - turn], 0, stage, phase)
                stage, phase = next_stage(args.ring, stage, phase)
                promoted = _promote_k_tile(args, sums, products[None, turn], 1, promoted)
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
    """The same where a K tile's products are several sets."""
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
    """Of a warpgroup's products of a K tile, of all operands."""
    return args.blocks * TILE_WEIGHTS // set_columns(args.blocks)


def _store(args: MathArgs, sums: cute.Tensor, place: tuple):
    outputs, tile = combine(sums, args.outputs, args.tiles.part(place).tile, args.activation)
    store = store_quantized_rows if args.kind.is_quantized else store_rows
    store(sums, outputs, args.kind, tile, args.config, set_columns(args.blocks))


@cute.jit
def _begin(args: MathArgs, products: cute.Tensor, index: cutlass.Constexpr, stage: Int32, phase: Int32):
    """Begin the MMAs of set ``index`` of a K tile, of the first one as soon as the K tile is there."""
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
    """Promote a K tile's only set when all groups of MMAs but so many of the last ones are done; the stage of the next one."""
    scales = LaneScales.of(args, stage)
    wait(products, pending)
    scales.release(args, stage)
    scales.promote(sums[None, 0], products, 0)
    stage, _ = next_stage(args.ring, stage, Int32(0))
    return stage


@dataclass(frozen=True)
class LaneScales:
    """Words of a lane's scales of a K tile.

    Attributes:
        of_tokens: two.
        of_weights: one of every block of 128.
        config: of the kernel.
    """

    of_tokens: list
    of_weights: list
    config: KernelConfig

    @classmethod
    def of(cls, args: MathArgs, stage: Int32) -> "LaneScales":
        """Of the K tile in a stage. They are asked for here."""
        _, tokens = extents(args.config)
        first = args.scales + stage * args.smem.scale_stage_bytes
        own = first + output_column(args.kind) * SCALE_BYTES
        return cls(
            [load_shared(own + row * SCALE_BYTES, 1, True)[0] for row in (0, LANE_ROWS_APART)],
            [load_shared(first + (tokens + block) * SCALE_BYTES, 1, True)[0] for block in range(args.blocks)],
            args.config,
        )

    def release(self, args: MathArgs, stage: Int32) -> None:
        """Release the stage, whose MMAs are done, when the scales have been read."""
        emptied = barrier_of_lane(args.ring.empty(Int32(0)), self.config.multicast_n)
        is_read = after_reads([*self.of_tokens, *self.of_weights], args.outputs)
        arrive_lanes(emptied + stage + is_read, self.config.multicast_n)

    def promote(self, sums: cute.Tensor, products: cute.Tensor, index: int) -> None:
        """Add set ``index`` of products, times the product of both scales, rounded first, each with one more rounding."""
        weights = ptx.float_of(self.of_weights[index * set_columns(len(self.of_weights)) // TILE_WEIGHTS])
        factors = [ptx.float_of(word) * weights for word in self.of_tokens]
        for i in range(cute.size(products)):
            sums[i] = fma(products[i], factors[i % 4 // 2], sums[i])

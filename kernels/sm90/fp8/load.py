"""LOAD roles: weights and tokens by TMA, scales by small asynchronous copies, as each scale has a row of its own in memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.planning.arch.sm90 import TILE_K, TILE_WEIGHTS
from nvfp4_cute.planning.arch.sm90_fp8 import Fp8Smem, halves
from nvfp4_cute.planning.config import KernelConfig

from ...common.group_table import ceil_div, select_slot
from ...common.launch_args import OperandView
from ...common.operand_maps import Descriptors, descriptor_addresses
from ...common.ring import PRODUCER_PHASE, Ring, next_stage
from ...common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from ...common.versions import inline_ptx
from ..tile_walk import WalkedTiles, sides_of_cta
from ..warp_schedule import WARP_SIZE

SCALE_BYTES = 4
ROW_BYTES = TILE_K


@dataclass(frozen=True)
class Scales:
    """Fp32 scales of one operand in global memory, rows of as many as there are K tiles.

    Attributes:
        addresses: of the first one, an entry a slot, or one for all groups.
        batch_rows: rows from batch to batch.
    """

    addresses: list
    batch_rows: Int32

    @classmethod
    def of(cls, views: list[OperandView]) -> "Scales":
        """Of an operand as the launch table describes it."""
        return cls([view.scale for view in views], views[0].sf_batch_blocks)

    def row(self, slot: Int32, batch: Int32 | int, row: Int32, k_tiles: Int32) -> Int64:
        """Address of a row's first scale."""
        index = Int64(batch * self.batch_rows + row) * k_tiles
        return select_slot(self.addresses, slot) + index * SCALE_BYTES


@dataclass(frozen=True)
class LoadArgs:
    """What the loading warps read.

    Attributes:
        descriptors: tensor maps: weights on the M side, tokens on the N side.
        weight_scales, token_scales: in global memory.
        weights, tokens, scales: shared addresses of stage 0; of scales those of the tokens, then one a half of the weights.
        ring: full: an arrival and the bytes of either TMA warp, and one of each lane that copies scales.
    """

    descriptors: Descriptors
    weight_scales: Scales
    token_scales: Scales
    weights: Int32
    tokens: Int32
    scales: Int32
    smem: Fp8Smem
    config: KernelConfig
    tiles: WalkedTiles
    ring: Ring


@cute.jit
def run_load_weights(args: LoadArgs):
    """Load the weights of every stage, as soon as it is empty."""
    tiles, smem = args.tiles, args.smem
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        side, _ = sides_of_cta(args.config, part.tile)
        row, batch = Int32(side.first_row), Int32(side.origin.batch)
        (descriptor,) = descriptor_addresses(args.descriptors.m, part.tile.slot)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full = args.ring.full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, smem.b_stage_bytes)
                at, where = args.weights + stage * smem.b_stage_bytes, (k_tile * TILE_K, row, batch)
                tma_load(at, descriptor, where, full.toint(), EVICT_FIRST, 1)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


@cute.jit
def run_load_tokens(args: LoadArgs):
    """Load this CTA's part of the tokens of every stage, as soon as it is empty in all CTAs of a pair, into all of them."""
    tiles, smem, num_cta = args.tiles, args.smem, args.config.multicast_n
    box = args.config.work_tile_mnk[0] // num_cta
    rank, both = Int32(0), None
    if cutlass.const_expr(num_cta > 1):
        rank, both = cute.arch.block_idx_in_cluster(), Int32((1 << num_cta) - 1)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        _, side = sides_of_cta(args.config, part.tile)
        row, batch = Int32(side.origin.row + side.first_row + rank * box), Int32(side.origin.batch)
        (descriptor,) = descriptor_addresses(args.descriptors.n, part.tile.slot)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full = args.ring.full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, smem.a_stage_bytes)
                at = args.tokens + stage * smem.a_stage_bytes + rank * (box * ROW_BYTES)
                tma_load(at, descriptor, (k_tile * TILE_K, row, batch), full.toint(), EVICT_LAST, 1, both)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


@cute.jit
def run_load_scales(args: LoadArgs):
    """Copy the scales of every stage, as soon as it is empty: a lane every 32nd token's, the first ones those of weights."""
    tiles, smem, config = args.tiles, args.smem, args.config
    tokens, blocks = config.work_tile_mnk[0], halves(config)
    lane = cute.arch.lane_idx()
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        tile = part.tile
        weights, side = sides_of_cta(config, tile)
        # Tokens behind the group's last one, and weights behind theirs, have the last one's scales: nobody uses their sums.
        sources = []
        for first in cutlass.range_constexpr(0, tokens, WARP_SIZE):
            row = cutlass.min(side.first_row + first + lane, tile.m - 1) + side.origin.row
            sources.append(args.token_scales.row(tile.slot, side.origin.batch, row, tile.k_tile_cnt))
        block = cutlass.min(weights.first_row // TILE_WEIGHTS + lane, ceil_div(tile.n, TILE_WEIGHTS) - 1)
        weight_source = args.weight_scales.row(tile.slot, weights.origin.batch, block, tile.k_tile_cnt)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            at, offset = (
                args.scales + stage * smem.scale_stage_bytes + lane * SCALE_BYTES,
                k_tile * SCALE_BYTES,
            )
            for i in cutlass.range_constexpr(len(sources)):
                left = tokens - i * WARP_SIZE
                _copy(at + i * (WARP_SIZE * SCALE_BYTES), sources[i] + offset, left)
            _copy(at + tokens * SCALE_BYTES, weight_source + offset, blocks)
            cute.arch.cp_async_mbarrier_arrive_noinc(args.ring.full(stage))
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


def _copy(target: Int32, source: Int64, num_lanes: int) -> None:
    """A scale of each of so many lanes, asynchronously (PTX ISA 9.7.9.25.3)."""
    inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {SCALE_BYTES};",
        read_only_args=[target, source],
        # The compiler knows what it can be, and PTX takes no constant.
        predicate=cute.arch.lane_idx() < num_lanes if num_lanes < WARP_SIZE else None,
    )

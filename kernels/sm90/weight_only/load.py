"""LOAD roles: two warps keep the ring full with TMA, one with weights and their scales, one with tokens.

The two CTAs of a pair multiply the same tokens by neighbouring weights. They alternate in loading a box of tokens for both.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, TILE_K
from nvfp4_cute.planning.arch.sm90_weight_only import WeightOnlySmem, token_box
from nvfp4_cute.planning.config import KernelConfig

from ...common.group_table import ceil_div
from ...common.operand_maps import Descriptors, descriptor_addresses
from ...common.ring import PRODUCER_PHASE, Ring, next_stage
from ...common.shared_access import store_shared
from ...common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from ..activations import SLAB_ROW_BYTES
from ..scheduler import ScheduledTiles
from ..tile_walk import WalkedTiles, sides_of_cta
from ..token_tiles import first_token, tokens_of_tile


@dataclass(frozen=True)
class LoadArgs:
    """Inputs of the LOAD roles.

    Attributes:
        descriptors: tensor maps: weights on the M side, tokens on the N side.
        weights, scales, tokens: shared addresses of stage 0: (STAGE, K TILE, OPERAND, ...), (STAGE, SLAB, TOKEN, 128 bytes).
            ``scales`` is None where scales multiply sums: MATH reads those from global memory.
        ring: full: one arrival and the bytes of each warp.
        sf_atoms, sf_tiles: scale atoms per K tile, and K tiles per atom; one of them is 1.
        k_extent: bytes of a row of weights in a box, a K tile or a stage.
        boxes: boxes of each weight operand per stage.
        row_k: values of a token in 128 bytes.
    """

    descriptors: Descriptors
    weights: Int32
    scales: Int32 | None
    tokens: Int32
    smem: WeightOnlySmem
    config: KernelConfig
    tiles: WalkedTiles | ScheduledTiles
    ring: Ring
    sf_atoms: int
    sf_tiles: int
    k_extent: int
    boxes: int
    row_k: int


@cute.jit
def clear(address: Int32, nbytes: cutlass.Constexpr, num_threads: cutlass.Constexpr):
    """Zeroes the token buffer with all threads of the CTA, because MMAs may read more tokens than were loaded."""
    at = cute.arch.thread_idx()[0] * 16
    for offset in cutlass.range(at, nbytes, num_threads * 16, unroll=4):
        store_shared(address + offset, [cutlass.Uint32(0)] * 4)
    cute.arch.fence_view_async_shared()


@cute.jit
def run_load_weights(args: LoadArgs):
    """Loads the weights of every stage as soon as it is empty."""
    tiles, config, smem = args.tiles, args.config, args.smem
    k_tiles, count = config.work_tile_mnk[2] // TILE_K, smem.num_b
    data_bytes, scale_bytes = smem.b_stage_bytes // args.boxes, smem.sfb_stage_bytes // k_tiles
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        side, _ = sides_of_cta(config, part.tile)
        row, batch = Int32(side.first_row), Int32(side.origin.batch)
        # A CTA's rows need not start at a block of scales.
        block = Int32(side.first_row // SF_BLOCK_ROWS)
        data_maps = descriptor_addresses(args.descriptors.m, part.tile.slot)
        scale_maps = descriptor_addresses(args.descriptors.sf_m, part.tile.slot)
        for index in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full = args.ring.full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, smem.weight_bytes)
                for box_idx in cutlass.range_constexpr(args.boxes * count):
                    box, i = index * args.boxes + box_idx // count, box_idx % count
                    at = (stage * args.boxes * count + box_idx) * data_bytes + args.weights
                    where = (box * args.k_extent, row, batch)
                    tma_load(at, data_maps[i], where, full.toint(), EVICT_FIRST, 1)
                if cutlass.const_expr(scale_bytes > 0):
                    for box_idx in cutlass.range_constexpr(k_tiles * count):
                        k_tile, i = index * k_tiles + box_idx // count, box_idx % count
                        at = (stage * k_tiles * count + box_idx) * scale_bytes + args.scales
                        where = (0, k_tile // args.sf_tiles * args.sf_atoms, block, batch)
                        tma_load(at, scale_maps[i], where, full.toint(), EVICT_FIRST, 1)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


@cute.jit
def run_load_tokens(args: LoadArgs):
    """Loads this CTA's boxes of tokens into both CTAs of a pair, for every stage as soon as it is empty in both."""
    tiles, config, num_cta, box = args.tiles, args.config, args.config.multicast_n, token_box(args.config)
    tile_tokens, slabs = config.work_tile_mnk[0], config.work_tile_mnk[2] // args.row_k
    rank, both = Int32(0), None
    if cutlass.const_expr(num_cta > 1):
        rank, both = cute.arch.block_idx_in_cluster(), Int32((1 << num_cta) - 1)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        _, side = sides_of_cta(config, part.tile)
        row, batch = Int32(side.origin.row + first_token(part.tile, config)), Int32(side.origin.batch)
        # Tokens after the group's last one may be stale, because columns of an MMA do not mix: load no empty boxes.
        num_boxes = ceil_div(tokens_of_tile(part.tile, config), box)
        (descriptor,) = descriptor_addresses(args.descriptors.n, part.tile.slot)
        for index in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full, at = args.ring.full(stage), args.tokens + stage * args.smem.a_stage_bytes
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, num_boxes * (slabs * box * SLAB_ROW_BYTES))
                for first in cutlass.range(rank, num_boxes, num_cta, unroll=1):
                    for slab in cutlass.range_constexpr(slabs):
                        target = at + (slab * tile_tokens + first * box) * SLAB_ROW_BYTES
                        where = ((index * slabs + slab) * args.row_k, row + first * box, batch)
                        tma_load(target, descriptor, where, full.toint(), EVICT_LAST, 1, both)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)

"""LOAD roles: weights and tokens by TMA; scales by small cp.async copies, because every scale is in another row of memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm90 import TILE_K
from nvfp4_cute.planning.arch.sm90_fp8 import Fp8Smem, blocks_of, extents
from nvfp4_cute.planning.config import KernelConfig

from ...common.fp32_scales import SCALE_BYTES, ScalePair, scales_of_tile
from ...common.operand_maps import Descriptors, descriptor_addresses
from ...common.ring import PRODUCER_PHASE, Ring, next_stage
from ...common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from ..tile_walk import WalkedTiles, sides_of_cta

ROW_BYTES = TILE_K


@dataclass(frozen=True)
class LoadArgs:
    """Inputs of the LOAD roles.

    Attributes:
        descriptors: tensor maps of the M side and of the N side; weights are on one of them.
        scale_pair: scales in global memory.
        weights, tokens, scales: shared addresses of stage 0. ``scales`` holds one per token, then one per block of weights; it is
            None for INT8.
        ring: full: one arrival and the bytes of each TMA warp, and one arrival per lane that copies scales.
    """

    descriptors: Descriptors
    scale_pair: ScalePair
    weights: Int32
    tokens: Int32
    scales: Int32 | None
    smem: Fp8Smem
    config: KernelConfig
    tiles: WalkedTiles
    ring: Ring


@dataclass(frozen=True)
class SharedOperand:
    """Destination of one side's operands: shared address of stage 0, bytes per stage, and L2 eviction policy.

    A stage of a dual GEMM holds the rows of the first weights, then those of the second.
    """

    address: Int32
    stage_bytes: int
    policy: int


def _operands(args: LoadArgs) -> tuple[SharedOperand, SharedOperand]:
    """Returns the operands on the M side and on the N side."""
    weights = SharedOperand(args.weights, args.smem.b_stage_bytes, EVICT_FIRST)
    tokens = SharedOperand(args.tokens, args.smem.a_stage_bytes, EVICT_LAST)
    return (weights, tokens) if args.config.swap_ab else (tokens, weights)


@cute.jit
def run_load_m_side(args: LoadArgs):
    """Loads the M side of every stage as soon as it is empty."""
    tiles, (operand, _) = args.tiles, _operands(args)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        side, _ = sides_of_cta(args.config, part.tile)
        row, batch = Int32(side.origin.row + side.first_row), Int32(side.origin.batch)
        descriptors = descriptor_addresses(args.descriptors.m, part.tile.slot)
        operand_bytes = operand.stage_bytes // len(descriptors)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full = args.ring.full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, operand.stage_bytes)
                at, where = operand.address + stage * operand.stage_bytes, (k_tile * TILE_K, row, batch)
                for i in cutlass.range_constexpr(len(descriptors)):
                    tma_load(at + i * operand_bytes, descriptors[i], where, full.toint(), operand.policy, 1)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


@cute.jit
def run_load_n_side(args: LoadArgs):
    """Loads this CTA's part of the N side into all CTAs of a pair, for every stage as soon as it is empty in all of them."""
    tiles, (_, operand), num_cta = args.tiles, _operands(args), args.config.multicast_n
    box = args.config.cta_tile_shape_mnk[1] // num_cta
    rank, both = Int32(0), None
    if cutlass.const_expr(num_cta > 1):
        rank, both = cute.arch.block_idx_in_cluster(), Int32((1 << num_cta) - 1)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        _, side = sides_of_cta(args.config, part.tile)
        row, batch = Int32(side.origin.row + side.first_row + rank * box), Int32(side.origin.batch)
        descriptors = descriptor_addresses(args.descriptors.n, part.tile.slot)
        operand_bytes = operand.stage_bytes // len(descriptors)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            full = args.ring.full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, operand.stage_bytes)
                at = operand.address + stage * operand.stage_bytes + rank * (box * ROW_BYTES)
                where = (k_tile * TILE_K, row, batch)
                for i in cutlass.range_constexpr(len(descriptors)):
                    to = at + i * operand_bytes
                    tma_load(to, descriptors[i], where, full.toint(), operand.policy, 1, both)
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)


@cute.jit
def run_load_scales(args: LoadArgs):
    """Copies the scales of every stage as soon as it is empty.

    Each lane copies every 32nd token's; the first lanes also weights'.
    """
    tiles, smem, config = args.tiles, args.smem, args.config
    (_, tokens), blocks = extents(config), blocks_of(config)
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    place = tiles.first()
    while tiles.has_tile(place):
        part = tiles.part(place)
        sides = sides_of_cta(config, part.tile)
        of_weights, of_tokens = sides if config.swap_ab else sides[::-1]
        sources = scales_of_tile(args.scale_pair, part.tile, of_weights, of_tokens, tokens, blocks)
        for k_tile in cutlass.range(part.first, part.first + part.count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            at = args.scales + stage * smem.scale_stage_bytes
            sources.copy(k_tile, at, at + tokens * SCALE_BYTES)
            cute.arch.cp_async_mbarrier_arrive_noinc(args.ring.full(stage))
            stage, phase = next_stage(args.ring, stage, phase)
        place = tiles.next(place)

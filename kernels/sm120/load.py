"""LOAD role: one warp keeps the shared-memory ring full with TMA; a second warp copies float32 scales if there are any.

Produces ``ab``: per stage, all operands and scales of one K tile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from nvfp4_cute.planning.arch.sm120 import SF_ATOM_ROWS, SmemPlan
from nvfp4_cute.planning.config import KernelConfig

from ..common.fp32_scales import SCALE_BYTES, ScalePair, scales_of_tile
from ..common.operand_maps import Boxes, Descriptors, descriptor_addresses, scale_coordinates
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.select import select
from ..common.sides import mma_sides
from ..common.split_k import k_share
from ..common.tma_load import cache_policies, tma_load
from .operands import StageBuffers
from .split_k import first_tile_and_stride


@dataclass(frozen=True)
class LoadArgs:
    """Inputs of the LOAD role.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``. ring: the barriers of ``ab_producer``. full: one arrival and the bytes of
            all TMA copies, and one arrival per lane that copies
            scales.
        scales: ``ScalePair`` in global memory, or None if TMA loads the scales.
    """

    descriptors: Descriptors
    boxes: Boxes
    buffers: StageBuffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    ab_producer: pipeline.PipelineProducer
    ring: Ring
    scales: ScalePair | None


@cute.jit
def run_load(args: LoadArgs):
    """Acquires an empty stage per K tile and issues its copies, whose bytes complete the stage's barrier."""
    first_tile, stride = first_tile_and_stride(args.config.split_k)
    ab_producer, config, groups, smem = args.ab_producer, args.config, args.groups, args.smem
    tile_k = config.cta_tile_shape_mnk[2]
    num_stage = smem.num_ab_stage
    policy_m, policy_n = cache_policies(config.swap_ab)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        desc_m = descriptor_addresses(args.descriptors.m, tile.slot)
        desc_n = descriptor_addresses(args.descriptors.n, tile.slot)
        desc_sf_m = descriptor_addresses(args.descriptors.sf_m, tile.slot)
        desc_sf_n = descriptor_addresses(args.descriptors.sf_n, tile.slot)
        m_side, n_side = mma_sides(config, tile)
        at_m, at_n = m_side.origin, n_side.origin
        row_m, row_n = at_m.row + m_side.first_row, at_n.row + n_side.first_row
        block_m = at_m.sf_block + m_side.first_row // SF_ATOM_ROWS
        block_n = at_n.sf_block + n_side.first_row // SF_ATOM_ROWS
        first, count = k_share(tile.k_tile_cnt, config.split_k)
        for k_tile_idx in cutlass.range(first, first + count, unroll=1):
            stage = ab_producer.acquire_and_advance()
            to = args.buffers.at_stage(smem, stage.index)
            k = k_tile_idx * tile_k
            barrier = stage.barrier.toint()
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(smem.num_m):
                    at = to.m + i * num_stage * smem.a_stage_bytes
                    _load(at, desc_m[i], (k, row_m, at_m.batch), barrier, policy_m)
                for i in cutlass.range_constexpr(smem.num_n):
                    at = to.n + i * num_stage * smem.b_stage_bytes
                    _load(at, desc_n[i], (k, row_n, at_n.batch), barrier, policy_n)
                for i in cutlass.range_constexpr(len(desc_sf_m)):
                    at = to.sf_m + i * num_stage * smem.sfa_stage_bytes
                    k_block = k_tile_idx * args.boxes.sf_m[0]
                    where = scale_coordinates(args.boxes.sf_m, k_block, block_m, at_m.batch)
                    _load(at, desc_sf_m[i], where, barrier, policy_m)
                for i in cutlass.range_constexpr(len(desc_sf_n)):
                    at = to.sf_n + i * num_stage * smem.sfb_stage_bytes
                    k_block = k_tile_idx * args.boxes.sf_n[0]
                    where = scale_coordinates(args.boxes.sf_n, k_block, block_n, at_n.batch)
                    _load(at, desc_sf_n[i], where, barrier, policy_n)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    # Exit only after the last stage has been read: its arrivals must not reach a CTA that has exited.
    ab_producer.tail()


@cute.jit
def run_load_scales(args: LoadArgs):
    """Copies the float32 scales of every stage as soon as it is empty.

    Each lane copies every 32nd token's, the first also weights'.
    """
    first_tile, stride = first_tile_and_stride(args.config.split_k)
    config, groups, smem = args.config, args.groups, args.smem
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        weights, tokens = mma_sides(config, tile)
        sources = scales_of_tile(args.scales, tile, weights, tokens, config.work_tile_mnk[0], 1)
        first, count = k_share(tile.k_tile_cnt, config.split_k)
        for k_tile_idx in cutlass.range(first, first + count, unroll=1):
            cute.arch.mbarrier_wait(args.ring.empty(stage), phase)
            to = args.buffers.at_stage(smem, stage)
            source_bytes = None
            if cutlass.const_expr(config.split_k > 1):
                # Write zeros, as TMA does, where the CTA has no K tile.
                source_bytes = select(k_tile_idx < tile.k_tile_cnt, Int32(SCALE_BYTES), Int32(0))
            sources.copy(k_tile_idx, to.sf_n, to.sf_m, source_bytes)
            cute.arch.cp_async_mbarrier_arrive_noinc(args.ring.full(stage))
            stage, phase = next_stage(args.ring, stage, phase)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)


def _load(destination: Int32, descriptor: Int64, coords: tuple, barrier: Int32, cache_policy: int) -> None:
    tma_load(destination, descriptor, coords, barrier, cache_policy, 1, state_space="shared::cta")

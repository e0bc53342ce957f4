"""LOAD role: one warp that keeps the ring of packed operands full with TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.arch.sm90 import SF_BLOCK_ROWS, SmemPlan
from nvfp4_cute.config import KernelConfig

from ..common.operand_maps import Descriptors, descriptor_addresses
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.sides import mma_sides
from ..common.split_k import k_tiles_of_cta
from ..common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from .operands import SF_ATOMS
from .tile_walk import start_walk


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of stage 0 of the weights, of the tokens, and of either's scales."""

    weights: Int32
    tokens: Int32
    weight_scales: Int32
    token_scales: Int32


@dataclass(frozen=True)
class LoadArgs:
    """What the loading warp reads. groups: ``GroupTable`` or ``DeviceGroups``."""

    descriptors: Descriptors
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    packed: Ring


@cute.jit
def run_load(args: LoadArgs):
    """Wait for an empty stage and issue its copies, once a K tile; their bytes complete the stage's barrier."""
    groups, config, smem, buffers, packed = args.groups, args.config, args.smem, args.buffers, args.packed
    tiler = config.work_tile_mnk
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor, walk = start_walk(groups, tiler, config.split_k)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, tiler)
        weights = descriptor_addresses(args.descriptors.m, tile.slot)
        (tokens,) = descriptor_addresses(args.descriptors.n, tile.slot)
        weight_scales = descriptor_addresses(args.descriptors.sf_m, tile.slot)
        (token_scales,) = descriptor_addresses(args.descriptors.sf_n, tile.slot)
        m_side, n_side = mma_sides(config, tile)
        m_origin, n_origin = m_side.origin, n_side.origin
        m_block = m_origin.sf_block + m_side.first_row // SF_BLOCK_ROWS
        n_block = n_origin.sf_block + n_side.first_row // SF_BLOCK_ROWS
        first, count = k_tiles_of_cta(tile.k_tile_cnt, config.split_k)
        for k_tile_idx in cutlass.range(first, first + count, unroll=1):
            cute.arch.mbarrier_wait(packed.empty(stage), phase)
            full = packed.full(stage).toint()
            # In bytes, two values each.
            k, k_block = k_tile_idx * (tiler[2] // 2), k_tile_idx * SF_ATOMS
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(packed.full(stage), smem.stage_bytes)
                # Weights are read once; tokens are read by every tile of weights.
                for i in cutlass.range_constexpr(smem.num_b):
                    at = buffers.weights + (stage * smem.num_b + i) * smem.b_stage_bytes
                    row = m_origin.row + m_side.first_row
                    tma_load(at, weights[i], (k, row, m_origin.batch), full, EVICT_FIRST, 1)
                    at = buffers.weight_scales + (stage * smem.num_b + i) * smem.sfb_stage_bytes
                    block = (0, k_block, m_block, m_origin.batch)
                    tma_load(at, weight_scales[i], block, full, EVICT_FIRST, 1)
                at = buffers.tokens + stage * smem.a_stage_bytes
                tma_load(
                    at, tokens, (k, n_origin.row + n_side.first_row, n_origin.batch), full, EVICT_LAST, 1
                )
                at = buffers.token_scales + stage * smem.sfa_stage_bytes
                tma_load(at, token_scales, (0, k_block, n_block, n_origin.batch), full, EVICT_LAST, 1)
            stage, phase = next_stage(packed, stage, phase)
        cursor = groups.next_cursor(cursor, walk.step, tiler)
        walk = walk.turned()

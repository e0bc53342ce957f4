"""LOAD role: one warp that keeps the shared-memory ring full with TMA.

Produces ``ab`` (all operands and their scales of one K tile a stage). Touches no tensor memory and no output.
Each CTA of a pair brings its half of both operands; the N side's scales, which both need, each brings half of for both.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from nvfp4_cute.arch.sm100 import SF_ATOM_ROWS, SmemPlan
from nvfp4_cute.config import KernelConfig

from ..common.chain import Chain, wait_for_layer_before
from ..common.operand_maps import SF_BLOCK_BYTES, Descriptors, descriptor_addresses
from ..common.sides import mma_sides
from ..common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from .columns import mma_columns
from .operands import make_boxes


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of the first stage of all operands and their scales, M side and N side, an entry an operand."""

    m: list
    n: list
    sf_m: list
    sf_n: list


@dataclass(frozen=True)
class LoadArgs:
    """What the load warp reads.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``.
        cta_rank: which CTA of the pair this is.
        chain: where every group's ``a`` is the result of the one before; None otherwise.
    """

    descriptors: Descriptors
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    cta_rank: Int32
    ab_producer: pipeline.PipelineProducer
    chain: Chain | None


@cute.jit
def run_load(args: LoadArgs, first_tile: Int32, stride: Int32):
    """Acquire an empty stage and issue its copies, once a K tile; their bytes complete the stage's barrier."""
    ab_producer, config, groups = args.ab_producer, args.config, args.groups
    num_cta, rank = config.cluster_size, args.cta_rank
    boxes, smem, buffers = make_boxes(config), args.smem, args.buffers
    k_blocks = boxes.sf_m[0]
    # Weights are read once; tokens are read by every tile of weights.
    policy_m, policy_n = (EVICT_FIRST, EVICT_LAST) if config.swap_ab else (EVICT_LAST, EVICT_FIRST)
    # This CTA's half of the N side's scales goes to both CTAs of the pair: half of the K blocks, or of the row blocks.
    split_k_blocks = boxes.sf_n[0] < k_blocks
    sf_n_offset = rank * (boxes.sf_n[0] * boxes.sf_n[1] * SF_BLOCK_BYTES)
    mcast_mask = None
    if cutlass.const_expr(num_cta == 2):
        mcast_mask = Int32(3) << (cute.arch.block_idx_in_cluster() - rank)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        desc_m = descriptor_addresses(args.descriptors.m, tile.slot)
        desc_n = descriptor_addresses(args.descriptors.n, tile.slot)
        desc_sf_m = descriptor_addresses(args.descriptors.sf_m, tile.slot)
        desc_sf_n = descriptor_addresses(args.descriptors.sf_n, tile.slot)
        m_side, n_side = mma_sides(config, tile)
        row_m = m_side.first_row + rank * boxes.rows_m
        row_n = n_side.first_row + rank * (mma_columns(config, n_side) // num_cta)
        block_m = m_side.origin.sf_block + row_m // SF_ATOM_ROWS
        block_n = n_side.origin.sf_block + n_side.first_row // SF_ATOM_ROWS
        if cutlass.const_expr(not split_k_blocks):
            block_n += rank * boxes.sf_n[1]
        row_m, row_n = m_side.origin.row + row_m, n_side.origin.row + row_n
        if cutlass.const_expr(args.chain is not None):
            wait_for_layer_before(args.chain, tile.slot)
        for k_tile_idx in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_producer.acquire_and_advance()
            barrier = stage.barrier.toint()
            k, k_block = k_tile_idx * config.cta_tile_shape_mnk[2], k_tile_idx * k_blocks
            k_block_n = k_block + rank * boxes.sf_n[0] if split_k_blocks else k_block
            with cute.arch.elect_one():
                coords = (k, row_m, m_side.origin.batch)
                for i in cutlass.range_constexpr(smem.num_m):
                    at = buffers.m[i] + stage.index * smem.a_stage_bytes
                    tma_load(at, desc_m[i], coords, barrier, policy_m, num_cta)
                coords = (k, row_n, n_side.origin.batch)
                for i in cutlass.range_constexpr(smem.num_n):
                    at = buffers.n[i] + stage.index * smem.b_stage_bytes
                    tma_load(at, desc_n[i], coords, barrier, policy_n, num_cta)
                coords = (0, k_block, block_m, m_side.origin.batch)
                for i in cutlass.range_constexpr(smem.num_m):
                    at = buffers.sf_m[i] + stage.index * smem.sfa_stage_bytes
                    tma_load(at, desc_sf_m[i], coords, barrier, policy_m, num_cta)
                coords = (0, k_block_n, block_n, n_side.origin.batch)
                for i in cutlass.range_constexpr(smem.num_n):
                    at = buffers.sf_n[i] + stage.index * smem.sfb_stage_bytes + sf_n_offset
                    tma_load(at, desc_sf_n[i], coords, barrier, policy_n, num_cta, mcast_mask)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    # Leave only after the MMA has released every stage: its arrivals must not reach a CTA that has exited.
    ab_producer.tail()

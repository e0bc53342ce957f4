"""MMA role of FP8: each K tile has an accumulator of its own, which the epilogue promotes.

Empties ``ab``, fills ``acc``. Of a pair's two warps only the leader's computes; both allocate and free.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm100_fp8 import MMA, MMA_TYPES, PAIR, TILE_K

from ...common.ptx import keep_before
from ...common.ring import CONSUMER_PHASE, PRODUCER_PHASE, next_stage, wait_until_empty
from ...common.split_k import k_share
from ..instructions import (
    DESCRIPTOR_UNIT_BYTES,
    OPERAND_DESCRIPTOR,
    commit_mma,
    dense_mma,
    mma_descriptor,
    order_after_wait,
    smem_descriptor,
)
from ..mma import MmaArgs, accumulator_mask, sharing_mask


@cute.jit
def run_mma(args: MmaArgs, first_tile: Int32, stride: Int32):
    """For each K tile: acquire an accumulator, issue its MMAs, commit."""
    ab, acc, config, groups = args.ab, args.acc, args.config, args.groups
    tmem, smem, num_cta, mma = args.tmem, args.smem, config.num_mma_cta, MMA[PAIR]
    m_units, n_units = (
        nbytes // DESCRIPTOR_UNIT_BYTES for nbytes in (smem.a_stage_bytes, smem.b_stage_bytes)
    )
    (desc_m,), (desc_n,) = (
        [smem_descriptor(OPERAND_DESCRIPTOR, address) for address in addresses]
        for addresses in (args.buffers.m, args.buffers.n)
    )
    shared, own = sharing_mask(config), accumulator_mask(config, args.leader_rank)
    instruction = mma_descriptor(Int32(config.cta_tile_shape_mnk[1]), MMA_TYPES, num_cta)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    acc_stage, acc_phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
        for _ in cutlass.range(k_tile_cnt, unroll=1):
            at_m, at_n = desc_m + stage * m_units, desc_n + stage * n_units
            accumulator = args.tmem_base + acc_stage * tmem.acc_stride
            cute.arch.mbarrier_wait(acc.empty(acc_stage), acc_phase)
            cute.arch.mbarrier_wait(ab.full(stage), phase)
            order_after_wait()
            following = next_stage(ab, stage, phase), next_stage(acc, acc_stage, acc_phase)
            # Found here, not behind the MMAs, where the next wait would wait for it.
            keep_before((*following[0], *following[1]))
            with cute.arch.elect_one():
                for step in cutlass.range_constexpr(TILE_K // mma.k):
                    offset = step * mma.row_bytes(mma.k) // DESCRIPTOR_UNIT_BYTES
                    dense_mma(
                        accumulator,
                        at_m + offset,
                        at_n + offset,
                        instruction,
                        step > 0,
                        mma.kind,
                        num_cta,
                    )
                commit_mma(acc.full(acc_stage), num_cta, own)
                commit_mma(ab.empty(stage), num_cta, shared)
            (stage, phase), (acc_stage, acc_phase) = following
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    # Leave only after the epilogue has released every accumulator: its arrivals must not reach a CTA that has exited.
    wait_until_empty(acc, acc_stage, acc_phase)

"""MMA role for kinds without block scales. With FP8, every K tile has an accumulator of its own, which the epilogue promotes.

Accumulators of a dual GEMM hold both products next to each other.

Consumes ``ab``, produces ``acc``. In a pair only the leader's warp issues MMAs; both warps allocate and free tensor memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.ptx import keep_before
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, next_stage, wait_until_empty
from ..common.sides import mma_sides
from ..common.split_k import k_share
from .columns import mma_columns
from .instructions import (
    DESCRIPTOR_UNIT_BYTES,
    OPERAND_DESCRIPTOR,
    commit_mma,
    dense_mma,
    mma_descriptor,
    order_after_wait,
    smem_descriptor,
)
from .mma import MmaArgs, accumulator_mask, sharing_mask


@cute.jit
def run_dense_mma(
    args: MmaArgs,
    mma: cutlass.Constexpr,
    types: cutlass.Constexpr,
    of_k_tiles: cutlass.Constexpr,
    first_tile: Int32,
    stride: Int32,
):
    """Acquires an accumulator per tile, or per K tile, issues its MMAs and commits.

    Args:
        mma: ``arch.base.Mma``.
        types: type bits of the instruction descriptor.
        of_k_tiles: whether every K tile has an accumulator of its own, with all columns of the tile.
    """
    ab, acc, config, groups = args.ab, args.acc, args.config, args.groups
    tmem, smem, num_cta = args.tmem, args.smem, config.num_mma_cta
    m_units, n_units = (
        nbytes // DESCRIPTOR_UNIT_BYTES for nbytes in (smem.a_stage_bytes, smem.b_stage_bytes)
    )
    descs_m, descs_n = (
        [smem_descriptor(OPERAND_DESCRIPTOR, address) for address in addresses]
        for addresses in (args.buffers.m, args.buffers.n)
    )
    num_products, tile_n = smem.num_m * smem.num_n, config.cta_tile_shape_mnk[1]
    shared, own = sharing_mask(config), accumulator_mask(config, args.leader_rank)
    instruction = mma_descriptor(Int32(config.cta_tile_shape_mnk[1]), types, num_cta)
    stage, phase = Int32(0), Int32(CONSUMER_PHASE)
    acc_stage, acc_phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    while groups.has_tile(cursor):
        tile = groups.tile(cursor, config.work_tile_mnk)
        _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
        if cutlass.const_expr(not of_k_tiles):
            _, n_side = mma_sides(config, tile)
            instruction = mma_descriptor(mma_columns(config, n_side), types, num_cta)
            cute.arch.mbarrier_wait(acc.empty(acc_stage), acc_phase)
        for k_tile_idx in cutlass.range(k_tile_cnt, unroll=1):
            at_m, at_n = [d + stage * m_units for d in descs_m], [d + stage * n_units for d in descs_n]
            accumulator = args.tmem_base + acc_stage * tmem.acc_stride
            if cutlass.const_expr(of_k_tiles):
                cute.arch.mbarrier_wait(acc.empty(acc_stage), acc_phase)
            cute.arch.mbarrier_wait(ab.full(stage), phase)
            order_after_wait()
            following, following_acc = next_stage(ab, stage, phase), (acc_stage, acc_phase)
            if cutlass.const_expr(of_k_tiles):
                following_acc = next_stage(acc, acc_stage, acc_phase)
            # Compute the next tile here: after the MMAs, the next wait would wait for it as well.
            keep_before((*following, *following_acc))
            with cute.arch.elect_one():
                for product in cutlass.range_constexpr(num_products):
                    of_m, of_n = at_m[product % smem.num_m], at_n[product % smem.num_n]
                    for step in cutlass.range_constexpr(config.cta_tile_shape_mnk[2] // mma.k):
                        offset = step * mma.row_bytes(mma.k) // DESCRIPTOR_UNIT_BYTES
                        accumulate = step > 0
                        if cutlass.const_expr(not of_k_tiles and step == 0):
                            accumulate = k_tile_idx
                        dense_mma(
                            accumulator + product * tile_n,
                            of_m + offset,
                            of_n + offset,
                            instruction,
                            accumulate,
                            mma.kind,
                            num_cta,
                        )
                if cutlass.const_expr(of_k_tiles):
                    commit_mma(acc.full(acc_stage), num_cta, own)
                commit_mma(ab.empty(stage), num_cta, shared)
            (stage, phase), (acc_stage, acc_phase) = following, following_acc
        if cutlass.const_expr(not of_k_tiles):
            with cute.arch.elect_one():
                commit_mma(acc.full(acc_stage), num_cta, own)
            acc_stage, acc_phase = next_stage(acc, acc_stage, acc_phase)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    if cutlass.const_expr(of_k_tiles):
        # Exit only after the epilogue has released every accumulator: its arrivals must not reach a CTA that has exited.
        wait_until_empty(acc, acc_stage, acc_phase)

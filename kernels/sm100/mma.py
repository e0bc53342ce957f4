"""MMA role: one warp that owns tensor memory and issues every tcgen05 copy and MMA.

Consumes ``ab``, produces ``acc``. Allocates tensor memory before its first use and frees it after the epilogue's last.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import tcgen05

from ..common.group_table import GroupTable, locate_tile
from .operands import SF_DTYPE


@dataclass(frozen=True)
class ScaleCopy:
    """One operand's way from shared to tensor memory.

    Attributes:
        tiled_copy: tcgen05.cp 32x128b, replicated to the four lane quadrants.
        smem: ((ATOM_V, REST_V), Rest_Tiler, MMA_MN, MMA_K, STAGE) descriptors.
        tmem_copy: ((ATOM_V, REST_V), Rest_Tiler, MMA_MN, MMA_K) destination.
        tmem_mma: (MMA, MMA_MN, MMA_K), the same columns as the MMA addresses them.
    """

    tiled_copy: cute.TiledCopy
    smem: cute.Tensor
    tmem_copy: cute.Tensor
    tmem_mma: cute.Tensor


@dataclass(frozen=True)
class MmaArgs:
    """What the MMA warp reads.

    Attributes:
        tCrA, tCrB: (MMA, MMA_MN, MMA_K, STAGE) shared-memory descriptors.
        tCtAcc: (MMA, MMA_M, MMA_N, ACC_STAGE) fp32 in tensor memory.
    """

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor
    tCtAcc: cute.Tensor
    sfa: ScaleCopy
    sfb: ScaleCopy
    groups: GroupTable
    cta_tile_shape_mnk: tuple
    ab_consumer: pipeline.PipelineConsumer
    acc_producer: pipeline.PipelineProducer


def make_scale_copy(s_scale: cute.Tensor, tmem_layout: cute.Layout, tmem_ptr: cute.Pointer) -> ScaleCopy:
    """Partition one operand's scales.

    Args:
        s_scale: (MMA, MMA_MN, MMA_K, STAGE) e4m3 in shared memory.
        tmem_layout: (MMA, MMA_MN, MMA_K) layout of one K tile's scales in tensor memory.
        tmem_ptr: its first column.
    """
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), SF_DTYPE)
    tmem_mma = cute.make_tensor(cute.recast_ptr(tmem_ptr, dtype=SF_DTYPE), tmem_layout)
    # The layouts broadcast each scale over its 16 elements with stride 0; the copy moves it once.
    s_compact, t_compact = cute.filter_zeros(s_scale), cute.filter_zeros(tmem_mma)
    tiled_copy = tcgen05.make_s2t_copy(atom, t_compact)
    thr_copy = tiled_copy.get_slice(0)
    return ScaleCopy(
        tiled_copy=tiled_copy,
        smem=tcgen05.get_s2t_smem_desc_tensor(tiled_copy, thr_copy.partition_S(s_compact)),
        tmem_copy=thr_copy.partition_D(t_compact),
        tmem_mma=tmem_mma,
    )


@cute.jit
def run_mma(args: MmaArgs):
    """For each tile: acquire an accumulator, for each K tile copy its scales and issue its MMAs, commit.

    Scales live in one place of tensor memory: tcgen05.cp and tcgen05.mma of one thread execute in order (PTX ISA
    9.7.16.6.2), so the next K tile's copy cannot overtake the MMAs that still read the previous one's.
    """
    ab_consumer, acc_producer, tiled_mma = args.ab_consumer, args.acc_producer, args.tiled_mma
    num_k_block = cute.size(args.tCrA, mode=[2])
    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.cta_tile_shape_mnk, tile_idx)
        acc_stage = acc_producer.acquire_and_advance()
        # (MMA, MMA_M, MMA_N)
        tCtAcc_stage = args.tCtAcc[(None, None, None, acc_stage.index)]
        tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_consumer.wait_and_advance()
            _copy_scales(args.sfa, stage)
            _copy_scales(args.sfb, stage)
            for k_block_idx in cutlass.range_constexpr(num_k_block):
                tiled_mma.set(tcgen05.Field.SFA, args.sfa.tmem_mma[(None, None, k_block_idx)].iterator)
                tiled_mma.set(tcgen05.Field.SFB, args.sfb.tmem_mma[(None, None, k_block_idx)].iterator)
                block = (None, None, k_block_idx, stage.index)
                cute.gemm(tiled_mma, tCtAcc_stage, args.tCrA[block], args.tCrB[block], tCtAcc_stage)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
            stage.release()
        acc_stage.commit()
        tile_idx += stride
    # The epilogue has read the last accumulator once its stage is empty again: tensor memory may then be freed.
    acc_producer.tail()


@cute.jit
def _copy_scales(scale: ScaleCopy, stage):
    cute.copy(scale.tiled_copy, scale.smem[(None, None, None, None, stage.index)], scale.tmem_copy)

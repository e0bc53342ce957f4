"""Shared-memory layouts and TMA partitions of A, B and their scales. Static: the same on host and device."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import cpasync, tcgen05

from nvfp4_cute.arch.sm100 import MMA_INST_K
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.scale_layout import SF_VEC_SIZE

AB_DTYPE = cutlass.Float4E2M1FN
SF_DTYPE = cutlass.Float8E4M3FN


@dataclass(frozen=True)
class SmemLayouts:
    """Staged layouts: a, b (MMA, MMA_MN, MMA_K, STAGE) swizzled; sfa, sfb the same with 128x4 scale atoms."""

    a: cute.ComposedLayout
    b: cute.ComposedLayout
    sfa: cute.Layout
    sfb: cute.Layout


@dataclass(frozen=True)
class TmaOperand:
    """One operand of all groups on its way to the kernel.

    Attributes:
        atoms: one TMA atom a slot; each becomes a 128-byte tensor map in the kernel's parameters.
        coords: (MN, K, 1) coordinate tensor of slot 0. Coordinates do not depend on extents, so it serves every slot.
    """

    atoms: list
    coords: cute.Tensor


@dataclass(frozen=True)
class LoadPartition:
    """One operand as the load warp sees it.

    Attributes:
        atoms: one TMA atom a slot.
        gmem: ((atom_v, rest_v), TILE_MN, TILE_K, 1) coordinates.
        smem: ((atom_v, rest_v), STAGE).
    """

    atoms: list
    gmem: cute.Tensor
    smem: cute.Tensor


def make_tiled_mma(config: KernelConfig) -> cute.TiledMma:
    """The block-scaled 1-CTA MMA: e2m1 x e2m1, one ue4m3 scale in 16, fp32 accumulator (PTX ISA 9.7.16.10.9)."""
    m, n, _ = config.cta_tile_shape_mnk
    op = tcgen05.MmaMXF4NVF4Op(SF_DTYPE, (m, n, MMA_INST_K), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
    return cute.make_tiled_mma(op)


def make_smem_layouts(tiled_mma: cute.TiledMma, config: KernelConfig) -> SmemLayouts:
    """Layouts of every stage of every operand."""
    tiler, num_stage = config.cta_tile_shape_mnk, config.num_ab_stage
    return SmemLayouts(
        a=blackwell.make_smem_layout_a(tiled_mma, tiler, AB_DTYPE, num_stage),
        b=blackwell.make_smem_layout_b(tiled_mma, tiler, AB_DTYPE, num_stage),
        sfa=blockscaled.make_smem_layout_sfa(tiled_mma, tiler, SF_VEC_SIZE, num_stage),
        sfb=blockscaled.make_smem_layout_sfb(tiled_mma, tiler, SF_VEC_SIZE, num_stage),
    )


def make_tma_operand(
    tensors: list, smem_layout, make_atom, tiled_mma: cute.TiledMma, config: KernelConfig, internal_type=None
) -> TmaOperand:
    """Encode one tensor map a group on the host.

    Args:
        tensors: one (MN, K, 1) tensor a slot.
        smem_layout: staged layout of the operand.
        make_atom: ``cute.nvgpu.make_tiled_tma_atom_A`` or ``_B``.
        internal_type: element type of the map where it is not the tensor's (scales travel as 16-bit words).
    """
    made = [
        make_atom(
            cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE),
            tensor,
            cute.slice_(smem_layout, (None, None, None, 0)),
            config.cta_tile_shape_mnk,
            tiled_mma,
            (1, 1, 1, 1),
            internal_type=internal_type,
        )
        for tensor in tensors
    ]
    return TmaOperand(atoms=[atom for atom, _ in made], coords=made[0][1])


def partition_operand(
    operand: TmaOperand, s_operand: cute.Tensor, tiler_mn_k: tuple, partition
) -> LoadPartition:
    """Tile, partition for the MMA, and partition for TMA.

    Args:
        s_operand: (MMA, MMA_MN, MMA_K, STAGE) in shared memory.
        tiler_mn_k: the CTA tile with None for the mode that the operand does not have.
        partition: ``thr_mma.partition_A`` or ``partition_B``.
    """
    # (bMN, bK, TILE_MN, TILE_K, 1)
    g_tiles = cute.local_tile(operand.coords, tiler_mn_k, (None, None, None))
    # (MMA, MMA_MN, MMA_K, TILE_MN, TILE_K, 1)
    g_mma = partition(g_tiles)
    smem, gmem = cpasync.tma_partition(
        operand.atoms[0],
        0,
        cute.make_layout(1),
        cute.group_modes(s_operand, 0, 3),
        cute.group_modes(g_mma, 0, 3),
    )
    return LoadPartition(operand.atoms, cute.filter_zeros(gmem), cute.filter_zeros(smem))

"""Operands of all groups between host and load warp: a tensor map a slot, and how boxes of it become stages."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync

# Of global addresses and pitches in tensor maps.
TMA_ALIGN_BYTES = 16


@dataclass(frozen=True)
class TmaOperand:
    """One operand of all groups on its way to the kernel.

    Attributes:
        atoms: one TMA atom a slot; each becomes a 128-byte tensor map in the kernel's parameters.
        coords: coordinate tensor of slot 0. Coordinates do not depend on extents, so it serves every slot.
    """

    atoms: list
    coords: cute.Tensor


@dataclass(frozen=True)
class LoadPartition:
    """One operand as the load warp sees it.

    Attributes:
        atoms: one TMA atom a slot.
        gmem: ((atom_v, rest_v), BOX, TILE_K) coordinates: boxes are a tile's rows, or a 128-row block of scales.
        smem: ((atom_v, rest_v), STAGE).
    """

    atoms: list
    gmem: cute.Tensor
    smem: cute.Tensor


def global_ptr(dtype: type, address: Int64) -> cute.Pointer:
    """Pointer to what a tensor map describes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN_BYTES)


def make_tma_operand(tensors: list, smem_layout, tiler: tuple) -> TmaOperand:
    """Encode one tensor map a group on the host.

    Args:
        tensors: one tensor a slot, of the same rank as ``tiler``.
        smem_layout: staged layout of the operand.
        tiler: the box of one stage.
    """
    stage_layout = cute.slice_(smem_layout, (*[None] * len(tiler), 0))
    made = [
        cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, stage_layout, tiler)
        for tensor in tensors
    ]
    return TmaOperand(atoms=[atom for atom, _ in made], coords=made[0][1])


def partition_tiles(operand: TmaOperand, s_tiles: cute.Tensor, g_tiles: cute.Tensor) -> LoadPartition:
    """Partition an operand by its box. s_tiles: (box..., STAGE) in shared memory; g_tiles: (box..., BOX, TILE_K)."""
    rank = cute.rank(s_tiles) - 1
    smem, gmem = cpasync.tma_partition(
        operand.atoms[0],
        0,
        cute.make_layout(1),
        cute.group_modes(s_tiles, 0, rank),
        cute.group_modes(g_tiles, 0, rank),
    )
    return LoadPartition(operand.atoms, gmem, smem)

"""LOAD role: keeps the ring of packed operands full with TMA, one K tile at a time, in between other work of its warp.

A cursor says where the loads stand: a tuple that ``load_next`` takes and gives back.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.arch.sm90 import SF_BLOCK_ROWS

from ..common.group_table import GroupTable, locate_tile
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.tma_descriptor import descriptor_ptr, select_descriptor_address
from ..common.tma_operand import LoadPartition


@dataclass(frozen=True)
class LoadArgs:
    """What the loading warp reads. stage_bytes: what the copies of a stage write."""

    a: LoadPartition
    b: LoadPartition
    sfa: LoadPartition
    sfb: LoadPartition
    num_sfa_blocks: int
    stage_bytes: int
    groups: GroupTable
    work_tile_mnk: tuple
    packed: Ring


@cute.jit
def first_load(args: LoadArgs):
    """The cursor of the CTA's first K tile."""
    tile_idx, _, _ = cute.arch.block_idx()
    return (tile_idx, Int32(0), Int32(0), Int32(PRODUCER_PHASE), *_enter_tile(args, tile_idx))


@cute.jit
def load_next(args: LoadArgs, cursor):
    """Wait for an empty stage and issue the copies of one K tile, whose bytes complete the stage's barrier; advance.

    Does nothing when all tiles have been loaded.
    """
    tile_idx, k_tile_idx, stage, phase, k_tile_cnt, row_a, row_b, sfa_block, a, b, sfa, sfb = cursor
    if tile_idx < args.groups.num_tiles:
        cute.arch.mbarrier_wait(args.packed.empty(stage), phase)
        full = args.packed.full(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, args.stage_bytes)
        _copy(args.b, descriptor_ptr(b), row_b, k_tile_idx, stage, full)
        _copy(args.sfb, descriptor_ptr(sfb), row_b, k_tile_idx, stage, full)
        _copy(args.a, descriptor_ptr(a), row_a, k_tile_idx, stage, full)
        for block in cutlass.range_constexpr(args.num_sfa_blocks):
            slot = stage * args.num_sfa_blocks + block
            _copy(args.sfa, descriptor_ptr(sfa), sfa_block + block, k_tile_idx, slot, full)
        stage, phase = next_stage(args.packed, stage, phase)
        k_tile_idx += 1
        if k_tile_idx == k_tile_cnt:
            stride, _, _ = cute.arch.grid_dim()
            tile_idx += stride
            k_tile_idx = Int32(0)
            k_tile_cnt, row_a, row_b, sfa_block, a, b, sfa, sfb = _enter_tile(args, tile_idx)
    return (tile_idx, k_tile_idx, stage, phase, k_tile_cnt, row_a, row_b, sfa_block, a, b, sfa, sfb)


@cute.jit
def _enter_tile(args: LoadArgs, tile_idx: Int32):
    """What the copies of a tile have in common: K tiles, coordinates, addresses of the tensor maps."""
    tile = locate_tile(args.groups, args.work_tile_mnk, tile_idx)
    return (
        tile.k_tile_cnt,
        tile.tile_m_idx,
        tile.tile_n_idx,
        tile.tile_m_idx * args.work_tile_mnk[0] // SF_BLOCK_ROWS,
        select_descriptor_address(args.a.atoms, tile.slot),
        select_descriptor_address(args.b.atoms, tile.slot),
        select_descriptor_address(args.sfa.atoms, tile.slot),
        select_descriptor_address(args.sfb.atoms, tile.slot),
    )


@cute.jit
def _copy(
    operand: LoadPartition, descriptor: cute.Pointer, row_idx: Int32, k_tile_idx: Int32, stage, barrier
):
    cute.copy(
        operand.atoms[0],
        operand.gmem[(None, row_idx, k_tile_idx)],
        operand.smem[(None, stage)],
        tma_bar_ptr=barrier,
        tma_desc_ptr=descriptor,
    )

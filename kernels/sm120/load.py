"""LOAD role: one warp that keeps the shared-memory ring full with TMA.

Produces ``ab`` (A, B and both scales of one K tile a stage). Touches no register fragment and no output.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ..common.group_table import GroupTable, locate_tile
from ..common.tma_descriptor import prefetch_descriptor, select_descriptor
from .operands import LoadPartition, TmaOperand


@dataclass(frozen=True)
class LoadArgs:
    """What the load warp reads."""

    a: LoadPartition
    b: LoadPartition
    sfa: LoadPartition
    sfb: LoadPartition
    groups: GroupTable
    cta_tile_shape_mnk: tuple
    ab_producer: pipeline.PipelineProducer


@cute.jit
def prefetch_first_descriptors(
    operands: list[TmaOperand], groups: GroupTable, cta_tile_shape_mnk: cutlass.Constexpr
):
    """Fetch the tensor maps of this CTA's first tile while other warps still set up barriers."""
    tile_idx, _, _ = cute.arch.block_idx()
    tile = locate_tile(groups, cta_tile_shape_mnk, tile_idx)
    with cute.arch.elect_one():
        for operand in operands:
            prefetch_descriptor(select_descriptor(operand.atoms, tile.slot))


@cute.jit
def run_load(args: LoadArgs):
    """Acquire an empty stage, issue its four copies, once a K tile; the copies' bytes complete the stage's barrier."""
    ab_producer = args.ab_producer
    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, args.cta_tile_shape_mnk, tile_idx)
        desc_a = select_descriptor(args.a.atoms, tile.slot)
        desc_b = select_descriptor(args.b.atoms, tile.slot)
        desc_sfa = select_descriptor(args.sfa.atoms, tile.slot)
        desc_sfb = select_descriptor(args.sfb.atoms, tile.slot)
        for k_tile_idx in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_producer.acquire_and_advance()
            _copy(args.a, desc_a, tile.tile_m_idx, k_tile_idx, stage)
            _copy(args.b, desc_b, tile.tile_n_idx, k_tile_idx, stage)
            _copy(args.sfa, desc_sfa, tile.tile_m_idx, k_tile_idx, stage)
            _copy(args.sfb, desc_sfb, tile.tile_n_idx, k_tile_idx, stage)
        tile_idx += stride
    # Leave only after the last stage was read: its arrivals must not reach a CTA that has exited.
    ab_producer.tail()


@cute.jit
def _copy(operand: LoadPartition, descriptor: cute.Pointer, tile_mn_idx: Int32, k_tile_idx: Int32, stage):
    cute.copy(
        operand.atoms[0],
        operand.gmem[(None, tile_mn_idx // operand.tiles_per_block, k_tile_idx)],
        operand.smem[(None, stage.index)],
        tma_bar_ptr=stage.barrier,
        tma_desc_ptr=descriptor,
    )

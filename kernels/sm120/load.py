"""LOAD role: one warp that keeps the shared-memory ring full with TMA.

Produces ``ab`` (A, B and both scales of one K tile a stage). Touches no register fragment and no output.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from nvfp4_cute.arch.sm120 import SF_ATOM_ROWS
from nvfp4_cute.config import KernelConfig

from ..common.group_table import GroupTable, locate_tile
from ..common.sides import mma_sides
from ..common.tma_descriptor import prefetch_descriptor, select_descriptor
from ..common.tma_operand import LoadPartition, TmaOperand


@dataclass(frozen=True)
class LoadArgs:
    """What the load warp reads: the operands on the MMA's M and N side, and their scales."""

    m: LoadPartition
    n: LoadPartition
    sf_m: LoadPartition
    sf_n: LoadPartition
    groups: GroupTable
    config: KernelConfig
    ab_producer: pipeline.PipelineProducer


@cute.jit
def prefetch_first_descriptors(
    operands: list[TmaOperand], groups: GroupTable, work_tile_mnk: cutlass.Constexpr
):
    """Fetch the tensor maps of this CTA's first tile while other warps still set up barriers."""
    tile_idx, _, _ = cute.arch.block_idx()
    tile = locate_tile(groups, work_tile_mnk, tile_idx)
    with cute.arch.elect_one():
        for operand in operands:
            prefetch_descriptor(select_descriptor(operand.atoms, tile.slot))


@cute.jit
def run_load(args: LoadArgs):
    """Acquire an empty stage, issue its four copies, once a K tile; the copies' bytes complete the stage's barrier."""
    ab_producer, config = args.ab_producer, args.config
    tile_m, tile_n, _ = config.cta_tile_shape_mnk
    tile_idx, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    while tile_idx < args.groups.num_tiles:
        tile = locate_tile(args.groups, config.work_tile_mnk, tile_idx)
        m_side, n_side = mma_sides(config, tile)
        desc_m = select_descriptor(args.m.atoms, tile.slot)
        desc_n = select_descriptor(args.n.atoms, tile.slot)
        desc_sf_m = select_descriptor(args.sf_m.atoms, tile.slot)
        desc_sf_n = select_descriptor(args.sf_n.atoms, tile.slot)
        for k_tile_idx in cutlass.range(tile.k_tile_cnt, unroll=1):
            stage = ab_producer.acquire_and_advance()
            _copy(args.m, desc_m, m_side.first_row // tile_m, k_tile_idx, stage)
            _copy(args.n, desc_n, n_side.first_row // tile_n, k_tile_idx, stage)
            _copy(args.sf_m, desc_sf_m, m_side.first_row // SF_ATOM_ROWS, k_tile_idx, stage)
            _copy(args.sf_n, desc_sf_n, n_side.first_row // SF_ATOM_ROWS, k_tile_idx, stage)
        tile_idx += stride
    # Leave only after the last stage was read: its arrivals must not reach a CTA that has exited.
    ab_producer.tail()


@cute.jit
def _copy(operand: LoadPartition, descriptor: cute.Pointer, box_idx: Int32, k_tile_idx: Int32, stage):
    cute.copy(
        operand.atoms[0],
        operand.gmem[(None, box_idx, k_tile_idx)],
        operand.smem[(None, stage.index)],
        tma_bar_ptr=stage.barrier,
        tma_desc_ptr=descriptor,
    )

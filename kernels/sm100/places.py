"""Records that loads and prefetches of the LOAD role share: its inputs, and the places of a work tile's operands."""

from dataclasses import dataclass

from cutlass import Int32

from nvfp4_cute.planning.arch.sm100.limits import SmemPlan
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import Boxes, Descriptors
from ..common.ring import Ring


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of stage 0 of all operands and their scales, M side and N side, one entry per operand."""

    m: list
    n: list
    sf_m: list
    sf_n: list


@dataclass(frozen=True)
class LoadArgs:
    """Inputs of the LOAD role.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``.
        m_rank: rank of this CTA among those with rows of a work tile's M side.
        cta_rank: rank of this CTA within its MMA.
        chain: ``common.chain.Chain`` if every group's ``a`` is the result of the previous group; otherwise None.
        all_columns: whether MMAs compute all columns of a tile even if the group has fewer.
        early_weights: whether weights are loaded before the previous launch has ended.
        ring_barrier_id: named barrier at which the warp that initializes the ring arrives; unused in pairs.
        begun_barrier_id, begun_threads: named barrier at which this warp arrives after issuing its first loads; None without one.
    """

    descriptors: Descriptors
    boxes: Boxes
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    m_rank: Int32
    cta_rank: Int32
    ab: Ring
    chain: object | None
    all_columns: bool
    early_weights: bool
    ring_barrier_id: int
    begun_barrier_id: int | None
    begun_threads: int


@dataclass(frozen=True)
class SidePlace:
    """Position of a tile on one side of the MMA.

    Attributes:
        row, block, batch: this CTA's first row of the operands, their row block of scales, and their batch. due, step: next K
            tile to prefetch here, counted from this CTA's first one, and distance to the following one. The distance is
            the number of tiles that share the operands.
        data, scales: addresses of tensor maps, one entry per operand.
    """

    row: Int32
    block: Int32
    batch: Int32
    due: Int32
    step: Int32
    data: tuple
    scales: tuple


@dataclass(frozen=True)
class TilePlace:
    """A work tile on both sides. k_tile_cnt: K tiles to load, over all CTAs that share them."""

    slot: Int32
    k_tile_cnt: Int32
    m: SidePlace
    n: SidePlace

    def for_loads(self) -> tuple:
        """Returns all numbers that loads of the tile use."""
        sides = [(s.row, s.block, s.batch, *s.data, *s.scales) for s in (self.m, self.n)]
        return (self.slot, self.k_tile_cnt, *sides[0], *sides[1])


def k_block_m(args: LoadArgs, k_tile: Int32) -> Int32:
    """Returns the first K block of the M side's scales of a K tile; the K tile itself if TMA does not load scales."""
    return k_tile if args.boxes.sf_m is None else k_tile * args.boxes.sf_m[0]


def k_block_n(args: LoadArgs, k_tile: Int32) -> Int32:
    """Returns the first K block of the N side's scales that this CTA loads."""
    boxes = args.boxes
    if boxes.sf_m is None or boxes.sf_n is None:
        return k_tile
    k_block = k_tile * boxes.sf_m[0]
    return k_block + args.cta_rank * boxes.sf_n[0] if boxes.sf_n[0] < boxes.sf_m[0] else k_block

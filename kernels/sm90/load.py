"""LOAD role: keeps the ring of packed operands full with TMA. Two warps of its own, or two warps of ACTIVATIONS."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, SmemPlan, k_tiles_of_stage, sf_blocks
from nvfp4_cute.planning.config import KernelConfig

from ..common.operand_maps import Descriptors, descriptor_addresses, scale_coordinates
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.select import select
from ..common.sides import TileSide
from ..common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from .scheduler import ScheduledTiles
from .tile_walk import WalkedTiles, sides_of_cta

# Operand that a warp loads.
WEIGHTS, TOKENS, NOTHING = 0, 1, 2


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of stage 0 of the weights, the tokens, and their scales."""

    weights: Int32
    tokens: Int32
    weight_scales: Int32
    token_scales: Int32


@dataclass(frozen=True)
class LoadArgs:
    """Inputs of the LOAD role.

    Attributes:
        tiles: work tiles of this CTA.
        sf_atoms: scale atoms along a K tile.
        k_extents: extents of a K tile in the tensor maps of weights and of tokens, in map elements.
    """

    descriptors: Descriptors
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    tiles: WalkedTiles | ScheduledTiles
    packed: Ring
    sf_atoms: int
    k_extents: tuple[int, int]


@dataclass(frozen=True)
class LoadPlace:
    """Position of one operand's next stage to load, given by its first K tile.

    Attributes:
        side: ``WEIGHTS``, ``TOKENS`` or ``NOTHING``.
        next_tile: place in ``LoadArgs.tiles`` of the next work tile.
        data_maps, scale_maps: addresses of tensor maps: one for tokens, one or two for weights.
        row, block, batch: first row of the tile in its operand, first block of scales, batch.
        k_tile, k_tile_end: index of the K tile, and the first one that is not this CTA's.
        stage, phase: position in the ring of packed stages.
    """

    side: Int32
    next_tile: tuple | Int32
    data_maps: tuple
    scale_maps: tuple
    row: Int32
    block: Int32
    batch: Int32
    k_tile: Int32
    k_tile_end: Int32
    stage: Int32
    phase: Int32

    def has_k_tile(self):
        """Returns whether there is a K tile to load."""
        return self.k_tile < self.k_tile_end


@cute.jit
def run_load(args: LoadArgs, side: Int32):
    """Loads every K tile of one operand as soon as its stage is empty."""
    place = first_place(args, side)
    while place.has_k_tile():
        place = load_k_tile(args, place)


@cute.jit
def first_place(args: LoadArgs, side: Int32) -> LoadPlace:
    """Returns the place of the CTA's first K tile of operand ``side``."""
    maps, zero = (Int64(0),) * len(args.descriptors.m), Int32(0)
    place = LoadPlace(
        side, args.tiles.first(), maps, maps, zero, zero, zero, zero, zero, zero, Int32(PRODUCER_PHASE)
    )
    if side != NOTHING:
        place = _enter_tiles(args, place)
    return place


@cute.jit
def load_k_tile(args: LoadArgs, place: LoadPlace) -> LoadPlace:
    """Waits until the stage is empty and issues its copies, if there is a K tile left. Returns the place after the stage."""
    if place.has_k_tile():
        cute.arch.mbarrier_wait(args.packed.empty(place.stage), place.phase)
        if place.side == WEIGHTS:
            _issue_copies(args, place, WEIGHTS)
        elif cutlass.const_expr(not args.config.decode_first):
            _issue_copies(args, place, TOKENS)
        stage, phase = next_stage(args.packed, place.stage, place.phase)
        place = _enter_tiles(
            args,
            replace(place, k_tile=place.k_tile + k_tiles_of_stage(args.config), stage=stage, phase=phase),
        )
    return place


@cute.jit
def _issue_copies(args: LoadArgs, place: LoadPlace, side: cutlass.Constexpr):
    config, smem, buffers, stage = args.config, args.smem, args.buffers, place.stage
    data, scales, data_bytes, scale_bytes, policy = (
        # Weights are read once; tokens are read again by every tile of weights, so keep those in L2.
        (buffers.weights, buffers.weight_scales, smem.b_stage_bytes, smem.sfb_stage_bytes, EVICT_FIRST),
        (buffers.tokens, buffers.token_scales, smem.a_stage_bytes, smem.sfa_stage_bytes, EVICT_LAST),
    )[side]
    box = args.sf_atoms, sf_blocks(config.cta_tile_shape_mnk[side])
    full = args.packed.full(stage)
    count, k_tiles = len(place.data_maps) if side == WEIGHTS else 1, k_tiles_of_stage(config)
    data_bytes, scale_bytes = data_bytes // k_tiles, scale_bytes // k_tiles
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, k_tiles * count * (data_bytes + scale_bytes))
        for box_idx in cutlass.range_constexpr(k_tiles * count):
            k_tile, i = place.k_tile + box_idx // count, box_idx % count
            k, k_block = k_tile * args.k_extents[side], k_tile * args.sf_atoms
            at = data + (stage * k_tiles * count + box_idx) * data_bytes
            tma_load(at, place.data_maps[i], (k, place.row, place.batch), full.toint(), policy, 1)
            at = scales + (stage * k_tiles * count + box_idx) * scale_bytes
            where = scale_coordinates(box, k_block, place.block, place.batch)
            tma_load(at, place.scale_maps[i], where, full.toint(), policy, 1)


@cute.jit
def _enter_tiles(args: LoadArgs, place: LoadPlace) -> LoadPlace:
    """Moves a place on to the next tile that has K tiles for this CTA, if its own tile has none left."""
    needs_tile = not place.has_k_tile()
    while needs_tile:
        # Ask only when needed, because asking may wait for SCHEDULER.
        needs_tile = args.tiles.has_tile(place.next_tile)
        if needs_tile:
            place = _enter_tile(args, place)
            needs_tile = not place.has_k_tile()
    return place


def _enter_tile(args: LoadArgs, place: LoadPlace) -> LoadPlace:
    """Returns the place of the next tile's first K tile."""
    config, maps, part = args.config, args.descriptors, args.tiles.part(place.next_tile)
    tile = part.tile
    weights, tokens = sides_of_cta(config, tile)
    data, scales = (descriptor_addresses(operands, tile.slot) for operands in (maps.m, maps.sf_m))
    where = _coordinates(weights)
    if not config.decode_first:
        is_tokens = place.side == TOKENS
        for addresses, operands in ((data, maps.n), (scales, maps.sf_n)):
            addresses[0] = select(is_tokens, *descriptor_addresses(operands, tile.slot), addresses[0])
        where = [select(is_tokens, *both) for both in zip(_coordinates(tokens), where, strict=True)]
    return LoadPlace(
        place.side,
        args.tiles.next(place.next_tile),
        tuple(data),
        tuple(scales),
        *where,
        part.first,
        part.first + part.count,
        place.stage,
        place.phase,
    )


def _coordinates(side: TileSide) -> list:
    """Returns the row, scale block and batch at which a tile starts in its operand."""
    origin = side.origin
    return [
        Int32(place)
        for place in (
            origin.row + side.first_row,
            origin.sf_block + side.first_row // SF_BLOCK_ROWS,
            origin.batch,
        )
    ]

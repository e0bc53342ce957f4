"""LOAD role: keep the ring of packed operands full with TMA. Two warps, or part of two warps of ACTIVATIONS."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.arch.sm90 import SF_BLOCK_ROWS, SmemPlan
from nvfp4_cute.config import KernelConfig

from ..common.group_table import WorkTile
from ..common.operand_maps import Descriptors, descriptor_addresses
from ..common.ring import PRODUCER_PHASE, Ring, next_stage
from ..common.sides import TileSide, mma_sides
from ..common.split_k import k_tiles_of_cta
from ..common.tma_load import EVICT_FIRST, EVICT_LAST, tma_load
from .operands import SF_ATOMS
from .tile_walk import TileWalk, start_walk, tile_of_cta

# Operands, each loaded by a warp of its own.
WEIGHTS, TOKENS = 0, 1


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of stage 0 of the weights, of the tokens, and of either's scales."""

    weights: Int32
    tokens: Int32
    weight_scales: Int32
    token_scales: Int32


@dataclass(frozen=True)
class LoadArgs:
    """What the loading warp reads. groups: ``GroupTable`` or ``DeviceGroups``."""

    descriptors: Descriptors
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    packed: Ring


@dataclass(frozen=True)
class LoadPlace:
    """The K tile of one operand to load next. It is none where ``cursor`` has no tile.

    Attributes:
        cursor, walk: of the work tile.
        data_maps, scale_maps: addresses of tensor maps, one of the tokens, one or two of weights.
        row, block, batch: first row of the tile in its operand, first block of scales, batch.
        k_tile, k_tile_end: index of the K tile, and the first one that is not the CTA's.
        stage, phase: in the ring of packed stages.
    """

    cursor: tuple
    walk: TileWalk
    data_maps: tuple
    scale_maps: tuple
    row: Int32
    block: Int32
    batch: Int32
    k_tile: Int32
    k_tile_end: Int32
    stage: Int32
    phase: Int32


@cute.jit
def run_load(args: LoadArgs, side: cutlass.Constexpr):
    """Load every K tile of one operand as soon as its stage is empty."""
    place = first_place(args, side)
    while args.groups.has_tile(place.cursor):
        place = load_k_tile(args, place, side)


@cute.jit
def first_place(args: LoadArgs, side: cutlass.Constexpr) -> LoadPlace:
    """Where the CTA starts with ``side``, ``WEIGHTS`` or ``TOKENS``."""
    cursor, walk = start_walk(args.groups, args.config)
    return _skip_done(args, side, _enter_tile(args, side, cursor, walk, Int32(0), Int32(PRODUCER_PHASE)))


@cute.jit
def _enter_tile(
    args: LoadArgs, side: cutlass.Constexpr, cursor: tuple, walk: TileWalk, stage: Int32, phase: Int32
) -> LoadPlace:
    """The first K tile of the tile at the cursor."""
    tile, maps = tile_of_cta(args.groups, cursor, args.config), args.descriptors
    rows = sides_of_cta(args.config, tile)[side]
    first, count = k_tiles_of_cta(tile.k_tile_cnt, args.config.split_k)
    return LoadPlace(
        cursor,
        walk,
        *(
            tuple(Int64(address) for address in descriptor_addresses(operands, tile.slot))
            for operands in ((maps.m, maps.sf_m), (maps.n, maps.sf_n))[side]
        ),
        Int32(rows.origin.row + rows.first_row),
        Int32(rows.origin.sf_block + rows.first_row // SF_BLOCK_ROWS),
        Int32(rows.origin.batch),
        first,
        first + count,
        stage,
        phase,
    )


def sides_of_cta(config: KernelConfig, tile: WorkTile) -> tuple[TileSide, TileSide]:
    """Of one CTA's tile: the part with weights and the one with tokens."""
    return mma_sides(replace(config, decode_first=False), tile)


@cute.jit
def load_k_tile(args: LoadArgs, place: LoadPlace, side: cutlass.Constexpr) -> LoadPlace:
    """If there is a K tile, wait until its stage is empty and issue its copies, whose bytes complete the stage's barrier.

    Returns:
        The place after it.
    """
    groups, config, smem, packed = args.groups, args.config, args.smem, args.packed
    buffers = args.buffers
    data, scales, data_bytes, scale_bytes, policy = (
        # Weights are read once; tokens are read by every tile of weights.
        (buffers.weights, buffers.weight_scales, smem.b_stage_bytes, smem.sfb_stage_bytes, EVICT_FIRST),
        (buffers.tokens, buffers.token_scales, smem.a_stage_bytes, smem.sfa_stage_bytes, EVICT_LAST),
    )[side]
    if groups.has_tile(place.cursor):
        stage = place.stage
        cute.arch.mbarrier_wait(packed.empty(stage), place.phase)
        full = packed.full(stage).toint()
        # In bytes, two values each.
        k, k_block = place.k_tile * (config.work_tile_mnk[2] // 2), place.k_tile * SF_ATOMS
        with cute.arch.elect_one():
            count = len(place.data_maps)
            cute.arch.mbarrier_arrive_and_expect_tx(packed.full(stage), count * (data_bytes + scale_bytes))
            for i in cutlass.range_constexpr(count):
                at = data + (stage * count + i) * data_bytes
                tma_load(at, place.data_maps[i], (k, place.row, place.batch), full, policy, 1)
                at, where = scales + (stage * count + i) * scale_bytes, (0, k_block, place.block, place.batch)
                tma_load(at, place.scale_maps[i], where, full, policy, 1)
        next_packed, next_phase = next_stage(packed, stage, place.phase)
        place = replace(place, k_tile=place.k_tile + 1, stage=next_packed, phase=next_phase)
        place = _skip_done(args, side, place)
    return place


@cute.jit
def _skip_done(args: LoadArgs, side: cutlass.Constexpr, place: LoadPlace) -> LoadPlace:
    """The place itself or, where its tile has no K tile left for this CTA, the first one of a tile that has."""
    groups, tiler = args.groups, args.config.work_tile_mnk
    while groups.has_tile(place.cursor) and place.k_tile == place.k_tile_end:
        cursor = groups.next_cursor(place.cursor, place.walk.step, tiler)
        place = replace(place, cursor=cursor, walk=place.walk.turned())
        if groups.has_tile(cursor):
            place = _enter_tile(args, side, cursor, place.walk, place.stage, place.phase)
    return place

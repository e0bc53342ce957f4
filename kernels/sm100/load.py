"""LOAD role: one warp keeps the shared-memory ring full with TMA.

Produces ``ab``: per stage, all operands and scales of one K tile. Float32 scales have a role of their own.

- Pairs: each CTA loads its half of both operands, and half of the N side's scales for both CTAs.
- Multicast: MMAs of a cluster that share the N side (``multicast_n``) alternate in loading a K tile of it for all of them.
- L2 prefetch (``prefetch``): if the ring is too short for the latency of device memory
  (``arch.sm100.limits.fetches_ahead``), tiles that share rows of an operand alternate in prefetching its K tiles into L2 before
  any of them loads them. Prefetching starts with the K tiles that do not fit the ring at first and continues over the ends of
  tiles.
- Start: loads that go to several CTAs wait until all of these have started. Meanwhile a pair prefetches its first K tile into
  L2, and single CTAs that share the N side load their own M side.
- Early weights: if the previous launch wrote neither weights nor group sizes (``LoadArgs.early_weights``), weights fill the
  ring, over several tiles if necessary, while it ends. Only tokens wait for it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm100.limits import (
    SF_ATOM_ROWS,
    fetches_ahead,
    loaded_k_tiles,
    prefetch_k_tiles,
)
from nvfp4_cute.planning.config import KernelConfig

from ..common.group_table import ceil_div
from ..common.operand_maps import SF_BLOCK_BYTES, descriptor_addresses, scale_coordinates
from ..common.ptx import keep_before
from ..common.ring import PRODUCER_PHASE, next_stage, wait_until_empty
from ..common.sides import mma_sides
from ..common.split_k import k_share
from ..common.tma_load import cache_policies, tma_load
from ..common.warp_schedule import WARP_SIZE
from .columns import mma_columns
from .places import LoadArgs, SidePlace, TilePlace, k_block_m, k_block_n
from .prefetch import prefetch_ahead, prefetch_first

# A K tile index that no tile has.
NEVER = -1


@cute.jit
def run_load(args: LoadArgs, first_tile: Int32, stride: Int32):
    """Waits for an empty stage per K tile and issues its copies, whose bytes complete the stage's barrier.

    The first tile's coordinates and tensor maps depend only on parameters and are computed before the first wait.
    """
    ab, config, groups = args.ab, args.config, args.groups
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    place = _locate(args, cursor, ab.num_stages)
    if cutlass.const_expr(config.num_mma_cta == 2):
        if cutlass.const_expr(not args.early_weights):
            if groups.has_tile(cursor):
                prefetch_first(args, place)
        # Wait for the peer: the leader's barriers count this CTA's bytes, and multicasts write the peer's memory.
        cute.arch.cluster_wait()
    else:
        keep_before(place.for_loads())
        cute.arch.barrier(barrier_id=args.ring_barrier_id, number_of_threads=2 * WARP_SIZE)
        if cutlass.const_expr(config.multicast_n > 1 and args.early_weights):
            # Early weights may be multicast to all CTAs.
            cute.arch.cluster_wait()
    # K tiles, from the next tile's first one on, whose weights are already being loaded.
    early = Int32(0)
    if cutlass.const_expr(args.early_weights):
        early = _load_weights(args, cursor, stride)
    # Results of the previous kernel are visible from here on.
    cute.arch.griddepcontrol_wait()
    # Stages that have never been filled are empty.
    num_begun = Int32(0)
    waits_for_cluster = config.multicast_n > 1 and config.num_mma_cta == 1 and not args.early_weights
    if groups.has_tile(cursor):
        _, k_tile_cnt = k_share(place.k_tile_cnt, config.split_k)
        num_begun = cutlass.min(k_tile_cnt, ab.num_stages)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place.slot)
        begin = Int32(0)
        if cutlass.const_expr(waits_for_cluster):
            # The first K tile's M side goes to this CTA only, so it need not wait for the others.
            _load_sides(args, place, begin, stage, "m", True)
            cute.arch.cluster_wait()
            _load_sides(args, place, begin, stage, "n", False)
            begin, (stage, phase) = begin + 1, next_stage(ab, stage, phase)
        _, stage, phase = _load_k_tiles(
            args, (place, place), (begin, num_begun), early, (stage, phase), False
        )
    else:
        if cutlass.const_expr(waits_for_cluster):
            cute.arch.cluster_wait()
    # The next launch may start. All launches before this one have ended, so it may read their results at once, and its loads do
    # not delay the first ones of this launch.
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(config.split_k > 1):
        # This role does not need the other CTAs, but every thread that arrives at a cluster barrier must wait there.
        cute.arch.cluster_wait()
    if cutlass.const_expr(args.begun_barrier_id is not None):
        cute.arch.barrier_arrive(barrier_id=args.begun_barrier_id, number_of_threads=args.begun_threads)
    while groups.has_tile(cursor):
        _, k_tile_cnt = k_share(place.k_tile_cnt, config.split_k)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place.slot)
        # Compute the next tile while the ring is full.
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        following = _without_turns(place)
        if groups.has_tile(cursor):
            following = _locate(args, cursor, 0)
        if cutlass.const_expr(fetches_ahead(config, args.smem)):
            if num_begun > 0:
                end = num_begun + prefetch_k_tiles(config, args.smem)
                for k_tile in cutlass.range(num_begun, end, unroll=1):
                    place, following = prefetch_ahead(args, place, following, k_tile)
        place, stage, phase = _load_k_tiles(
            args, (place, following), (num_begun, k_tile_cnt), early, (stage, phase), True
        )
        num_begun = Int32(0)
        if cutlass.const_expr(args.early_weights):
            early -= k_tile_cnt
    # Exit only after the MMA has released every stage: its arrivals must not reach a CTA that has exited.
    wait_until_empty(ab, stage, phase)


@cute.jit
def _load_weights(args: LoadArgs, cursor: tuple, stride: Int32) -> Int32:
    """Fills the ring with weights of this CTA's tiles from the cursor on. Returns the number of K tiles loaded."""
    config, groups = args.config, args.groups
    weights, _ = sides_of(config)
    num_loaded = Int32(0)
    while groups.has_tile(cursor) and num_loaded < args.ab.num_stages:
        place = _locate(args, cursor, 0)
        _, k_tile_cnt = k_share(place.k_tile_cnt, config.split_k)
        end = cutlass.min(k_tile_cnt, args.ab.num_stages - num_loaded)
        for i in cutlass.range(end, unroll=1):
            _load_sides(args, place, i, num_loaded + i, weights, True)
        num_loaded += end
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
    return num_loaded


@cute.jit
def _load_k_tiles(
    args: LoadArgs, places: tuple, k_tiles: tuple, early: Int32, ring_place: tuple, waits: cutlass.Constexpr
) -> tuple:
    """Loads some K tiles of this CTA's share of a tile, and prefetches later ones into L2 where stages may be full.

    Args:
        places: the tile and the next tile (``_locate``).
        k_tiles: first K tile, and the one after the last.
        early: K tiles, from the tile's first one on, whose weights are already being loaded.
        ring_place: stage and phase of the first K tile.
        waits: whether stages may be full.

    Returns:
        The next tile with its updated prefetch positions, stage and phase.
    """
    ab, ahead = args.ab, prefetch_k_tiles(args.config, args.smem)
    prefetches = waits and fetches_ahead(args.config, args.smem)
    place, following = places
    stage, phase = ring_place
    begin, end = k_tiles
    for i in cutlass.range(begin, end, unroll=1):
        if cutlass.const_expr(waits):
            cute.arch.mbarrier_wait(ab.empty(stage), phase)
        if cutlass.const_expr(args.early_weights):
            weights, tokens = sides_of(args.config)
            if i >= early:
                _load_sides(args, place, i, stage, weights, True)
            _load_sides(args, place, i, stage, tokens, False)
        else:
            _load_sides(args, place, i, stage, "mn", True)
        if cutlass.const_expr(prefetches):
            place, following = prefetch_ahead(args, place, following, i + ahead)
        stage, phase = next_stage(ab, stage, phase)
    return following, stage, phase


@cute.jit
def _load_sides(
    args: LoadArgs,
    place: TilePlace,
    k_tile: Int32,
    stage: Int32,
    sides: cutlass.Constexpr[str],
    expects: cutlass.Constexpr[bool],
):
    """Loads a K tile, counted from this CTA's first one, of the given ``sides``.

    expects: whether to expect the bytes of all sides.
    """
    config, full = args.config, args.ab.full(stage)
    first_k_tile, _ = k_share(place.k_tile_cnt, config.split_k)
    # MMAs that share the N side alternate in loading it.
    loads_n = "n" in sides
    if cutlass.const_expr(loads_n and config.multicast_n > 1):
        loads_n = k_tile % config.multicast_n == args.m_rank // config.num_mma_cta
    with cute.arch.elect_one():
        if cutlass.const_expr(expects):
            if args.cta_rank == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, config.num_mma_cta * args.smem.loaded_bytes)
        if cutlass.const_expr("m" in sides):
            _load_m(args, place.m, first_k_tile + k_tile, stage, full.toint())
        if loads_n:
            _load_n(args, place.n, first_k_tile + k_tile, stage, full.toint())


@cute.jit
def _load_m(args: LoadArgs, side: SidePlace, k_tile: Int32, stage: Int32, barrier: Int32):
    """Loads the M side's boxes of a K tile."""
    config, smem, buffers = args.config, args.smem, args.buffers
    policy, _ = cache_policies(config.swap_ab)
    coords = (k_tile * config.cta_tile_shape_mnk[2], side.row, side.batch)
    for j in cutlass.range_constexpr(smem.num_m):
        at = buffers.m[j] + stage * smem.a_stage_bytes
        tma_load(at, side.data[j], coords, barrier, policy, config.num_mma_cta)
    k_block = k_block_m(args, k_tile)
    for j in cutlass.range_constexpr(len(side.scales)):
        coords = scale_coordinates(args.boxes.sf_m, k_block, side.block, side.batch)
        at = buffers.sf_m[j] + stage * smem.sfa_stage_bytes
        tma_load(at, side.scales[j], coords, barrier, policy, config.num_mma_cta)


@cute.jit
def _load_n(args: LoadArgs, side: SidePlace, k_tile: Int32, stage: Int32, barrier: Int32):
    """Loads this CTA's part of the N side of a K tile.

    Operands go to all MMAs that share them. Scales go to all CTAs; each CTA of a pair loads half of the K blocks or of the row
    blocks. A single block is loaded for the CTAs of this rank.
    """
    config, smem, buffers, rank = args.config, args.smem, args.buffers, args.cta_rank
    num_cta, num_mmas = config.num_mma_cta, config.multicast_n
    _, policy = cache_policies(config.swap_ab)
    mask = sum(1 << i * num_cta for i in range(num_mmas)) << rank if num_mmas > 1 else None
    coords = (k_tile * config.cta_tile_shape_mnk[2], side.row, side.batch)
    for j in cutlass.range_constexpr(smem.num_n):
        at = buffers.n[j] + stage * smem.b_stage_bytes
        tma_load(at, side.data[j], coords, barrier, policy, num_cta, mask)
    splits = args.boxes.splits_sf_n
    if cutlass.const_expr(splits):
        mask = Int32((1 << config.num_m_cta) - 1) if config.num_m_cta > 1 else None
    k_block = k_block_n(args, k_tile)
    for j in cutlass.range_constexpr(len(side.scales)):
        coords = scale_coordinates(args.boxes.sf_n, k_block, side.block, side.batch)
        at = buffers.sf_n[j] + stage * smem.sfb_stage_bytes
        if cutlass.const_expr(splits):
            k_blocks, row_blocks = args.boxes.sf_n
            at += rank * (k_blocks * row_blocks * SF_BLOCK_BYTES)
        tma_load(at, side.scales[j], coords, barrier, policy, num_cta, mask)


def sides_of(config: KernelConfig) -> tuple[str, str]:
    """Returns the sides of the MMA that hold weights (``b``) and tokens (``a``)."""
    return ("m", "n") if config.swap_ab else ("n", "m")


def _without_turns(place: TilePlace) -> TilePlace:
    """Returns the tile with prefetching disabled."""
    m, n = (replace(side, due=Int32(NEVER)) for side in (place.m, place.n))
    return replace(place, m=m, n=n)


@cute.jit
def _turns(
    idx: Int32,
    sharing: Int32,
    is_long: object,
    first_due: cutlass.Constexpr,
    mma_idx: Int32,
    num_mmas: cutlass.Constexpr,
) -> tuple:
    """Returns the first K tile to prefetch here, and the distance to the following ones.

    Args:
        idx, sharing: index of the tile among those that share the operand, and their number.
        is_long: whether the ring cannot hold all K tiles.
        mma_idx, num_mmas: index of the MMA among those that share loads, and their number.
    """
    if cutlass.const_expr(num_mmas > 1):
        idx = idx * num_mmas + mma_idx
    due = idx + first_due if (sharing > 1) & is_long else Int32(NEVER)
    return due, sharing * num_mmas


@cute.jit
def _locate(args: LoadArgs, cursor: tuple, first_due: cutlass.Constexpr) -> TilePlace:
    """Returns the tile at the cursor, with K tiles from ``first_due`` on to be prefetched."""
    config, rank, descriptors = args.config, args.cta_rank, args.descriptors
    boxes, num_cta = args.boxes, config.num_mma_cta
    tile = args.groups.tile(cursor, config.work_tile_mnk)
    m_side, n_side = mma_sides(config, tile)
    row_m = m_side.first_row + args.m_rank * boxes.rows_m
    row_n = n_side.first_row
    if cutlass.const_expr(num_cta == 2):
        columns = config.cta_tile_shape_mnk[1] if args.all_columns else mma_columns(config, n_side)
        row_n += rank * (columns // num_cta)
    block_m = m_side.origin.sf_block + row_m // SF_ATOM_ROWS
    block_n = n_side.origin.sf_block + n_side.first_row // SF_ATOM_ROWS
    if cutlass.const_expr(boxes.splits_sf_n and boxes.sf_n[0] == boxes.sf_m[0]):
        block_n += rank * boxes.sf_n[1]
    work_m, work_n, _ = config.work_tile_mnk
    sharing_a, sharing_b = ceil_div(tile.n, work_n), ceil_div(tile.m, work_m)
    # A tile that shares an operand with no other tile does not prefetch it, which would double the copies. If the ring holds
    # all K tiles, loads are issued just as early.
    _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
    is_long = k_tile_cnt > args.ab.num_stages
    sharing_m, sharing_n = (tile.tile_n_idx, sharing_a), (tile.tile_m_idx, sharing_b)
    if cutlass.const_expr(config.swap_ab):
        sharing_m, sharing_n = sharing_n, sharing_m
    turns_m = _turns(*sharing_m, is_long, first_due, Int32(0), 1)
    turns_n = _turns(*sharing_n, is_long, first_due, args.m_rank // num_cta, config.multicast_n)
    data_m, scales_m, data_n, scales_n = (
        tuple(descriptor_addresses(operands, tile.slot))
        for operands in (descriptors.m, descriptors.sf_m, descriptors.n, descriptors.sf_n)
    )
    return TilePlace(
        tile.slot,
        loaded_k_tiles(config, tile.k_tile_cnt),
        SidePlace(m_side.origin.row + row_m, block_m, Int32(m_side.origin.batch), *turns_m, data_m, scales_m),
        SidePlace(n_side.origin.row + row_n, block_n, Int32(n_side.origin.batch), *turns_n, data_n, scales_n),
    )

"""LOAD role: one warp that keeps the shared-memory ring full with TMA.

Fills ``ab`` (all operands and their scales of one K tile a stage). Touches no tensor memory and no output.
Each CTA of a pair brings its half of both operands; the N side's scales, which both need, each brings half of for both.
Where the ring is too short for the latency of device memory (``arch.sm100.fetches_ahead``) tiles that share rows of an
operand take turns in bringing K tiles of it into L2 before any of them loads them: from the K tiles on that the ring does
not hold at first, over the ends of tiles. A pair's loads wait for both CTAs; L2 brings their first K tile meanwhile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.arch.sm100 import (
    PREFETCH_K_TILES,
    SF_ATOM_ROWS,
    SmemPlan,
    fetches_ahead,
)
from nvfp4_cute.config import KernelConfig

from ..common.group_table import ceil_div
from ..common.operand_maps import SF_BLOCK_BYTES, Descriptors, descriptor_addresses
from ..common.ptx import keep_before
from ..common.ring import PRODUCER_PHASE, Ring, next_stage, wait_until_empty
from ..common.sides import mma_sides
from ..common.split_k import k_share
from ..common.tma_load import cache_policies, tma_load, tma_prefetch
from ..common.warp_schedule import WARP_SIZE
from .columns import mma_columns
from .instructions import PAIR_MASK
from .operands import make_boxes

# Places in what ``_locate`` returns.
K_TILE_CNT, DUE_M, DUE_N, ADDRESSES = 1, 8, 9, 12
# A K tile that no tile has.
NEVER = -1


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of the first stage of all operands and their scales, M side and N side, an entry an operand."""

    m: list
    n: list
    sf_m: list
    sf_n: list


@dataclass(frozen=True)
class LoadArgs:
    """What the load warp reads.

    Attributes:
        groups: ``GroupTable`` or ``DeviceGroups``.
        cta_rank: which CTA of the pair this is.
        chain: ``common.chain.Chain`` where every group's ``a`` is the result of the one before; None otherwise.
        ring_barrier_id: named barrier where the warp that makes the ring's barriers arrives; not of a pair.
        begun_barrier_id, begun_threads: of the named barrier where this warp arrives when it has asked for what the ring holds;
            None for none.
    """

    descriptors: Descriptors
    buffers: Buffers
    smem: SmemPlan
    config: KernelConfig
    groups: object
    cta_rank: Int32
    ab: Ring
    chain: object | None
    ring_barrier_id: int
    begun_barrier_id: int | None
    begun_threads: int


@cute.jit
def run_load(args: LoadArgs, first_tile: Int32, stride: Int32):
    """Wait for an empty stage and issue its copies, once a K tile; their bytes complete the stage's barrier.

    The first tile's coordinates and tensor maps are parameters alone: they are found before anything is waited for.
    """
    ab, config, groups = args.ab, args.config, args.groups
    stage, phase = Int32(0), Int32(PRODUCER_PHASE)
    cursor = groups.first_cursor(first_tile, config.work_tile_mnk)
    place = _locate(args, cursor, ab.num_stages)
    if cutlass.const_expr(config.num_mma_cta == 2):
        if groups.has_tile(cursor):
            _prefetch_first(args, place)
        # The leader's barriers count this CTA's bytes, and multicasts reach the peer.
        cute.arch.cluster_wait()
    else:
        keep_before(place)
        cute.arch.barrier(barrier_id=args.ring_barrier_id, number_of_threads=2 * WARP_SIZE)
    # What the previous kernel wrote is there from here on.
    cute.arch.griddepcontrol_wait()
    # A stage that was never filled is empty.
    num_begun = Int32(0)
    if groups.has_tile(cursor):
        _, k_tile_cnt = k_share(place[K_TILE_CNT], config.split_k)
        num_begun = cutlass.min(k_tile_cnt, ab.num_stages)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place[0])
        _, _, stage, phase = _load_k_tiles(args, (place, place), (Int32(0), num_begun), (stage, phase), False)
    if cutlass.const_expr(args.begun_barrier_id is not None):
        cute.arch.barrier_arrive(barrier_id=args.begun_barrier_id, number_of_threads=args.begun_threads)
    while groups.has_tile(cursor):
        _, k_tile_cnt = k_share(place[K_TILE_CNT], config.split_k)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place[0])
        # Found while the ring is full.
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        following = _without_turns(place)
        if groups.has_tile(cursor):
            following = _locate(args, cursor, 0)
        if cutlass.const_expr(fetches_ahead(config, args.smem)):
            if num_begun > 0:
                for k_tile in cutlass.range(num_begun, num_begun + PREFETCH_K_TILES, unroll=1):
                    place, following = _prefetch_ahead(args, place, following, k_tile)
        _, following, stage, phase = _load_k_tiles(
            args, (place, following), (num_begun, k_tile_cnt), (stage, phase), True
        )
        num_begun = Int32(0)
        place = following
    # Leave only after the MMA has released every stage: its arrivals must not reach a CTA that has exited.
    wait_until_empty(ab, stage, phase)


@cute.jit
def _load_k_tiles(
    args: LoadArgs, places: tuple, k_tiles: tuple, ring_place: tuple, waits: cutlass.Constexpr
) -> tuple:
    """Load some of the K tiles of this CTA's share of a tile, and have L2 bring later ones where stages may be full.

    Args:
        places: of the tile and of the next one (``_locate``).
        k_tiles: the first of them, and the first behind them.
        ring_place: stage and phase of the first.
        waits: whether stages may be full.

    Returns: ``places`` with the turns that follow, stage and phase.
    """
    ab, config, smem, buffers = args.ab, args.config, args.smem, args.buffers
    num_cta, rank, boxes = config.num_mma_cta, args.cta_rank, make_boxes(args.config)
    k_blocks = boxes.sf_m[0]
    policy_m, policy_n = cache_policies(config.swap_ab)
    # This CTA's half of the N side's scales goes to both CTAs of the pair: half of the K blocks, or of the row blocks.
    split_k_blocks = boxes.sf_n[0] < k_blocks
    sf_n_offset = rank * (boxes.sf_n[0] * boxes.sf_n[1] * SF_BLOCK_BYTES)
    mcast_mask = Int32(PAIR_MASK) if num_cta == 2 else None
    prefetches = waits and fetches_ahead(config, smem)
    place, following = places
    _, all_k_tiles, row_m, row_n, block_m, block_n, batch_m, batch_n, _, _, _, _, *addresses = place
    desc_m, desc_sf_m = addresses[: smem.num_m], addresses[smem.num_m : 2 * smem.num_m]
    desc_n, desc_sf_n = addresses[2 * smem.num_m : -smem.num_n], addresses[-smem.num_n :]
    first_k_tile, _ = k_share(all_k_tiles, config.split_k)
    stage, phase = ring_place
    begin, end = k_tiles
    for i in cutlass.range(begin, end, unroll=1):
        k_tile_idx = first_k_tile + i
        full = ab.full(stage)
        k, k_block = k_tile_idx * config.cta_tile_shape_mnk[2], k_tile_idx * k_blocks
        k_block_n = k_block + rank * boxes.sf_n[0] if split_k_blocks else k_block
        if cutlass.const_expr(waits):
            cute.arch.mbarrier_wait(ab.empty(stage), phase)
        with cute.arch.elect_one():
            if rank == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, num_cta * smem.stage_bytes)
            barrier = full.toint()
            coords = (k, row_m, batch_m)
            for j in cutlass.range_constexpr(smem.num_m):
                at = buffers.m[j] + stage * smem.a_stage_bytes
                tma_load(at, desc_m[j], coords, barrier, policy_m, num_cta)
            coords = (k, row_n, batch_n)
            for j in cutlass.range_constexpr(smem.num_n):
                at = buffers.n[j] + stage * smem.b_stage_bytes
                tma_load(at, desc_n[j], coords, barrier, policy_n, num_cta)
            coords = (0, k_block, block_m, batch_m)
            for j in cutlass.range_constexpr(smem.num_m):
                at = buffers.sf_m[j] + stage * smem.sfa_stage_bytes
                tma_load(at, desc_sf_m[j], coords, barrier, policy_m, num_cta)
            coords = (0, k_block_n, block_n, batch_n)
            for j in cutlass.range_constexpr(smem.num_n):
                at = buffers.sf_n[j] + stage * smem.sfb_stage_bytes + sf_n_offset
                tma_load(at, desc_sf_n[j], coords, barrier, policy_n, num_cta, mcast_mask)
        if cutlass.const_expr(prefetches):
            place, following = _prefetch_ahead(args, place, following, i + PREFETCH_K_TILES)
        stage, phase = next_stage(ab, stage, phase)
    return place, following, stage, phase


@cute.jit
def _prefetch_ahead(args: LoadArgs, place: tuple, following: tuple, k_tile: Int32) -> tuple:
    """Bring a K tile, counted from this CTA's first one of a tile, into L2 where it is its turn: of this tile or the next.

    Returns: both places with the turns that follow.
    """
    _, k_tile_cnt = k_share(place[K_TILE_CNT], args.config.split_k)
    if k_tile < k_tile_cnt:
        place = _prefetch_due(args, place, k_tile)
    else:
        following = _prefetch_due(args, following, k_tile - k_tile_cnt)
    return place, following


@cute.jit
def _prefetch_due(args: LoadArgs, place: tuple, k_tile: Int32) -> tuple:
    """Bring what is due of a K tile into L2. Returns ``place`` with the turns that follow."""
    due_m, due_n, step_m, step_n = place[DUE_M:ADDRESSES]
    first_k_tile, _ = k_share(place[K_TILE_CNT], args.config.split_k)
    if k_tile == due_m:
        _prefetch_m(args, place, first_k_tile + k_tile)
        due_m += step_m
    if k_tile == due_n:
        _prefetch_n(args, place, first_k_tile + k_tile)
        due_n += step_n
    return (*place[:DUE_M], due_m, due_n, step_m, step_n, *place[ADDRESSES:])


@cute.jit
def _prefetch_first(args: LoadArgs, place: tuple):
    """Bring first K tiles into L2: of weights the first one, of tokens, which more tiles share, another one in each."""
    k_tile_m = k_tile_n = Int32(0)
    due_m, due_n = place[DUE_M], place[DUE_N]
    if cutlass.const_expr(args.config.swap_ab):
        k_tile_n = cutlass.max(due_n - args.ab.num_stages, 0)
    else:
        k_tile_m = cutlass.max(due_m - args.ab.num_stages, 0)
    if k_tile_m < place[K_TILE_CNT]:
        _prefetch_m(args, place, k_tile_m)
    if k_tile_n < place[K_TILE_CNT]:
        _prefetch_n(args, place, k_tile_n)


@cute.jit
def _prefetch_m(args: LoadArgs, place: tuple, k_tile: Int32):
    """Bring the M side's boxes of a K tile into L2."""
    _, _, row, _, block, _, batch, _, *_ = place
    config, num_m, addresses = args.config, args.smem.num_m, place[ADDRESSES:]
    policy, _ = cache_policies(config.swap_ab)
    _prefetch(addresses[:num_m], (k_tile * config.cta_tile_shape_mnk[2], row, batch), policy)
    k_block = k_tile * make_boxes(config).sf_m[0]
    _prefetch(addresses[num_m : 2 * num_m], (0, k_block, block, batch), policy)


@cute.jit
def _prefetch_n(args: LoadArgs, place: tuple, k_tile: Int32):
    """Bring the N side's boxes of a K tile into L2."""
    _, _, _, row, _, block, _, batch, *_ = place
    config, boxes, num_m, num_n = args.config, make_boxes(args.config), args.smem.num_m, args.smem.num_n
    addresses = place[ADDRESSES:]
    _, policy = cache_policies(config.swap_ab)
    k_blocks, loaded = boxes.sf_m[0], boxes.sf_n[0]
    k_block = k_tile * k_blocks + (args.cta_rank * loaded if loaded < k_blocks else 0)
    _prefetch(addresses[2 * num_m : -num_n], (k_tile * config.cta_tile_shape_mnk[2], row, batch), policy)
    _prefetch(addresses[-num_n:], (0, k_block, block, batch), policy)


@cute.jit
def _prefetch(descriptors: list, coords: tuple, cache_policy: cutlass.Constexpr):
    """Bring the boxes at ``coords`` of one side's operands, or of their scales, into L2."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(len(descriptors)):
            tma_prefetch(descriptors[i], coords, cache_policy)


@cute.jit
def _without_turns(place: tuple) -> tuple:
    """A tile of which nothing is prefetched."""
    never = Int32(NEVER)
    return (*place[:DUE_M], never, never, *place[DUE_N + 1 :])


@cute.jit
def _locate(args: LoadArgs, cursor: tuple, first_due: cutlass.Constexpr) -> tuple:
    """Of the tile at the cursor: slot, K tiles, this CTA's coordinates on both sides, its turns, addresses of tensor maps.

    Coordinates: rows of the operands, row blocks of their scales, batches; M side first. Turns: the first K tile of each
    side that is prefetched here, of those from ``first_due`` on, and from each to the next: as many as there are tiles that
    share the operand.
    """
    config, rank, descriptors = args.config, args.cta_rank, args.descriptors
    boxes, num_cta = make_boxes(config), config.num_mma_cta
    tile = args.groups.tile(cursor, config.work_tile_mnk)
    m_side, n_side = mma_sides(config, tile)
    row_m = m_side.first_row + rank * boxes.rows_m
    row_n = n_side.first_row
    if cutlass.const_expr(num_cta == 2):
        row_n += rank * (mma_columns(config, n_side) // num_cta)
    block_m = m_side.origin.sf_block + row_m // SF_ATOM_ROWS
    block_n = n_side.origin.sf_block + n_side.first_row // SF_ATOM_ROWS
    if cutlass.const_expr(boxes.sf_n[0] == boxes.sf_m[0]):
        block_n += rank * boxes.sf_n[1]
    work_m, work_n, _ = config.work_tile_mnk
    sharing_a, sharing_b = ceil_div(tile.n, work_n), ceil_div(tile.m, work_m)
    # A tile that shares an operand with none prefetches nothing of it: it would copy twice as often. Rings that hold all
    # K tiles ask for them as soon.
    _, k_tile_cnt = k_share(tile.k_tile_cnt, config.split_k)
    is_long = k_tile_cnt > args.ab.num_stages
    due_a = tile.tile_n_idx + first_due if (sharing_a > 1) & is_long else Int32(NEVER)
    due_b = tile.tile_m_idx + first_due if (sharing_b > 1) & is_long else Int32(NEVER)
    turns = (due_a, due_b, sharing_a, sharing_b)
    if cutlass.const_expr(config.swap_ab):
        turns = (due_b, due_a, sharing_b, sharing_a)
    return (
        tile.slot,
        tile.k_tile_cnt,
        m_side.origin.row + row_m,
        n_side.origin.row + row_n,
        block_m,
        block_n,
        Int32(m_side.origin.batch),
        Int32(n_side.origin.batch),
        *turns,
        *descriptor_addresses(descriptors.m, tile.slot),
        *descriptor_addresses(descriptors.sf_m, tile.slot),
        *descriptor_addresses(descriptors.n, tile.slot),
        *descriptor_addresses(descriptors.sf_n, tile.slot),
    )

"""LOAD role: one warp that keeps the shared-memory ring full with TMA.

Fills ``ab`` (all operands and their scales of one K tile a stage). Touches no tensor memory and no output.
Each CTA of a pair brings its half of both operands; the N side's scales, which both need, each brings half of for both.
Where the ring is too short for the latency of device memory (``arch.sm100.fetches_ahead``) tiles that share rows of an
operand take turns in bringing K tiles of it into L2 before any of them loads them. A pair's loads wait for both CTAs; L2
brings a share of their first K tiles meanwhile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.arch.sm100 import (
    MIN_PREFETCHED_RINGS,
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
    place = _locate(args, cursor)
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
        _, k_tile_cnt = k_share(place[1], config.split_k)
        num_begun = cutlass.min(k_tile_cnt, ab.num_stages)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place[0])
        place, stage, phase = _load_k_tiles(args, place, (Int32(0), num_begun), (stage, phase), False)
    if cutlass.const_expr(args.begun_barrier_id is not None):
        cute.arch.barrier_arrive(barrier_id=args.begun_barrier_id, number_of_threads=args.begun_threads)
    while groups.has_tile(cursor):
        _, k_tile_cnt = k_share(place[1], config.split_k)
        if cutlass.const_expr(args.chain is not None):
            args.chain.wait_for_layer_before(place[0])
        place, stage, phase = _load_k_tiles(args, place, (num_begun, k_tile_cnt), (stage, phase), True)
        num_begun = Int32(0)
        cursor = groups.next_cursor(cursor, stride, config.work_tile_mnk)
        place = _locate(args, cursor)
    # Leave only after the MMA has released every stage: its arrivals must not reach a CTA that has exited.
    wait_until_empty(ab, stage, phase)


@cute.jit
def _load_k_tiles(
    args: LoadArgs, place: tuple, k_tiles: tuple, ring_place: tuple, waits: cutlass.Constexpr
) -> tuple:
    """Load some of the K tiles of this CTA's share of a tile.

    Args:
        place: of the tile (``_locate``).
        k_tiles: the first of them, and the first behind them.
        ring_place: stage and phase of the first.
        waits: whether stages may be full.

    Returns: ``place`` with the turns that follow, stage and phase.
    """
    ab, config, smem, buffers = args.ab, args.config, args.smem, args.buffers
    num_cta, rank, boxes = config.num_mma_cta, args.cta_rank, make_boxes(args.config)
    k_blocks = boxes.sf_m[0]
    policy_m, policy_n = cache_policies(config.swap_ab)
    # This CTA's half of the N side's scales goes to both CTAs of the pair: half of the K blocks, or of the row blocks.
    split_k_blocks = boxes.sf_n[0] < k_blocks
    sf_n_offset = rank * (boxes.sf_n[0] * boxes.sf_n[1] * SF_BLOCK_BYTES)
    mcast_mask = Int32(PAIR_MASK) if num_cta == 2 else None
    prefetches, k_ahead = fetches_ahead(config, smem), PREFETCH_K_TILES * config.cta_tile_shape_mnk[2]
    slot, all_k_tiles, row_m, row_n, block_m, block_n, batch_m, batch_n, *rest = place
    due_m, due_n, step_m, step_n, *addresses = rest
    desc_m, desc_sf_m = addresses[: smem.num_m], addresses[smem.num_m : 2 * smem.num_m]
    desc_n, desc_sf_n = addresses[2 * smem.num_m : -smem.num_n], addresses[-smem.num_n :]
    first_k_tile, k_tile_cnt = k_share(all_k_tiles, config.split_k)
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
            due = i + PREFETCH_K_TILES
            later, later_block = k + k_ahead, k_block + PREFETCH_K_TILES * k_blocks
            later_block_n = k_block_n + PREFETCH_K_TILES * k_blocks
            if due < k_tile_cnt and due == due_m:
                _prefetch(desc_m, (later, row_m, batch_m), policy_m)
                _prefetch(desc_sf_m, (0, later_block, block_m, batch_m), policy_m)
                due_m += step_m
            if due < k_tile_cnt and due == due_n:
                _prefetch(desc_n, (later, row_n, batch_n), policy_n)
                _prefetch(desc_sf_n, (0, later_block_n, block_n, batch_n), policy_n)
                due_n += step_n
        stage, phase = next_stage(ab, stage, phase)
    turns = (due_m, due_n, step_m, step_n)
    coordinates = (row_m, row_n, block_m, block_n, batch_m, batch_n)
    return (slot, all_k_tiles, *coordinates, *turns, *addresses), stage, phase


@cute.jit
def _prefetch(descriptors: list, coords: tuple, cache_policy: cutlass.Constexpr):
    """Bring the boxes at ``coords`` of one side's operands, or of their scales, into L2."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(len(descriptors)):
            tma_prefetch(descriptors[i], coords, cache_policy)


@cute.jit
def _prefetch_first(args: LoadArgs, place: tuple):
    """Bring one of the first K tiles of each side into L2: another one in each tile that shares the operand."""
    _, k_tile_cnt, row_m, row_n, block_m, block_n, batch_m, batch_n, *rest = place
    due_m, due_n, _, _, *addresses = rest
    config, smem, boxes = args.config, args.smem, make_boxes(args.config)
    policy_m, policy_n = cache_policies(config.swap_ab)
    tile_k, k_blocks, num_m = config.cta_tile_shape_mnk[2], boxes.sf_m[0], smem.num_m
    k_tile_m = cutlass.max(due_m - PREFETCH_K_TILES, 0)
    if k_tile_m < k_tile_cnt:
        _prefetch(addresses[:num_m], (k_tile_m * tile_k, row_m, batch_m), policy_m)
        coords = (0, k_tile_m * k_blocks, block_m, batch_m)
        _prefetch(addresses[num_m : 2 * num_m], coords, policy_m)
    k_tile_n = cutlass.max(due_n - PREFETCH_K_TILES, 0)
    k_block_n = k_tile_n * k_blocks + (args.cta_rank * boxes.sf_n[0] if boxes.sf_n[0] < k_blocks else 0)
    if k_tile_n < k_tile_cnt:
        operands, scales = addresses[2 * num_m : -smem.num_n], addresses[-smem.num_n :]
        _prefetch(operands, (k_tile_n * tile_k, row_n, batch_n), policy_n)
        _prefetch(scales, (0, k_block_n, block_n, batch_n), policy_n)


@cute.jit
def _locate(args: LoadArgs, cursor: tuple) -> tuple:
    """Of the tile at the cursor: slot, K tiles, this CTA's coordinates on both sides, its turns, addresses of tensor maps.

    Coordinates: rows of the operands, row blocks of their scales, batches; M side first. Turns: the first K tile of each
    side that is prefetched here, and from each to the next: as many as there are tiles that share the operand.
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
    # K tiles, or half of them, ask for them as soon.
    is_long = tile.k_tile_cnt > MIN_PREFETCHED_RINGS * args.ab.num_stages
    due_a = tile.tile_n_idx + PREFETCH_K_TILES if (sharing_a > 1) & is_long else Int32(0)
    due_b = tile.tile_m_idx + PREFETCH_K_TILES if (sharing_b > 1) & is_long else Int32(0)
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

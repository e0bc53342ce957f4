"""L2 prefetches of the LOAD role, for K tiles that the ring does not hold yet.

Tiles that share rows of an operand alternate, so that only one of them prefetches each K tile (``SidePlace.due``).
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.operand_maps import scale_coordinates
from ..common.split_k import k_share
from ..common.tma_load import cache_policies, tma_prefetch
from .places import LoadArgs, SidePlace, TilePlace, k_block_m, k_block_n


@cute.jit
def prefetch_ahead(args: LoadArgs, place: TilePlace, following: TilePlace, k_tile: Int32) -> tuple:
    """Prefetches a K tile of this tile or the next into L2, if this CTA is the one to prefetch it.

    Returns:
        Both tiles with updated prefetch positions.
    """
    _, k_tile_cnt = k_share(place.k_tile_cnt, args.config.split_k)
    if k_tile < k_tile_cnt:
        place = _prefetch_due(args, place, k_tile)
    else:
        following = _prefetch_due(args, following, k_tile - k_tile_cnt)
    return place, following


@cute.jit
def _prefetch_due(args: LoadArgs, place: TilePlace, k_tile: Int32) -> TilePlace:
    """Prefetches the operands of a K tile that are due. Returns ``place`` with updated prefetch positions."""
    m, n = place.m, place.n
    due_m, due_n = m.due, n.due
    first_k_tile, _ = k_share(place.k_tile_cnt, args.config.split_k)
    if k_tile == due_m:
        _prefetch_m(args, place, first_k_tile + k_tile)
        due_m += m.step
    if k_tile == due_n:
        _prefetch_n(args, place, first_k_tile + k_tile)
        due_n += n.step
    return replace(place, m=replace(m, due=due_m), n=replace(n, due=due_n))


@cute.jit
def prefetch_first(args: LoadArgs, place: TilePlace):
    """Prefetches the first K tile of the weights into L2, and one of the tokens: tiles that share them take different ones."""
    k_tile_m = k_tile_n = Int32(0)
    if cutlass.const_expr(args.config.swap_ab):
        k_tile_n = cutlass.max(place.n.due - args.ab.num_stages, 0)
    else:
        k_tile_m = cutlass.max(place.m.due - args.ab.num_stages, 0)
    if k_tile_m < place.k_tile_cnt:
        _prefetch_m(args, place, k_tile_m)
    if k_tile_n < place.k_tile_cnt:
        _prefetch_n(args, place, k_tile_n)


@cute.jit
def _prefetch_m(args: LoadArgs, place: TilePlace, k_tile: Int32):
    """Prefetches the M side's boxes of a K tile into L2."""
    policy, _ = cache_policies(args.config.swap_ab)
    _prefetch_side(args, place.m, k_tile, k_block_m(args, k_tile), args.boxes.sf_m, policy)


@cute.jit
def _prefetch_n(args: LoadArgs, place: TilePlace, k_tile: Int32):
    """Prefetches the N side's boxes of a K tile into L2."""
    _, policy = cache_policies(args.config.swap_ab)
    _prefetch_side(args, place.n, k_tile, k_block_n(args, k_tile), args.boxes.sf_n, policy)


@cute.jit
def _prefetch_side(
    args: LoadArgs,
    side: SidePlace,
    k_tile: Int32,
    k_block: Int32,
    sf_box: cutlass.Constexpr,
    cache_policy: cutlass.Constexpr,
):
    """Prefetches the boxes of one side's operands, then of their scales, into L2."""
    k = k_tile * args.config.cta_tile_shape_mnk[2]
    with cute.arch.elect_one():
        for descriptor in side.data:
            tma_prefetch(descriptor, (k, side.row, side.batch), cache_policy)
    with cute.arch.elect_one():
        for descriptor in side.scales:
            coords = scale_coordinates(sf_box, k_block, side.block, side.batch)
            tma_prefetch(descriptor, coords, cache_policy)

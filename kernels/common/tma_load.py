"""TMA load of one box by tensor map; exactly one thread of a warp calls it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .versions import inline_ptx

# Clears the bit that distinguishes the two CTAs of a pair, which gives the leader's barrier (PTX ISA 9.7.9.27.1.2).
LEADER_MASK = 0xFEFFFFFF
# L2 policies as createpolicy.fractional returns them for a fraction of 1.
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


@cute.jit
def tma_load(
    destination: Int32,
    descriptor: Int64,
    coords: tuple,
    barrier: Int32,
    cache_policy: cutlass.Constexpr,
    num_cta: cutlass.Constexpr,
    mcast_mask: Int32 | None = None,
    state_space: cutlass.Constexpr = "shared::cluster",
):
    """Copies the box at ``coords`` (innermost first) to shared memory; its bytes complete the leader's ``barrier``.

    Args:
        destination: shared address in this CTA.
        descriptor: generic address of the tensor map.
        mcast_mask: CTAs of the cluster that receive the box at this offset, or None for this CTA only.
        state_space: state space of the destination. For sm_120a ptxas turns "shared::cluster" into a function call and
            "shared::cta" into one instruction.
    """
    rank = len(coords)
    places = ", ".join(f"{{$r{i}}}" for i in range(3, 3 + rank))
    multicast, mask, group, args = "", "", "", []
    if cutlass.const_expr(num_cta == 2):
        group = ".cta_group::2"
        barrier = barrier & LEADER_MASK
    if cutlass.const_expr(mcast_mask is not None):
        multicast, mask = ".multicast::cluster", f" {{$r{3 + rank}}},"
        args = [cutlass.Int16(mcast_mask)]
    inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.{state_space}.global.tile.mbarrier::complete_tx::bytes"
        f"{multicast}{group}.L2::cache_hint [{{$r0}}], [{{$r1}}, {{{places}}}], [{{$r2}}],{mask} "
        f"{{$r{3 + rank + len(args)}}};",
        read_only_args=[
            destination,
            descriptor,
            barrier,
            *(Int32(c) for c in coords),
            *args,
            Int64(cache_policy),
        ],
    )


def cache_policies(swap_ab: bool) -> tuple[int, int]:
    """Returns the L2 policies of the M side and the N side: weights are read once, tokens by every tile of weights."""
    return (EVICT_FIRST, EVICT_LAST) if swap_ab else (EVICT_LAST, EVICT_FIRST)


@cute.jit
def tma_prefetch(descriptor: Int64, coords: tuple, cache_policy: cutlass.Constexpr):
    """Prefetches the box at ``coords`` (innermost first) into L2."""
    rank = len(coords)
    places = ", ".join(f"{{$r{i}}}" for i in range(1, 1 + rank))
    inline_ptx(
        f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile.L2::cache_hint [{{$r0}}, {{{places}}}], {{$r{1 + rank}}};",
        read_only_args=[descriptor, *(Int32(c) for c in coords), Int64(cache_policy)],
    )

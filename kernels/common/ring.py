"""A ring of shared-memory stages with a full and an empty mbarrier each, and the place of one role in it.

``Ring`` holds only addresses; a role's place is two local Int32 that it rebinds: ``stage, phase = next_stage(ring,
stage, phase)``. A producer starts at phase 1 (its first wait for an empty stage passes at once), a consumer at phase 0.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .select import select
from .versions import inline_ptx

PRODUCER_PHASE = 1
CONSUMER_PHASE = 0


@dataclass(frozen=True)
class Ring:
    """Barriers of ``num_stages`` stages: ``full[s]``, then ``empty[s]``."""

    barriers: cute.Pointer
    num_stages: int

    def full(self, stage: Int32) -> cute.Pointer:
        """Completes when the stage's data has arrived."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> cute.Pointer:
        """Completes when every consumer has released the stage."""
        return self.barriers + self.num_stages + stage


@cute.jit
def init_ring(ring: Ring, full_arrivals: Int32, empty_arrivals: Int32):
    """Initialise the barriers: one thread of the CTA, before a fence and a CTA barrier."""
    for stage in range(ring.num_stages):
        cute.arch.mbarrier_init(ring.full(stage), full_arrivals)
        cute.arch.mbarrier_init(ring.empty(stage), empty_arrivals)


@cute.jit
def init_ring_by_lanes(ring: Ring, full_arrivals: Int32, empty_arrivals: Int32):
    """The same, and the fence: a whole warp, each of whose lanes initialises one barrier."""
    lane = cute.arch.lane_idx()
    if lane < 2 * ring.num_stages:
        cute.arch.mbarrier_init(
            ring.full(lane), select(lane < ring.num_stages, Int32(full_arrivals), Int32(empty_arrivals))
        )
        cute.arch.mbarrier_init_fence()


@cute.jit
def next_stage(ring: Ring, stage: Int32, phase: Int32):
    """The place after (stage, phase)."""
    following = stage + 1
    wraps = following == ring.num_stages
    return select(wraps, Int32(0), following), select(wraps, phase ^ 1, phase)


def consumer_place(ring: Ring, count: Int32) -> tuple:
    """The consumer's place behind ``count`` stages, of a ring whose stages are a power of two: one number to keep, not two."""
    assert ring.num_stages.bit_count() == 1
    return count & (ring.num_stages - 1), count >> (ring.num_stages.bit_length() - 1) & 1


@cute.jit
def wait_until_empty(ring: Ring, stage: Int32, phase: Int32):
    """Wait until all stages are empty again. ``stage, phase``: the producer's place behind the last one it filled."""
    for _ in cutlass.range(ring.num_stages, unroll=1):
        cute.arch.mbarrier_wait(ring.empty(stage), phase)
        stage, phase = next_stage(ring, stage, phase)


def barrier_of_lane(barrier: cute.Pointer, num_cta: int) -> cute.Pointer:
    """What lanes pass to ``arrive_lanes``: the barrier here, or in the first lanes that of each of a cluster's CTAs."""
    if num_cta == 1:
        return barrier
    return cute.arch.map_dsmem_ptr(barrier, cute.arch.lane_idx() % num_cta)


@cute.jit
def arrive_lanes(barrier: cute.Pointer, num_cta: cutlass.Constexpr):
    """As ``arrive_warp``, with an address that was mapped before and no register for a count: fewer instructions."""
    cute.arch.sync_warp()
    space = "" if num_cta == 1 else "::cluster"
    inline_ptx(
        f"mbarrier.arrive.shared{space}.b64 _, [{{$r0}}];",
        read_only_args=[barrier],
        predicate=cute.arch.lane_idx() < num_cta,
    )


@cute.jit
def arrive_warp(barrier: cute.Pointer, num_cta: cutlass.Constexpr = 1):
    """One arrival for the warp, after everything that its lanes did before: here, or in each of a cluster's CTAs."""
    cute.arch.sync_warp()
    if cutlass.const_expr(num_cta == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
    else:
        lane = cute.arch.lane_idx()
        if lane < num_cta:
            cute.arch.mbarrier_arrive(barrier, lane)

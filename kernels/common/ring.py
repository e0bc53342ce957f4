"""Ring of shared-memory stages, each with a full and an empty mbarrier, and the position of a role in it.

``Ring`` holds only addresses. A role's position is two local Int32 that it rebinds: ``stage, phase = next_stage(ring,
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
    """Barriers of ``num_stages`` stages: all ``full[s]``, then all ``empty[s]``."""

    barriers: cute.Pointer
    num_stages: int

    def full(self, stage: Int32) -> cute.Pointer:
        """Returns the barrier that completes when the stage's data has arrived."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> cute.Pointer:
        """Returns the barrier that completes when every consumer has released the stage."""
        return self.barriers + self.num_stages + stage


@cute.jit
def init_ring(ring: Ring, full_arrivals: Int32, empty_arrivals: Int32):
    """Initializes the barriers; called by one thread of the CTA before a fence and a CTA barrier."""
    for stage in range(ring.num_stages):
        cute.arch.mbarrier_init(ring.full(stage), full_arrivals)
        cute.arch.mbarrier_init(ring.empty(stage), empty_arrivals)


@cute.jit
def init_ring_by_lanes(ring: Ring, full_arrivals: Int32, empty_arrivals: Int32):
    """Initializes one barrier per lane of the calling warp, and fences."""
    lane = cute.arch.lane_idx()
    if lane < 2 * ring.num_stages:
        cute.arch.mbarrier_init(
            ring.full(lane), select(lane < ring.num_stages, Int32(full_arrivals), Int32(empty_arrivals))
        )
        cute.arch.mbarrier_init_fence()


@cute.jit
def next_stage(ring: Ring, stage: Int32, phase: Int32):
    """Returns the position after (stage, phase)."""
    following = stage + 1
    wraps = following == ring.num_stages
    return select(wraps, Int32(0), following), select(wraps, phase ^ 1, phase)


def consumer_place(ring: Ring, count: Int32) -> tuple:
    """Returns the consumer's position after ``count`` stages of a ring with a power-of-two number of stages.

    A role then keeps one number instead of two.
    """
    assert ring.num_stages.bit_count() == 1
    return count & (ring.num_stages - 1), count >> (ring.num_stages.bit_length() - 1) & 1


@cute.jit
def wait_until_empty(ring: Ring, stage: Int32, phase: Int32):
    """Waits until all stages are empty. stage, phase: the producer's position after the last stage it filled."""
    for _ in cutlass.range(ring.num_stages, unroll=1):
        cute.arch.mbarrier_wait(ring.empty(stage), phase)
        stage, phase = next_stage(ring, stage, phase)


def barrier_of_lane(barrier: cute.Pointer, num_cta: int) -> cute.Pointer:
    """Returns the argument of ``arrive_lanes``: this CTA's barrier, or in lane i < num_cta that of the cluster's CTA i."""
    if num_cta == 1:
        return barrier
    return cute.arch.map_dsmem_ptr(barrier, cute.arch.lane_idx() % num_cta)


@cute.jit
def arrive_lanes(barrier: cute.Pointer, num_cta: cutlass.Constexpr):
    """Arrives as ``arrive_warp`` does, with an address mapped in advance and no count register: fewer instructions."""
    cute.arch.sync_warp()
    space = "" if num_cta == 1 else "::cluster"
    inline_ptx(
        f"mbarrier.arrive.shared{space}.b64 _, [{{$r0}}];",
        read_only_args=[barrier],
        predicate=cute.arch.lane_idx() < num_cta,
    )


@cute.jit
def arrive_warp(barrier: cute.Pointer):
    """Arrives once for the warp, after everything its lanes did before."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)

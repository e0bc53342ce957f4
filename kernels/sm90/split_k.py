"""Split-K: of the CTAs that share the K tiles of a work tile, the first one adds up and stores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring
from ..common.split_k import CHUNK_BYTES, CHUNK_VALUES, address_in_cta, store_async
from .operands import load_shared
from .warp_schedule import WARP_SIZE, WarpSchedule

MATH_THREADS = WARP_SIZE * WarpSchedule.num_math_warps


@dataclass(frozen=True)
class PartialSums:
    """Where the first CTA gets the others' sums.

    Attributes:
        address: shared address: (SENDER, CHUNK of 4 sums, THREAD, 16 bytes).
        ring: one stage. full: in the first CTA, 1 arrival + bytes. empty: in each other one, an arrival a MATH warp.
        split: CTAs of the cluster.
    """

    address: Int32
    ring: Ring
    split: int


@cute.jit
def gather_sums(partial: PartialSums, acc: cute.Tensor, turn: Int32):
    """Send the sums to the first CTA of the cluster, or, there, add those of the others to them.

    Args:
        turn: 0 and 1 in turn: parity of the tiles before.
    """
    tidx = cute.arch.thread_idx()[0]
    rank = cute.arch.block_idx_in_cluster()
    chunks = cute.size(acc) // CHUNK_VALUES
    sender_bytes = chunks * MATH_THREADS * CHUNK_BYTES
    address = partial.address + tidx * CHUNK_BYTES
    full, empty = partial.ring.full(Int32(0)), partial.ring.empty(Int32(0))
    if rank > 0:
        cute.arch.mbarrier_wait(empty, turn ^ PRODUCER_PHASE)
        target = address_in_cta(address + (rank - 1) * sender_bytes, 0)
        barrier = address_in_cta(full.toint(), 0)
        for chunk in cutlass.range_constexpr(chunks):
            values = [acc[CHUNK_VALUES * chunk + i] for i in range(CHUNK_VALUES)]
            store_async(target + chunk * (MATH_THREADS * CHUNK_BYTES), values, barrier)
    else:
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, (partial.split - 1) * sender_bytes)
        cute.arch.mbarrier_wait(full, turn ^ CONSUMER_PHASE)
        for sender in cutlass.range_constexpr(partial.split - 1):
            for chunk in cutlass.range_constexpr(chunks):
                at = address + sender * sender_bytes + chunk * (MATH_THREADS * CHUNK_BYTES)
                words = cute.make_rmem_tensor(CHUNK_VALUES, Uint32)
                loaded = load_shared(at, CHUNK_VALUES)
                for i in cutlass.range_constexpr(CHUNK_VALUES):
                    words[i] = loaded[i]
                sums = cute.recast_tensor(words, Float32)
                for i in cutlass.range_constexpr(CHUNK_VALUES):
                    acc[CHUNK_VALUES * chunk + i] = acc[CHUNK_VALUES * chunk + i] + sums[i]


@cute.jit
def give_room(partial: PartialSums):
    """In the first CTA: let the others send the next sums. Behind the stores: an arrival does not wait for reads."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for sender in cutlass.range_constexpr(1, partial.split):
            cute.arch.mbarrier_arrive(partial.ring.empty(Int32(0)), Int32(sender))

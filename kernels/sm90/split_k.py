"""Split-K: the CTAs of a cluster share the K tiles of a work tile; the first one adds up and stores.

Sums travel by asynchronous stores between shared memories, and are added in the order of the CTAs: the result does not
depend on who is first.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common.group_table import WorkTile
from ..common.ring import CONSUMER_PHASE, PRODUCER_PHASE, Ring
from .operands import load_shared
from .warp_schedule import WARP_SIZE, WarpSchedule

CHUNK_VALUES = 4
CHUNK_BYTES = 4 * CHUNK_VALUES
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
def k_tiles_of_cta(tile: WorkTile, split: cutlass.Constexpr) -> tuple:
    """First K tile of this CTA's share, and how many."""
    first, count = Int32(0), tile.k_tile_cnt
    if cutlass.const_expr(split > 1):
        rank = cute.arch.block_idx_in_cluster()
        first = rank * tile.k_tile_cnt // split
        count = (rank + 1) * tile.k_tile_cnt // split - first
    return first, count


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
        target = _in_first_cta(address + (rank - 1) * sender_bytes)
        barrier = _in_first_cta(full.toint())
        for chunk in cutlass.range_constexpr(chunks):
            values = [acc[CHUNK_VALUES * chunk + i] for i in range(CHUNK_VALUES)]
            _store_async(target + chunk * (MATH_THREADS * CHUNK_BYTES), values, barrier)
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
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for sender in cutlass.range_constexpr(1, partial.split):
                cute.arch.mbarrier_arrive(empty, Int32(sender))


def _in_first_cta(address: Int32) -> Int32:
    """The same place in the shared memory of the cluster's first CTA."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, 0;", write_only_types=[Int32], read_only_args=[address]
    )


def _store_async(address: Int32, values: list, barrier: Int32) -> None:
    """Four consecutive values to another CTA; their bytes complete its barrier (PTX ISA 9.7.9.12)."""
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )

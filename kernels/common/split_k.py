"""Split-K: the CTAs of a cluster share the K tiles of a work tile and exchange partial sums through distributed shared memory.

Partial sums are added in the order of the CTAs, so the result does not depend on which CTA finishes first.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import ptx
from .ring import CONSUMER_PHASE, PRODUCER_PHASE
from .versions import inline_ptx

# Float32 sums per store.
CHUNK_VALUES = 4
CHUNK_BYTES = 4 * CHUNK_VALUES
# Longest sleep of a wait before it polls again, as in CuTe DSL's own waits.
SUSPEND_NS = 10_000_000


@dataclass(frozen=True)
class PartialSums:
    """Memory and barriers by which each thread of the receiving CTA gets the sums of the same thread in the other CTAs.

    Attributes:
        address: shared address of the thread's first chunk from the first sender: (SENDER, CHUNK of 4 sums, THREAD, 16
            bytes). Senders are all CTAs of the cluster but the receiver.
        full: barrier in the receiver: 1 arrival + bytes.
        empty: barrier in every sender: one arrival per warp of the threads.
        num_threads: threads that share the barriers.
        split: CTAs of the cluster.
    """

    address: Int32
    full: cute.Pointer
    empty: cute.Pointer
    num_threads: int
    split: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of every thread."""
        return self.num_threads * CHUNK_BYTES


@cute.jit
def k_tiles_of_cta(
    k_tile_cnt: Int32, split: cutlass.Constexpr, begins_with_more: cutlass.Constexpr = False
) -> tuple:
    """Returns the first K tile and the number of K tiles of this CTA's share; 0 if there are fewer K tiles than CTAs.

    begins_with_more: whether the first CTAs get the larger shares, so that the first one always has K tiles.
    """
    first, count = Int32(0), k_tile_cnt
    if cutlass.const_expr(split > 1):
        rank, more = cute.arch.block_idx_in_cluster(), (split - 1) * begins_with_more
        first = (rank * k_tile_cnt + more) // split
        count = ((rank + 1) * k_tile_cnt + more) // split - first
    return first, count


@cute.jit
def k_share(k_tile_cnt: Int32, split: cutlass.Constexpr) -> tuple:
    """Returns the first K tile and the number of K tiles of this CTA's share, at least one.

    TMA fills a K tile beyond the last one with zeros.
    """
    first, count = k_tiles_of_cta(k_tile_cnt, split)
    if cutlass.const_expr(split > 1):
        first = k_tile_cnt if count == 0 else first
        count = cutlass.max(count, 1)
    return first, count


@cute.jit
def send_sums(partial: PartialSums, acc: cute.Tensor, receiver: Int32, parity: Int32):
    """Sends this thread's sums to the receiver once it has read those of the previous tile.

    Args:
        acc: float32 or int32 sums, compact; a multiple of 4.
        receiver: another CTA of the cluster.
        parity: parity of the number of earlier tiles.
    """
    rank, chunks = cute.arch.block_idx_in_cluster(), cute.size(acc) // CHUNK_VALUES
    sender = rank - 1 if rank > receiver else rank
    cute.arch.mbarrier_wait(partial.empty, parity ^ PRODUCER_PHASE)
    target = address_in_cta(partial.address + sender * (chunks * partial.chunk_bytes), receiver)
    barrier = address_in_cta(partial.full.toint(), receiver)
    for chunk in cutlass.range_constexpr(chunks):
        values = [_as_float(acc[CHUNK_VALUES * chunk + i]) for i in range(CHUNK_VALUES)]
        store_async(target + chunk * partial.chunk_bytes, values, barrier)


@cute.jit
def add_sums(partial: PartialSums, acc: cute.Tensor, thread: Int32, parity: Int32):
    """Waits, in the receiver, for the other CTAs' sums and adds them to this thread's in order.

    Args:
        acc, parity: see :func:`send_sums`.
        thread: index of this thread among ``partial.num_threads``.
    """
    chunks, num_senders = cute.size(acc) // CHUNK_VALUES, partial.split - 1
    if thread == 0:
        nbytes = num_senders * chunks * partial.chunk_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(partial.full, nbytes)
    wait_for_cluster(partial.full.toint(), parity ^ CONSUMER_PHASE)
    address = partial.address
    # Not unrolled: a CTA has few tiles, and code that runs once costs more to fetch than to execute.
    for _ in cutlass.range(num_senders, unroll=1):
        for chunk in cutlass.range_constexpr(chunks):
            values = load_chunk(address + chunk * partial.chunk_bytes)
            for i in cutlass.range_constexpr(CHUNK_VALUES):
                sent = values[i] if acc.element_type is Float32 else ptx.bits_of(values[i]).to(Int32)
                acc[CHUNK_VALUES * chunk + i] = acc[CHUNK_VALUES * chunk + i] + sent
        address += chunks * partial.chunk_bytes


@cute.jit
def give_room(partial: PartialSums):
    """Lets the other CTAs send their next sums.

    The receiver calls it after its stores, because arrivals do not wait for reads.
    """
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < partial.split and lane != cute.arch.block_idx_in_cluster():
        cute.arch.mbarrier_arrive(partial.empty, lane)


def _as_float(value: Float32 | Int32) -> Float32:
    """Returns a sum as a float for the exchange; an integer's bits are reinterpreted."""
    return value if isinstance(value, Float32) else ptx.float_of(value.to(Uint32))


def wait_for_cluster(barrier: Int32, parity: Int32) -> None:
    """Waits for a phase of an mbarrier with acquire at cluster scope, for data that other CTAs of the cluster stored.

    The default scope of an mbarrier wait is the CTA (PTX ISA 9.7.13.15.16).
    """
    inline_ptx(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}, {$r2}; "
        "@done bra.uni DONE; bra.uni WAIT; DONE: }",
        read_only_args=[barrier, parity, Int32(SUSPEND_NS)],
    )


def address_in_cta(address: Int32, rank: Int32 | int) -> Int32:
    """Maps a shared address to another CTA of the cluster."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(rank)],
    )


def store_async(address: Int32, values: list, barrier: Int32) -> None:
    """Stores a chunk of sums to another CTA; the bytes complete its barrier (PTX ISA 9.7.9.12)."""
    inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )


def load_chunk(address: Int32) -> list:
    """Loads a chunk of sums from this CTA's shared memory."""
    return list(
        inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )

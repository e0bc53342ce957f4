"""Signals between GPUs of one host: counters in the memory of the waiting rank.

A CTA that has stored into a rank's buffer adds 1, with release at system scope, to that rank's counter for the sender. All
ranks launch equally many CTAs per call, and each also stores into its own buffer, so a rank waits until every counter has
reached its own. Counters only grow; differences stay correct when they wrap. A wait also ends after a timeout. It then writes
the lost rank's number plus 1 to a word of the buffer, which ends all later waits at once, and to a word of host memory.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from nvfp4_cute.launch_table import PeerHeader

from .select import select
from .versions import inline_ptx, nanoseconds

WORD_BYTES = 4


@dataclass(frozen=True)
class Signals:
    """Counters that a rank waits for.

    Attributes:
        counters: address of int32 [ranks] in the rank's own buffer.
        fault, host_fault: addresses of the fault words in the buffer and in host memory.
        rank: index of its own counter.
        num_ranks: number of counters.
        timeout_ns: longest wait in nanoseconds.
    """

    counters: Int64
    fault: Int64
    host_fault: Int64
    rank: Int32
    num_ranks: Int32
    timeout_ns: Int64

    @cute.jit
    def wait(self) -> Boolean:
        """Waits until all ranks have stored; all lanes of a warp must call it.

        Returns whether a rank timed out, whose data is missing.
        """
        lane = cute.arch.lane_idx()
        lost = Int32(0)
        if lane < self.num_ranks:
            lost = _load(self.fault, "relaxed")
            goal = _load(self.counters + self.rank * WORD_BYTES, "relaxed")
            missing = goal - _load(self.counters + lane * WORD_BYTES)
            if (missing > 0) & (lost == 0):
                began = nanoseconds()
                while missing > 0:
                    missing = goal - _load(self.counters + lane * WORD_BYTES)
                    if (missing > 0) & (nanoseconds() - began > self.timeout_ns):
                        lost, missing = lane + 1, Int32(0)
                        _store(self.fault, lost)
                        _store(self.host_fault, lost)
        cute.arch.sync_warp()
        return cute.arch.vote_ballot_sync(lost != 0) != 0


def signals_of(table: cute.Tensor, columns, first: int) -> Signals:
    """Reads signals from a launch table with the columns ``HEADER`` to ``TIMEOUT_NS``.

    first: first of the header's counters to wait for.
    """
    header = table[columns.HEADER]
    return Signals(
        counters=header + first * WORD_BYTES,
        fault=header + PeerHeader.FAULT * WORD_BYTES,
        host_fault=table[columns.HOST_FAULT],
        rank=Int32(table[columns.RANK]),
        num_ranks=Int32(table[columns.NUM_RANKS]),
        timeout_ns=table[columns.TIMEOUT_NS],
    )


@cute.jit
def signal(peers: tuple, first: int, rank: Int32):
    """Signals all peers once all threads of the CTA have stored into their buffers. first: first of the header's counters."""
    cute.arch.sync_threads()
    tidx, _, _ = cute.arch.thread_idx()
    if tidx < len(peers):
        counter = peer_of(peers, tidx) + (first + rank) * WORD_BYTES
        inline_ptx("red.release.sys.global.add.u32 [{$r0}], 1;", read_only_args=[counter])


def peer_of(peers: tuple, rank: Int32) -> Int64:
    """Returns the address of a rank's buffer."""
    address = peers[0]
    for number, peer in enumerate(peers[1:], 1):
        address = select(rank == number, peer, address)
    return address


def _load(address: Int64, order: str = "acquire") -> Int32:
    return inline_ptx(
        f"ld.{order}.sys.global.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address]
    )


def _store(address: Int64, word: Int32) -> None:
    inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])

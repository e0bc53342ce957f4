"""Signals between GPUs of one host: counters in the memory of the rank that waits.

A CTA that has stored into a rank's buffer adds 1 to that rank's counter of the sender, with release at system scope. All ranks
launch as many CTAs in a call, and each stores into its own buffer, too: so a rank waits until every counter has reached its own.
Counters only grow; differences are right when they wrap. A wait ends after a time, too: then the lost rank's number and 1 is left
in a word of the buffer, which ends all later waits at once, and in one of the host's.
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
    """What a rank waits for.

    Attributes:
        counters: address of int32 (ranks), in its own buffer. fault: address of the word there. host_fault: of the host's.
        rank: which of the counters is its own. num_ranks: how many there are.
        timeout_ns: how long it waits at most.
    """

    counters: Int64
    fault: Int64
    host_fault: Int64
    rank: Int32
    num_ranks: Int32
    timeout_ns: Int64

    @cute.jit
    def wait(self) -> Boolean:
        """Until all ranks have stored, by a whole warp. Returns whether one did not in time: then what it sends is not there."""
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
    """Of a launch table with the columns ``HEADER`` to ``TIMEOUT_NS``; first: of the header's counters that are waited for."""
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
    """All threads of the CTA have stored into the peers' buffers: tell them. first: of the header's counters for it."""
    cute.arch.sync_threads()
    tidx, _, _ = cute.arch.thread_idx()
    if tidx < len(peers):
        counter = peer_of(peers, tidx) + (first + rank) * WORD_BYTES
        inline_ptx("red.release.sys.global.add.u32 [{$r0}], 1;", read_only_args=[counter])


def peer_of(peers: tuple, rank: Int32) -> Int64:
    """The address of a rank's buffer."""
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

"""The trace of a launch: a list of events per warp, which `record.recorder` records and `timing` replays."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Origin = tuple[int, int, int]
Event = tuple[Any, ...]
"""An Op and its operands. A barrier is ``rank << 24 | offset``; bytes and counts are ints."""

SECTOR, LINE = 32, 128
"""Smallest transfer of memory in bytes, and bytes of a cache line."""


class Op(IntEnum):
    """Kinds of events, with their operands."""

    # Issue slots, cycles of the ALU, cycles of the path to shared memory, chain, instructions of blocks that are new to
    # this CTA, and issue slots of loops that multiply.
    COMPUTE = 0
    INIT = 1  # barrier, count
    ARRIVE = 2  # barrier, count
    DROP = 3  # barrier, count
    TX = 4  # barrier, bytes expected (negative: completed)
    WAIT = 5  # barrier, number of completed phases needed
    LOAD = (
        6  # pieces, bytes written to shared memory of each target, signals, targets, descriptor, instruction
    )
    STORE = 7  # pieces, bytes
    EXCHANGE = 8  # bytes, signals: between shared memories of a cluster
    COMMIT_STORES = 9
    WAIT_STORES = 10  # pending groups allowed
    MMA = 11  # (kind, m, n, cta_group, A in tensor memory)
    TENSOR_COPY = 12  # shape, cta_group
    COMMIT_MMA = 13  # barriers
    TENSOR_LOAD = 14  # 32-bit columns
    TENSOR_STORE = 15  # 32-bit columns
    WAIT_TENSOR_LOAD = 16
    WAIT_TENSOR_STORE = 17
    ALLOCATE = 18
    WGMMA = 19  # (type of A, n, A in registers)
    COMMIT_WGMMA = 20
    WAIT_WGMMA = 21  # pending groups allowed
    READ = 22  # number, cache lines of global memory
    USE = 23  # number of the read
    WRITE = 24  # cache lines of global memory
    ASYNC_READ = 25  # lines (cp.async)
    COMMIT_ASYNC = 26
    WAIT_ASYNC = 27  # pending groups allowed
    ARRIVE_ASYNC = 28  # barrier, pending count raised first
    BARRIER = 29  # number, threads (0: all threads of the CTA), whether it waits
    CLUSTER_ARRIVE = 30
    CLUSTER_WAIT = 31
    SLEEP = 32  # nanoseconds
    MATRIX = 33  # mma.sync: (A type, flops)
    ATOMIC = 34  # number, lines
    TAKE_OVER = 35  # barriers, bytes: the answer to a request for another cluster
    SIGNAL = 36  # words of global memory: a write that another warp may poll
    POLL = 37  # word of global memory, number of its writes that ended the polling loop, lines
    FENCE = 38  # until all SMs see what the CTA has written
    PREFETCH = 39  # pieces, bytes of the boxes, descriptor: into L2
    PREFETCH_MAP = 40  # descriptors
    GRID_WAIT = 41  # griddepcontrol.wait
    GRID_TRIGGER = 42  # griddepcontrol.launch_dependents
    MARK = 43  # half of the replayed part of a warp
    SCOREBOARD = 44  # numbers of reads: machine code waits for them, whichever instruction uses them
    CONFLICTS = 45  # extra cycles of shared-memory accesses due to bank conflicts


Piece = tuple[int, ...]
"""A region of global memory that is copied as a unit: address of its first byte, bytes of its 32-byte sectors.

For a box of several rows also the bytes from one row to the next, and per row.
"""


@dataclass
class ClusterTrace:
    """The events of one cluster: ``warps[rank][warp index]`` is a list.

    Attributes:
        loaded, stored: bytes of global memory that all its instructions load and store.
        share: the recorded part of the cluster's events, its first tiles. If it is less than 1, lists of warps that
            load or multiply have a MARK.
    """

    origin: tuple[int, int, int]
    warps: list[list[list[Event]]]
    loaded: int = 0
    stored: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Pace:
    """Machine code per issue slot of PTX, averaged over a part of a kernel; 1 if unknown.

    Attributes:
        issue: machine instructions.
        cycles: least cycles of a warp, by their control words.
    """

    issue: float = 1.0
    cycles: float = 1.0


@dataclass
class LaunchTrace:
    """The events of a launch.

    Attributes:
        ctas_per_sm: CTAs that an SM holds at a time.
        clusters: traces in grid order.
        programmatic: it may start before the previous launch has ended, see ``Launch``.
        writable: memory that it may write: (address on the device, bytes) of each tensor.
        middle: if `clusters` holds only the first tiles, traces of equally many tiles from the middle.
        before: pieces that the clusters of `middle` have loaded before these tiles, in order.
        reads: pieces that all tiles of a launch with a `middle` load, each once.
        main, rest: pace of loops that multiply, and of all other code.
    """

    kernel: str
    ctas_per_sm: int
    clusters: list[ClusterTrace]
    programmatic: bool = False
    writable: tuple[Piece, ...] = ()
    middle: "LaunchTrace | None" = None
    before: tuple[Piece, ...] = ()
    reads: tuple[Piece, ...] = ()
    main: Pace = Pace()
    rest: Pace = Pace()

    @property
    def multiplies(self) -> bool:
        """Whether its first cluster executes wgmma."""
        events = (
            (event for cta in self.clusters[0].warps for warp in cta for event in warp)
            if self.clusters
            else ()
        )
        return any(event[0] is Op.WGMMA for event in events)

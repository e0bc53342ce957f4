"""Time-consuming work of one warp, and notes for all warps: whether data moves, and the placement of memory."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvfp4_cute.emulator.record.events import ClusterTrace, Event, Op, Piece
from nvfp4_cute.emulator.record.late_loads import Moved
from nvfp4_cute.emulator.record.placement import Placement

MERGED = 8
"""Largest number of mma.sync in one event."""
SLOTS_BETWEEN = 64
"""Largest number of issue slots between them."""
NOT_MOVED = Moved(0, None)
LOOP_OF_LOOKS = (Op.COMPUTE, Op.USE, Op.SLEEP)
"""Events of a loop that polls global memory, besides the polls."""


@dataclass
class Track:
    """Events of one warp, and its work since the last event."""

    seen: set[int]
    trace: ClusterTrace
    moved: dict[int, Moved] = field(
        default_factory=dict
    )  # place of each load in machine code, from `moved_loads`
    events: list[Event] = field(default_factory=list)
    slots: float = 0.0
    alu: float = 0.0
    port: float = 0.0
    path: float = 0.0
    fresh: int = 0
    main: float = 0.0  # issue slots in loops that multiply
    conflicts: int = 0  # extra cycles due to bank conflicts
    pending: dict[int, int] = field(default_factory=dict)  # register slot -> number of the read that fills it
    reads: int = 0
    block: int = 0  # current basic block
    multiplied: int = 0  # mma.sync so far
    held: list[tuple[int, Event]] = field(
        default_factory=list
    )  # late loads, and the number of mma.sync before each
    awaited: dict[int, int] = field(
        default_factory=dict
    )  # number of a read -> number of mma.sync before the wait for it
    polled: tuple[int, int, int] | None = None
    look: tuple[int, int, int] | None = (
        None  # last load that may poll: program counter, address, index of its event
    )

    def flush(self) -> None:
        """Ends the computation since the last event."""
        if self.slots or self.path:
            self.events.append(
                (Op.COMPUTE, self.slots, self.alu, self.port, self.path, self.fresh, self.main)
            )
            self.slots = self.alu = self.port = self.path = self.main = 0.0
            self.fresh = 0
        if self.conflicts:
            self.events.append((Op.CONFLICTS, self.conflicts))
            self.conflicts = 0

    def multiply(self, element: str, flops: int) -> None:
        """Appends an mma.sync.

        Consecutive ones with little between them form one event, because a warp waits only for the first.
        """
        if self.awaited:
            self._wait_for_due()
        last = self.events[-1] if self.events else (None,)
        if (
            last[0] is Op.MATRIX
            and last[1] == element
            and last[2] < MERGED * flops
            and self.slots < SLOTS_BETWEEN
        ):
            self.events[-1] = (Op.MATRIX, element, last[2] + flops)
        else:
            self.add(Op.MATRIX, element, flops)
        self.multiplied += 1
        if self.held:
            self._issue_held(lambda place, _: place <= self.multiplied)

    def read(self, pc: int, number: int, lines: tuple[Piece, ...]) -> None:
        """Appends a load from global memory, or holds it back if machine code issues it later."""
        moved = self.moved.get(pc, NOT_MOVED)
        if moved.later:
            self.held.append((self.multiplied + moved.later, (Op.READ, number, lines)))
        else:
            self.add(Op.READ, number, lines)
        if moved.waited is not None:
            self.awaited[number] = self.multiplied + max(moved.later, moved.waited)

    def use(self, number: int) -> None:
        """Appends a wait for a load, which has been issued by then."""
        if self.held:
            self._issue_held(lambda _, event: event[1] <= number)
        self.add(Op.USE, number)

    def end(self) -> None:
        """Ends the open computation."""
        self._issue_held(lambda *_: True)
        self.flush()

    def _wait_for_due(self) -> None:
        """Appends a wait for the loads that machine code awaits before the next mma.sync."""
        due = tuple(number for number, place in self.awaited.items() if place <= self.multiplied)
        if due:
            self.add(Op.SCOREBOARD, due)
            for number in due:
                del self.awaited[number]

    def _issue_held(self, is_due: Callable[[int, Event], bool]) -> None:
        due = [event for place, event in self.held if is_due(place, event)]
        self.held = [item for item in self.held if item[1] not in due]
        for event in due:
            self.add(*event)

    def add(self, *event: Any) -> None:
        """Appends an event after the computation before it."""
        self.flush()
        self.events.append(event)

    def looks_again(self, pc: int, address: int) -> bool:
        """Whether a load repeats the last poll of an address, with only its loop in between. Forgets that poll if so."""
        if self.look is None or self.look[:2] != (pc, address):
            return False
        position = self.look[2]
        if any(event[0] not in LOOP_OF_LOOKS for event in self.events[position + 1 :]):
            return False
        del self.events[position:]
        self.slots = self.alu = self.port = self.path = self.main = 0.0
        return True

    def count(self, pieces: list[Piece], *, stored: bool = False) -> None:
        """Adds requested bytes."""
        nbytes = sum(piece[1] for piece in pieces)
        if stored:
            self.trace.stored += nbytes
        else:
            self.trace.loaded += nbytes


@dataclass
class Notes:
    """State of the launch that recording steps and effects need.

    Attributes:
        with_data: whether copies and products are also done.
        placement: device addresses of the launch's memory; addresses in events are device addresses.
        writes: number of writes of each word of global memory that single threads write; counted if the code polls
            global memory.
    """

    with_data: bool = False
    placement: Placement = field(default_factory=Placement)
    writes: dict[int, int] = field(default_factory=lambda: defaultdict(int))

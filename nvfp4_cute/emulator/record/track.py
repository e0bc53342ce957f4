"""What one warp does that takes time, and what the notes of all warps need: whether data moves, where memory lies."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvfp4_cute.emulator.record.events import ClusterTrace, Event, Op, Piece
from nvfp4_cute.emulator.record.late_loads import Moved
from nvfp4_cute.emulator.record.placement import Placement

MERGED = 8
"""mma.sync that are one event at most."""
SLOTS_BETWEEN = 64
"""Issue slots between them at most."""
NOT_MOVED = Moved(0, None)
LOOP_OF_LOOKS = (Op.COMPUTE, Op.USE, Op.SLEEP)
"""What a loop does that polls global memory, beside looking."""


@dataclass
class Track:
    """What one warp did since its last event, and its events."""

    seen: set[int]
    trace: ClusterTrace
    moved: dict[int, Moved] = field(default_factory=dict)  # of loads, as `moved_loads` has it
    events: list[Event] = field(default_factory=list)
    slots: float = 0.0
    alu: float = 0.0
    port: float = 0.0
    path: float = 0.0
    fresh: int = 0
    main: float = 0.0  # of the slots, those in loops that multiply
    conflicts: int = 0  # of banks: cycles
    pending: dict[int, int] = field(default_factory=dict)  # register slot -> number of the read that fills it
    reads: int = 0
    block: int = 0  # the basic block that runs
    multiplied: int = 0  # mma.sync so far
    held: list[tuple[int, Event]] = field(
        default_factory=list
    )  # late loads, and behind which mma.sync they come
    awaited: dict[int, int] = field(
        default_factory=dict
    )  # number of a read -> behind which mma.sync it is waited for
    polled: tuple[int, int, int] | None = None
    look: tuple[int, int, int] | None = (
        None  # the last load that may poll: where it stands, address, its event
    )

    def flush(self) -> None:
        """Close the computation since the last event."""
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
        """Append an mma.sync. A few with little between them are one event: a warp waits for none but the first."""
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
            self._issue_held(lambda behind, _: behind <= self.multiplied)

    def read(self, pc: int, number: int, lines: tuple[Piece, ...]) -> None:
        """Append a load of global memory, or hold it back where it comes late."""
        moved = self.moved.get(pc, NOT_MOVED)
        if moved.behind:
            self.held.append((self.multiplied + moved.behind, (Op.READ, number, lines)))
        else:
            self.add(Op.READ, number, lines)
        if moved.waited is not None:
            self.awaited[number] = self.multiplied + max(moved.behind, moved.waited)

    def use(self, number: int) -> None:
        """Append a wait for a load, which has been issued by then."""
        if self.held:
            self._issue_held(lambda _, event: event[1] <= number)
        self.add(Op.USE, number)

    def end(self) -> None:
        """Close what is open."""
        self._issue_held(lambda *_: True)
        self.flush()

    def _wait_for_due(self) -> None:
        """Append a wait for loads that machine code waits for in front of the next mma.sync."""
        due = tuple(number for number, behind in self.awaited.items() if behind <= self.multiplied)
        if due:
            self.add(Op.SCOREBOARD, due)
            for number in due:
                del self.awaited[number]

    def _issue_held(self, is_due: Callable[[int, Event], bool]) -> None:
        due = [event for behind, event in self.held if is_due(behind, event)]
        self.held = [item for item in self.held if item[1] not in due]
        for event in due:
            self.add(*event)

    def add(self, *event: Any) -> None:
        """Append an event after what was computed before it."""
        self.flush()
        self.events.append(event)

    def looks_again(self, pc: int, address: int) -> bool:
        """Whether a load repeats the last look at an address, with nothing but its loop since. Forgets that look if so."""
        if self.look is None or self.look[:2] != (pc, address):
            return False
        position = self.look[2]
        if any(event[0] not in LOOP_OF_LOOKS for event in self.events[position + 1 :]):
            return False
        del self.events[position:]
        self.slots = self.alu = self.port = self.path = self.main = 0.0
        return True

    def count(self, pieces: list[Piece], *, stored: bool = False) -> None:
        """Add requested bytes."""
        nbytes = sum(piece[1] for piece in pieces)
        if stored:
            self.trace.stored += nbytes
        else:
            self.trace.loaded += nbytes


@dataclass
class Notes:
    """What recording steps and effects need to know of the launch.

    Attributes:
        with_data: whether copies and products happen as well.
        placement: where a device would have the launch's memory: addresses in events are the device's.
        writes: how often each word of global memory has been written that one thread writes at a time; counted where code
            polls global memory.
    """

    with_data: bool = False
    placement: Placement = field(default_factory=Placement)
    writes: dict[int, int] = field(default_factory=lambda: defaultdict(int))

"""What a launch does that takes time, recorded while the machine executes it: a list of events for every warp.

Between events a warp only computes; that is one ``COMPUTE`` event with the cost of the instructions (costs). All
other events are what the replay (timing) has to order: barriers, copies, matrix instructions, accesses of global memory.
Those of instructions are in steps, those of asynchronous operations in effects.

Control flow and addresses decide the time of a kernel, data hardly ever. A recorder therefore skips data unless asked
not to: copies move nothing and products are not computed, only barriers and counters see them. Registers that such an
instruction would write become zero.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.record.effects import EFFECTS
from nvfp4_cute.emulator.record.events import (
    ClusterTrace,
    Event,
    LaunchTrace,
    Op,
    Origin,
    Piece,
)
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.emulator.record.representatives import LaunchWork, choose, everyone
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Warp
    from nvfp4_cute.emulator.machine import Cluster, Launch


MERGED = 8
"""mma.sync that are one event at most."""
SLOTS_BETWEEN = 64
"""Issue slots between them at most."""
LOOP_OF_LOOKS = (Op.COMPUTE, Op.USE, Op.SLEEP)
"""What a loop does that polls global memory, beside looking."""


@dataclass
class Track:
    """What one warp did since its last event, and its events."""

    seen: set[int]
    trace: ClusterTrace
    events: list[Event] = field(default_factory=list)
    slots: float = 0.0
    alu: float = 0.0
    port: float = 0.0
    path: float = 0.0
    fresh: int = 0
    pending: dict[int, int] = field(default_factory=dict)  # register slot -> number of the read that fills it
    reads: int = 0
    block: int = 0  # the basic block that runs
    polled: tuple[int, int, int] | None = None
    look: tuple[int, int, int] | None = (
        None  # the last load that may poll: where it stands, address, its event
    )

    def flush(self) -> None:
        """Close the computation since the last event."""
        if self.slots or self.path:
            self.events.append((Op.COMPUTE, self.slots, self.alu, self.port, self.path, self.fresh))
            self.slots = self.alu = self.port = self.path = 0.0
            self.fresh = 0

    def multiply(self, element: str, flops: int) -> None:
        """Append an mma.sync. A few with little between them are one event: a warp waits for none but the first."""
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
        self.slots = self.alu = self.port = self.path = 0.0
        return True

    def count(self, pieces: list[Piece], *, stored: bool = False) -> None:
        """Add requested bytes."""
        nbytes = sum(piece[1] for piece in pieces)
        if stored:
            self.trace.stored += nbytes
        else:
            self.trace.loaded += nbytes


class Clock(Protocol):
    """What models the time of a launch from its events."""

    @property
    def with_data(self) -> bool:
        """Whether copies and products are to be done as well, as `Recorder` takes it."""
        ...

    def model(self, trace: LaunchTrace) -> Any:
        """The time of a launch, in a form of the clock's own."""
        ...


class Recorder:
    """Records clusters as a machine runs them. Set as ``Machine.recorder``.

    Attributes:
        with_data: whether copies and products happen as well.  traces: one for every cluster that has ended.
        placement: where a device would have the launch's memory: addresses in events are the device's.
        work: what the clusters of the next launch compute, if those that are alike are to be executed once.
        writes: how often each word of global memory has been written that one thread writes at a time; counted where code
            polls global memory.
    """

    def __init__(self, *, with_data: bool = False):
        """Nothing recorded yet."""
        self.with_data = with_data
        self.placement = Placement()
        self.work: LaunchWork | None = None
        self.traces: list[ClusterTrace] = []
        self._origins: list[Origin] = []
        self.writes: dict[int, int] = defaultdict(int)

    def begin(self, cluster: "Cluster") -> None:
        """A cluster starts."""
        trace = ClusterTrace(cluster.origin, [])
        for cta in cluster.ctas:
            seen: set[int] = set()
            for warp in cta.warps:
                warp.track = Track(seen, trace)

    def end(self, cluster: "Cluster") -> None:
        """A cluster has ended."""
        trace = cluster.ctas[0].warps[0].track.trace
        for cta in cluster.ctas:
            for warp in cta.warps:
                warp.track.flush()
            trace.warps.append([warp.track.events for warp in cta.warps])
        self.traces.append(trace)

    def take(self, launch: "Launch") -> LaunchTrace:
        """What was recorded of a launch that has ended; it is forgotten here."""
        traces, self.traces = self.traces, []
        self.writes.clear()
        clusters = sorted(traces, key=lambda trace: trace.origin[::-1])
        if self.work is not None:
            clusters, self.work = everyone(clusters, self.work, self._origins), None
        return LaunchTrace(launch.code.entry.name, launch.resident_ctas(1), clusters)

    def executed(self, origins: "list[Origin]", memory: GlobalMemory) -> "list[Origin]":
        """The clusters that are executed, of those at `origins`, of a launch that uses `memory`."""
        self.placement = Placement(memory.registered)
        if self.work is None:
            return origins
        if len(origins) != len(self.work.clusters):
            raise EmulatorError(
                f"{len(origins)} clusters are launched, and the work of {len(self.work.clusters)} is known"
            )
        self._origins, self.work = origins, self.work.placed(self.placement)
        return [origins[number] for number in sorted(set(choose(self.work)))]

    def shares(self, launch: "Launch", origins: "list[Origin]", sm_count: int) -> "list[list[Origin]]":
        """Divide the clusters of a launch that steals work: the first of a list will do the work of all.

        On a GPU whoever is free takes the next cluster. Here they run one after the other, so that the first would take
        everything; they take turns instead.
        """
        if not any(inst.opcode == "clusterlaunchcontrol" for inst in launch.code.insts):
            return [origins]
        width = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        resident = max(1, launch.resident_ctas(sm_count) // width)
        return [origins[first::resident] for first in range(min(resident, len(origins)))]

    # ---- asynchronous operations -------------------------------------------------------------------
    def issue(self, warp: "Warp", engine: Engine, effect: Callable[[], Any]) -> None:
        """An asynchronous operation: record it, and let happen what it does to barriers."""
        cta = warp.cta
        cta.machine.changes += 1
        if engine is Engine.TMEM_STORE:  # its instruction is an event
            effect()
            return
        function, args = _parts(effect)
        note = EFFECTS.get(function)
        if note is None:
            raise EmulatorError(f"no timing of {getattr(function, '__qualname__', function)}")
        signals = note(self, warp, *args)
        if self.with_data or signals is None:
            effect()
            return
        for owner, offset, nbytes in signals:
            owner.mbarrier(offset).complete_tx(nbytes)

    def issue_store(self, warp: "Warp", read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """A bulk store."""
        warp.cta.machine.changes += 1
        function, args = _parts(write)
        EFFECTS[function](self, warp, *args)
        if self.with_data:
            write(read())


def _parts(effect: Any) -> tuple[Any, tuple[Any, ...]]:
    return (effect.func, effect.args) if isinstance(effect, partial) else (effect, ())

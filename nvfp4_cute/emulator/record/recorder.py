"""Records the time-consuming work of a launch while the machine executes it: a list of events per warp.

Between events a warp only computes. One ``COMPUTE`` event has the cost of these instructions (costs). All other
events are work that the replay (timing) must order: barriers, copies, matrix instructions, accesses to global memory.
`steps` records the events of instructions, `effects` those of asynchronous operations.

Control flow and addresses determine the time of a kernel; data hardly matters. A recorder therefore skips data unless
asked not to: copies move nothing and products are not computed, but barriers and counters are updated. Registers that
such an instruction would write become zero.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.record.effects import EFFECTS
from nvfp4_cute.emulator.record.events import (
    ClusterTrace,
    LaunchTrace,
    Origin,
    Piece,
)
from nvfp4_cute.emulator.record.late_loads import Moved, moved_loads
from nvfp4_cute.emulator.record.paces import paces
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.emulator.record.representatives import (
    LaunchWork,
    choose,
    everyone,
    in_the_middle,
)
from nvfp4_cute.emulator.record.steps import is_counter
from nvfp4_cute.emulator.record.track import Notes, Track
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cluster, Executable, Launch, Warp


class Clock(Protocol):
    """Models the time of a launch from its events."""

    @property
    def with_data(self) -> bool:
        """Whether copies and products are also done, see `Recorder`."""
        ...

    def placement(self) -> Placement:
        """Returns the placement of memory that earlier launches have used, if they and the next launch belong together."""
        ...

    def model(self, trace: LaunchTrace) -> Any:
        """Returns the modelled time of a launch, in the clock's own form."""
        ...


class Recorder(Notes):
    """Records clusters as a machine runs them. Set as ``Machine.recorder``.

    Attributes:
        traces: one trace per cluster that has ended.
        work: work of the launch's clusters, if equal clusters are to be executed only once.
        upcoming: the work of the next launches, in order.
    """

    def __init__(self, *, with_data: bool = False, placement: Callable[[], Placement] = Placement):
        """Starts without records. `placement`: see `Clock`."""
        super().__init__(with_data)
        self._placement = placement
        self._writable: tuple[Piece, ...] = ()
        self.work: LaunchWork | None = None
        self.upcoming: list[LaunchWork | None] = []
        self.traces: list[ClusterTrace] = []
        self._moved: dict[int, Moved] = {}
        self._origins: list[Origin] = []

    def begin(self, cluster: "Cluster") -> None:
        """Starts a cluster."""
        trace = ClusterTrace(cluster.origin, [])
        for cta in cluster.ctas:
            seen: set[int] = set()
            for warp in cta.warps:
                warp.track = Track(seen, trace, self._moved)

    def end(self, cluster: "Cluster") -> None:
        """Ends a cluster."""
        trace = cluster.ctas[0].warps[0].track.trace
        for cta in cluster.ctas:
            for warp in cta.warps:
                warp.track.end()
            trace.warps.append([warp.track.events for warp in cta.warps])
        self.traces.append(trace)

    def take(self, launch: "Launch") -> LaunchTrace:
        """Returns the record of a launch that has ended, and forgets it."""
        traces, self.traces = self.traces, []
        self.writes.clear()
        clusters = sorted(traces, key=lambda trace: trace.origin[::-1])
        middle = None
        if self.work is not None:
            work, self.work = self.work, None
            middle = in_the_middle(clusters, work, self._origins)
            clusters = everyone(clusters, work, self._origins)
        trace = LaunchTrace(
            launch.code.entry.name, launch.resident_ctas(1), clusters, launch.programmatic, self._writable
        )
        main, rest = paces(launch.code, launch.machine_code)
        trace = replace(trace, main=main, rest=rest)
        if middle is not None:
            trace.reads = middle.reads
            trace.middle = replace(trace, clusters=middle.clusters, before=middle.before, reads=())
        return trace

    def executed(self, origins: "list[Origin]", launch: "Launch", memory: GlobalMemory) -> "list[Origin]":
        """Returns the clusters to execute, among those at `origins`, of a launch that uses `memory`."""
        self._moved = moved_loads(launch.code, launch.machine_code)
        self.placement = self._placement()
        self.placement.add(memory.registered)
        self._writable = tuple(
            (self.placement.of(found.start), found.nbytes) for found in memory.registered if found.writable
        )
        self.work = self.upcoming.pop(0) if self.upcoming else None
        if self.work is None:
            return origins
        if len(origins) != len(self.work.clusters):
            raise EmulatorError(
                f"{len(origins)} clusters are launched, and the work of {len(self.work.clusters)} is known"
            )
        self._origins, self.work = origins, self.work.placed(self.placement)
        return [origins[number] for number in sorted(set(choose(self.work)))]

    def shares(self, launch: "Launch", origins: "list[Origin]", sm_count: int) -> "list[list[Origin]]":
        """Divides the clusters of a launch that steals work: the first cluster of each list does the work of the list.

        On a GPU the next free cluster takes the next work. Here clusters run one after the other, and the first would
        take everything, so they take work in turns.
        """
        if not any(inst.opcode == "clusterlaunchcontrol" for inst in launch.code.insts):
            return [origins]
        width = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        resident = max(1, launch.resident_ctas(sm_count) // width)
        return [origins[first::resident] for first in range(min(resident, len(origins)))]

    def together(self, launch: "Launch", sm_count: int) -> int:
        """Returns how many clusters run side by side.

        If they take work from a counter in global memory, these are as many as the GPU holds.

        One after the other, the first cluster would take all work. Side by side each takes the next piece in turn, as
        on a GPU with pieces of equal duration: a warp that has taken one lets the others continue (`steps`).
        """
        if not takes_work(launch.code):
            return 1
        width = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        return max(1, launch.resident_ctas(sm_count) // width)

    # ---- asynchronous operations -------------------------------------------------------------------
    def issue(self, warp: "Warp", engine: Engine, effect: Callable[[], Any]) -> None:
        """Records an asynchronous operation, and performs its effect on barriers."""
        cta = warp.cta
        cta.machine.changes += 1
        if engine is Engine.TMEM_STORE:  # its instruction is already an event
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
        """Records a bulk store."""
        warp.cta.machine.changes += 1
        function, args = _parts(write)
        EFFECTS[function](self, warp, *args)
        if self.with_data:
            write(read())


def takes_work(code: "Executable") -> bool:
    """Whether a kernel may take work from a counter: an atomic addition to global memory in a loop, with a used result."""
    counters = [pc for pc, inst in enumerate(code.insts) if is_counter(inst)]
    return any(start <= pc < end for pc in counters for start, end in code.loops)


def _parts(effect: Any) -> tuple[Any, tuple[Any, ...]]:
    return (effect.func, effect.args) if isinstance(effect, partial) else (effect, ())

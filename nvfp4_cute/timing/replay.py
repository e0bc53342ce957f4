"""The time of a launch, modelled: the recorded events of all its warps replayed on the SMs of a GPU at once.

A discrete-event simulation. Warps run through their events; what they share is a queue that serves in order of time:
the four schedulers, matrix pipes and the copy engine of each SM, L2 and device memory of the GPU. Waits end when the
barrier's arrivals and bytes have come. The same trace gives the same time.
"""

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop

from nvfp4_cute.emulator.record.events import Event, LaunchTrace, Op
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.timing import barriers, copies, threads, work
from nvfp4_cute.timing.barriers import complete, complete_cluster
from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.memory import LAYOUTS, Memory
from nvfp4_cute.timing.result import Timing, critical_path, lanes_of, stalls_of
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import Cluster, Cta, Handler, Sm, Warp

HANDLERS: dict[Op, Handler] = {
    **work.HANDLERS,
    **barriers.HANDLERS,
    **copies.HANDLERS,
    **threads.HANDLERS,
}
MOST_EXPLAINED = 2_000_000
"""Events of a launch whose causes of time are kept: they take a few hundred bytes each."""


# ---- roles -----------------------------------------------------------------------------------------------------------
def role_of(events: list[Event]) -> str:
    """What a warp does, from its events."""
    kinds = {event[0] for event in events}
    multiplies = kinds & {Op.MMA, Op.WGMMA, Op.MATRIX}
    stores = kinds & {Op.STORE, Op.WRITE}
    if Op.MMA in kinds:
        return "MMA"
    if multiplies:
        return "MMA + epilogue" if stores else "MMA"
    if Op.LOAD in kinds or Op.ASYNC_READ in kinds:
        return "load"
    if stores or Op.TENSOR_LOAD in kinds:
        return "epilogue"
    return "other"


# ---- the simulation --------------------------------------------------------------------------------------------------
class Replay(Simulation):
    """Replays the clusters of one launch. `run` once.

    Attributes:
        trace: of the launch.  sms: of the GPU.
    """

    def __init__(self, constants: Constants, trace: LaunchTrace, *, timeline: bool = False, layout: int = 0):
        """`timeline`: keep what every warp did when. `layout`: where memory lies, as ``Memory`` takes it."""
        explained = timeline or _count_events(trace) <= MOST_EXPLAINED
        super().__init__(
            constants,
            Memory(constants, layout=layout, keep_log=timeline),
            timeline=timeline,
            explained=explained,
        )
        self.trace = trace
        self._gpcs: list[list[Sm]] = [[] for _ in constants.gpcs]
        for gpc, count in enumerate(constants.gpcs):
            first = sum(constants.gpcs[:gpc])
            self._gpcs[gpc] = [Sm(i, gpc) for i in range(first, first + count)]
        self.sms = [sm for group in self._gpcs for sm in group]
        self._waiting = deque(trace.clusters)
        self._started = 0
        self._finished: list[Warp] = []
        self._per_sm = trace.ctas_per_sm
        self._handlers = {op: partial(HANDLERS[op], self) for op in Op}
        self._roles: dict[int, str] = {}

    # ---- scheduling ----------------------------------------------------------------------------------
    def run(self) -> Timing:
        """Replay everything.

        Raises:
            EmulatorError: warps wait for what never comes: the trace is not that of a whole launch.
        """
        heap = self.heap
        with _no_garbage_collection():
            self._place(self.constants.launch / 2)
            while heap:
                self.now, _, action, args = heappop(heap)
                action(*args)
        if self._waiting or any(sm.ctas for sm in self.sms):
            raise EmulatorError("the replay stopped before the launch ended: a wait was never answered")
        return self._result()

    def _place(self, time: float, before: Warp | None = None) -> None:
        """Put waiting clusters on SMs that have room, the emptiest first. `before`: the warp whose end made it."""
        while self._waiting:
            size = len(self._waiting[0].warps)
            sms = self._room(size)
            if sms is None:
                return
            self._start(Cluster(self._waiting.popleft()), sms, time, before)

    def _room(self, size: int) -> list[Sm] | None:
        best: list[Sm] | None = None
        best_load = 0.0
        for group in self._gpcs:
            free = sorted((sm for sm in group if sm.ctas < self._per_sm), key=lambda sm: (sm.ctas, sm.index))
            if len(free) < size:
                continue
            load = sum(sm.ctas for sm in free[:size]) + sum(sm.ctas for sm in group) / 1000
            if best is None or load < best_load:
                best, best_load = free[:size], load
        return best

    def _start(self, cluster: Cluster, sms: list[Sm], time: float, before: Warp | None) -> None:
        for rank, (sm, warps) in enumerate(zip(sms, cluster.trace.warps, strict=True)):
            cta = Cta(cluster, rank, sm)
            cta.start = time
            cta.number = self._started
            self._started += 1
            if not sm.ctas:
                sm.since = time
            sm.ctas += 1
            for index, events in enumerate(warps):
                warp = Warp(cta, index, events)
                warp.role = self._role(events)
                cta.warps.append(warp)
                if before is None:
                    self.stall(warp, 0.0, time, "launch")
                else:
                    self.stall(warp, self.now, time, "CTA start", before, self.now)
                self.at(time, self.advance, warp, time)
            cta.live = len(cta.warps)
            cluster.live += cta.live
            cluster.ctas.append(cta)

    def _role(self, events: list[Event]) -> str:
        found = self._roles.get(id(events))
        if found is None:
            found = self._roles[id(events)] = role_of(events)
        return found

    def advance(self, warp: Warp, time: float) -> None:
        """Run a warp from `time` until it blocks, ends, or another one is due."""
        events, handlers, heap = warp.events, self._handlers, self.heap
        count = len(events)
        while warp.position < count:
            if heap and heap[0][0] < time:
                self.at(time, self.advance, warp, time)
                return
            event = events[warp.position]
            warp.position += 1
            self.now = time
            result = handlers[event[0]](warp, time, *event[1:])
            if result is None:
                return  # blocked: whoever wakes it goes on with the next event
            time = result
        self._end(warp, time)

    def _end(self, warp: Warp, time: float) -> None:
        self.last = max(self.last, time)
        self._finished.append(warp)
        cta, cluster = warp.cta, warp.cta.cluster
        cta.live -= 1
        cluster.live -= 1
        if warp.passed == cluster.phase:
            # Only warps that live are waited for.
            cluster.barrier.arrived -= 1
        for named in cta.named.values():
            complete(self, named, cta.live, time, len(cta.warps))
        complete_cluster(self, cluster, time)
        if cta.live:
            return
        finished = max([time, *(w.stores.done for w in cta.warps)])
        self.last = max(self.last, finished)
        if cluster.live == 0 or len(cluster.ctas) == 1:
            for one in cluster.ctas:
                self.at(finished, self._free, one.sm, warp)

    def _free(self, sm: Sm, last: Warp) -> None:
        sm.ctas -= 1
        if not sm.ctas:
            sm.busy += self.now - sm.since
        if self._waiting:
            self._place(self.now + self.constants.cta_start, last)

    def _result(self) -> Timing:
        finished = self._finished
        return Timing(
            self.trace.kernel,
            self.constants,
            self.last + self.constants.launch / 2,
            self.memory.hbm_bytes,
            self.memory.l2_bytes,
            sum(cluster.loaded for cluster in self.trace.clusters),
            sum(cluster.stored for cluster in self.trace.clusters),
            self.memory.hbm_busy,
            [sm.busy for sm in self.sms],
            [sm.mma_busy for sm in self.sms],
            stalls_of(finished),
            critical_path(finished) if finished and self.explained else {},
            lanes=lanes_of(finished, self.sms) if self.timeline else [],
            memory_log=self.memory.log,
        )


def _count_events(trace: LaunchTrace) -> int:
    return sum(len(events) for cluster in trace.clusters for cta in cluster.warps for events in cta)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A replay makes millions of objects and no cycles; looking for cycles took a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def replay(
    constants: Constants, trace: LaunchTrace, *, timeline: bool = False, all_layouts: bool = False
) -> Timing:
    """The modelled time of a recorded launch.

    `timeline`: keep what every warp did when. `all_layouts`: model the time in every layout of memory, else in the first.

    Raises:
        EmulatorError: warps wait for what never comes, or a cluster is larger than the GPU's groups of SMs.
    """
    timing = Replay(constants, trace, timeline=timeline).run()
    others = range(1, LAYOUTS) if all_layouts else ()
    timing.elsewhere = [Replay(constants, trace, layout=layout).run().cycles for layout in others]
    return timing

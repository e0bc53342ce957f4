"""Modelled time of launches: replays the recorded events of all their warps on the SMs of a GPU.

A discrete-event simulation. Warps run through their events. Shared resources are queues that serve in order of time:
the four schedulers, matrix pipes and the copy engine of each SM, L2 and device memory of the GPU. Waits end when the
barrier's arrivals and bytes are complete. Equal traces give equal times.
"""

import gc
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappop

from nvfp4_cute.emulator.record.events import Event, LaunchTrace, Op
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.timing import barriers, copies, threads, work
from nvfp4_cute.timing.barriers import complete, complete_cluster
from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.memory import LAYOUTS, Memory
from nvfp4_cute.timing.result import ChainTiming, Timing, critical_path, lanes_of, stalls_of
from nvfp4_cute.timing.simulation import Simulation
from nvfp4_cute.timing.state import Cluster, Cta, Grid, Handler, Sm, Warp

HANDLERS: dict[Op, Handler] = {
    **work.HANDLERS,
    **barriers.HANDLERS,
    **copies.HANDLERS,
    **threads.HANDLERS,
}
MOST_EXPLAINED = 2_000_000
"""Number of events of a launch up to which causes of time are kept; they take a few hundred bytes each."""


# ---- roles -----------------------------------------------------------------------------------------------------------
def role_of(events: list[Event]) -> str:
    """Returns the role of a warp, from its events."""
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
    """Replays the clusters of consecutive launches in a CUDA graph. Call `run` once.

    A launch starts when the previous one has ended. A programmatic launch starts as soon as all CTAs of the previous
    one allow it and SMs have room. Each launch has its own L1 caches and tensor maps; all share L2.

    Attributes:
        grids: the launches.
        sms: SMs of the GPU.
    """

    def __init__(
        self,
        constants: Constants,
        traces: Sequence[LaunchTrace],
        *,
        timeline: bool = False,
        explained: bool = True,
        layout: int = 0,
    ):
        """Makes a replay of launches.

        Args:
            timeline: keep the actions of every warp.
            explained: keep the causes of waits, if there are not too many.
            layout: layout of memory, see ``Memory``.
        """
        explained = timeline or (explained and sum(map(_count_events, traces)) <= MOST_EXPLAINED)
        super().__init__(
            constants,
            Memory(constants, layout=layout, keep_log=timeline),
            timeline=timeline,
            explained=explained,
        )
        self.memory.know(traces[0].before)
        self.grids: list[Grid] = []
        for trace in traces:
            self.grids.append(Grid(trace, self.grids[-1] if self.grids else None, constants.num_sms))
            self.grids[-1].least_bytes = _least_bytes(constants, trace, [grid.trace for grid in self.grids])
            if trace.middle is not None:
                middle = Replay(constants, [trace.middle], explained=explained, layout=layout)
                (used,) = middle.run().launches
                self.grids[-1].follow(middle.grids[0], used)
        self._gpcs: list[list[Sm]] = [[] for _ in constants.gpcs]
        for gpc, count in enumerate(constants.gpcs):
            first = sum(constants.gpcs[:gpc])
            self._gpcs[gpc] = [Sm(i, gpc) for i in range(first, first + count)]
        self.sms = [sm for group in self._gpcs for sm in group]
        self._begun: list[Grid] = []
        self._started = 0
        self._handlers = {op: partial(HANDLERS[op], self) for op in Op}
        self._roles: dict[int, str] = {}
        self._timings: list[Timing] = []

    # ---- launches ------------------------------------------------------------------------------------
    def run(self) -> ChainTiming:
        """Replays all launches.

        Raises:
            EmulatorError: warps wait for events that never come, so the trace does not contain a complete launch.
        """
        heap = self.heap
        with _no_garbage_collection():
            self._begin(self.grids[0], self.constants.launch / 2)
            while heap:
                self.now, _, action, args = heappop(heap)
                action(*args)
                if not heap:
                    self._end_what_was_begun()
        if any(grid.ended is None for grid in self.grids):
            raise EmulatorError("the replay stopped before the launch ended: a wait was never answered")
        return self._result()

    def _begin(self, grid: Grid, time: float) -> None:
        """Lets the CTAs of a launch start."""
        grid.is_due, grid.start = True, time
        # Device memory first serves reads of the previous launch, which may continue after this one may start.
        free = time if grid.before is None else max(time, grid.before.least)
        grid.least = free + grid.least_bytes / self.constants.hbm_bandwidth
        self._count_from_here(grid)
        self._begun.append(grid)
        self._place(time)

    def _count_from_here(self, grid: Grid) -> None:
        """Starts to count the work of memory and matrix pipes as that of this launch, whichever launch causes it."""
        grid.at_start = self.memory.counters
        grid.mma_at_start = [sm.mma_busy for sm in self.sms]

    def _let_next(self, grid: Grid) -> None:
        """Lets the launch after a launch start from now on."""
        following = self._after(grid)
        if following is not None and not following.is_due:
            following.is_due = True
            c = self.constants
            time = self.now + (c.next_programmatic if following.trace.programmatic else c.next_launch)
            self.at(time, self._begin, following, time)

    def _end_what_was_begun(self) -> None:
        """Ends a launch of which only the first events of clusters exist, when its warps wait for events beyond these.

        It ends when all warps would have ended at the pace since their marks.
        """
        for grid in self._begun:
            if grid.left and grid.share < 1 and (grid.before is None or grid.before.ended is not None):
                for sm in self.sms:
                    if grid.resident(sm.index):
                        sm.ctas -= grid.resident(sm.index)
                        sm.load -= grid.room * grid.resident(sm.index)
                        grid.leave(sm.index, self.now, all_of_them=True)
                grid.left = grid.untriggered = 0
                grid.waiting.clear()
                grid.last = end = max(self.now, grid.projected_end())
                self.at(end, self._complete, grid)
                if any(begun.waiting for begun in self._begun):  # for the room of its CTAs
                    self.at(end + self.constants.cta_start, self._place, end + self.constants.cta_start)
                return

    def _after(self, grid: Grid) -> Grid | None:
        number = self.grids.index(grid) + 1
        return self.grids[number] if number < len(self.grids) else None

    def trigger(self, cta: Cta) -> None:
        """Notes that a CTA allows the next launch to start."""
        if cta.triggered:
            return
        cta.triggered, grid = True, cta.grid
        grid.untriggered -= 1
        following = self._after(grid)
        if not grid.untriggered and following is not None and following.trace.programmatic:
            self._let_next(grid)

    def _complete(self, grid: Grid | None) -> None:
        """Completes a launch, unless an earlier one is incomplete: then it ends with that one, or later by itself."""
        while grid is not None and grid.ended is None and not grid.left and grid.last <= self.now:
            if grid.before is not None and grid.before.ended is None:
                return
            grid.ended = self.now
            self.memory.settle(grid.trace.writable, self.now)
            self._timings.append(self._timing_of(grid))
            following = self._after(grid)
            if (
                following in self._begun
            ):  # its work in the meantime, like its time, was counted as that of this launch
                self._count_from_here(following)
            resumed = self.now + self.constants.released
            for warp, since in grid.waiters:
                self.stall(warp, since, resumed, "launch before")
                self.at(resumed, self.advance, warp, resumed)
            self._let_next(grid)
            grid = self._after(grid)

    # ---- CTAs and warps ------------------------------------------------------------------------------
    def _place(self, time: float, before: Warp | None = None) -> None:
        """Places waiting clusters on SMs with room, the emptiest first. `before`: the warp whose end made room."""
        for grid in self._begun:
            while grid.waiting:
                sms = self._room(len(grid.waiting[0].warps), grid.room)
                if sms is None:
                    return
                self._start(Cluster(grid.waiting.popleft(), grid), sms, time, before)

    def _room(self, size: int, room: float) -> list[Sm] | None:
        best: list[Sm] | None = None
        best_load = 0.0
        most = 1 + 1e-6 - room
        for group in self._gpcs:
            free = sorted((sm for sm in group if sm.load <= most), key=lambda sm: (sm.ctas, sm.index))
            if len(free) < size:
                continue
            load = sum(sm.ctas for sm in free[:size]) + sum(sm.ctas for sm in group) / 1000
            if best is None or load < best_load:
                best, best_load = free[:size], load
        return best

    def _start(self, cluster: Cluster, sms: list[Sm], time: float, before: Warp | None) -> None:
        grid = cluster.grid
        for rank, (sm, warps) in enumerate(zip(sms, cluster.trace.warps, strict=True)):
            cta = Cta(cluster, rank, sm)
            cta.start = time
            cta.number = self._started
            self._started += 1
            if sm.grid is not grid:
                sm.grid, sm.lines, sm.maps = grid, {}, {}
            sm.ctas += 1
            sm.load += grid.room
            grid.occupy(sm.index, time)
            for index, events in enumerate(warps):
                warp = Warp(cta, index, events)
                warp.role = self._role(events)
                cta.warps.append(warp)
                if before is None:
                    self.stall(warp, self._end_before(grid), time, "launch")
                else:
                    self.stall(warp, self.now, time, "CTA start", before, self.now)
                self.at(time, self.advance, warp, time)
                if cluster.trace.share < 1:
                    grid.marks.append(warp)
            cta.live = len(cta.warps)
            cluster.live += cta.live
            cluster.ctas.append(cta)

    def _end_before(self, grid: Grid) -> float:
        """Returns the end of the previous launch, or the current time."""
        if grid.before is None:
            return 0.0
        return self.now if grid.before.ended is None else grid.before.ended

    def _role(self, events: list[Event]) -> str:
        found = self._roles.get(id(events))
        if found is None:
            found = self._roles[id(events)] = role_of(events)
        return found

    def advance(self, warp: Warp, time: float) -> None:
        """Runs a warp from `time` until it blocks, ends, or another one is due."""
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
                return  # blocked: the action that wakes it continues with the next event
            time = result
        self._end(warp, time)

    def _end(self, warp: Warp, time: float) -> None:
        cta, cluster, grid = warp.cta, warp.cta.cluster, warp.cta.grid
        warp.ended = time
        grid.last = max(grid.last, time, cta.written)
        grid.finished.append(warp)
        cta.live -= 1
        cluster.live -= 1
        if warp.passed == cluster.phase:
            # Only live warps are waited for.
            cluster.barrier.arrived -= 1
        for named in cta.named.values():
            complete(self, named, cta.live, time, len(cta.warps))
        complete_cluster(self, cluster, time)
        if cta.live:
            return
        finished = max([time, *(w.stores.done for w in cta.warps)])
        grid.last = max(grid.last, finished)
        if cluster.live == 0 or len(cluster.ctas) == 1:
            for one in cluster.ctas:
                self.at(finished, self._free, one, warp)

    def _free(self, cta: Cta, last: Warp) -> None:
        sm, grid = cta.sm, cta.grid
        sm.ctas -= 1
        sm.load -= grid.room
        grid.leave(sm.index, self.now)
        grid.left -= 1
        if not grid.left and grid.share < 1:
            grid.last = max(grid.last, grid.projected_end())
        if any(begun.waiting for begun in self._begun):
            self._place(self.now + self.constants.cta_start, last)
        self.trigger(cta)
        if not grid.left:
            self.at(max(grid.last, self.now), self._complete, grid)

    # ---- results -------------------------------------------------------------------------------------
    def _timing_of(self, grid: Grid) -> Timing:
        """Returns the timing of a launch that has ended. Its time begins at the end of the previous launch."""
        trace, used = grid.trace, self.memory.counters.since(grid.at_start)
        factor, hbm_bytes, l2_bytes = 1 / grid.share, used.hbm_bytes, used.l2_bytes
        if grid.middle is not None:
            hbm_bytes += round(grid.middle.hbm_bytes * (factor - 1))
            l2_bytes += round(grid.middle.l2_bytes * (factor - 1))
        hbm_bytes = max(hbm_bytes, grid.least_bytes)
        return Timing(
            trace.kernel,
            self.constants,
            self.now - self._end_before(grid),
            hbm_bytes,
            l2_bytes,
            sum(cluster.loaded for cluster in trace.clusters),
            sum(cluster.stored for cluster in trace.clusters),
            hbm_bytes / self.constants.hbm_bandwidth if grid.share < 1 else used.hbm_busy,
            grid.busy,
            [
                (sm.mma_busy - earlier) * factor
                for sm, earlier in zip(self.sms, grid.mma_at_start, strict=True)
            ],
            stalls_of(grid.finished),
            critical_path(grid.finished) if grid.finished and self.explained else {},
        )

    def _least(self) -> float:
        """Returns the earliest time at which device memory can have moved the launches' reads and evicted writes.

        Results that later launches use may stay in L2, but those of the last launch may not, because the traffic bounds a graph
        that is launched repeatedly. A single launch with results that fit in L2 could end earlier.
        """
        first, last = self.grids[0], self.grids[-1]
        replayed = self.memory.counters.since(last.at_start).stored_bytes
        written = max(replayed, sum(cluster.stored for cluster in last.trace.clusters))
        nbytes = sum(timing.hbm_bytes for timing in self._timings) + last.at_start.left_bytes + written
        return first.start + nbytes / self.constants.hbm_peak

    def _result(self) -> ChainTiming:
        ended = self.grids[-1].ended or 0.0
        self._timings[-1].cycles += self.constants.launch / 2 + max(0.0, self._least() - ended)
        finished = [warp for grid in self.grids for warp in grid.finished]
        return ChainTiming(
            self.constants,
            self._timings,
            lanes_of(finished, self.sms) if self.timeline else [],
            self.memory.log,
        )


def _count_events(trace: LaunchTrace) -> int:
    return sum(len(events) for cluster in trace.clusters for cta in cluster.warps for events in cta)


def _least_bytes(constants: Constants, trace: LaunchTrace, launches: Sequence[LaunchTrace]) -> int:
    """Returns the bytes of `reads` that no launch writes, so they come from device memory."""
    written = sorted(piece for launch in launches for piece in launch.writable)
    starts = [address for address, _ in written]

    def is_written(address: int) -> bool:
        place = bisect_right(starts, address)
        return place > 0 and address < sum(written[place - 1])

    return Memory(constants).know(piece for piece in trace.reads if not is_written(piece[0]))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection.

    A replay makes millions of objects without cycles; searching cycles took a third of its time.
    """
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
    """Returns the modelled time of a recorded launch.

    `timeline`: keep the actions of every warp. `all_layouts`: model the time in every layout of memory, not only in the
    first.

    Raises:
        EmulatorError: warps wait for events that never come, or a cluster is larger than the GPU's groups of SMs.
    """
    chain = replay_chain(constants, [trace], timeline=timeline)
    (timing,) = chain.launches
    timing.lanes, timing.memory_log = chain.lanes, chain.memory_log
    others = range(1, LAYOUTS) if all_layouts else ()
    timing.elsewhere = [Replay(constants, [trace], layout=layout).run().cycles for layout in others]
    return timing


def replay_chain(
    constants: Constants, traces: Sequence[LaunchTrace], *, timeline: bool = False, explained: bool = True
) -> ChainTiming:
    """Returns the modelled time of recorded launches, one after the other in a CUDA graph.

    `timeline`: keep the actions of every warp. `explained`: return the causes of waits.

    Raises:
        EmulatorError: see `replay`.
    """
    return Replay(constants, traces, timeline=timeline, explained=explained).run()

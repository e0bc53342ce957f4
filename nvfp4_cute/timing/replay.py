"""The time of launches, modelled: the recorded events of all their warps replayed on the SMs of a GPU.

A discrete-event simulation. Warps run through their events; what they share is a queue that serves in order of time:
the four schedulers, matrix pipes and the copy engine of each SM, L2 and device memory of the GPU. Waits end when the
barrier's arrivals and bytes have come. The same trace gives the same time.
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
    """Replays the clusters of launches that follow each other in a CUDA graph. `run` once.

    A launch starts when the one before it has ended; a programmatic one as soon as all CTAs of that one let it, where SMs have
    room. Its L1 caches and tensor maps are its own, L2 is that of all.

    Attributes:
        grids: the launches.  sms: of the GPU.
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
        """`timeline`: keep what every warp did when. `explained`: keep what it waited for, if that is not too much.

        `layout`: where memory lies, as ``Memory`` takes it.
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
            self.grids[-1].least_bytes = _least_bytes(trace, [grid.trace for grid in self.grids])
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
        """Replay everything.

        Raises:
            EmulatorError: warps wait for what never comes: the trace is not that of a whole launch.
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
        """The CTAs of a launch may start."""
        grid.is_due, grid.start = True, time
        # Device memory first sends what the launch before reads, which may last longer than until this one may start.
        free = time if grid.before is None else max(time, grid.before.least)
        grid.least = free + grid.least_bytes / self.constants.hbm_bandwidth
        self._count_from_here(grid)
        self._begun.append(grid)
        self._place(time)

    def _count_from_here(self, grid: Grid) -> None:
        """What memory and matrix pipes do from now on counts as the launch's, whichever one's it is."""
        grid.at_start = self.memory.counters
        grid.mma_at_start = [sm.mma_busy for sm in self.sms]

    def _let_next(self, grid: Grid) -> None:
        """The launch behind a launch may start from now on."""
        following = self._after(grid)
        if following is not None and not following.is_due:
            following.is_due = True
            c = self.constants
            time = self.now + (c.next_programmatic if following.trace.programmatic else c.next_launch)
            self.at(time, self._begin, following, time)

    def _end_what_was_begun(self) -> None:
        """Nothing goes on: of a launch whose clusters are not there to their end, some warps wait for what others would do.

        It ends when all would have ended who go on as they did since their marks.
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
                if any(begun.waiting for begun in self._begun):  # for the room that its CTAs had
                    self.at(end + self.constants.cta_start, self._place, end + self.constants.cta_start)
                return

    def _after(self, grid: Grid) -> Grid | None:
        number = self.grids.index(grid) + 1
        return self.grids[number] if number < len(self.grids) else None

    def trigger(self, cta: Cta) -> None:
        """A CTA lets the next launch start, as far as it is concerned."""
        if cta.triggered:
            return
        cta.triggered, grid = True, cta.grid
        grid.untriggered -= 1
        following = self._after(grid)
        if not grid.untriggered and following is not None and following.trace.programmatic:
            self._let_next(grid)

    def _complete(self, grid: Grid | None) -> None:
        """What a launch did is done, unless one before it is not: then it ends with that one, or later by itself."""
        while grid is not None and grid.ended is None and not grid.left and grid.last <= self.now:
            if grid.before is not None and grid.before.ended is None:
                return
            grid.ended = self.now
            self.memory.settle(grid.trace.writable, self.now)
            self._timings.append(self._timing_of(grid))
            following = self._after(grid)
            if following in self._begun:  # what it did meanwhile was counted as this one's, as its time was
                self._count_from_here(following)
            resumed = self.now + self.constants.released
            for warp, since in grid.waiters:
                self.stall(warp, since, resumed, "launch before")
                self.at(resumed, self.advance, warp, resumed)
            self._let_next(grid)
            grid = self._after(grid)

    # ---- CTAs and warps ------------------------------------------------------------------------------
    def _place(self, time: float, before: Warp | None = None) -> None:
        """Put waiting clusters on SMs that have room, the emptiest first. `before`: the warp whose end made it."""
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
        """When the launch before a launch ended, or else now."""
        if grid.before is None:
            return 0.0
        return self.now if grid.before.ended is None else grid.before.ended

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
        cta, cluster, grid = warp.cta, warp.cta.cluster, warp.cta.grid
        warp.ended = time
        grid.last = max(grid.last, time, cta.written)
        grid.finished.append(warp)
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

    # ---- what came of it -----------------------------------------------------------------------------
    def _timing_of(self, grid: Grid) -> Timing:
        """Of a launch that has ended; its time begins where that of the launch before ends."""
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
        """When device memory can have moved what launches read, and what has to leave, at the earliest.

        Results that later launches use may stay in L2, and those of the last launch may not: a graph that is launched again and
        again is no faster than its traffic. What has room in L2 would let a single launch end earlier.
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


def _least_bytes(trace: LaunchTrace, launches: Sequence[LaunchTrace]) -> int:
    """Of `reads`: what no launch writes, so that it comes from device memory."""
    written = sorted(piece for launch in launches for piece in launch.writable)
    starts = [address for address, _ in written]

    def is_written(address: int) -> bool:
        place = bisect_right(starts, address)
        return place > 0 and address < sum(written[place - 1])

    return sum(nbytes for address, nbytes in trace.reads if not is_written(address))


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
    chain = replay_chain(constants, [trace], timeline=timeline)
    (timing,) = chain.launches
    timing.lanes, timing.memory_log = chain.lanes, chain.memory_log
    others = range(1, LAYOUTS) if all_layouts else ()
    timing.elsewhere = [Replay(constants, [trace], layout=layout).run().cycles for layout in others]
    return timing


def replay_chain(
    constants: Constants, traces: Sequence[LaunchTrace], *, timeline: bool = False, explained: bool = True
) -> ChainTiming:
    """The modelled time of recorded launches, one after the other in a CUDA graph.

    `timeline`: keep what every warp did when. `explained`: say what warps waited for.

    Raises:
        EmulatorError: as of `replay`.
    """
    return Replay(constants, traces, timeline=timeline, explained=explained).run()

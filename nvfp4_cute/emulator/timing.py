"""The time of a launch, modelled: the recorded events of all its warps replayed on the SMs of a GPU at once.

A discrete-event simulation. Warps run through their events; what they share is a queue that serves in order of time:
the four schedulers, matrix pipes and the copy engine of each SM, L2 and device memory of the GPU. Waits end when the
barrier's arrivals and bytes have come. The same trace gives the same time.
"""

import gc
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from typing import Any

from nvfp4_cute.emulator.machine import RANK_SHIFT
from nvfp4_cute.emulator.timing_constants import Constants
from nvfp4_cute.emulator.timing_events import ClusterTrace, Event, LaunchTrace, Op, Piece
from nvfp4_cute.emulator.timing_memory import Memory
from nvfp4_cute.errors import EmulatorError

NAME_CHARACTERS = 60
SCHEDULERS = 4
"""Of an SM; warp i belongs to scheduler i mod 4."""
MOST_EXPLAINED = 2_000_000
"""Events of a launch whose causes of time are kept: they take a few hundred bytes each."""


@dataclass(frozen=True)
class Span:
    """A piece of a warp's time, in cycles: computing or a stall, and for a stall who ended it and what that did.

    Attributes:
        cause: "compute", or what was waited for.  by: the warp whose action ended the stall, or None.
        since: when that warp acted.
    """

    start: float
    end: float
    cause: str
    by: "_Warp | None" = None
    since: float = 0.0


@dataclass
class Timing:
    """The modelled time of a launch, and what it consists of.

    Attributes:
        kernel: its name.  constants: the GPU.  cycles: from the launch to its end.
        hbm_bytes: read from device memory.  l2_bytes: that SMs read from L2.
        requested_bytes / stored_bytes: that the instructions ask for and store, in whole 32-byte sectors of global memory.
        hbm_busy: cycles that device memory worked.
        sm_busy: cycles that each SM had a CTA.  mma_busy: cycles that its matrix pipes worked.
        stalls: warp cycles by role and cause.  critical: cycles of the critical path by cause. Both are empty for a launch of
            more than `MOST_EXPLAINED` events without a timeline.
        lanes, memory_log: the timeline, where it was asked for: rows of spans, and (cycles, bytes) of every read of
            device memory.
    """

    kernel: str
    constants: Constants
    cycles: float
    hbm_bytes: int
    l2_bytes: int
    requested_bytes: int
    stored_bytes: int
    hbm_busy: float
    sm_busy: list[float]
    mma_busy: list[float]
    stalls: dict[str, dict[str, float]]
    critical: dict[str, float]
    lanes: list["Lane"] = field(default_factory=list)
    memory_log: list[tuple[float, int]] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Microseconds."""
        return self.constants.us(self.cycles)

    @property
    def mma_percent(self) -> float:
        """Share of the kernel's time that the matrix pipes of all SMs worked."""
        return 100 * sum(self.mma_busy) / (self.cycles * self.constants.num_sms)

    @property
    def hbm_percent(self) -> float:
        """Share of the kernel's time that device memory worked."""
        return 100 * self.hbm_busy / self.cycles

    @property
    def tail_us(self) -> float:
        """How much longer the last SM worked than the average one."""
        busy = [cycles for cycles in self.sm_busy if cycles]
        return self.constants.us(max(busy) - sum(busy) / len(busy)) if busy else 0.0

    def report(self) -> str:
        """What took the time, as text."""
        clock = self.constants.clock_hz / 1e6
        lines = [
            f"{self.kernel[:NAME_CHARACTERS]}: {self.us:.2f} us (modelled) on {self.constants.name}",
            f"  device memory {self.hbm_bytes / 1e6:.2f} MB read, busy {self.hbm_percent:.0f} %; "
            f"L2 {self.l2_bytes / 1e6:.2f} MB; matrix pipes busy {self.mma_percent:.0f} %; "
            f"{sum(map(bool, self.sm_busy))} SMs used, tail {self.tail_us:.2f} us",
        ]
        if self.critical:
            lines.append("  critical path: " + _shares(self.critical, clock))
        for role, causes in sorted(self.stalls.items()):
            lines.append(f"  {role}: " + _shares(causes, clock))
        return "\n".join(lines)


def _shares(cycles: dict[str, float], clock_mhz: float) -> str:
    total = sum(cycles.values()) or 1.0
    parts = sorted(cycles.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{cause} {value / clock_mhz:.2f} us ({100 * value / total:.0f} %)" for cause, value in parts
    )


@dataclass
class Lane:
    """A row of a timeline: an SM, what the row shows, its spans, and where it stands among the rows of the SM."""

    sm: int
    name: str
    spans: list[Span]
    order: int = 0


# ---- parts of an SM --------------------------------------------------------------------------------------------------
class _Sm:
    """What the warps of an SM share."""

    def __init__(self, index: int, gpc: int):
        self.index, self.gpc = index, gpc
        self.ctas = 0
        self.warm: set[int] = set()
        self.maps: dict[int, float] = {}  # tensor map -> when it is there
        self.schedulers = [0.0] * SCHEDULERS
        self.alus = [0.0] * SCHEDULERS
        self.matrix = [0.0] * SCHEDULERS
        self.pipe = self.last_copy = self.copy_pipe = self.last_start = 0.0
        self.tensor_loads = [0.0] * SCHEDULERS
        self.copies: deque[tuple[Any, ...]] = deque()
        self.engine_busy = False
        self.ingress = self.egress = self.memory_port = self.port = self.exchange_port = 0.0
        self.mma_busy = self.busy = self.since = 0.0
        self.lines: dict[int, float] = {}
        self.engine_spans: list[Span] = []
        self.matrix_spans: list[Span] = []


class _Barrier:
    """An mbarrier in time."""

    __slots__ = ("count", "last", "pending", "phase", "tx", "waiting")

    def __init__(self, count: int):
        self.count = self.pending = count
        self.phase = self.tx = 0
        self.waiting: list[tuple[int, _Warp, float]] = []
        self.last: tuple[str, _Warp | None, float] = ("", None, 0.0)


class _Named:
    """A named barrier or the cluster barrier: who has come, who waits."""

    __slots__ = ("arrived", "expected", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.expected = 0
        self.waiting: list[tuple[_Warp, float]] = []


class _Word:
    """A word of global memory that warps wait for: writes that L2 has, who waits for how many, and since when looks arrive."""

    __slots__ = ("waiting", "writes")

    def __init__(self) -> None:
        self.writes = 0
        self.waiting: list[tuple[int, _Warp, float, float]] = []


class _Warp:
    """A warp and its place."""

    __slots__ = (
        "async_groups", "copied", "cta", "events", "groups", "index", "open_async", "open_stores", "open_wgmma", "passed", "position",
        "reads", "role", "scheduler", "sm", "spans", "stores", "tensor_done", "tensor_stored", "wgmmas",
    )  # fmt: skip

    def __init__(self, cta: "_Cta", index: int, events: list[Event]):
        self.cta, self.index, self.events, self.sm = cta, index, events, cta.sm
        self.scheduler = index % SCHEDULERS
        self.position = self.passed = 0
        self.role = ""
        self.spans: list[Span] = []
        self.reads: dict[int, float] = {}
        self.copied: dict[int, float] = {}
        self.stores: list[float] = []
        self.open_stores = 0.0
        self.wgmmas: list[float] = []
        self.open_wgmma = 0.0
        self.async_groups: list[float] = []
        self.open_async = 0.0
        self.tensor_done = self.tensor_stored = 0.0


class _Cta:
    """A CTA on its SM."""

    __slots__ = ("cluster", "live", "named", "number", "rank", "sm", "start", "warps", "written")

    def __init__(self, cluster: "_Cluster", rank: int, sm: _Sm):
        self.cluster, self.rank, self.sm = cluster, rank, sm
        self.named: dict[int, _Named] = defaultdict(_Named)
        self.warps: list[_Warp] = []
        self.live = 0
        self.start = self.written = 0.0
        self.number = 0


class _Cluster:
    """A cluster: its CTAs, mbarriers by address, and cluster barrier."""

    __slots__ = ("barrier", "barriers", "ctas", "live", "phase", "slot", "trace")

    def __init__(self, trace: ClusterTrace):
        self.trace = trace
        self.ctas: list[_Cta] = []
        self.barriers: dict[int, _Barrier] = {}
        self.barrier = _Named()
        self.phase = 0
        self.live = 0


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
class Simulation:
    """Replays the clusters of one launch. `run` once."""

    def __init__(self, constants: Constants, trace: LaunchTrace, *, timeline: bool = False):
        """`timeline`: keep what every warp did when."""
        self.constants, self.trace = constants, trace
        self.memory = Memory(constants, keep_log=timeline)
        self.timeline = timeline
        self._explained = timeline or _count_events(trace) <= MOST_EXPLAINED
        self.now = self.last = 0.0
        self._gpcs: list[list[_Sm]] = [[] for _ in constants.gpcs]
        for gpc, count in enumerate(constants.gpcs):
            first = sum(constants.gpcs[:gpc])
            self._gpcs[gpc] = [_Sm(i, gpc) for i in range(first, first + count)]
        self.sms = [sm for group in self._gpcs for sm in group]
        self._waiting = deque(trace.clusters)
        self._heap: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._sequence = self._started = 0
        self._finished: list[_Warp] = []
        self._per_sm = trace.ctas_per_sm
        self._sm_cycles = 1 / constants.sm_bandwidth
        self._issue_left = 1 - constants.wgmma_issue
        self._handlers = {op: getattr(self, f"_{op.name.lower()}") for op in Op}
        self._roles: dict[int, str] = {}
        self._intervals: dict[Any, float] = {}
        self._words: dict[int, _Word] = defaultdict(_Word)

    # ---- scheduling ----------------------------------------------------------------------------------
    def _at(self, time: float, action: Any, *args: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, action, args))

    def run(self) -> Timing:
        """Replay everything.

        Raises:
            EmulatorError: warps wait for what never comes: the trace is not that of a whole launch.
        """
        heap = self._heap
        with _no_garbage_collection():
            self._place(self.constants.launch / 2)
            while heap:
                self.now, _, action, args = heappop(heap)
                action(*args)
        if self._waiting or any(sm.ctas for sm in self.sms):
            raise EmulatorError("the replay stopped before the launch ended: a wait was never answered")
        return self._result()

    def _place(self, time: float, before: "_Warp | None" = None) -> None:
        """Put waiting clusters on SMs that have room, the emptiest first. `before`: the warp whose end made it."""
        while self._waiting:
            size = len(self._waiting[0].warps)
            sms = self._room(size)
            if sms is None:
                return
            self._start(_Cluster(self._waiting.popleft()), sms, time, before)

    def _room(self, size: int) -> list[_Sm] | None:
        best: list[_Sm] | None = None
        best_load = 0.0
        for group in self._gpcs:
            free = sorted((sm for sm in group if sm.ctas < self._per_sm), key=lambda sm: (sm.ctas, sm.index))
            if len(free) < size:
                continue
            load = sum(sm.ctas for sm in free[:size]) + sum(sm.ctas for sm in group) / 1000
            if best is None or load < best_load:
                best, best_load = free[:size], load
        return best

    def _start(self, cluster: _Cluster, sms: list[_Sm], time: float, before: "_Warp | None") -> None:
        for rank, (sm, warps) in enumerate(zip(sms, cluster.trace.warps, strict=True)):
            cta = _Cta(cluster, rank, sm)
            cta.start = time
            cta.number = self._started
            self._started += 1
            if not sm.ctas:
                sm.since = time
            sm.ctas += 1
            for index, events in enumerate(warps):
                warp = _Warp(cta, index, events)
                warp.role = self._role(events)
                cta.warps.append(warp)
                if before is None:
                    self._stall(warp, 0.0, time, "launch")
                else:
                    self._stall(warp, self.now, time, "CTA start", before, self.now)
                self._at(time, self._advance, warp, time)
            cta.live = len(cta.warps)
            cluster.live += cta.live
            cluster.ctas.append(cta)

    def _role(self, events: list[Event]) -> str:
        found = self._roles.get(id(events))
        if found is None:
            found = self._roles[id(events)] = role_of(events)
        return found

    def _advance(self, warp: _Warp, time: float) -> None:
        """Run a warp from `time` until it blocks, ends, or another one is due."""
        events, handlers, heap = warp.events, self._handlers, self._heap
        count = len(events)
        while warp.position < count:
            if heap and heap[0][0] < time:
                self._at(time, self._advance, warp, time)
                return
            event = events[warp.position]
            warp.position += 1
            self.now = time
            result = handlers[event[0]](warp, time, *event[1:])
            if result is None:
                return  # blocked: whoever wakes it goes on with the next event
            time = result
        self._end(warp, time)

    def _end(self, warp: _Warp, time: float) -> None:
        self.last = max(self.last, time)
        self._finished.append(warp)
        cta, cluster = warp.cta, warp.cta.cluster
        cta.live -= 1
        cluster.live -= 1
        for named in cta.named.values():
            self._complete(named, cta.live, time, len(cta.warps))
        self._complete_cluster(cluster, time)
        if cta.live:
            return
        finished = max([time, *(done for w in cta.warps for done in w.stores)])
        self.last = max(self.last, finished)
        if cluster.live == 0 or len(cluster.ctas) == 1:
            for one in cluster.ctas:
                self._at(finished, self._free, one.sm, warp)

    def _free(self, sm: _Sm, last: "_Warp") -> None:
        sm.ctas -= 1
        if not sm.ctas:
            sm.busy += self.now - sm.since
        if self._waiting:
            self._place(self.now + self.constants.cta_start, last)

    def _stall(
        self, warp: _Warp, start: float, end: float, cause: str, by: _Warp | None = None, since: float = 0.0
    ) -> None:
        if end > start and self._explained:
            warp.spans.append(Span(start, end, cause, by, since))

    # ---- computing -----------------------------------------------------------------------------------
    def _compute(
        self, warp: _Warp, time: float, slots: float, alu: float, port: float, path: float, fresh: int
    ) -> float:
        sm, index = warp.sm, warp.scheduler
        if fresh and warp.cta.start <= self.constants.launch / 2:
            path += fresh * self.constants.fetch
        issued = sm.schedulers[index] = self._worked(sm, index, max(sm.schedulers[index], time), slots)
        done = sm.alus[index] = self._worked(sm, index, max(sm.alus[index], time), alu)
        sm.port = max(sm.port, time) + port
        end = max(time + path, issued, done, sm.port if port else 0.0)
        self._stall(warp, time, end, "compute")
        return end

    def _worked(self, sm: _Sm, index: int, start: float, cycles: float) -> float:
        """When `cycles` of a scheduler or an ALU are done, which wgmma slows down: it uses registers, too."""
        left = self._issue_left
        if left == 1:
            return start + cycles
        beside = sm.matrix[index] - start
        if beside <= 0:
            return start + cycles
        return start + cycles / left if cycles <= beside * left else start + cycles + beside * (1 - left)

    def _matrix(self, warp: _Warp, time: float, element: str, flops: int) -> float:
        sm, index = warp.sm, warp.scheduler
        cycles = SCHEDULERS * flops / self.constants.matrix_rate(element)
        start = max(sm.matrix[index], time)
        sm.matrix[index] = start + cycles
        sm.mma_busy += cycles / SCHEDULERS
        self._stall(warp, time, start, "matrix pipe")
        return start + 1

    def _sleep(self, warp: _Warp, time: float, nanoseconds: int) -> float:
        end = time + nanoseconds * self.constants.clock_hz / 1e9
        self._stall(warp, time, end, "sleep")
        return end

    # ---- mbarriers -----------------------------------------------------------------------------------
    def _init(self, warp: _Warp, time: float, barrier: int, count: int) -> float:
        warp.cta.cluster.barriers[barrier] = _Barrier(count)
        return time + 2

    def _arrive(self, warp: _Warp, time: float, barrier: int, count: int) -> float:
        cluster = warp.cta.cluster
        if barrier >> RANK_SHIFT == warp.cta.rank:
            self._arrived(cluster, barrier, count, 0, "arrival", warp, time)
        else:
            remote = time + self.constants.arrive_remote
            self._at(remote, self._arrived, cluster, barrier, count, 0, "arrival", warp, time)
        return time + 4

    def _drop(self, warp: _Warp, time: float, barrier: int, count: int) -> float:
        warp.cta.cluster.barriers[barrier].count -= count
        return self._arrive(warp, time, barrier, count)

    def _tx(self, warp: _Warp, time: float, barrier: int, nbytes: int) -> float:
        self._arrived(warp.cta.cluster, barrier, 0, -nbytes, "arrival", warp, time)
        return time + 2

    def _arrived(
        self,
        cluster: _Cluster,
        place: int,
        count: int,
        nbytes: int,
        what: str,
        by: _Warp | None,
        since: float,
    ) -> None:
        """Arrivals and completed bytes; wakes who waits if they complete the phase."""
        barrier = cluster.barriers[place]
        barrier.pending -= count
        barrier.tx -= nbytes
        if barrier.pending or barrier.tx:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.last = (what, by, since)
        if barrier.waiting:
            waiting, barrier.waiting = barrier.waiting, []
            end = self.now + self.constants.wake
            for needed, warp, start in waiting:
                if barrier.phase >= needed:
                    self._stall(warp, start, end, _cause(warp, what, by), by, since)
                    self._at(end, self._advance, warp, end)
                else:
                    barrier.waiting.append((needed, warp, start))

    def _wait(self, warp: _Warp, time: float, place: int, needed: int) -> float | None:
        barrier = warp.cta.cluster.barriers[place]
        if barrier.phase >= needed:
            return time + self.constants.wait_ready
        barrier.waiting.append((needed, warp, time))
        return None

    # ---- named barriers and the cluster barrier ------------------------------------------------------
    def _barrier(self, warp: _Warp, time: float, number: int, threads: int, waits: bool) -> float | None:
        named, cta = warp.cta.named[number], warp.cta
        named.arrived += 1
        named.expected = threads // 32
        if waits:
            named.waiting.append((warp, time))
        self._complete(named, cta.live, time, named.expected or cta.live)
        return None if waits else time + 4

    def _complete(self, named: _Named, live: int, time: float, warps: int) -> None:
        needed = named.expected or live
        if not named.arrived or named.arrived < needed:
            return
        named.arrived = 0
        end = time + self.constants.barrier_base + self.constants.barrier_per_warp * warps
        waiting, named.waiting = named.waiting, []
        last = waiting[-1][0] if waiting else None
        for warp, start in waiting:
            self._stall(warp, start, end, "barrier", last, time)
            self._at(end, self._advance, warp, end)

    def _cluster_arrive(self, warp: _Warp, time: float) -> float:
        cluster = warp.cta.cluster
        cluster.barrier.arrived += 1
        warp.passed = cluster.phase
        self._complete_cluster(cluster, time)
        return time + 4

    def _complete_cluster(self, cluster: _Cluster, time: float) -> None:
        barrier = cluster.barrier
        if barrier.arrived and barrier.arrived >= cluster.live:
            barrier.arrived = 0
            cluster.phase += 1
            end = time + self.constants.cluster_barrier
            waiting, barrier.waiting = barrier.waiting, []
            for warp, start in waiting:
                self._stall(warp, start, end, "cluster barrier", None, time)
                self._at(end, self._advance, warp, end)

    def _cluster_wait(self, warp: _Warp, time: float) -> float | None:
        cluster = warp.cta.cluster
        if cluster.phase > warp.passed:
            return time + self.constants.cluster_barrier / 2
        cluster.barrier.waiting.append((warp, time))
        return None

    # ---- bulk copies ---------------------------------------------------------------------------------
    def _load(
        self,
        warp: _Warp,
        time: float,
        pieces: tuple[Piece, ...],
        nbytes: int,
        signals: Any,
        ranks: Any,
        tensor_map: int,
        instruction: int,
    ) -> float:
        start = max(time, warp.copied.get(instruction, 0.0))
        self._stall(warp, time, start, "TMA issue")
        warp.copied[instruction] = start + self.constants.tma_reissue
        self._at(start, self._queue_copy, warp.sm, (warp, start, pieces, nbytes, signals, ranks, tensor_map))
        return start + 4

    def _queue_copy(self, sm: _Sm, copy: tuple[Any, ...]) -> None:
        sm.copies.append(copy)
        if not sm.engine_busy:
            sm.engine_busy = True
            self._next_copy(sm)

    def _next_copy(self, sm: _Sm) -> None:
        """The copy engine of an SM takes the next instruction."""
        if not sm.copies:
            sm.engine_busy = False
            return
        self._at(self.now + self._fetch_tile(sm, *sm.copies.popleft()), self._next_copy, sm)

    def _fetch_tile(
        self,
        sm: _Sm,
        warp: _Warp,
        issued: float,
        pieces: Any,
        nbytes: int,
        signals: Any,
        ranks: Any,
        tensor_map: int,
    ) -> float:
        """Ask memory for a tile; returns how long the engine is busy with it."""
        c, start, cluster = self.constants, self.now, warp.cta.cluster
        if tensor_map:
            start = max(start, sm.maps.setdefault(tensor_map, start + c.descriptor_latency))
        there = start + (c.l2_latency if not pieces else 0)
        hit = True
        for piece in pieces:
            reply = self.memory.read(piece, start, sm.gpc)
            there = max(there, reply.time)
            hit = hit and reply.hit
        what = "L2 data" if hit else "memory data"
        for rank, place in zip(ranks, signals, strict=True):
            target = cluster.ctas[rank].sm
            target.ingress = max(target.ingress + nbytes * self._sm_cycles, there)
            done = target.ingress + c.copy_latency
            self._at(done, self._arrived, cluster, place, 0, nbytes, what, warp, issued)
        busy = max(c.tma_issue, nbytes * self._sm_cycles)
        if self.timeline:
            sm.engine_spans.append(Span(self.now, self.now + busy, what))
        return busy

    def _prefetch(
        self, warp: _Warp, time: float, pieces: tuple[Piece, ...], nbytes: int, tensor_map: int
    ) -> float:
        self._at(time, self._queue_copy, warp.sm, (warp, time, pieces, nbytes, (), (), tensor_map))
        return time + 4

    def _prefetch_map(self, warp: _Warp, time: float, maps: tuple[int, ...]) -> float:
        for tensor_map in maps:
            warp.sm.maps.setdefault(tensor_map, time + self.constants.descriptor_latency)
        return time + 1

    def _exchange(self, warp: _Warp, time: float, nbytes: int, signals: Any) -> float:
        sm = warp.sm
        sm.exchange_port = max(sm.exchange_port, time) + nbytes / self.constants.exchange_bandwidth
        end = sm.exchange_port + self.constants.arrive_remote
        for place in signals:
            self._at(end, self._arrived, warp.cta.cluster, place, 0, nbytes, "cluster data", warp, time)
        # An instruction of 32 lanes is 32 of these.
        return time + min(4.0, nbytes / self.constants.smem_bandwidth)

    def _take_over(self, warp: _Warp, time: float, signals: Any, nbytes: int) -> float:
        end = time + 2 * self.constants.l2_latency
        for place in signals:
            self._at(end, self._arrived, warp.cta.cluster, place, 0, nbytes, "work", warp, time)
        return time + 4

    def _store(self, warp: _Warp, time: float, pieces: tuple[Piece, ...], nbytes: int) -> float:
        sm = warp.sm
        sm.egress = max(sm.egress, time) + max(self.constants.tma_issue, nbytes * self._sm_cycles)
        done = (
            max([sm.egress, *(self.memory.write(piece, time) for piece in pieces)])
            + self.constants.store_latency
        )
        warp.open_stores = max(warp.open_stores, done)
        return time + 4

    def _commit_stores(self, warp: _Warp, time: float) -> float:
        warp.stores.append(warp.open_stores)
        warp.open_stores = 0.0
        return time

    def _wait_stores(self, warp: _Warp, time: float, pending: int, only_reads: bool) -> float:
        covered = warp.stores[: len(warp.stores) - pending]
        end = max([time, *covered])
        if not only_reads:
            del warp.stores[: len(covered)]
        self._stall(warp, time, end, "store")
        return end

    # ---- tensor memory and matrix instructions -------------------------------------------------------
    def _mma(self, warp: _Warp, time: float, shape: tuple[str, int, int, int, bool]) -> float:
        interval = self._intervals.get(shape)
        if interval is None:
            interval = self._intervals[shape] = self.constants.mma_interval(*shape)
        sm = warp.sm
        start = max(sm.pipe, sm.last_copy, time)
        sm.last_start, sm.pipe = start, start + interval
        for cta in self._pair(warp, shape[3]):
            cta.sm.mma_busy += interval
            if self.timeline:
                cta.sm.matrix_spans.append(Span(start, start + interval, "MMA"))
        return time + 4

    def _pair(self, warp: _Warp, cta_group: int) -> Sequence[_Cta]:
        if cta_group == 1:
            return (warp.cta,)
        even = warp.cta.rank & ~1
        return warp.cta.cluster.ctas[even : even + 2]

    def _tensor_copy(self, warp: _Warp, time: float, nbytes: int, cta_group: int) -> float:
        sm = warp.sm
        sm.copy_pipe = max(sm.copy_pipe, sm.last_start, time) + nbytes / self.constants.tensor_copy_bandwidth
        sm.last_copy = sm.copy_pipe
        return time + 4

    def _commit_mma(self, warp: _Warp, time: float, places: tuple[int, ...]) -> float:
        sm, cluster = warp.sm, warp.cta.cluster
        done = max(sm.pipe, sm.last_copy, time) + self.constants.commit_latency - self.constants.wake
        for place in places:
            remote = place >> RANK_SHIFT != warp.cta.rank
            when = done + (self.constants.arrive_remote / 2 if remote else 0)
            self._at(when, self._arrived, cluster, place, 1, 0, "MMA", warp, time)
        return time + 4

    def _tensor_load(self, warp: _Warp, time: float, columns: int) -> float:
        free = warp.sm.tensor_loads
        free[warp.scheduler] = max(free[warp.scheduler], time) + columns
        warp.tensor_done = free[warp.scheduler] + self.constants.tensor_load_latency
        return time + 2

    def _tensor_store(self, warp: _Warp, time: float, columns: int) -> float:
        free = warp.sm.tensor_loads
        free[warp.scheduler] = max(free[warp.scheduler], time) + columns
        warp.tensor_stored = free[warp.scheduler] + self.constants.tensor_load_latency
        return time + 2

    def _wait_tensor_load(self, warp: _Warp, time: float) -> float:
        end = max(time, warp.tensor_done)
        self._stall(warp, time, end, "tensor memory")
        return end

    def _wait_tensor_store(self, warp: _Warp, time: float) -> float:
        end = max(time, warp.tensor_stored)
        self._stall(warp, time, end, "tensor memory")
        return end

    def _allocate(self, warp: _Warp, time: float) -> float:
        self._stall(warp, time, time + self.constants.allocate, "tensor memory allocation")
        return time + self.constants.allocate

    def _wgmma(self, warp: _Warp, time: float, shape: tuple[str, int, bool]) -> float:
        interval = self._intervals.get(shape)
        if interval is None:
            interval = self._intervals[shape] = self.constants.wgmma_interval(*shape)
        sm, index = warp.sm, warp.scheduler
        start = max(sm.matrix[index], time)
        sm.matrix[index] = start + interval
        sm.mma_busy += interval / SCHEDULERS
        warp.open_wgmma = start + interval
        if self.timeline and index == 0:
            sm.matrix_spans.append(Span(start, start + interval, "MMA"))
        return time + 2

    def _commit_wgmma(self, warp: _Warp, time: float) -> float:
        warp.wgmmas.append(warp.open_wgmma)
        return time

    def _wait_wgmma(self, warp: _Warp, time: float, pending: int) -> float:
        covered = warp.wgmmas[: len(warp.wgmmas) - pending]
        del warp.wgmmas[: len(covered)]
        end = max([time, *(done + self.constants.wgmma_latency for done in covered)])
        self._stall(warp, time, end, "MMA")
        return end

    # ---- global memory by threads --------------------------------------------------------------------
    def _fetch_lines(self, warp: _Warp, time: float, lines: tuple[Piece, ...]) -> float:
        """When the last line is there; the SM takes a line a cycle, and reads none twice while it remembers it."""
        sm, there = warp.sm, time
        sm.memory_port = max(sm.memory_port, time)
        for line in lines:
            sm.memory_port += max(1.0, line[1] * self._sm_cycles)
            known = sm.lines.get(line[0])
            if known is None:
                known = sm.lines[line[0]] = self.memory.read(line, time, sm.gpc).time
            there = max(there, known, sm.memory_port)
        return there

    def _read(self, warp: _Warp, time: float, number: int, lines: tuple[Piece, ...]) -> float:
        warp.reads[number] = self._fetch_lines(warp, time, lines)
        return time + 1

    def _atomic(self, warp: _Warp, time: float, number: int, lines: tuple[Piece, ...]) -> float:
        done = max([self.memory.read(line, time, warp.sm.gpc).time for line in lines], default=time)
        warp.reads[number] = done
        return time + 1

    def _use(self, warp: _Warp, time: float, number: int) -> float:
        end = max(time, warp.reads.get(number, time))
        self._stall(warp, time, end, "global load")
        return end

    def _write(self, warp: _Warp, time: float, lines: tuple[Piece, ...]) -> float:
        sm = warp.sm
        for line in lines:
            sm.memory_port = max(sm.memory_port, time) + max(1.0, line[1] * self._sm_cycles)
            warp.cta.written = max(warp.cta.written, self.memory.write(line, time))
        self.last = max(self.last, warp.cta.written)
        return max(time + 1, sm.memory_port - 200)

    # ---- waiting for other CTAs through global memory ------------------------------------------------
    def _fence(self, warp: _Warp, time: float) -> float:
        """Wait until L2 has confirmed what the CTA wrote."""
        end = max(time + self.constants.l2_latency, warp.cta.written + self.constants.store_latency)
        self._stall(warp, time, end, "fence")
        return end

    def _signal(self, warp: _Warp, time: float, words: tuple[int, ...]) -> float:
        self._at(time + self.constants.l2_latency / 2, self._written, words, warp, time)
        return time + 1

    def _written(self, words: tuple[int, ...], by: _Warp, since: float) -> None:
        """L2 has a write of each of some words: looks that come from now on see it."""
        for address in words:
            word = self._words[address]
            word.writes += 1
            waiting, word.waiting = word.waiting, []
            for needed, warp, start, look in waiting:
                if word.writes < needed:
                    word.waiting.append((needed, warp, start, look))
                    continue
                # Looks follow each other, each asked for when the one before has answered.
                between = self.constants.l2_latency
                look += max(0, ceil((self.now - look) / between)) * between
                end = look + between / 2
                self._stall(warp, start, end, "other CTAs", by, since)
                self._at(end, self._advance, warp, end)

    def _poll(self, warp: _Warp, time: float, address: int, needed: int, lines: tuple[Piece, ...]) -> None:
        """Look at a word until it has been written as often as it takes."""
        answer = max(self.memory.read(line, time, warp.sm.gpc).time for line in lines)
        look = answer - self.constants.l2_latency / 2
        self._at(look, self._look, warp, time, address, needed, look)

    def _look(self, warp: _Warp, start: float, address: int, needed: int, look: float) -> None:
        word = self._words[address]
        if word.writes < needed:
            word.waiting.append((needed, warp, start, look))
            return
        end = look + self.constants.l2_latency / 2
        self._stall(warp, start, end, "global load")
        self._at(end, self._advance, warp, end)

    def _async_read(self, warp: _Warp, time: float, lines: tuple[Piece, ...]) -> float:
        warp.open_async = max(warp.open_async, self._fetch_lines(warp, time, lines))
        return time + 1

    def _commit_async(self, warp: _Warp, time: float) -> float:
        warp.async_groups.append(warp.open_async)
        return time

    def _wait_async(self, warp: _Warp, time: float, pending: int) -> float:
        covered = warp.async_groups[: len(warp.async_groups) - pending]
        end = max([time, *covered])
        self._stall(warp, time, end, "memory data")
        return end

    def _arrive_async(self, warp: _Warp, time: float, barrier: int, raised: bool) -> float:
        cluster = warp.cta.cluster
        if raised:
            cluster.barriers[barrier].pending += 1
        done = max(time, warp.open_async)
        self._at(done, self._arrived, cluster, barrier, 1, 0, "memory data", warp, time)
        return time + 2

    # ---- the result ----------------------------------------------------------------------------------
    def _result(self) -> Timing:
        stalls: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for warp in self._finished:
            for span in warp.spans:
                stalls[warp.role][span.cause] += span.end - span.start
        cycles = self.last + self.constants.launch / 2
        critical = self._critical_path()
        return Timing(
            self.trace.kernel,
            self.constants,
            cycles,
            self.memory.hbm_bytes,
            self.memory.l2_bytes,
            0,
            0,
            self.memory.hbm_busy,
            [sm.busy for sm in self.sms],
            [sm.mma_busy for sm in self.sms],
            {role: dict(causes) for role, causes in stalls.items()},
            critical,
            self._lanes() if self.timeline else [],
            self.memory.log,
        )

    def _critical_path(self) -> dict[str, float]:
        """Walk back from the warp that ended last, at each stall to whoever ended it; cycles by cause."""
        found: dict[str, float] = defaultdict(float)
        if not (self._finished and self._explained):
            return {}
        warp = max(self._finished, key=lambda w: w.spans[-1].end)
        time, index = warp.spans[-1].end, len(warp.spans) - 1
        while index >= 0 and time > 0:
            span = warp.spans[index]
            if span.start >= time:
                index -= 1
                continue
            if span.by is not None and span.since < time:
                found[span.cause] += time - max(span.since, 0.0)
                time, warp = span.since, span.by
                index = _span_before(warp.spans, time)
                continue
            found[span.cause] += time - span.start
            time, index = span.start, index - 1
        return dict(found)

    def _lanes(self) -> list[Lane]:
        lanes = [
            Lane(w.sm.index, f"warp {w.index}: {w.role} (CTA {w.cta.number})", w.spans, w.cta.number)
            for w in self._finished
        ]
        for sm in self.sms:
            for name, spans in (("TMA", sm.engine_spans), ("tensor cores", sm.matrix_spans)):
                if spans:
                    lanes.append(Lane(sm.index, name, spans, 1 << 30))
        return lanes


def _span_before(spans: list[Span], time: float) -> int:
    """Index of the last span that begins before a time."""
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        if spans[middle].start < time:
            low = middle + 1
        else:
            high = middle
    return low - 1


def _cause(warp: _Warp, what: str, by: _Warp | None) -> str:
    """What a warp waited for, from its role and from what completed the phase."""
    if what == "MMA":
        return "free stage" if warp.role == "load" else "MMA"
    if what == "arrival" and by is not None:
        if warp.role == "load":
            return "free stage"
        if by.role.endswith("epilogue"):
            return "epilogue"
        return f"{by.role} warp"
    return what


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


def replay(constants: Constants, trace: LaunchTrace, *, timeline: bool = False) -> Timing:
    """The modelled time of a recorded launch. `timeline`: keep what every warp did when.

    Raises:
        EmulatorError: warps wait for what never comes, or a cluster is larger than the GPU's groups of SMs.
    """
    timing = Simulation(constants, trace, timeline=timeline).run()
    timing.requested_bytes = sum(cluster.loaded for cluster in trace.clusters)
    timing.stored_bytes = sum(cluster.stored for cluster in trace.clusters)
    return timing

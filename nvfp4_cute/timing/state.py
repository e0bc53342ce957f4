"""State of a replayed launch: warps, CTAs and clusters, their barriers, and the shared parts of an SM."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvfp4_cute.emulator.record.events import ClusterTrace, Event, LaunchTrace
from nvfp4_cute.errors import EmulatorError

SCHEDULERS = 4
"""Schedulers per SM; warp i belongs to scheduler i mod 4."""
Handler = Callable[..., float | None]
"""Handles an event: from simulation, warp, time and operands to when the warp continues; None if something else wakes it."""


@dataclass(frozen=True)
class Span:
    """A piece of a warp's time, in cycles: computing or a stall, with the action that ended the stall.

    Attributes:
        cause: "compute", or the cause of the wait.
        by: the warp whose action ended the stall, or None.
        since: time of that action.
    """

    start: float
    end: float
    cause: str
    by: "Warp | None" = None
    since: float = 0.0


class Sm:
    """State that the warps of an SM share."""

    def __init__(self, index: int, gpc: int):
        self.index, self.gpc = index, gpc
        self.ctas = 0
        self.load = 0.0  # share of its room that CTAs occupy
        self.grid: Grid | None = None  # grid whose CTA started last
        self.maps: dict[int, float] = {}  # tensor map -> time of its arrival
        self.schedulers = [0.0] * SCHEDULERS
        self.alus = [0.0] * SCHEDULERS
        self.blocks: list[list[float]] = [
            [] for _ in range(SCHEDULERS)
        ]  # ends of the blocks that warps execute
        self.matrix = [0.0] * SCHEDULERS
        self.pipe = self.last_copy = self.copy_pipe = self.last_start = 0.0
        self.tensor_loads = [0.0] * SCHEDULERS
        self.copies: deque[tuple[Any, ...]] = deque()
        self.engine_busy = False
        self.ingress = self.egress = self.memory_port = self.port = self.exchange_port = 0.0
        self.mma_busy = 0.0
        self.lines: dict[int, float] = {}
        self.engine_spans: list[Span] = []
        self.matrix_spans: list[Span] = []


class Barrier:
    """State of an mbarrier."""

    __slots__ = ("count", "last", "pending", "phase", "tx", "waiting")

    def __init__(self, count: int):
        self.count = self.pending = count
        self.phase = self.tx = 0
        self.waiting: list[tuple[int, Warp, float]] = []
        self.last: tuple[str, Warp | None, float] = ("", None, 0.0)


class NamedBarrier:
    """A named barrier or the cluster barrier: arrived and waiting warps."""

    __slots__ = ("arrived", "expected", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.expected = 0
        self.waiting: list[tuple[Warp, float]] = []


class Word:
    """A word of global memory that warps poll:

    its writes in L2, waiting warps with their numbers of writes, and times of polls.
    """

    __slots__ = ("waiting", "writes")

    def __init__(self) -> None:
        self.writes = 0
        self.waiting: list[tuple[int, Warp, float, float]] = []


class Groups:
    """Asynchronous work of a warp, which it commits in groups and awaits in that order.

    Attributes:
        done: completion time of all work issued so far.
        committed: for each group that has not been awaited, completion time of it and all earlier groups.
    """

    __slots__ = ("committed", "done")

    def __init__(self) -> None:
        self.done = 0.0
        self.committed: list[float] = []

    def add(self, done: float) -> None:
        """Adds work to the open group."""
        self.done = max(self.done, done)

    def commit(self) -> None:
        """Closes a group."""
        self.committed.append(self.done)

    def wait(self, pending: int) -> float:
        """Returns when all but the newest `pending` groups are done; 0 if there are no others."""
        covered = max(0, len(self.committed) - pending)
        done = self.committed[covered - 1] if covered else 0.0
        del self.committed[:covered]
        return done


class Warp:
    """A warp and its position in its events."""

    __slots__ = (
        "async_reads", "copied", "cta", "ended", "events", "index", "marked", "passed", "position", "reads", "role", "scheduler",
        "sm", "spans", "stores", "tensor_done", "tensor_stored", "wgmmas",
    )  # fmt: skip

    def __init__(self, cta: "Cta", index: int, events: list[Event]):
        self.cta, self.index, self.events, self.sm = cta, index, events, cta.sm
        self.scheduler = index % SCHEDULERS
        self.position = 0
        self.marked = self.ended = -1.0  # times at which it reached its mark, and the end of its events
        # Phase of the cluster barrier at which it arrived last.
        self.passed = -1
        self.role = ""
        self.spans: list[Span] = []
        self.reads: dict[int, float] = {}
        self.copied: dict[int, float] = {}
        self.stores, self.wgmmas, self.async_reads = Groups(), Groups(), Groups()
        self.tensor_done = self.tensor_stored = 0.0


class Cta:
    """A CTA on its SM."""

    __slots__ = (
        "cluster", "grid", "live", "named", "number", "rank", "sm", "start", "triggered", "warps", "written",
    )  # fmt: skip

    def __init__(self, cluster: "Cluster", rank: int, sm: Sm):
        self.cluster, self.rank, self.sm, self.grid = cluster, rank, sm, cluster.grid
        self.triggered = False
        self.named: dict[int, NamedBarrier] = defaultdict(NamedBarrier)
        self.warps: list[Warp] = []
        self.live = 0
        self.start = self.written = 0.0
        self.number = 0


class Cluster:
    """A cluster: its CTAs, mbarriers by address, and cluster barrier."""

    __slots__ = ("barrier", "barriers", "ctas", "grid", "live", "phase", "trace")

    def __init__(self, trace: ClusterTrace, grid: "Grid"):
        self.trace, self.grid = trace, grid
        self.ctas: list[Cta] = []
        self.barriers: dict[int, Barrier] = {}
        self.barrier = NamedBarrier()
        self.phase = 0
        self.live = 0


class Grid:
    """A launch in a chain.

    Attributes:
        before: the previous launch, if any.
        waiting: clusters without an SM so far.
        left: CTAs that have not ended.
        untriggered: CTAs among them that have not allowed the next launch to start.
        room: share of an SM that a CTA occupies.
        is_due: whether its start, `start`, is known.
        ended: time when all of it is done and visible, None before.
        waiters: warps of the next launch that wait for that, with the start of their wait.
        last: latest end of any of its work so far.
        finished: warps that have ended.
        least_bytes: for a partly replayed launch: bytes that it must read from device memory.
        least: time when it has read them.
        share: replayed share of its events.
        marks: warps with marks.
        middle: timing of a replay of tiles in the middle, as a complete launch.
        words: words of global memory, by address.
        busy: cycles in which it had a CTA on each SM.
        at_start: counters of the memory at its start.
    """

    def __init__(self, trace: LaunchTrace, before: "Grid | None", num_sms: int):
        self.trace, self.before = trace, before
        self.waiting = deque(trace.clusters)
        self.left = self.untriggered = sum(len(cluster.warps) for cluster in trace.clusters)
        self.room = 1 / trace.ctas_per_sm
        self.is_due = False
        self.start = self.last = self.least = 0.0
        self.least_bytes = 0
        self.ended: float | None = None
        self.waiters: list[tuple[Warp, float]] = []
        self.finished: list[Warp] = []
        self.words: dict[int, Word] = defaultdict(Word)
        self.busy = [0.0] * num_sms
        self.mma_at_start = [0.0] * num_sms
        self.at_start = Counters()
        events = sum(_count(cluster) for cluster in trace.clusters)
        whole = sum(_count(cluster) / cluster.share for cluster in trace.clusters)
        self.share = events / whole if events else 1.0
        self.marks: list[Warp] = []
        self.middle: Any = None
        self._steady: dict[tuple[float, str], float] = {}
        self._resident: dict[int, int] = defaultdict(int)
        self._since = [0.0] * num_sms

    def occupy(self, sm: int, time: float) -> None:
        """Notes that a CTA starts on an SM."""
        if not self._resident[sm]:
            self._since[sm] = time
        self._resident[sm] += 1

    def resident(self, sm: int) -> int:
        """Returns the number of CTAs on an SM."""
        return self._resident[sm]

    def projected_end(self) -> float:
        """Returns when clusters with a replayed first share of events would end at the pace since their marks.

        Among clusters with equal shares, warps of a role all continue at the mean rate, because they share their
        bottleneck. Warps without marks, such as those of the epilogue, end as long after the others as in the replayed tiles.
        Tiles that are not replayed may share fewer inputs, so the end is not before device memory has delivered all
        of them.

        Raises:
            EmulatorError: no warp reached the end of its share.
        """
        end, paces = 0.0, self._paces()
        if not paces:
            raise EmulatorError(
                "of the first tiles of a launch nothing follows: none of its warps got through them"
            )
        for (share, role), (reached, half) in paces.items():
            half = self._steady.get((share, role), half)
            end = max(end, reached + half * 2 * (1 - share) / share)
        return max(self.least, end + self._tail())

    def _tail(self) -> float:
        """Returns the time from the end of the last marked warp until all other warps wait for more tiles."""
        last = max(warp.ended for warp in self.marks)
        clusters = {id(warp.cta.cluster): warp.cta.cluster for warp in self.marks}.values()
        waits = [wait for one in clusters for barrier in one.barriers.values() for wait in barrier.waiting]
        return max([0.0, *(since - last for _, warp, since in waits if warp.marked < 0)])

    def _paces(self) -> dict[tuple[float, str], tuple[float, float]]:
        """Returns, by share and role of warps, when they reached the end of their events, and their time since their marks."""
        alike: dict[tuple[float, str], list[Warp]] = defaultdict(list)
        for warp in self.marks:
            if 0 <= warp.marked < warp.ended:
                alike[warp.cta.cluster.trace.share, warp.role].append(warp)
        return {
            kind: (
                sum(warp.ended for warp in warps) / len(warps),
                sum(warp.ended - warp.marked for warp in warps) / len(warps),
            )
            for kind, warps in alike.items()
        }

    def follow(self, middle: "Grid", timing: Any) -> None:
        """Sets the time of tiles after the first ones to that of tiles in the middle. `timing`: timing of their replay."""
        self._steady = {kind: half for kind, (_, half) in middle._paces().items()}
        self.middle = timing

    def leave(self, sm: int, time: float, *, all_of_them: bool = False) -> None:
        """Notes that a CTA, or all of them, have ended on an SM."""
        self._resident[sm] = 0 if all_of_them else self._resident[sm] - 1
        if not self._resident[sm]:
            self.busy[sm] += time - self._since[sm]


def _count(cluster: ClusterTrace) -> int:
    return sum(len(events) for cta in cluster.warps for events in cta)


@dataclass(frozen=True)
class Counters:
    """Traffic up to a time.

    Attributes:
        hbm_bytes: bytes read from device memory.
        l2_bytes: bytes that L2 sent.
        hbm_busy: cycles in which device memory worked.
        stored_bytes: results that reached L2, each counted once.
        left_bytes: bytes of them that were evicted from L2.
    """

    hbm_bytes: int = 0
    l2_bytes: int = 0
    hbm_busy: float = 0.0
    stored_bytes: int = 0
    left_bytes: int = 0

    def since(self, earlier: "Counters") -> "Counters":
        """Returns the difference to an earlier state."""
        return Counters(
            self.hbm_bytes - earlier.hbm_bytes,
            self.l2_bytes - earlier.l2_bytes,
            self.hbm_busy - earlier.hbm_busy,
            self.stored_bytes - earlier.stored_bytes,
            self.left_bytes - earlier.left_bytes,
        )

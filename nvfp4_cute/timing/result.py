"""Results of a replay: the modelled time of a launch, its parts, and its timeline."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.state import Sm, Span, Warp

NAME_CHARACTERS = 80


@dataclass
class Timing:
    """The modelled time of a launch, and its parts.

    Attributes:
        kernel: its name.
        constants: the GPU.
        cycles: from the launch to its end.
        hbm_bytes: bytes read from device memory.
        l2_bytes: bytes that SMs read from L2.
        requested_bytes, stored_bytes: bytes that the instructions load and store, in full 32-byte sectors of global
            memory.
        hbm_busy: cycles in which device memory worked.
        sm_busy: cycles in which each SM had a CTA.
        mma_busy: cycles in which its matrix pipes worked.
        stalls: warp cycles by role and cause.
        critical: cycles of the critical path by cause. `stalls` and `critical` are empty for a launch of more than
            `MOST_EXPLAINED` events without a timeline.
        elsewhere: cycles in the other layouts of memory, if requested.
        lanes, memory_log: the timeline, if requested: rows of spans, and (cycles, bytes) of every read of device
            memory.
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
    elsewhere: list[float] = field(default_factory=list)
    lanes: list["Lane"] = field(default_factory=list)
    memory_log: list[tuple[float, int]] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Time in microseconds."""
        return self.constants.us(self.cycles)

    @property
    def us_by_layout(self) -> list[float]:
        """Microseconds in every requested layout of memory."""
        return [self.constants.us(cycles) for cycles in (self.cycles, *self.elsewhere)]

    @property
    def mma_percent(self) -> float:
        """Share of the kernel's time in which the matrix pipes of all SMs worked."""
        return 100 * sum(self.mma_busy) / (self.cycles * self.constants.num_sms)

    @property
    def hbm_percent(self) -> float:
        """Share of the kernel's time in which device memory worked."""
        return 100 * self.hbm_busy / self.cycles

    @property
    def tail_us(self) -> float:
        """Time by which the last SM worked longer than the average one."""
        busy = [cycles for cycles in self.sm_busy if cycles]
        return self.constants.us(max(busy) - sum(busy) / len(busy)) if busy else 0.0

    def report(self) -> str:
        """Returns the parts of the time as text."""
        clock = self.constants.clock_hz / 1e6
        used = sum(map(bool, self.sm_busy))
        lines = [
            f"{short_name(self.kernel, NAME_CHARACTERS)}: {self.us:.2f} us (modelled) on {self.constants.name}",
            f"  device memory {self.hbm_bytes / 1e6:.2f} MB read, busy {self.hbm_percent:.0f} %; "
            f"L2 {self.l2_bytes / 1e6:.2f} MB; matrix pipes busy {self.mma_percent:.0f} %; "
            f"{used} SM{'s' * (used != 1)} used, tail {self.tail_us:.2f} us",
        ]
        if self.critical:
            after = self.cycles - sum(self.critical.values())
            lines.append("  critical path: " + _shares({**self.critical, "end of the launch": after}, clock))
        if self.stalls:
            lines.append("  time of all warps of a role, added up:")
        for role, causes in sorted(self.stalls.items()):
            lines.append(f"    {role}: " + _shares(causes, clock))
        return "\n".join(lines)


@dataclass
class ChainTiming:
    """The modelled time of consecutive launches in a CUDA graph.

    Attributes:
        constants: the GPU.
        launches: timings in order. The time of each begins at the end of the previous one, so they add up.
        lanes, memory_log: see `Timing`.
    """

    constants: Constants
    launches: list[Timing]
    lanes: list["Lane"] = field(default_factory=list)
    memory_log: list[tuple[float, int]] = field(default_factory=list)

    @property
    def cycles(self) -> float:
        """Cycles from the first launch to the end of the last."""
        return sum(timing.cycles for timing in self.launches)

    @property
    def us(self) -> float:
        """Total time in microseconds."""
        return self.constants.us(self.cycles)

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from device memory."""
        return sum(timing.hbm_bytes for timing in self.launches)

    def report(self) -> str:
        """Returns the times of the launches and their parts as text."""
        lines = [
            f"{len(self.launches)} launches: {self.us:.2f} us (modelled) on {self.constants.name}; "
            f"device memory {self.hbm_bytes / 1e6:.2f} MB read"
        ]
        return "\n".join([*lines, *(timing.report() for timing in self.launches)])


def _shares(cycles: dict[str, float], clock_mhz: float) -> str:
    total = sum(cycles.values()) or 1.0
    parts = sorted(cycles.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{cause} {value / clock_mhz:.2f} us ({100 * value / total:.0f} %)" for cause, value in parts
    )


@dataclass
class Lane:
    """A row of a timeline: an SM, the row's subject, its spans, and its position among the rows of the SM."""

    sm: int
    name: str
    spans: list[Span]
    order: int = 0


def stalls_of(finished: Sequence[Warp]) -> dict[str, dict[str, float]]:
    """Returns warp cycles by role and cause."""
    stalls: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for warp in finished:
        for span in warp.spans:
            stalls[warp.role][span.cause] += span.end - span.start
    return {role: dict(causes) for role, causes in stalls.items()}


def critical_path(finished: Sequence[Warp]) -> dict[str, float]:
    """Follows each stall back to the warp that ended it, from the warp that ended last. Returns cycles by cause."""
    found: dict[str, float] = defaultdict(float)
    warp = max(finished, key=lambda w: w.spans[-1].end)
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


def lanes_of(finished: Sequence[Warp], sms: Sequence[Sm]) -> list[Lane]:
    """Returns one timeline row per warp, and one per used copy engine and matrix pipe."""
    lanes = [
        Lane(w.sm.index, f"warp {w.index}: {w.role} (CTA {w.cta.number})", w.spans, w.cta.number)
        for w in finished
    ]
    for sm in sms:
        for name, spans in (("TMA", sm.engine_spans), ("tensor cores", sm.matrix_spans)):
            if spans:
                lanes.append(Lane(sm.index, name, spans, 1 << 30))
    return lanes


def _span_before(spans: list[Span], time: float) -> int:
    """Returns the index of the last span that begins before a time."""
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        if spans[middle].start < time:
            low = middle + 1
        else:
            high = middle
    return low - 1

"""Records that the parts of the hazard checker share, and the ledger that they report to."""

import linecache
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from nvfp4_cute.emulator.check.clocks import CAUSED, SEEN, Components, WarpClock, epoch, joined
from nvfp4_cute.emulator.check.shadow import Actor, Shadow
from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.emulator.ptx import Inst
from nvfp4_cute.emulator.state import Cta, Warp
from nvfp4_cute.errors import EmulatorError

SEVERITIES = ("error", "warning", "note")

KEPT_PHASES = 4
"""Newest phases of an mbarrier for which the checker keeps the knowledge of the arrivals."""

_NAMES = (
    ("cp.async.bulk.tensor", "TMA store", "global.shared::cta"),
    ("cp.async.bulk.tensor", "TMA load", ""),
    ("cp.reduce.async.bulk", "bulk reduction", ""),
    ("cp.async.bulk", "bulk store", "global.shared::cta"),
    ("cp.async.bulk", "bulk load", ""),
)


@dataclass(frozen=True)
class Site:
    """An instruction in one warp."""

    cta: tuple[int, int, int]
    warp: int
    inst: Inst
    atomic: bool = False

    @property
    def instruction(self) -> str:
        """Opcode and modifiers, such as ``cp.async.ca.shared.global``."""
        return ".".join((self.inst.opcode, *self.inst.mods))

    @property
    def python(self) -> str:
        """The Python line of the instruction, such as ``load.py:48``; empty if unknown."""
        source = self.inst.source
        return f"{source[0].rsplit('/', 1)[-1]}:{source[1]}" if source else ""

    @property
    def python_text(self) -> str:
        """The text of that Python line; empty if there is no such file."""
        return linecache.getline(*self.inst.source).strip() if self.inst.source else ""

    def lines(self) -> list[str]:
        """The Python line with its text, and the PTX line."""
        shown = [f"    {self.python}: {self.python_text}"] if self.python_text else []
        return [*shown, f"    {'    ' * len(shown)}PTX line {self.inst.line}: {self.inst.short_text}"]

    def __str__(self) -> str:
        """Returns a text such as ``TMA load (cta 0,0,0 warp 5, PTX line 224, load.py:48)``."""
        words = self.instruction
        name = ".".join(words.split(".")[:2])
        for start, readable, part in _NAMES:
            if words.startswith(start) and part in words:
                name = readable
                break
        python = f", {self.python}" if self.python else ""
        return (
            f"{name} (cta {','.join(map(str, self.cta))} warp {self.warp}, PTX line {self.inst.line}{python})"
        )


@dataclass
class Hazard:
    """One finding.

    Attributes:
        kind: "race", "proxy-fence", "early-release", "uninitialised", "mbarrier", "tensor-memory", "double-store", "exit", or the
            `kind` of a `faults.Fault` that stopped the launch ("silicon" among them).
        kernel: name of the entry.
        site: the instruction that showed the hazard, if one did.
        other: the other access.
        text: description of the hazard.
        count: number of occurrences.
        pairs: number of instruction pairs in PTX, if it stands for several (`merged`).
        also: places of findings with the same cause that this one stands for (`by_cause`).
        rule: name of the rule in `silicon`, for that kind.
        severity: "error", "warning", or "note" if the evidence is weak or only speed is at stake.
    """

    kind: str
    kernel: str
    site: Site | None
    other: Site | None
    text: str
    count: int = 1
    severity: str = "error"
    rule: str = ""
    pairs: int = 1
    also: tuple[Site, ...] = ()

    def __str__(self) -> str:
        """Returns kind, text, and the lines of Python and PTX."""
        kind = self.kind if self.severity == "error" else f"{self.kind} ({self.severity})"
        often = f" [{self.count} times{f', {self.pairs} places in PTX' if self.pairs > 1 else ''}]"
        lines = [f"{kind}: {self.text}" + (often if self.count > 1 else "")]
        for site in (self.site, self.other):
            if site is not None:
                lines += site.lines()
        if self.also:
            places = dict.fromkeys(site.python or f"PTX line {site.inst.line}" for site in self.also)
            lines.append(f"    the same at {', '.join(places)}")
        return "\n".join(lines)


def merged(hazards: Iterable[Hazard]) -> list[Hazard]:
    """Merges hazards of a kind at the same source lines: unrolled loops and several CTAs repeat one mistake."""
    found: dict[Any, Hazard] = {}
    for hazard in hazards:
        places = [s.inst.source or s.inst.line for s in (hazard.site, hazard.other) if s is not None]
        # Without an instruction the text identifies the hazard, in any CTA.
        what = frozenset(places) or re.sub(r"cta \d+,\d+,\d+", "", hazard.text)
        key = (hazard.kind, hazard.severity, hazard.rule, hazard.kernel, len(places), what)
        known = found.get(key)
        if known is None:
            found[key] = hazard
        else:
            count, pairs = known.count + hazard.count, known.pairs + bool(places)
            found[key] = replace(known, count=count, pairs=pairs)
    return list(found.values())


def by_cause(hazards: Iterable[Hazard]) -> list[Hazard]:
    """Merges hazards of a kind that share a place, because a missing wait shows at every line that relied on it.

    The shared place is the other access if there is one. The first hazard of a cause keeps its text; its `also` names
    the places of the others.
    """
    found: dict[Any, Hazard] = {}
    for number, hazard in enumerate(merged(hazards)):
        shared, own = (hazard.other, hazard.site) if hazard.other is not None else (None, hazard.site)
        cause = (shared.inst.source or shared.inst.line) if shared is not None else number
        key = (hazard.kind, hazard.severity, hazard.rule, hazard.kernel, cause)
        known = found.get(key)
        if known is None:
            found[key] = hazard
        else:
            more = (own,) if own is not None else ()
            count, pairs = known.count + hazard.count, known.pairs + hazard.pairs
            found[key] = replace(known, count=count, pairs=pairs, also=known.also + more)
    return list(found.values())


def counted(severities: Iterable[str]) -> str:
    """Returns the number of hazards per severity, such as ``2 errors, 1 warning``; empty for none."""
    counts = Counter(severities)
    return ", ".join(
        f"{counts[severity]} {severity}{'s' * (counts[severity] > 1)}"
        for severity in SEVERITIES
        if counts[severity]
    )


class HazardError(EmulatorError):
    """Raised for a launch with hazards. `hazards`: all of them."""

    def __init__(self, hazards: "list[Hazard]"):
        """`hazards`: at least one hazard."""
        self.hazards = hazards
        shown = by_cause(hazards)
        said = counted(hazard.severity for hazard in shown)
        kernel = short_name(hazards[0].kernel)
        super().__init__(f"{said} in kernel `{kernel}`:\n" + "\n".join(map(str, shown)))


@dataclass(frozen=True)
class HeldWrite:
    """A write over an unordered write, to be reported after it is done.

    Attributes:
        content: reads the place.
        before: content of the place before the write.
    """

    kind: str
    site: Site
    other: Site
    text: str
    detail: str
    content: Callable[[], np.ndarray]
    before: np.ndarray


class Copied(NamedTuple):
    """A cp.async copy by lanes of a warp to shared memory: `nbytes` to each offset (int64), by `lanes` (uint32)."""

    offsets: np.ndarray
    nbytes: int
    lanes: np.ndarray


@dataclass
class Record:
    """The checker's record of an operation: the knowledge of its warp, its component and number, and its place.

    Attributes:
        unwritten: registers that it loaded with words that were never written.
        copied: its lane-by-lane copy, if it was one.
    """

    knowledge: np.ndarray
    component: int
    number: int
    site: int
    unwritten: np.ndarray | None = None
    copied: Copied | None = None
    _actor: Actor | None = None

    def actor(self, stamp: int | None = None, *, proxy: bool = True) -> Actor:
        """Returns the operation as an actor. `stamp`: its epoch, if not that of its own component."""
        if stamp is not None or not proxy:
            own = epoch(self.component, self.number) if stamp is None else stamp
            return Actor(self.knowledge, own, self.site, proxy)
        if self._actor is None or self._actor.knowledge is not self.knowledge:
            self._actor = Actor(self.knowledge, epoch(self.component, self.number), self.site, True)
        return self._actor


@dataclass
class BarrierClock:
    """Knowledge that a wait for an mbarrier gives.

    Attributes:
        component: its value is the number of complete phases.
        gathering: knowledge of the arrivals of the current phase.
        complete: knowledge of the arrivals of all complete phases.
        init: epoch of its initialisation.
        fence: epoch of the fence that made the initialisation visible to other proxies and CTAs.
        made: epoch of the warp that initialised it.
        arrivals: places of all arrivals so far.
        users: newest event of each warp that used it.
        senders: a place that stored from another CTA, by phase.
        waiters: events and places of the waits for the newest phase, by warpgroup.
        completing: called before a phase is complete.
        phases: number of complete phases.
        history: for the newest phases, the knowledge of their and all earlier arrivals, and whether bytes were part of
            them.
    """

    component: int
    gathering: np.ndarray
    complete: np.ndarray
    init: tuple[int, int]
    made: tuple[int, int]
    init_site: int
    fence: tuple[int, int] | None = None
    arrivals: dict[int, int] = field(default_factory=dict)
    users: dict[int, tuple[int, int]] = field(default_factory=dict)
    senders: dict[int, int] = field(default_factory=dict)
    waiters: dict[Any, list[tuple[int, int, int]]] = field(default_factory=dict)
    completing: Callable[["BarrierClock"], None] = lambda record: None
    phases: int = 0
    history: deque[tuple[np.ndarray, bool]] = field(default_factory=lambda: deque(maxlen=KEPT_PHASES))

    def phase_done(self) -> None:
        """Completes a phase; called by the barrier."""
        self.completing(self)
        self.waiters.clear()
        self.complete = joined(self.complete.copy(), self.gathering)  # the history keeps the old array
        self.gathering[:] = 0
        self.phases += 1
        copied, _ = self.users.get(self.component, (0, 0))
        self.history.append((self.complete, copied >= self.phases))

    def after(self, phases: int) -> tuple[np.ndarray, bool] | None:
        """Returns the knowledge of the first `phases` phases, and whether bytes were part of the last one; None if not kept."""
        back = self.phases - phases
        return self.history[-1 - back] if phases and back < len(self.history) else None

    def known_phases(self, knowledge: np.ndarray) -> int:
        """Returns the number of phases that a holder of the knowledge knows to be complete.

        It knows of a phase directly, or of all of its arrivals.
        """
        known = int(max(knowledge[SEEN, self.component], knowledge[CAUSED, self.component]))
        for phases in range(self.phases, known, -1):
            kept = self.after(phases)
            if kept is None:
                break
            complete, copied = kept
            told = complete[SEEN]
            if not copied and not np.count_nonzero(told > knowledge[SEEN, : told.size]):
                return phases
        return known


def whose(cta: Cta) -> str:
    """Names the CTA whose memory it is, if there are several."""
    return f" of cta {','.join(map(str, cta.idx))}" if len(cta.cluster.ctas) > 1 else ""


class Ledger(Protocol):
    """The checker, from the point of view of its parts (`hazards.Checker`)."""

    sites: list[Site]
    components: Components
    shared: dict[Cta, Shadow]

    def clock(self, warp: Warp) -> WarpClock:
        """Returns the clock of a warp of the running cluster."""
        ...

    def site(self, warp: Warp, pc: int, *, atomic: bool = False) -> int:
        """Returns the number of an instruction's place in a warp."""
        ...

    def warp_actor(self, warp: Warp, pc: int) -> Actor:
        """Returns a warp as the actor of its own accesses, through the generic proxy."""
        ...

    def operation(self) -> Record:
        """Returns the record of the operation that happens now."""
        ...

    def touch(self, cta: Cta, actor: Actor) -> None:
        """Notes that a CTA must not exit before an access by another CTA, or by an engine, is done."""
        ...

    def shared_range(self, cta: Cta, granules: tuple[int, int]) -> str:
        """Returns the byte range from the first to the last granule, for reports."""
        ...

    def report(
        self,
        kind: str,
        site: Site | None,
        other: Site | None,
        text: str,
        detail: str = "",
        severity: str = "error",
        *,
        rule: str = "",
    ) -> None:
        """Collects a hazard."""
        ...

    def report_write(
        self,
        kind: str,
        site: Site,
        other: Site,
        text: str,
        content: Callable[[], np.ndarray],
        detail: str = "",
    ) -> None:
        """Collects a write over an unordered write."""
        ...

"""mbarriers for the checker: a wait learns what the arrivals knew. Finds uses of missing barriers, and missed phases."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import (
    CAUSED,
    CLUSTER,
    COMPONENT_SHIFT,
    SEEN,
    VALUE_MASK,
    epoch,
    joined,
)
from nvfp4_cute.emulator.check.lane_order import LaneOrder
from nvfp4_cute.emulator.check.ledger import BarrierClock, Ledger, Site, whose
from nvfp4_cute.emulator.check.shadow import Actor
from nvfp4_cute.emulator.check.silicon_checks import SiliconChecks
from nvfp4_cute.emulator.memory import Mbarrier
from nvfp4_cute.emulator.places import WORD_BYTES

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

WARPS_PER_GROUP = 4
BARRIER_BYTES = 8

INITS, INIT_FENCES = "initialisations", "fences of initialisations"
"""Components of a warp's clock that number its mbarrier initialisations, and its later fences."""


class Mbarriers:
    """Clocks of the mbarriers of the running clusters."""

    def __init__(self, checker: Ledger, silicon: SiliconChecks, lane_order: LaneOrder):
        """`checker`: receives the findings."""
        self.checker, self.silicon, self.lane_order = checker, silicon, lane_order
        self.begin()

    def begin(self) -> None:
        """Forgets all barriers, for new clusters."""
        self._live: dict[Cta, np.ndarray] = {}
        # By warp and component of the barrier: waits that gave up, and waits that may have passed some phases earlier.
        self._given_up: dict[tuple[tuple[int, int, int], int], dict[int, tuple[BarrierClock, int]]] = {}
        self._early: dict[tuple[tuple[int, int, int], int], dict[int, tuple[BarrierClock, int]]] = {}

    def initialised(self, warp: "Warp", pc: int, barrier: Mbarrier, old: Mbarrier | None) -> None:
        """Notes that a barrier was initialised, perhaps over an old one."""
        clock, number = self.checker.clock(warp), self.checker.site(warp, pc)
        if old is not None and old.record is not None:
            self._check_reuse(warp, number, old, "initialises mbarrier {} again")
        live = self._live.get(warp.cta)
        if live is None:
            live = self._live[warp.cta] = np.zeros(-(-warp.cta.smem.size // BARRIER_BYTES), bool)
        live[barrier.offset // BARRIER_BYTES] = True
        barrier.record = BarrierClock(
            self.checker.components.new(),
            self.checker.components.nothing(),
            self.checker.components.nothing(),
            clock.count(INITS),
            (clock.own, clock.value),
            number,
            completing=partial(self._overtaken, barrier.offset),
        )

    def _overtaken(self, offset: int, record: BarrierClock) -> None:
        """Checks, before a phase completes, that every waiter for the previous phase has found that one complete.

        A slower warp would find the parity of the new phase and keep waiting. One warp of a warpgroup stands for all
        four.
        """
        gathering = self.checker.components.fit(record.gathering)
        known = np.maximum(gathering[SEEN], gathering[CAUSED])
        for waits in record.waiters.values():
            if any(known[component] >= value for component, value, _ in waits):
                continue
            site = self.checker.sites[waits[0][2]]
            self.checker.report(
                "mbarrier",
                site,
                None,
                f"{site} waits for a phase of mbarrier smem+{offset:#x}, but nothing ensures that it finds the phase "
                "complete before the next one completes: a slower warp misses it",
                severity="warning",
            )

    def invalidated(self, warp: "Warp", pc: int, barrier: Mbarrier) -> None:
        """Notes that a warp is about to invalidate a barrier, whose storage may then be reused."""
        if barrier.record is not None:
            self._check_reuse(warp, self.checker.site(warp, pc), barrier, "invalidates mbarrier {}")
        self._live[warp.cta][barrier.offset // BARRIER_BYTES] = False

    def written_over(self, cta: "Cta", rows: tuple[int, int], index: Any, number: int) -> None:
        """Checks that no barrier lies in granules of shared memory that are overwritten: at `index`, in 16-byte rows [rows)."""
        live = self._live.get(cta)
        if live is None or not np.count_nonzero(live[2 * rows[0] : 2 * rows[1]]):
            return
        site, size = self.checker.sites[number], len(live)
        memory = self.checker.shared[cta]
        granules = memory.numbers(index).reshape(-1) // (BARRIER_BYTES // WORD_BYTES * memory.parts)
        hit = granules[live[np.minimum(granules, size - 1)]]
        if hit.size:
            at = int(hit[0]) * BARRIER_BYTES
            text = f"{site} writes over mbarrier smem+{at:#x}{whose(cta)}: execute mbarrier.inval first"
            self.checker.report("mbarrier", site, None, text)

    def _check_reuse(self, warp: "Warp", number: int, old: Mbarrier, does: str) -> None:
        seen, site = self.checker.clock(warp).knowledge[SEEN], self.checker.sites[number]
        busy = old.pending != old.count or old.tx
        unordered = [user for c, (v, user) in old.record.users.items() if c < len(seen) and seen[c] < v]
        if busy or unordered:
            other, place = self.checker.sites[unordered[0]] if unordered else None, f"smem+{old.offset:#x}"
            self.checker.report(
                "mbarrier",
                site,
                other,
                f"{site} {does.format(place)} while it is in use ({old.describe()})",
            )

    def fence(self, warp: "Warp") -> None:
        """Notes a fence that makes the warp's mbarrier initialisations visible to other proxies and CTAs."""
        clock, fence = self.checker.clock(warp), None
        if INITS not in clock.engines:
            return
        for cta in warp.cta.cluster.ctas:
            for barrier in cta.smem.barriers.values():
                record: BarrierClock | None = barrier.record
                if record is not None and record.init[0] == clock.engine(INITS) and record.fence is None:
                    record.fence = fence = fence or clock.count(INIT_FENCES)
        clock.fenced_inits = clock.issued[INITS]

    def relaxed(self, warp: "Warp", published: np.ndarray) -> np.ndarray:
        """Returns what a relaxed arrival of a warp announces.

        Its fences cover its mbarrier initialisations, and CTAs run.
        """
        clock = self.checker.clock(warp)
        told = clock.relaxed(published)
        if clock.fenced_inits:
            told[SEEN, clock.engine(INITS)] = clock.fenced_inits
            told[SEEN, clock.engine(INIT_FENCES)] = clock.issued.get(INIT_FENCES, 0)
        self.silicon.caused(published, told)
        return told

    def _use(
        self,
        cta: "Cta",
        barrier: Mbarrier,
        knowledge: np.ndarray,
        number: int,
        *,
        outside: bool,
        proxy: bool = False,
    ) -> BarrierClock:
        """Checks a use of a barrier. `outside`: from another CTA, or through the async proxy (`proxy`).

        The generic proxy needs no fence of initialisations if a release of cluster scope announced them.
        """
        record: BarrierClock = barrier.record
        component, value = record.init
        site, init = self.checker.sites[number], self.checker.sites[record.init_site]
        if knowledge[SEEN, component] < value:
            self.checker.report(
                "mbarrier",
                site,
                init,
                f"{site} uses mbarrier smem+{barrier.offset:#x}{whose(cta)}, which {init} initialises: nothing "
                "orders them (a bar.sync or cluster barrier after the initialisation?)",
            )
        elif (
            outside
            and (record.fence is None or knowledge[SEEN, record.fence[0]] < record.fence[1])
            and (proxy or knowledge[CLUSTER, record.made[0]] < record.made[1])
        ):
            self.checker.report(
                "mbarrier",
                site,
                init,
                f"{site} uses mbarrier smem+{barrier.offset:#x}{whose(cta)} from outside the CTA's generic proxy "
                f"without a fence.mbarrier_init after {init}",
            )
        return record

    def arrive(
        self,
        warp: "Warp",
        pc: int,
        cta: "Cta",
        barrier: Mbarrier,
        *,
        wide: bool = False,
        relaxed: bool = False,
    ) -> None:
        """Notes that a warp is about to arrive (release unless `relaxed`). `wide`: with cluster scope."""
        clock, number = self.checker.clock(warp), self.checker.site(warp, pc)
        stamp = (clock.own, clock.value)
        published = clock.publish(number)
        self.lane_order.announced(warp, published, number)
        outside = cta is not warp.cta
        record = self._use(cta, barrier, published, number, outside=outside)
        if outside and (relaxed or not wide):
            self.silicon.narrow = True
        if relaxed:
            record.gathering = joined(record.gathering, self.relaxed(warp, published))
        elif outside and not wide:
            record.gathering = joined(record.gathering, clock.narrowed(published))
        else:
            record.gathering = joined(record.gathering, published)
        record.arrivals[number] = barrier.phase
        record.users[stamp[0]] = (stamp[1], number)
        if outside:
            self.checker.touch(cta, Actor(published, epoch(*stamp), number, False))

    def counted(self, warp: "Warp", pc: int, cta: "Cta", barrier: Mbarrier) -> None:
        """Notes that a warp is about to change the count of bytes that a barrier expects, which orders nothing."""
        clock, number = self.checker.clock(warp), self.checker.site(warp, pc)
        outside, actor = cta is not warp.cta, self.checker.warp_actor(warp, pc)
        record = self._use(cta, barrier, actor.knowledge, number, outside=outside)
        record.users[clock.own] = (clock.value, number)
        if outside:
            self.checker.touch(cta, actor)

    def arrive_later(self, cta: "Cta", barrier: Mbarrier, *, outside: bool = True) -> None:
        """Notes that the current operation (a commit) is about to arrive: everything before it on its engine is complete."""
        own = self.checker.operation()
        record = self._use(cta, barrier, own.knowledge, own.site, outside=outside, proxy=outside)
        learnt = own.knowledge.copy()
        learnt[SEEN, own.component] = learnt[CLUSTER, own.component] = own.number
        record.gathering = joined(record.gathering, learnt)
        record.arrivals[own.site] = barrier.phase
        record.users[own.component] = (own.number, own.site)
        self.checker.touch(cta, own.actor())

    def signalled(self, cta: "Cta", offset: int, *, stored: bool = False) -> int:
        """Returns the epoch of data whose arrival the current operation will signal to an mbarrier.

        `stored`: sent by st.async, which uses the generic proxy.
        """
        barrier = cta.mbarrier(offset)
        own = self.checker.operation()
        elsewhere = self.checker.sites[own.site].cta != cta.idx
        record = self._use(
            cta, barrier, own.knowledge, own.site, outside=elsewhere or not stored, proxy=not stored
        )
        record.gathering = self.checker.components.fit(record.gathering)
        self.silicon.caused(own.knowledge, record.gathering)
        causes = np.maximum(own.knowledge[SEEN], own.knowledge[CAUSED])
        np.maximum(record.gathering[CAUSED], causes, out=record.gathering[CAUSED])
        if stored and elsewhere:
            record.senders[barrier.phase] = own.site
        record.users[record.component] = (barrier.phase + 1, own.site)
        return epoch(record.component, barrier.phase + 1)

    def gives_up(
        self, warp: "Warp", pc: int, barriers: list[Mbarrier], complete: Callable[[Mbarrier], bool]
    ) -> bool:
        """Returns whether a wait now answers false, although its phase is complete or it could block until then.

        A wait may do so unless its warp knows that the phase is complete: a test may come too early, and a wait may
        time out. Each wait does it once per warp (`WarpClock.gave_up`). Code that repeats the wait until it answers
        true is unaffected.

        Args:
            barriers: barriers that it waits for.
            complete: whether the phase of a barrier is complete.
        """
        clock = self.checker.clock(warp)
        knowledge = clock.knowledge = self.checker.components.fit(clock.knowledge)
        if any(
            complete(barrier) and barrier.record.known_phases(knowledge) >= barrier.phase
            for barrier in barriers
        ):
            return False
        clock.gave_up.add(pc)
        given_up = self._given_up.setdefault((warp.cta.idx, warp.idx), {})
        for barrier in barriers:
            given_up.setdefault(barrier.record.component, (barrier.record, self.checker.site(warp, pc)))
        return True

    def weak_wait(self, reader: Site, writer: int) -> str:
        """Names the wait of a reader's warp that would have announced the epoch of a write if it could not pass early."""
        owner = reader.cta, reader.warp
        for waits, why in (
            (self._given_up, "may answer false after a while: repeat it until it answers true"),
            (
                self._early,
                "may pass two phases earlier, because the parity is equal and its warp knows of neither phase: wait for every "
                "phase, or learn of the earlier ones by another wait",
            ),
        ):
            for record, number in waits.get(owner, {}).values():
                if self._tells(record, writer):
                    return f"; {self.checker.sites[number]} {why}"
        return ""

    @staticmethod
    def _tells(record: BarrierClock, writer: int) -> bool:
        component, value = writer >> COMPONENT_SHIFT, writer & VALUE_MASK
        known = record.complete[SEEN]
        return component == record.component or (component < known.size and bool(known[component] >= value))

    def waited(
        self,
        warp: "Warp",
        pc: int,
        cta: "Cta",
        barrier: Mbarrier,
        *,
        token: int | None = None,
        wide: bool = False,
        relaxed: bool = False,
    ) -> None:
        """Notes that a warp's wait or test found a phase complete (acquire unless `relaxed`). `wide`: with cluster scope.

        The warp learns of the fewest phases that would have let it pass. With a parity these are the phases that it
        knew of, or one more. Further phases that are complete in this run need not be complete in another.

        Args:
            token: state token of the awaited phase; None for a wait with a parity.
        """
        clock, number = self.checker.clock(warp), self.checker.site(warp, pc)
        knowledge = clock.knowledge = self.checker.components.fit(clock.knowledge)
        record = self._use(cta, barrier, knowledge, number, outside=False)
        owner, component = (warp.cta.idx, warp.idx), record.component
        self._given_up.get(owner, {}).pop(component, None)
        if token is None:
            known = record.known_phases(knowledge)
            phases = known + (barrier.phase - known & 1)
        else:
            phases = min(Mbarrier.phase_of(token) + 1, barrier.phase)
        complete = record.complete
        if phases < barrier.phase:
            kept = record.after(phases)
            complete = self.checker.components.nothing() if kept is None else kept[0]
            self._early.setdefault(owner, {})[component] = (record, number)
        else:
            self._early.get(owner, {}).pop(component, None)
        if relaxed:
            found = self.checker.components.fit(complete).copy()
            found[SEEN, component] = phases
            clock.found_relaxed(found)
        else:
            clock.learn(complete)
            clock.completed(component, phases)
        sender = record.senders.get(phases - 1)
        if sender is not None and not wide:
            self.silicon.async_store_awaited(warp, pc, self.checker.sites[sender])
        record.users[clock.own] = (clock.value, number)
        if phases == barrier.phase:
            group = record.waiters.setdefault((warp.cta, warp.idx // WARPS_PER_GROUP), [])
            group.append((clock.own, clock.value, number))

    def _arrivals(self, barrier: Mbarrier) -> str:
        record: BarrierClock | None = barrier.record
        if record is None or not record.arrivals:
            return "nobody has arrived on it"
        sites = sorted(str(self.checker.sites[number]) for number in record.arrivals)
        return "arrivals came from " + "; ".join(sites[:6])

    def explain_hang(self, warps: Iterable["Warp"]) -> str:
        """Returns, for each awaited mbarrier, who arrived on it so far, and who of them cannot arrive again."""
        lines: list[str] = [""]
        seen: set[int] = set()
        for warp in warps:
            barrier = getattr(warp.wait, "barrier", None)
            if barrier is None or id(barrier) in seen:
                continue
            seen.add(id(barrier))
            lines.append(
                f"  mbarrier smem+{barrier.offset:#x}: {barrier.describe()}; {self._arrivals(barrier)}"
            )
            exited = self._exited(warp, barrier)
            if exited:
                lines.append(f"    of these, {exited} exited and will not arrive again")
        return "\n".join(lines)

    def _exited(self, warp: "Warp", barrier: Mbarrier) -> str:
        done = {(w.cta.idx, w.idx) for cta in warp.cta.cluster.ctas for w in cta.warps if w.done}
        sites = [self.checker.sites[n] for n in (barrier.record.arrivals if barrier.record else ())]
        names = sorted(
            {f"cta {','.join(map(str, s.cta))} warp {s.warp}" for s in sites if (s.cta, s.warp) in done}
        )
        return ", ".join(names)

    def exits(self, cta: "Cta", name: str) -> None:
        """Checks that no barrier of a CTA that has ended waits for bytes. `name`: name of the CTA."""
        for barrier in cta.smem.barriers.values():
            if barrier.tx:
                # Bytes that are expected in vain harm only waiters, and all threads have left. Bytes that were not
                # expected completed a phase too early or too late.
                expected = "expected but not copied" if barrier.tx > 0 else "copied but not expected"
                self.checker.report(
                    "mbarrier",
                    None,
                    None,
                    f"{name} exits while mbarrier smem+{barrier.offset:#x} has an unbalanced transaction count "
                    f"({abs(barrier.tx)} bytes {expected}, phase {barrier.phase})",
                    self._arrivals(barrier),
                    "note" if barrier.tx > 0 else "error",
                )

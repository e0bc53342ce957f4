"""Hazards: unordered accesses, reads of unwritten bytes, and barriers and tensor memory left in a bad state.

The checker observes an execution. Synchronising instructions tell it who learns what from whom (`clocks`). It compares
accesses with shadow memory (`shadow`) and collects violations as `Hazard`. An access is a race if nothing orders it
after an earlier one to the same bytes, whatever order this execution happened to choose.

Sources of order:

* A warp's instructions are in program order. Its asynchronous operations start after everything that the warp knew at
  their issue.
* A wait on an mbarrier phase, a named or cluster barrier, or an atomic location passes on what the arrivals knew.
* Data of TMA loads is there after a wait for the mbarrier phase that they complete.
* A commit's arrival means that all earlier tcgen05 operations of its warp are complete. Operations of one warp on one
  engine are in order (`modes`). wait_group and tcgen05.wait mean that the warp's own operations are complete.
* Generic writes are visible to the async proxy only after a fence.proxy.async between the two.
* Loads from shared memory are complete when one of their values is used (`early_release`).

Lanes of one warp count as one thread, except for the warnings of `warp_order` and `lane_order`. Atomics and strong
loads and stores on one address order whole warps; relaxed and volatile ones on global memory do so together with
fences (`global_races`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nvfp4_cute.emulator.check import shadow
from nvfp4_cute.emulator.check.clocks import (
    CAUSED,
    COMPONENT_SHIFT,
    NOBODY,
    SEEN,
    VALUE_MASK,
    Components,
    WarpClock,
    epoch,
    joined,
)
from nvfp4_cute.emulator.check.early_release import EarlyReleases
from nvfp4_cute.emulator.check.global_races import GlobalRaces
from nvfp4_cute.emulator.check.lane_order import LaneOrder
from nvfp4_cute.emulator.check.ledger import Copied, Hazard, HeldWrite, Record, Site, whose
from nvfp4_cute.emulator.check.mbarriers import Mbarriers
from nvfp4_cute.emulator.check.pdl import Dependencies
from nvfp4_cute.emulator.check.shadow import Accesses, Actor, Conflict, Shadow, TensorShadow
from nvfp4_cute.emulator.check.shared_atomics import SharedAtomics
from nvfp4_cute.emulator.check.silicon_checks import SiliconChecks
from nvfp4_cute.emulator.check.tensor_maps import TensorMaps
from nvfp4_cute.emulator.check.unawaited import Unawaited
from nvfp4_cute.emulator.check.warp_order import WarpOrder
from nvfp4_cute.emulator.check.wgmma_registers import WgmmaRegisters
from nvfp4_cute.emulator.faults import Fault, SiliconFault
from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.modes import UNORDERED, Engine, Operation
from nvfp4_cute.emulator.places import WORD_BYTES, Place
from nvfp4_cute.emulator.silicon import named
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cluster, Cta, Launch, Warp

COMPONENTS_PER_WARP, BARRIERS_PER_CTA = 8, 64
"""Initial capacities; there may be more of either."""

MOST_HAZARDS = 50
"""Number of distinct hazards per launch and severity after which the checker stops collecting."""

NAN_OPERANDS = re.compile(r"tcgen05\.mma\..*kind::(f16|tf32)\b")
"""MMAs that turn unwritten operands into NaN, which spreads to results that use them. Some other formats have no NaN."""

SHARED_ACCESS = ("ld.shared.", "st.shared.", "ldmatrix.", "stmatrix.")
"""Ordinary accesses to shared memory, which any barrier orders."""

SMALL_COPY = re.compile(r"cp\.async\.(?!bulk)")
"""Operations of a CTA's own warps on its own shared memory that may be under way when it exits.

PTX ISA does not forbid it, and CUTLASS's `examples/cute/tutorial/sgemm_sm80.cu` exits before its last copies end.
"""

NamedGate: TypeAlias = "tuple[Cta, int, int]"
"""A round of a named barrier: CTA, number of the barrier, number of the round."""

COPIED = "public kernels for Blackwell leave it out after cp.async, and run; PTX ISA asks for it"

USES = "uses"
"""Component of a warp's clock that numbers its loads from tensor memory as their registers are used."""

ONLY_USED = "the registers were used before, which orders no access to memory: put tcgen05.wait::ld before the release"


@dataclass
class Freed:
    """A free of tensor memory after uses of data loaded from it, without a wait. It is held back until the CTA ends.

    Attributes:
        component: component of the loads.
        read_later: a register that they loaded was first read after the free.
    """

    site: Site
    other: Site
    text: str
    component: int
    read_later: bool = False


class Checker:
    """Collects the hazards of the launches of a machine.

    Attributes:
        hazards: hazards of all launches so far.
        current: record of the operation that happens now.
        shared, tensor: shadows of the running CTAs' memories.
        globals: races on global memory.
        mbarriers: knowledge about mbarriers.
        passing: the barrier at which each blocked warp has arrived.
        held: conflicts of the current store with other writes, while it is checked before it is done; else None.
    """

    def __init__(self) -> None:
        """Starts without findings."""
        self.hazards: list[Hazard] = []
        self.current: Record | None = None
        self.held: list[HeldWrite] | None = None
        self.kernel = ""
        self._bytewise = False
        self.sites: list[Site] = []
        self._twins: dict[int, int] = {}
        self._found: dict[tuple[Any, ...], Hazard] = {}
        self.components = Components(0)
        self._clocks: dict[Warp, WarpClock] = {}
        self.accesses = Accesses()
        self.shared: dict[Cta, Shadow] = {}
        self.tensor: dict[Cta, TensorShadow] = {}
        self._gates: dict[Any, np.ndarray] = {}
        self._round_components: dict[tuple[Cta, int], int] = {}
        self._rounds: dict[tuple[Cta, int], dict[Warp, tuple[int, int]]] = {}
        self._uses: dict[
            int, int
        ] = {}  # components of loads of tensor memory, and of the uses of the loaded values
        self.passing: dict[Warp, Any] = {}
        self._frees: list[Freed] = []
        self._partly_used: set[int] = set()  # components of loads whose registers only some lanes used
        self.early_releases = EarlyReleases(self)
        self.warp_order = WarpOrder(self)
        self.lane_order = LaneOrder(self)
        self.unawaited = Unawaited(self.used)
        self.wgmma_registers = WgmmaRegisters(self)
        self.shared_atomics = SharedAtomics(self, self._shared_conflict)
        self.silicon = SiliconChecks(self)
        self.mbarriers = Mbarriers(self, self.silicon, self.lane_order)
        self.dependencies = Dependencies(self, self.silicon)
        self.globals = GlobalRaces(self, self.silicon, self.dependencies.access)
        self.tensor_maps = TensorMaps(self, self.globals)
        self._touched: dict[Cta, dict[int, tuple[int, int]]] = {}

    # ---- life of a launch --------------------------------------------------------------------------
    def begin_launch(self, launch: "Launch", memory: GlobalMemory) -> None:
        """Starts a launch. Earlier launches are complete and cannot race with it."""
        self.kernel = launch.code.entry.name
        self._bytewise = shadow.stores_parts(launch.code.insts)
        self.globals.begin_launch(memory)
        self.early_releases.begin_launch()
        self.globals.keep_reads(self.dependencies.begin_launch(launch))
        self._forget()  # a failed launch may have left clusters
        self.sites = []
        self._twins.clear()
        self._found.clear()

    def begin_cluster(self, cluster: "Cluster") -> None:
        """Starts a cluster with fresh memories and clocks. Clusters that begin before `end_clusters` run side by side."""
        warps = [warp for cta in cluster.ctas for warp in cta.warps]
        if not self._clocks:
            expected = COMPONENTS_PER_WARP * len(warps) + BARRIERS_PER_CTA * len(cluster.ctas)
            self.components = Components(expected)
            self.globals.begin_clusters()
            self.dependencies.begin_clusters()
        for warp in warps:
            self._clocks[warp] = WarpClock(self.components, warp)
            self.silicon.begin_warp(warp)
        accesses, bytewise = self.accesses, self._bytewise
        self.shared.update(
            (cta, shadow.shared_shadow(cta.smem.size, accesses, bytewise=bytewise)) for cta in cluster.ctas
        )
        self.tensor.update((cta, TensorShadow(accesses)) for cta in cluster.ctas)
        self._touched.update((cta, {}) for cta in cluster.ctas)

    def end_clusters(self) -> None:
        """Ends all running clusters, and checks the state that their CTAs leave."""
        self._judge_frees()
        self.silicon.judge_tiles()
        for cta in self.shared:
            self._check_exit(cta)
            self.silicon.exits(cta)
        self._forget()

    def _forget(self) -> None:
        self._clocks, self.shared, self.tensor, self._touched = {}, {}, {}, {}
        self.accesses = Accesses()
        self._gates, self._uses, self.passing, self.current = {}, {}, {}, None
        self._frees = []
        self._partly_used = set()
        self._round_components, self._rounds = {}, {}
        self.early_releases.begin()
        self.warp_order.begin()
        self.lane_order.begin()
        self.unawaited.begin()
        self.wgmma_registers.begin()
        self.shared_atomics.begin(self.accesses)
        self.mbarriers.begin()
        self.tensor_maps.begin()
        self.silicon.begin()

    def _check_exit(self, cta: "Cta") -> None:
        name = f"cta {','.join(map(str, cta.idx))}"
        for base, columns in cta.tmem.allocations.items():
            text = (
                f"{name} exits with {columns} columns at {base} still allocated; free them by tcgen05.dealloc"
            )
            self.report("tensor-memory", None, None, text)
        self.mbarriers.exits(cta, name)
        known = self.components.nothing()
        for warp in cta.warps:
            known = joined(known, self.clock(warp).knowledge)
        known = self._with_uses(known)  # a warp exits only after its needed values have arrived
        for component, (value, number) in self._touched[cta].items():
            if max(known[SEEN, component], known[CAUSED, component]) < value:
                site = self.sites[number]
                severity = "note" if SMALL_COPY.match(site.instruction) else "error"
                if site.instruction.startswith("tcgen05.commit") and site.cta == cta.idx:
                    # Attention kernels of CUTLASS and FlashAttention exit before their last arrival, and run on GPUs.
                    severity = "warning"
                self.report(
                    "exit",
                    site,
                    None,
                    f"{name} may exit before {site} is done with its shared memory or tensor memory: "
                    "no warp of it waits for that",
                    severity=severity,
                )

    # ---- reports -------------------------------------------------------------------------------------
    def site(self, warp: "Warp", pc: int, *, atomic: bool = False) -> int:
        """Returns the number of an instruction's place in a warp."""
        sites, key = self._clocks[warp].sites, ~pc if atomic else pc
        number = sites.get(key)
        if number is None:
            number = sites[key] = len(self.sites)
            self.sites.append(Site(warp.cta.idx, warp.idx, warp.code.insts[pc], atomic))
        return number

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
        """Collects a hazard. Hazards of one kind at the same instructions count once."""
        text = f"{text} ({detail})" if detail else text
        self.adopt(Hazard(kind, self.kernel, site, other, text, severity=severity, rule=rule))

    def adopt(self, hazard: Hazard) -> None:
        """Collects a hazard that another process may have found."""
        site, other = hazard.site, hazard.other
        lines = site.inst.line if site else hazard.text, other.inst.line if other else None
        key = (hazard.kind, hazard.severity, hazard.rule, *lines)
        known = self._found.get(key)
        if known is not None:
            known.count += hazard.count
        elif sum(found[1] == hazard.severity for found in self._found) < MOST_HAZARDS:
            self._found[key] = hazard
            self.hazards.append(hazard)

    def report_write(
        self,
        kind: str,
        site: Site,
        other: Site,
        text: str,
        content: Callable[[], np.ndarray],
        detail: str = "",
    ) -> None:
        """Collects a write over an unordered write. `content`: reads the place before the write is done."""
        if self.held is None:
            self.report(kind, site, other, text, detail)
        else:
            self.held.append(HeldWrite(kind, site, other, text, detail, content, content()))

    def judge(self, held: "list[HeldWrite]") -> None:
        """Reports writes that were held back, after they are done. Writes that changed nothing are only warnings."""
        for write in held:
            same = np.array_equal(write.before, write.content())
            text = f"{write.text}; both write the same bytes" if same else write.text
            severity = "warning" if same else "error"
            self.report(write.kind, write.site, write.other, text, write.detail, severity)

    def judged(self, check: Callable[[], None], store: Callable[[], Any]) -> Any:
        """Checks a write against earlier ones, does it, and reports by its effect. Returns the result of `store`."""
        held = self.held = []
        try:
            check()
        finally:
            self.held = None
        result = store()
        if held:
            self.judge(held)
        return result

    def stopped(self, error: EmulatorError) -> None:
        """Collects the error that stopped the launch as a hazard."""
        self._judge_frees()
        self.silicon.judge_tiles()
        kind = error.kind if isinstance(error, Fault) else Fault.kind
        rule = named(str(error)) if kind == SiliconFault.kind else None
        self.report(kind, None, None, str(error), rule=rule.name if rule else "")

    def of_this_launch(self) -> list[Hazard]:
        """Returns the hazards since `begin_launch`, including notes."""
        return list(self._found.values())

    @property
    def failed(self) -> bool:
        """Whether this launch has a hazard that is an error."""
        return any(hazard.severity == "error" for hazard in self._found.values())

    def operation(self) -> Record:
        """Returns the record of the operation that happens now."""
        return self._record()

    def _conflict(
        self,
        conflict: Conflict,
        actor: Actor,
        *,
        write: bool,
        where: str,
        content: Callable[[np.ndarray], np.ndarray] | None = None,
        hint: str = "",
    ) -> None:
        site, other = self.sites[actor.site], self.sites[conflict.site]
        does = "writes" if write else "reads"
        if conflict.unfenced:
            copied = SMALL_COPY.match(other.instruction) and site.instruction.startswith("tcgen05.")
            self.report(
                "proxy-fence",
                site,
                other,
                f"{site} {does} {where} through the async proxy, {other} wrote it through the generic proxy: "
                "no fence.proxy.async between them",
                COPIED if copied else "",
                "warning" if copied else "error",
            )
            return
        tail = f"that {other} writes" if conflict.wrote else f"while {other} may still read it"
        if conflict.wrote and write:
            tail = f"that {other} may still be writing"
        text = f"{site} {does} {where} {tail}: nothing orders them"
        if site.instruction.startswith(SHARED_ACCESS) and other.instruction.startswith(SHARED_ACCESS):
            text += "; a barrier between them would (cute.arch.sync_threads, or an mbarrier)"
        if site is other and actor.proxy:
            text += " (the same instruction, in another lane if nobody elected one, or an earlier time)"
        text += self.mbarriers.weak_wait(site if conflict.wrote else other, conflict.writer)
        if conflict.wrote and write and content is not None:
            self.report_write("race", site, other, text, lambda: content(conflict.late))
        else:
            # The hardware has delivered registers that were used; this has not been seen to cause harm.
            self.report("race", site, other, text, hint, "warning" if hint else "error")

    # ---- clocks --------------------------------------------------------------------------------------
    def clock(self, warp: "Warp") -> WarpClock:
        """Returns the clock of a warp of the running cluster."""
        return self._clocks[warp]

    def warp_actor(self, warp: "Warp", pc: int) -> Actor:
        """Returns a warp as the actor of its own accesses, through the generic proxy."""
        clock = self._clocks[warp]
        clock.knowledge = self.components.fit(clock.knowledge)
        return Actor(clock.knowledge, clock.epoch, self.site(warp, pc), False)

    def issued(self, operation: Operation) -> Record:
        """Notes that an operation was submitted. Returns its record."""
        clock = self._clocks[operation.warp]
        component = clock.engine(operation.engine)
        number = clock.next_number(operation.engine)
        site = self.site(operation.warp, operation.pc)
        knowledge = clock.publish(site)
        self.lane_order.announced(operation.warp, knowledge, site)
        if operation.engine is Engine.CP_ASYNC:
            self.silicon.owns(component, operation.warp.cta)
        if operation.engine is Engine.TCGEN05:
            knowledge[SEEN, component] = number - 1
            if "commit" not in self.sites[site].inst.mods:
                self.silicon.issued(operation.warp, number)
        return Record(knowledge, component, number, site)

    def completed(self, operation: Operation) -> None:
        """Notes that the warp that issued an operation knows it to be complete."""
        record: Record = operation.record
        warp = operation.warp
        if operation.engine in UNORDERED:
            self.warp_order.waits(warp, record.component)
        elif record.copied is not None:
            self.warp_order.copied(warp, record.site, record.copied)
        self._clocks[warp].completed(record.component, record.number)
        self.globals.completed(epoch(record.component, record.number))
        is_newest = record.number == self.issued_on(warp, operation.engine)
        if operation.engine in (Engine.TMEM_LOAD, Engine.WGMMA) and is_newest:
            self.unawaited.awaited(warp)

    def loaded(self, operation: Operation, slots: Sequence[int | None]) -> None:
        """Notes that a finished operation wrote registers (None: a sink)."""
        self.unawaited.loaded(operation, slots)

    def issued_on(self, warp: "Warp", engine: Engine) -> int:
        """Returns how many operations a warp has issued on an engine."""
        return self._clocks[warp].issued.get(engine, 0)

    def covered(self, warp: "Warp", peer: "Warp", engine: Engine, number: int) -> None:
        """Notes that a warp knows another one's operations on an engine to be complete up to a number."""
        self._clocks[warp].completed(self._clocks[peer].engine(engine), number)

    def used(self, operation: Operation, index: int) -> None:
        """Notes a use of a register that an operation wrote.

        The value is there, but that tells others nothing about its read of tensor memory: a register dependency does
        not order memory accesses, tcgen05.wait::ld does (PTX ISA, tcgen05 memory consistency, canonical patterns).
        """
        record: Record = operation.record
        for free in self._frees:
            free.read_later = free.read_later or free.component == record.component
        if operation.warp.lanes != operation.lanes:
            self._partly_used.add(record.component)
        clock = self._clocks[operation.warp]
        uses = self._uses[record.component] = clock.engine(USES)
        clock.completed(uses, record.number)
        if record.unwritten is not None and record.unwritten[index]:
            site = self.sites[record.site]
            self.report(
                "uninitialised",
                site,
                None,
                f"a register that {site} loaded is used; nobody wrote what it read",
            )

    def _with_uses(self, knowledge: np.ndarray) -> np.ndarray:
        """Returns knowledge in which loads of tensor memory count as complete when their registers are used."""
        known = self.components.fit(knowledge).copy()
        for loads, uses in self._uses.items():
            known[SEEN, loads] = max(known[SEEN, loads], known[SEEN, uses])
        return known

    def gate_in(self, warp: "Warp", pc: int, gate: Any, *, relaxed: bool = False) -> None:
        """Notes that a warp arrives at a gate that others wait for. `relaxed`: the arrival does not release to other CTAs."""
        self.lane_order.met(warp)
        published = self._clocks[warp].publish(self.site(warp, pc))
        if relaxed:  # hardware waits for the warp's stores, but PTX ISA does not order them for other CTAs
            published, self.silicon.narrow = self._clocks[warp].narrowed(published), True
        known = self._gates.get(gate)
        self._gates[gate] = published if known is None else joined(known, published)
        self.globals.arrive(warp, gate)

    def round_in(self, warp: "Warp", pc: int, gate: "NamedGate", *, waits: bool) -> None:
        """Notes that a warp arrives at a named barrier. It must know that the last round is over, or may have been part of it.

        A warp may arrive and then wait in one round, as in flash-attention's epilogue. If it does so over two rounds,
        this is a warning, because something unseen here may hold the warp back in between.
        """
        cta, which, rounds = gate
        clock, component = self._clocks[warp], self._round_component(cta, which)
        clock.knowledge = self.components.fit(clock.knowledge)
        number, members = self.site(warp, pc), self._rounds.setdefault((cta, which), {})
        last, other = members.get(warp, (-1, number))
        members[warp] = (rounds, number)
        if last == rounds and not waits:
            said = "where its warp arrived before and has learnt of no completed round since"
        elif clock.knowledge[SEEN, component] < rounds:
            said = "and does not know that its last round is complete"
        else:
            return
        site = self.sites[number]
        text = f"{site} arrives at named barrier {which} {said}: it may count for another round"
        severity = "warning" if waits and last >= 0 else "error"
        self.report("named-barrier", site, self.sites[other] if last >= 0 else None, text, severity=severity)

    def round_out(self, warp: "Warp", gate: "NamedGate") -> None:
        """Notes that a warp which waited at a named barrier knows that the round is over."""
        cta, which, rounds = gate
        self._clocks[warp].completed(self._round_component(cta, which), rounds + 1)

    def _round_component(self, cta: "Cta", which: int) -> int:
        found = self._round_components.get((cta, which))
        if found is None:
            found = self._round_components[cta, which] = self.components.new()
        return found

    def gate_out(self, warp: "Warp", gate: Any) -> None:
        """Adds the knowledge of the arrivals at a gate to a warp."""
        known = self._gates.get(gate)
        if known is not None:
            self._clocks[warp].learn(known)
            self.globals.pass_gate(warp, gate)

    # ---- shared and tensor memory ----------------------------------------------------------------------
    def access_shared(
        self, cta: "Cta", place: Place, actor: Actor, *, write: bool, writers: list[int] | None = None
    ) -> None:
        """Compares an access to shared memory with earlier ones. `writers`: last writers of its granules, if known."""
        index, span = place
        memory = self.shared[cta]
        if write:
            self.mbarriers.written_over(cta, span, index, actor.site)
        self.shared_atomics.plain(cta, place, actor, write=write)
        if writers is None and (not write or self.silicon.narrow or self.lane_order.active):
            writers = memory.writers_of(index)
        if write:
            conflict = memory.write(index, span, actor)
        else:
            conflict = memory.read(index, span, actor, writers)
        if self.lane_order.active and writers:
            self.lane_order.check(writers, self.accesses, actor, f"shared memory{whose(cta)}", write=write)
        if conflict is not None:
            self._shared_conflict(cta, conflict, actor, write=write)
        if (
            self.silicon.narrow
            and writers
            and (conflict is None or conflict.unfenced)
            and self.silicon.late_elsewhere(map(memory.accesses.epochs.__getitem__, writers), actor)
        ):
            what = f"shared memory{whose(cta)}"
            numbers, accesses = memory.writers.at(memory.at(index)), self.accesses
            epochs, sites = accesses.epochs_of(numbers), accesses.sites_of(numbers)
            self.silicon.stores_relied_on(epochs, sites, actor, what)

    def access_atomically(self, cta: "Cta", place: Place, actor: Actor, *, reads: bool) -> None:
        """Compares an atomic or a strong store with earlier plain accesses to shared memory.

        `reads`: the stored value depends on the old one.
        """
        self.mbarriers.written_over(cta, place[1], place[0], actor.site)
        if reads and self.shared[cta].writers_of(place[0]) == [NOBODY]:
            self.unwritten_load(cta, place, actor)
        self.shared_atomics.access(cta, place, actor)

    def _shared_conflict(
        self, cta: "Cta", conflict: Conflict, actor: Actor, *, write: bool, compared: bool = True
    ) -> None:
        """Reports a conflict. `compared`: a write over a write that changes nothing is only a warning."""
        where = self.shared_range(cta, conflict.granules)
        content = cta.smem.views[WORD_BYTES // self.shared[cta].parts].take if compared else None
        self._conflict(conflict, actor, write=write, where=where, content=content)

    def shared_range(self, cta: "Cta", granules: tuple[int, int]) -> str:
        """Returns the byte range from the first to the last granule, for reports."""
        size = WORD_BYTES // self.shared[cta].parts
        return f"smem+{size * granules[0]:#x}..{size * (granules[1] + 1) - 1:#x}{whose(cta)}"

    def access_tensor(self, cta: "Cta", place: Place, actor: Actor, *, write: bool) -> None:
        """Compares an access to tensor memory with earlier ones."""
        index, span = place
        memory = self.tensor[cta]
        conflict = (memory.write if write else memory.read)(index, span, actor)
        if conflict is None:
            return
        where, hint = self._columns(cta, conflict), ""
        if write and not conflict.wrote:
            patient = replace(actor, knowledge=self._with_uses(actor.knowledge))
            hint = "" if memory.unordered_reader(index, span, patient) else ONLY_USED
        self._conflict(conflict, actor, write=write, where=where, hint=hint)

    def _columns(self, cta: "Cta", conflict: Conflict) -> str:
        width = self.tensor[cta].shape[1]
        low, high = conflict.granules
        columns = sorted((low % width, high % width))
        lanes = (
            f"lanes {low // width * shadow.HALF_QUADRANT}..{(high // width + 1) * shadow.HALF_QUADRANT - 1}"
        )
        return f"tensor memory columns {columns[0]}..{columns[1]}, {lanes}{whose(cta)}"

    def read_operand(self, cta: "Cta", place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """Checks that the current operation reads shared memory that was written."""
        actor = self._acting(cta, stamp, proxy=proxy)
        writers = self.shared[cta].writers_of(place[0])
        if NOBODY in writers:
            spreads = NAN_OPERANDS.match(self.sites[actor.site].instruction)
            severity = "warning" if spreads else "error"
            self._unwritten(actor.site, f"shared memory{whose(cta)}", cta, place, severity)
        self.access_shared(cta, place, actor, write=False, writers=writers)

    def unwritten_register(self, warp: "Warp", pc: int, name: str) -> None:
        """Reports a register that is read and was never written."""
        site = self.sites[self.site(warp, pc)]
        self.report(
            "register", site, None, f"{site} reads {name}, which was never written", severity="warning"
        )

    def unwritten_load(self, cta: "Cta", place: Place, actor: Actor) -> None:
        """Notes that a warp loads only unwritten bytes of shared memory.

        Kernels load full tiles and store the part inside the tensor, so it may not matter; poison shows if it does.
        """
        self._unwritten(actor.site, f"shared memory{whose(cta)}", cta, place, "warning")

    def freed(self, warp: "Warp", pc: int, place: Place) -> None:
        """Checks that all accesses are complete when a warp frees columns of tensor memory."""
        cta, actor = warp.cta, self.warp_actor(warp, pc)
        conflict = self.tensor[cta].unordered(*place, actor)
        if conflict is not None:
            site, other = self.sites[actor.site], self.sites[conflict.site]
            patient = replace(actor, knowledge=self._with_uses(actor.knowledge))
            text = f"{site} frees {self._columns(cta, conflict)} while {other} may still use it: nothing orders them"
            if self.tensor[cta].unordered(*place, patient) is None:
                self._frees.append(Freed(site, other, text, conflict.epoch >> COMPONENT_SHIFT))
            else:
                self.report("race", site, other, text + self.mbarriers.weak_wait(site, conflict.epoch))

    def _judge_frees(self) -> None:
        """Reports frees of tensor memory after uses of data loaded from it.

        If every lane has its values and nothing reads them later, it is a note: hardware has delivered a load whose
        register is used.
        """
        frees, self._frees = self._frees, []
        for free in frees:
            severity = "warning" if free.read_later or free.component in self._partly_used else "note"
            self.report("race", free.site, free.other, free.text, ONLY_USED, severity)

    def freed_again(self, warp: "Warp", pc: int, columns: str, other: str) -> None:
        """Reports that a warp frees columns that were freed before, which harms a CTA that has received them since."""
        site = self.sites[self.site(warp, pc)]
        text = f"{site} frees {columns} again, which were freed before, by {other}: another CTA of the SM may have them now"
        self.report("tensor-memory", site, None, text, severity="warning")

    def write_global(self, addresses: np.ndarray, nbytes: int, *, atomic: bool = False) -> None:
        """Checks a write of the current operation to global memory: `nbytes` at each address."""
        actor = self._record().actor()
        if atomic:
            actor = replace(actor, site=self._atomic_twin(actor.site))
        self.globals.access(addresses, nbytes, actor, write=True, atomic=atomic)

    def read_global(
        self, addresses: np.ndarray, nbytes: int, *, proxy: bool = True, stamp: int | None = None
    ) -> None:
        """Checks a read of global memory by the current operation. `stamp`: epoch of its completion on an mbarrier."""
        actor = self._record().actor(stamp, proxy=proxy)
        self.globals.access(addresses, nbytes, actor, write=False, noted=stamp is not None or not proxy)

    def _atomic_twin(self, number: int) -> int:
        if number not in self._twins:
            self._twins[number] = len(self.sites)
            self.sites.append(replace(self.sites[number], atomic=True))
        return self._twins[number]

    def _unwritten(self, number: int, what: str, cta: "Cta", place: Place, severity: str = "error") -> None:
        site = self.sites[number]
        low, high = 16 * place[1][0], 16 * place[1][1] - 1
        text = f"{site} reads {what} in smem+{low:#x}..{high:#x} that nobody wrote"
        self.report("uninitialised", site, None, text, severity=severity)

    def write_shared(self, cta: "Cta", place: Place, *, stamp: int | None = None, proxy: bool = True) -> None:
        """Checks a write of the current operation to shared memory. `stamp`: epoch of its completion on an mbarrier."""
        actor = self._acting(cta, stamp, proxy=proxy)
        if stamp is not None:
            self.early_releases.written(cta, *place, actor)
        self.access_shared(cta, place, actor, write=True)

    def read_tensor(self, cta: "Cta", lanes: slice, columns: slice) -> np.ndarray | None:
        """Checks a read of a rectangle of tensor memory. Returns which words were never written, or None if all were."""
        actor = self._acting(cta)
        self.access_tensor(cta, TensorShadow.rectangle(lanes, columns), actor, write=False)
        return self.tensor[cta].unwritten_words(lanes, columns)

    def require_tensor(self, what: str, unwritten: np.ndarray | None, columns: slice) -> None:
        """Reports an operand in tensor memory with words that were never written."""
        if unwritten is not None and unwritten.any():
            site = self.sites[self._record().site]
            self.report(
                "uninitialised",
                site,
                None,
                f"{site} uses {what} in tensor memory columns {columns.start}..{columns.stop - 1} that nobody wrote",
            )

    def note_unwritten(self, registers: np.ndarray) -> None:
        """Notes registers (bool each) that the current operation loads with unwritten words; a use of them is a hazard."""
        if registers.any():
            self._record().unwritten = registers

    def write_tensor(self, cta: "Cta", lanes: slice, columns: slice, valid: bool | None = True) -> None:
        """Checks a write of a rectangle of tensor memory. `valid` None: the caller marks the written words."""
        actor = self._acting(cta)
        self.access_tensor(cta, TensorShadow.rectangle(lanes, columns), actor, write=True)
        if valid is not None:
            self.tensor[cta].valid[lanes, columns] = valid

    def lanes_copied(self, offsets: np.ndarray, nbytes: int, lanes: np.ndarray) -> None:
        """Notes that lanes of the current operation (uint32) copied `nbytes` each to offsets (int64) in shared memory."""
        self._record().copied = Copied(offsets, nbytes, lanes)

    def lanes_differ(self, where: str) -> None:
        """Reports that lanes of the current operation write different bytes to one place."""
        site = self.sites[self._record().site]
        self.report(
            "race", site, site, f"lanes of {site} write different bytes to {where}: nothing orders them"
        )

    def copy_source(self, cta: "Cta", place: Place) -> bool:
        """Checks a read of shared memory by a copy. Returns whether all of it was written."""
        writers = self.shared[cta].writers_of(place[0])
        self.access_shared(cta, place, self._acting(cta), write=False, writers=writers)
        return NOBODY not in writers

    def _record(self) -> Record:
        record = self.current
        assert record is not None, "an effect outside an operation"
        record.knowledge = self.components.fit(record.knowledge)
        return record

    def _acting(self, cta: "Cta", stamp: int | None = None, *, proxy: bool = True) -> Actor:
        """Returns the current operation as an actor on a CTA's memory. The CTA must not exit before the access is done."""
        actor = self._record().actor(stamp, proxy=proxy)
        self.touch(cta, actor)
        return actor

    def touch(self, cta: "Cta", actor: Actor) -> None:
        """Notes that a CTA must not exit before an access by another CTA, or by an engine, is done."""
        component, value = actor.epoch >> COMPONENT_SHIFT, actor.epoch & VALUE_MASK
        known = self._touched[cta].get(component)
        if known is None or known[0] < value:
            self._touched[cta][component] = (value, actor.site)


def checker_of(warp: "Warp") -> Checker:
    """Returns the checker of the machine that a watched warp runs on."""
    checker: Any = warp.cta.machine.checker
    assert checker is not None, "a watched step on an unchecked machine"
    found: Checker = checker
    return found

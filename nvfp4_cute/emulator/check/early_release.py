"""Reads of shared memory that were only issued, not complete, when their stage was released to an asynchronous write.

A load is complete when a later instruction needs its values, because only that makes the hardware wait for it. An
arrival does not wait, and the assembler puts no wait before it. A warp that observes the arrival may therefore start a
TMA copy over bytes that are still being read (seen on an H200: wrong sums in 29 of 40 launches). In the checker's
clocks an arrival publishes the loads that its warp issued; this module also notes the first use of each load. A load is
overtaken if an asynchronous write knows of the load but not of its first use, and that use comes later. Unused values
cause no harm.

Any instruction uses a value, except mov, which does not exist in machine code. A fence of the warp also waits for all
loads. This order is that of PTX: ptxas may move arithmetic and mma.sync after an arrival that they precede, which only
the machine code shows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import SEEN, VALUE_MASK, WarpClock, epoch
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.shadow import Actor, distinct
from nvfp4_cute.emulator.late_registers import reached_slots
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code
    from nvfp4_cute.emulator.state import Cta, Warp

READS = "reads"
"""Component of a warp's clock that numbers its loads from shared memory."""

UNUSED = np.iinfo(np.int64).max
FIRST_CAPACITY = 256


@dataclass(frozen=True)
class Overtaken:
    """An unused load whose bytes were overwritten, with the finding to report if it is used."""

    load: int
    writer: int
    release: int | None
    where: str


class WarpReads:
    """Loads of one warp from shared memory.

    Attributes:
        component: component of their numbers in the warp's clock.
        used: the warp's own count at the first use, by load number.
        holding: loads whose unused values lie in a register, by slot.
        overtaken: overtaken loads, by number.
    """

    def __init__(self, clock: WarpClock):
        """Starts without loads."""
        self.clock = clock
        self.component = clock.engine(READS)
        self.used = np.zeros(FIRST_CAPACITY, np.int64)
        self.holding: dict[int, tuple[int, ...]] = {}
        self.overtaken: dict[int, Overtaken] = {}

    def issue(self, slots: Iterable[int]) -> int:
        """Returns the epoch of a new load into registers."""
        number = self.clock.next_number(READS)
        if number == self.used.size:
            self.used = np.concatenate([self.used, np.zeros_like(self.used)])
        self.used[number] = UNUSED
        self.clock.completed(self.component, number)
        self.holding.update(dict.fromkeys(slots, (number,)))
        return epoch(self.component, number)

    def use(self, slots: Iterable[int]) -> list[Overtaken]:
        """Notes that values in registers are used. Returns loads that were overtaken before."""
        found = []
        for slot in slots:
            for number in self.holding.pop(slot, ()):
                if self.used[number] == UNUSED:
                    self.used[number] = self.clock.value
                    if number in self.overtaken:
                        found.append(self.overtaken[number])
        return found

    def move(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Notes that registers get the unchanged values of other registers, or of none: values that were not loaded."""
        numbers = tuple({number for slot in sources for number in self.holding.get(slot, ())})
        for slot in targets:
            self.holding[slot] = numbers

    def overwritten(self, numbers: np.ndarray, seen: np.ndarray) -> list[int]:
        """Returns which of these loads a writer with the knowledge `seen` overtakes."""
        late = (self.used[numbers] > seen[self.clock.own]) & (numbers <= seen[self.component])
        return np.unique(numbers[late]).tolist() if late.any() else []


class EarlyReleases:
    """Loads of all warps of the running clusters, and asynchronous writes over them."""

    def __init__(self, checker: Ledger):
        """`checker`: receives the findings."""
        self.checker = checker
        self._reads: dict[Warp, WarpReads] = {}
        self._of_component: dict[int, WarpReads] = {}
        self._first: dict[int | None, int] = {}

    def begin_launch(self) -> None:
        """Forgets the findings of earlier launches."""
        self._first = {}

    def begin(self) -> None:
        """Forgets all reads, for new clusters."""
        self._reads, self._of_component = {}, {}

    def loaded(self, warp: "Warp", actor: Actor, slots: Iterable[int]) -> Actor:
        """Notes a load from shared memory into registers. Returns the load as an actor."""
        reads = self._reads.get(warp)
        if reads is None:
            reads = self._reads[warp] = WarpReads(self.checker.clock(warp))
            self._of_component[reads.component] = reads
        stamp = reads.issue(slots)
        return Actor(reads.clock.knowledge, stamp, actor.site, False)

    def holding(self, warp: "Warp") -> bool:
        """Whether registers of a warp may hold loaded values that are still unused."""
        reads = self._reads.get(warp)
        return reads is not None and bool(reads.holding)

    def used(self, warp: "Warp", slots: Iterable[int]) -> None:
        """Notes a use of registers, which may hold loaded values."""
        reads = self._reads.get(warp)
        if reads is not None and reads.holding:
            for overtaken in reads.use(slots):
                self._report(overtaken)

    def fenced(self, warp: "Warp") -> None:
        """Notes a fence, which waits for all loads of the warp."""
        reads = self._reads.get(warp)
        if reads is not None:
            self.used(warp, list(reads.holding))

    def moved(self, warp: "Warp", sources: Iterable[int], targets: Iterable[int]) -> None:
        """Notes writes of registers: unchanged values of other registers, or of none."""
        reads = self._reads.get(warp)
        if reads is not None and reads.holding:
            reads.move(sources, targets)

    def written(self, cta: "Cta", index: Any, span: tuple[int, int], actor: Actor) -> None:
        """Compares an asynchronous write of the granules at `index`, in rows [span), with the loads of these granules."""
        memory = self.checker.shared[cta]
        index, accesses = memory.at(index), memory.accesses
        for component, readers in memory.readers.items():
            reads = self._of_component.get(component)
            if reads is None or readers.beside(span):
                continue
            loads = {accesses.epochs[n] & VALUE_MASK for n in distinct(readers.at(index))}
            for number in reads.overwritten(np.array(sorted(loads)), actor.knowledge[SEEN]):
                numbers = readers.numbers[index]
                its_own = accesses.epochs_of(numbers) & VALUE_MASK == number
                overtaken = Overtaken(
                    load=int(accesses.sites_of(numbers)[its_own][0]),
                    writer=actor.site,
                    release=reads.clock.releases.get(int(actor.knowledge[SEEN, reads.clock.own])),
                    where=self.checker.shared_range(cta, memory.extent(index, its_own)),
                )
                if reads.used[number] == UNUSED:
                    reads.overtaken.setdefault(number, overtaken)
                else:
                    self._report(overtaken)

    def _report(self, overtaken: Overtaken) -> None:
        """Reports one finding per release: the first read that the release does not wait for stands for all of them."""
        sites = self.checker.sites
        release = None if overtaken.release is None else sites[overtaken.release]
        first = self._first.setdefault(release.inst.line if release else None, overtaken.load)
        load, writer = sites[first], sites[overtaken.writer]
        self.checker.report(
            "early-release",
            load,
            release,
            f"{load} reads {overtaken.where}, {release or 'its warp'} releases it before any value of the read is used, and "
            f"{writer} overwrites it: the arrival does not wait for the read; use the loaded values before "
            "the arrival, or execute fence.proxy.async before it",
        )


# ---- steps -----------------------------------------------------------------------------------------------------------
ELSEWHERE = {"param", "param::entry", "local", "const", "global"}
"""Spaces of loads that are not from shared memory."""


def prepare_uses(code: "Code") -> None:
    """Watches the instructions of an entry that touch registers which loads from shared memory may have written."""
    moves = {pc for pc, inst in enumerate(code.insts) if inst.opcode == "mov"}
    loads = {pc for pc, inst in enumerate(code.insts) if _may_read_shared(inst)}
    held = reached_slots(code, loads, moves)
    for pc, inst in enumerate(code.insts) if held else ():
        reads = sorted(held & code.reads[pc])
        # Under a predicate some lanes may keep the loaded value.
        writes = sorted(held & code.writes[pc]) if inst.pred is None and pc not in loads else []
        if pc in moves and writes:
            code.watch(pc, _holding, _move(reads, writes))
        elif reads or writes:
            code.watch(pc, _holding, _use(reads, writes))


def _may_read_shared(inst: Inst) -> bool:
    return inst.opcode == "ldmatrix" or (inst.opcode in ("ld", "ldu") and ELSEWHERE.isdisjoint(inst.mods))


def _holding(warp: "Warp") -> bool:
    return _releases(warp).holding(warp)


def _use(reads: list[int], writes: list[int]) -> "Callable[[Warp], None]":
    def look(warp: "Warp") -> None:
        releases = _releases(warp)
        releases.used(warp, reads)
        if writes:
            releases.moved(warp, (), writes)

    return look


def _move(reads: list[int], writes: list[int]) -> "Callable[[Warp], None]":
    return lambda warp: _releases(warp).moved(warp, reads, writes)


def _releases(warp: "Warp") -> EarlyReleases:
    checker: Any = warp.cta.machine.checker
    assert checker is not None, "a watched step on an unchecked machine"
    return checker.early_releases

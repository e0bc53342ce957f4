"""Registers of wgmma operations: they must not change while wgmma may read them, and wgmma.fence orders earlier writes.

PTX ISA (wgmma.mma_async, wgmma.fence) leaves three cases undefined: an access to a register of A or D before a
wgmma.wait_group has covered the operation; an operation whose registers were accessed without a wgmma.fence of the warp
in between; and a first operation without a fence. Consecutive operations on the same D are the exception. Plain moves
are ignored: compilers put them anywhere, and the assembler, which knows the operations under way, removes or places
them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import SEEN
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.late_registers import always, executes
from nvfp4_cute.emulator.modes import Engine

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code
    from nvfp4_cute.emulator.state import Warp

WORD_BYTES = 4
"""Size of a register of A or D; descriptors are wider, predicates narrower."""


class WgmmaRegisters:
    """Writes and uses of the registers of warps' wgmma operations.

    `_written`: place of the last write since the newest wgmma.fence, by warp that executed one and by slot. `_reading`:
    number of the newest product that reads a slot of A, and its place, by warp and slot.
    """

    def __init__(self, checker: Ledger):
        """`checker`: receives the findings."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Starts new warps."""
        self._written: dict[Warp, dict[int, int]] = {}
        self._reading: dict[Warp, dict[int, tuple[int, int]]] = {}

    def fenced(self, warp: "Warp") -> None:
        """Notes that a warp executes wgmma.fence."""
        self._written.setdefault(warp, {}).clear()

    def write(self, warp: "Warp", pc: int, slots: tuple[int, ...]) -> None:
        """Checks the registers that a warp is about to write."""
        written, reading = self._written.get(warp), self._reading.get(warp)
        if written is not None:
            written.update(dict.fromkeys(slots, pc))
        if reading:
            found = [reading.pop(slot) for slot in slots if slot in reading]
            complete = self._complete(warp) if found else 0
            for number, reader in found:
                if complete < number:
                    sites, place = self.checker.sites, self.checker.site
                    site, other = sites[place(warp, pc)], sites[place(warp, reader)]
                    text = (
                        f"{site} writes a register of A while {other} may still read it: no wgmma.wait_group has waited "
                        "for that"
                    )
                    self.checker.report("register", site, other, text)

    def _complete(self, warp: "Warp") -> int:
        clock = self.checker.clock(warp)
        component = clock.engine(Engine.WGMMA)
        return int(clock.knowledge[SEEN, component])

    def multiply(self, warp: "Warp", pc: int, a: tuple[int, ...], d: tuple[int, ...]) -> None:
        """Checks the registers of a product that a warp is about to issue: A (none if it lies in shared memory) and D."""
        written = self._written.get(warp)
        if written is None or not written.keys().isdisjoint((*a, *d)):
            site = self.checker.sites[self.checker.site(warp, pc)]
            if written is None:
                other, text = None, f"{site} is the first one of its warp, and no wgmma.fence comes before it"
                self.fenced(warp)
            else:
                which, first = next(
                    (name, s) for name, slots in (("A", a), ("D", d)) for s in slots if s in written
                )
                other = self.checker.sites[self.checker.site(warp, written[first])]
                text = f"{site} uses a register of {which} that {other} wrote: no wgmma.fence between them"
                for slot in (*a, *d):
                    written.pop(slot, None)
            self.checker.report("register", site, other, text)
        if a:
            number = self.checker.clock(warp).issued.get(Engine.WGMMA, 0) + 1
            self._reading.setdefault(warp, {}).update(dict.fromkeys(a, (number, pc)))


def prepare_wgmma(code: "Code") -> None:
    """Watches the instructions of an entry that touch registers of its products."""
    products = [
        pc for pc, inst in enumerate(code.insts) if inst.opcode == "wgmma" and inst.mods[:1] == ("mma_async",)
    ]
    if not products:
        return
    used: set[int] = set()
    for pc in products:
        d = code.writes[pc]
        a = tuple(sorted(s for s in code.reads[pc] - d if code.builder.width(s) == WORD_BYTES))
        accumulates = code.builder.read(code.insts[pc].operands[3], "pred")
        used |= {*a, *d}
        code.watch(pc, always, _multiply(pc, a, tuple(sorted(d)), accumulates))
    for pc, inst in enumerate(code.insts):
        if inst.opcode == "wgmma":
            if inst.mods[:1] == ("fence",):
                code.watch(pc, always, lambda warp: _of(warp).fenced(warp))
        elif inst.opcode != "mov" and not used.isdisjoint(code.writes[pc]):
            code.watch(pc, executes(code, pc), _write(pc, tuple(sorted(used & code.writes[pc]))))


def _multiply(pc: int, a: tuple[int, ...], d: tuple[int, ...], accumulates: Any) -> "Callable[[Warp], None]":
    return lambda warp: _of(warp).multiply(warp, pc, a, d if np.any(accumulates(warp)) else ())


def _write(pc: int, slots: tuple[int, ...]) -> "Callable[[Warp], None]":
    return lambda warp: _of(warp).write(warp, pc, slots)


def _of(warp: "Warp") -> WgmmaRegisters:
    checker: Any = warp.cta.machine.checker
    assert checker is not None, "a watched step on an unchecked machine"
    found: WgmmaRegisters = checker.wgmma_registers
    return found

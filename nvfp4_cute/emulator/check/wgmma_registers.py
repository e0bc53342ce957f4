"""Registers that wgmma uses: nobody writes them while it may read them, and a wgmma.fence orders what was written before.

PTX ISA (wgmma.mma_async, wgmma.fence): to access a register of A or D before a wgmma.wait_group has covered the operation is
undefined, and so is an operation whose registers were accessed with no wgmma.fence of the warp between, as is a first operation
without a fence; D of operations one after the other is the exception. Plain moves are left out: compilers put them
anywhere, and the assembler, which knows what is under way, turns them into nothing or places them.
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
"""Of a register of A or D; descriptors are wider, predicates narrower."""


class WgmmaRegisters:
    """What warps did to registers that a wgmma of theirs uses.

    `_written`: by warp that has executed a wgmma.fence and by slot, where it was written since the newest one. `_reading`: by
    warp and slot of A, the number of the newest product that reads it, and where.
    """

    def __init__(self, checker: Ledger):
        """`checker`: where findings go."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Fresh warps."""
        self._written: dict[Warp, dict[int, int]] = {}
        self._reading: dict[Warp, dict[int, tuple[int, int]]] = {}

    def fenced(self, warp: "Warp") -> None:
        """A warp executes wgmma.fence."""
        self._written.setdefault(warp, {}).clear()

    def write(self, warp: "Warp", pc: int, slots: tuple[int, ...]) -> None:
        """A warp is about to write registers."""
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
        """A warp is about to issue a product that reads the registers of A (none where it lies in shared memory) and D."""
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
    """Watch the instructions of an entry that touch registers of its products."""
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

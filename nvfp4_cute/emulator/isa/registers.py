"""setmaxnreg: warps exchange registers through the pool of their CTA (PTX ISA 9.7.19.5)."""

from typing import TYPE_CHECKING

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler
from nvfp4_cute.emulator.lanes import LANES, RuleWait
from nvfp4_cute.emulator.ptx import Entry, Imm, Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

REGISTER_FILE = 65536
"""32-bit registers per SM."""


def entry_registers(entry: Entry) -> int | None:
    """Returns registers per thread at the entry of a kernel with setmaxnreg, or None if its directives do not bound them.

    The rule follows the reports of ptxas 13.0 ("Used ... registers") over thread counts, occupancies and budgets: the
    largest budget, as far as threads of all CTAs that ``.minnctapersm`` requires get that many. Without a bound, ptxas
    drops setmaxnreg.
    """
    directives = entry.directives
    if "maxnreg" in directives:
        return directives["maxnreg"][0]
    block = directives.get("reqntid") or directives.get("maxntid")
    ctas = directives.get("minnctapersm")
    if not block or not ctas:
        return None
    x, y, z = (*block, 1, 1)[:3]
    most = REGISTER_FILE // (max(ctas[0], 1) * x * y * z) // 8 * 8
    budgets = [
        int(op.value)
        for i in entry.insts
        if i.opcode == "setmaxnreg"
        for op in i.operands
        if isinstance(op, Imm)
    ]
    return min(most, max(budgets, default=most))


@handler("setmaxnreg")
def set_budget(inst: Inst, b: Builder) -> Step:
    """Changes the register count of the warp's threads; .inc waits until the CTA has released enough."""
    mods = Mods(inst)
    action = mods.one_of("inc", "dec")
    mods.drop("sync", "aligned", "u32")
    mods.done()
    count, pc = b.imm(inst.operands[0]), b.pc
    if action is None or count % 8 or not 24 <= count <= 256:
        raise inst.unsupported(f"setmaxnreg to {count} registers: a multiple of 8 in 24..256")

    def step(warp: "Warp") -> RuleWait | None:
        cta, entry = warp.cta, warp.code.registers
        current = warp.budgets[-1] if warp.budgets else entry
        if current is not None and (count < current if action == "inc" else count > current):
            raise silicon.fault(
                "register-direction",
                f"setmaxnreg.{action} {count} by a warp whose threads have {current} registers",
            )
        if entry is not None and action == "inc" and not _fits(cta, warp, count, entry):
            return RuleWait(
                lambda: _fits(cta, warp, count, entry),
                lambda: silicon.BY_NAME["register-pool"].text(_wanted(cta, warp, count, entry)),
            )
        warp.budgets = (*warp.budgets, count)
        cta.machine.changes += 1
        checker = cta.machine.checker
        if checker is not None and entry is None:
            checker.silicon.unbounded_registers(warp, pc)
        return None

    return step


def _used(cta: "Cta", warp: "Warp", count: int, entry: int) -> int:
    """Returns the registers of the CTA's threads, including those that have exited, if `warp` had `count` per thread."""
    others = (w for w in cta.warps if w is not warp)
    return LANES * (count + sum(w.budgets[-1] if w.budgets else entry for w in others))


def _fits(cta: "Cta", warp: "Warp", count: int, entry: int) -> bool:
    return _used(cta, warp, count, entry) <= LANES * entry * len(cta.warps)


def _wanted(cta: "Cta", warp: "Warp", count: int, entry: int) -> str:
    return (
        f"setmaxnreg.inc {count}: the warps of the CTA would have {_used(cta, warp, count, entry)} registers, "
        f"it was launched with {LANES * entry * len(cta.warps)} ({entry} a thread)"
    )

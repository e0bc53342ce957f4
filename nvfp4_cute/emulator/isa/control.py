"""Control flow, and instructions that change nothing on a machine that runs in order."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler
from nvfp4_cute.emulator.ptx import Inst, Label, Symbol
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Wait
    from nvfp4_cute.emulator.state import Warp

IGNORED = {
    "prefetch": "a cache hint: loads see memory itself",
    "prefetchu": "a cache hint: loads see memory itself",
    "applypriority": "an eviction hint",
    "discard": "permission to drop a line; keeping the data is allowed",
    "membar": "ordering: every access is performed in program order",
    "fence": "ordering: every access is performed in program order",
    "nanosleep": "time does not pass; the warp's turn ends when it polls",
    "pmevent": "a profiler event",
}
"""Instructions that are accepted and do nothing, each with the reason. Their modifiers are not examined."""


@handler(*IGNORED)
def ignored(inst: Inst, b: Builder) -> Step:
    """An instruction of the IGNORED table; a nanosleep loop counts as polling."""
    if inst.opcode == "nanosleep":
        return _sleep
    return lambda warp: None


def _sleep(warp: "Warp") -> None:
    warp.polled = True


@handler("griddepcontrol")
def grid_dependency(inst: Inst, b: Builder) -> Step:
    """Waits for nothing, because the earlier launch has always finished. The checker notes the wait."""
    return lambda warp: None


@handler("bra")
def branch(inst: Inst, b: Builder) -> Step:
    """Jumps; a predicate that differs between lanes splits the warp into groups."""
    mods = Mods(inst)
    mods.drop("uni")
    mods.done()
    target, after = b.label(inst.operands[0]), b.pc + 1
    b.guarded = True
    if inst.pred is None:
        b.falls_through = False
        return lambda warp: target
    slot, wanted = b.slot(inst.pred[0], "pred"), not inst.pred[1]

    def step(warp: "Warp") -> Any:
        predicate = warp.regs[slot]
        if predicate is wanted:
            return target
        if predicate.__class__ is bool:
            return None
        if predicate is None:
            raise TypeError("undefined predicate")
        taken = warp.active & (predicate if wanted else ~predicate)
        count = int(np.count_nonzero(taken))
        if count == 0:
            return None
        if count == warp.num_active:
            return target
        return (
            warp.split(taken, target, after) if warp.groups else warp.split_once(taken, count, target, after)
        )

    return step


@handler("brx.idx")
def branch_indexed(inst: Inst, b: Builder) -> Step:
    """Jumps to entry `index` of a .branchtargets list."""
    mods = Mods(inst)
    mods.drop("uni")
    mods.done()
    table = inst.operands[1]
    if not isinstance(table, Label | Symbol):
        raise inst.unsupported("brx.idx without a .branchtargets list")
    names = b.tables.get(table.name.split("#")[0])
    if names is None:
        raise inst.unsupported(f"no .branchtargets list `{table.name}`")
    targets = [b.label(Label(name)) for name in names]
    b.falls_through = False
    read = b.read(inst.operands[0], "u32")

    def step(warp: "Warp") -> Any:
        index = read(warp)
        wanted = np.unique(index[warp.active]).tolist() if index.__class__ is np.ndarray else [index]
        if wanted[-1] >= len(targets):
            raise EmulatorError(f"brx.idx index {wanted[-1]} with {len(targets)} targets")
        if len(wanted) == 1:
            return targets[wanted[0]]
        return warp.scatter([(targets[value], warp.active & (index == value)) for value in wanted])

    return step


@handler("ret", "exit")
def leave(inst: Inst, b: Builder) -> Step:
    """Ends the lanes. ret and exit are equal, because a kernel has no caller."""
    mods = Mods(inst)
    mods.drop("uni")
    mods.done()
    b.guarded = True
    after = b.pc + 1
    if inst.pred is None:
        b.falls_through = False
        return lambda warp: warp.exit_lanes(warp.active, after)
    slot, wanted = b.slot(inst.pred[0], "pred"), not inst.pred[1]

    def step(warp: "Warp") -> Any:
        predicate = warp.regs[slot]
        if predicate.__class__ is bool:
            return warp.exit_lanes(warp.active, after) if predicate is wanted else None
        mask = warp.active & (predicate if wanted else ~predicate)
        return warp.exit_lanes(mask, after) if mask.any() else None

    return step


@handler("trap", "brkpt")
def trap(inst: Inst, b: Builder) -> Step:
    """Aborts the launch."""

    def step(warp: "Warp") -> "Wait | None":
        raise EmulatorError(f"the kernel executed {inst.opcode} (lanes {warp.active_lanes()})")

    return step

"""Registers that asynchronous operations write: their contents until then, and steps that handle them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nvfp4_cute.emulator.faults import RegisterFault
from nvfp4_cute.emulator.lanes import LANES
from nvfp4_cute.emulator.modes import Engine, Operation
from nvfp4_cute.emulator.ptx import Inst, Reg

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp


Step = Callable[["Warp"], Any]


class Steps(Protocol):
    """An entry's instructions, their steps, and the slots that they touch (`code.Code`)."""

    builder: Any
    steps: list[Any]
    reads: list[frozenset[int]]
    writes: list[frozenset[int]]

    @property
    def insts(self) -> Sequence[Inst]:
        """Instructions by program counter, like all other attributes."""
        ...


class Deferred:
    """Content of a register whose writing operation is under way."""

    __slots__ = ("index", "operation")

    def __init__(self, operation: "Operation | Replay", index: int):
        """The register will hold ``operation.result[index]``."""
        self.operation, self.index = operation, index

    def get(self) -> Any:
        """Returns the value. Using a register of a tcgen05.ld waits for the load, as the hardware's scoreboard does.

        Raises:
            RegisterFault: a wgmma accumulator before wgmma.wait_group.
        """
        operation = self.operation
        must_be_awaited(operation)
        operation.finish()
        if isinstance(operation, Operation) and operation.record is not None:
            operation.queue.used(operation, self.index)
        return operation.result[self.index]


class Replay:
    """A mov of registers that are not written yet; it is executed when its result is used.

    Compilers put moves that pack registers between tcgen05.ld and tcgen05.wait::ld. These moves disappear in machine
    code, so they must not count as uses.
    """

    engine = None
    awaited = True

    def __init__(self, warp: "Warp", step: Step, sources: Sequence[int], targets: Sequence[int]):
        """Captures the sources' current contents."""
        self.warp, self.step, self.sources, self.targets = warp, step, sources, targets
        self.values = [warp.regs[slot] for slot in sources]
        self.result: Any = None

    def finish(self) -> None:
        """Executes the move with the captured sources and leaves all registers as they are."""
        if self.result is not None:
            return
        regs, slots = self.warp.regs, (*self.sources, *self.targets)
        saved = [regs[slot] for slot in slots]
        for slot, value in zip(self.sources, self.values, strict=True):
            regs[slot] = value.get() if value.__class__ is Deferred else value
        for slot in self.targets:
            regs[slot] = None  # all lanes moved, even those that wait now: no old value is left
        self.step(self.warp)
        self.result = [regs[slot] for slot in self.targets]
        for slot, value in zip(slots, saved, strict=True):
            regs[slot] = value


def must_be_awaited(operation: "Operation | Replay") -> None:
    """Raises RegisterFault if the result of an operation may not be used yet: a wgmma accumulator before wgmma.wait_group."""
    if operation.engine is Engine.WGMMA and not operation.awaited:
        raise RegisterFault(
            "reads an accumulator of a wgmma.mma_async that no wgmma.wait_group has waited for"
        )


def defer(operation: Operation, warp: "Warp", slots: Sequence[int | None]) -> None:
    """Puts a `Deferred` into each register that an operation will write (None: a sink)."""
    for index, slot in enumerate(slots):
        if slot is not None:
            warp.regs[slot] = Deferred(operation, index)


def settle(warp: "Warp", slots: Iterable[int]) -> None:
    """Replaces each `Deferred` by its value."""
    regs = warp.regs
    for slot in slots:
        value = regs[slot]
        if value.__class__ is Deferred:
            regs[slot] = value.get()


ISSUERS = ("cp", "tcgen05", "wgmma", "clusterlaunchcontrol")
"""First words of the instructions that issue asynchronous operations."""

LATE_WRITERS = {("tcgen05", "ld"), ("wgmma", "mma_async")}


def prepare_noted(code: Steps) -> None:
    """Rewrites the issuing steps of an entry so that each operation notes where it was issued."""
    for pc, inst in enumerate(code.insts):
        if inst.opcode in ISSUERS or inst.mods[:1] == ("async",):  # st.async, red.async
            code.steps[pc] = _noting(code.steps[pc], pc)


def prepare_late(code: Steps) -> None:
    """Rewrites the steps of an entry for operations that happen after their issue.

    Steps that touch late-written registers first settle them if their predicate holds. Moves pass on the `Deferred`.
    """
    for pc, passes_on, slots in late_uses(code):
        if passes_on:
            passing = _copying_on if copies(code.insts[pc]) else _passing_on
            code.steps[pc] = passing(code.steps[pc], sorted(code.reads[pc]), sorted(code.writes[pc]))
        else:
            code.steps[pc] = _settling(code.steps[pc], slots, executes(code, pc))


def late_uses(code: Steps) -> Iterator[tuple[int, bool, tuple[int, ...]]]:
    """Yields the instructions that touch slots which late writers may have written.

    A late writer counts only with the slots that it reads and does not write.

    Yields:
        Index of the instruction, whether it is a move that passes such values on, and the slots: those that it reads,
        then those that it writes.
    """
    moves = {pc for pc, inst in enumerate(code.insts) if inst.opcode == "mov" and inst.pred is None}
    writers = {pc for pc, inst in enumerate(code.insts) if (inst.opcode, *inst.mods[:1]) in LATE_WRITERS}
    late = reached_slots(code, writers, moves)
    for pc in range(len(code.insts)) if late else ():
        reads, writes = sorted(late & code.reads[pc]), sorted(late & code.writes[pc])
        if pc in writers:
            reads, writes = [slot for slot in reads if slot not in code.writes[pc]], []
        if reads or writes:
            yield pc, pc in moves and bool(reads), (*reads, *writes)


def always(warp: "Warp") -> bool:
    """Returns True: the predicate of an instruction without one."""
    return True


def executes(code: Steps, pc: int) -> "Callable[[Warp], bool]":
    """Returns a test of whether an instruction's predicate holds in an active lane; `always` for one without a predicate."""
    guard = code.insts[pc].pred
    if guard is None:
        return always
    slot, wanted = code.builder.slot(guard[0], "pred"), not guard[1]
    return lambda warp: bool(np.any(np.broadcast_to(warp.regs[slot], LANES)[warp.active] == wanted))


def reached_slots(code: Steps, writers: set[int], moves: set[int]) -> set[int]:
    """Returns the slots that may hold late-written values: targets of the writers, and of moves from such slots."""
    late: set[int] = set()
    for pc in writers:
        late |= code.writes[pc]
    grew = True
    while grew:
        before = len(late)
        for pc in moves:
            if not late.isdisjoint(code.reads[pc]):
                late |= code.writes[pc]
        grew = len(late) > before
    return late


def _noting(step: Step, pc: int) -> Step:
    def run(warp: "Warp") -> Any:
        warp.pc = pc
        return step(warp)

    return run


def _settling(step: Step, slots: tuple[int, ...], runs: "Callable[[Warp], bool]") -> Step:
    def run(warp: "Warp") -> Any:
        regs = warp.regs
        for slot in slots:
            if regs[slot].__class__ is Deferred and runs(warp):
                regs[slot] = regs[slot].get()
        return step(warp)

    return run


def copies(inst: Inst) -> bool:
    """Whether a mov copies a register to another register of the same type."""
    dest, source = inst.operands
    return isinstance(dest, Reg) and isinstance(source, Reg) and dest.type == source.type


def _copying_on(step: Step, sources: list[int], targets: list[int]) -> Step:
    """Returns a step that copies one register; both then hold the same `Deferred`."""
    (source,), (target,) = sources, targets

    def run(warp: "Warp") -> Any:
        value = warp.regs[source]
        if value.__class__ is not Deferred:
            return step(warp)
        if warp.groups or not warp.all_active:
            settle(warp, sources)
            return step(warp)
        warp.regs[target] = value
        return None

    return run


def _passing_on(step: Step, sources: list[int], targets: list[int]) -> Step:
    def run(warp: "Warp") -> Any:
        regs = warp.regs
        for slot in sources:
            if regs[slot].__class__ is Deferred:
                break
        else:
            return step(warp)
        if warp.groups or not warp.all_active:
            settle(warp, sources)
            return step(warp)
        move = Replay(warp, step, sources, targets)
        for index, slot in enumerate(targets):
            regs[slot] = Deferred(move, index)
        return None

    return run


def resolved(values: Sequence[Any]) -> np.ndarray:
    """Returns uint32 (registers, 32), the values of captured registers after the operations that write them."""
    words = np.empty((len(values), 32), np.uint32)
    for row, value in zip(words, values, strict=True):
        row[:] = value.operation.result[value.index] if value.__class__ is Deferred else value
    return words

"""An entry compiled to steps: its basic blocks, and the registers that are live at each place.

Liveness decides what a divergent write must preserve. A group of lanes that writes a register may overwrite all 32
lanes unless a group waiting elsewhere still reads the old value, that is, unless the register is live where that
group waits. Values computed by one elected lane therefore stay plain Python ints.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.fused import Plain, Run, plain
from nvfp4_cute.emulator.isa import Builder, Step, Wrapper
from nvfp4_cute.emulator.isa.families import find_handler
from nvfp4_cute.emulator.isa.registers import entry_registers
from nvfp4_cute.emulator.isa.requirements import architecture, missing_on, missing_operand
from nvfp4_cute.emulator.late_registers import prepare_late, prepare_noted
from nvfp4_cute.emulator.memory import SHARED_BASE
from nvfp4_cute.emulator.ptx import Entry, Program, Variable
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Signal, Wait
    from nvfp4_cute.emulator.state import Warp

Watching: TypeAlias = "Callable[[Warp], bool]"
Look: TypeAlias = "Callable[[Warp], None]"

SPACE_BASE = {"shared": SHARED_BASE, "local": 0}


class Code:
    """Executable form of one entry. Shared by all warps; holds no run-time state.

    Attributes:
        steps / insts: one per instruction, by index (the program counter).
        reads / writes: register slots that each instruction touches.
        static_shared / local_bytes: bytes of named shared variables and of local memory per lane.
        polls: whether warps may wait for words of global memory; known only on a timed machine.
        together: returns the code that checks warps in lockstep (`check.touches`); None on a machine that does not check.
        registers: registers of a thread at the entry, if setmaxnreg changes them and directives bound them.
    """

    def __init__(
        self,
        program: Program,
        entry: Entry,
        *,
        late: bool = False,
        noted: bool = False,
        wrappers: Sequence[Wrapper] = (),
    ):
        """Compiles every instruction of `entry`.

        Args:
            late: asynchronous operations may happen after their issue.
            noted: a record is kept of each asynchronous operation.
            wrappers: functions that wrap the step of every instruction, applied in order; `compiled.compiled` passes
                those of the package.

        Raises:
            EmulatorError: an instruction, modifier, or operand form that is not modelled, or that the module's target
                does not have; names the PTX line.
        """
        self.program, self.entry = program, entry
        self.wrappers = wrappers
        self.insts = entry.insts
        self.buffers: list[np.ndarray] = []  # keeps initialised module variables alive
        self.static_shared = self.local_bytes = 0
        self.symbols = self._place_symbols(program)
        self.builder = Builder(entry.labels, self.symbols, entry.tables, architecture(program.target))
        self.steps: list[Step] = []
        self._bare: list[Step] = []  # steps without any wrapper
        self._fusible: list[Step] = []  # steps with nothing around them but looks
        self._looks: dict[int, list[tuple[Watching, Look]]] = {}
        self._runs: dict[tuple[int, int], Step] = {}
        self.reads: list[frozenset[int]] = []
        self.writes: list[frozenset[int]] = []
        self._kills: list[frozenset[int]] = []
        self._successors: list[tuple[int, ...]] = []
        for pc in range(len(self.insts)):
            self._compile(pc)
        self.registers = entry_registers(entry)
        silicon.check_groups(self.insts)
        if late or noted:
            prepare_noted(self)
        if late:
            prepare_late(self)
        # Falling off the end is a return.
        self.leaders = self._find_leaders()
        self.polls = False
        self.together: Callable[[], Code] | None = None
        self.tails: list[tuple[tuple[Step, ...], tuple[int, ...]] | None] = [None] * (len(self.steps) + 1)
        self._block_live: dict[int, int] | None = None
        self._live_sets: dict[int, frozenset[int]] = {}
        self._uses: dict[frozenset[int], bool] = {}
        self.everything = frozenset(range(len(self.builder.template)))

    # ---- building ------------------------------------------------------------------------------
    def _place_symbols(self, program: Program) -> dict[str, tuple[str, int]]:
        symbols = {p.name: ("param", p.offset) for p in self.entry.params}
        sizes = dict(SPACE_BASE)
        dynamic: list[Variable] = []
        for variable in (*program.variables.values(), *self.entry.variables.values()):
            if variable.space in ("global", "const"):
                symbols[variable.name] = (variable.space, self._place_global(variable))
            elif variable.nbytes is None:
                dynamic.append(variable)
            else:
                start = -(-sizes[variable.space] // variable.align) * variable.align
                symbols[variable.name] = (variable.space, start)
                sizes[variable.space] = start + variable.nbytes
        # Dynamic shared memory follows the named variables; all extern arrays share its start.
        for variable in dynamic:
            start = -(-sizes["shared"] // variable.align) * variable.align
            symbols[variable.name] = (variable.space, start)
        starts = [symbols[v.name][1] for v in dynamic]
        self.static_shared = max([sizes["shared"], *starts]) - SHARED_BASE
        self.local_bytes = sizes["local"]
        return symbols

    def _place_global(self, variable: Variable) -> int:
        if variable.nbytes is None:
            raise EmulatorError(f"extern {variable.space} variable `{variable.name}` has no definition")
        buffer = np.zeros(variable.nbytes + variable.align, np.uint8)
        start = -buffer.ctypes.data % variable.align
        if variable.init:
            buffer[start : start + variable.nbytes] = np.frombuffer(variable.init, np.uint8)
        self.buffers.append(buffer)
        return buffer.ctypes.data + start

    def _compile(self, pc: int) -> None:
        inst, b = self.insts[pc], self.builder
        prefix, function = find_handler(inst)
        words, arch = (inst.opcode, *inst.mods), self.builder.arch
        missing = missing_on(words, arch) or missing_operand(words, len(inst.operands), arch)
        if missing is not None:
            raise inst.error(missing)
        b.begin(inst, pc, prefix)
        step = function(b.inst, b)
        self._bare.append(step)
        self._fusible.append(step)
        for wrap in self.wrappers:
            step = wrap(b.inst, b, step)
        if inst.pred is not None and not b.guarded:
            slot = b.slot(inst.pred[0], "pred")
            step = _guarded(step, slot, not inst.pred[1], frozenset(b.writes))
        if b.dynamic:
            step = _refreshing(step, tuple(b.dynamic.items()))
        self.steps.append(step)
        self.reads.append(frozenset(b.reads))
        self.writes.append(frozenset(b.writes))
        # A predicated write may leave old values in place: it ends no live range.
        self._kills.append(frozenset() if inst.pred is not None else frozenset(b.writes))
        falls = (pc + 1,) if b.falls_through or (inst.pred is not None) else ()
        self._successors.append((*b.targets, *falls))

    def _find_leaders(self) -> list[int]:
        leaders = {0, *self.entry.labels.values()}
        for pc, successors in enumerate(self._successors):
            if successors != (pc + 1,):
                leaders.update(successors)
                leaders.add(pc + 1)
        return sorted(p for p in leaders if p < len(self.steps))

    @property
    def loops(self) -> list[tuple[int, int]]:
        """First instruction of each loop, and the instruction after it.

        A loop reaches from the target of a backward branch to the branch.
        """
        return [(to, pc + 1) for pc, targets in enumerate(self._successors) for to in targets if to <= pc]

    def watch(self, pc: int, active: Watching, look: Look) -> None:
        """Calls `look(warp)` before an instruction, whenever `active(warp)` is true.

        A look changes no registers and no memory, so when several instructions become one function, all looks may come
        first.
        """
        step = self.steps[pc]

        def run(warp: "Warp") -> "Wait | Signal | int | None":
            if active(warp):
                look(warp)
            return step(warp)

        if step is self._fusible[pc]:
            self._fusible[pc] = run
        self.steps[pc] = run
        self._looks.setdefault(pc, []).append((active, look))

    def uses(self, slots: frozenset[int]) -> bool:
        """Whether any instruction reads one of the slots."""
        found = self._uses.get(slots)
        if found is None:
            found = self._uses[slots] = any(not slots.isdisjoint(reads) for reads in self.reads)
        return found

    # ---- running -------------------------------------------------------------------------------
    def tail(self, pc: int) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        """Returns the steps from `pc` to the end of its basic block, their first instructions, and the index after the block.

        A step executes one instruction or a run of them.
        """
        found = self.tails[pc]
        if found is None:
            steps: list[Step] = []
            places: list[int] = []
            end, run = self._end(pc), list[Plain]()
            for at in range(pc, end + 1):
                one = self._plain(at) if at < end else None
                if one is not None:
                    run.append(one)
                    continue
                if run:
                    steps.append(self.steps[run[0].pc] if len(run) == 1 else self._run(run))
                    places.append(run[0].pc)
                    run = []
                if at < end:
                    steps.append(self.steps[at])
                    places.append(at)
            found = self.tails[pc] = (tuple(steps), (*places, end))
        return found

    def _end(self, pc: int) -> int:
        """Returns the index after the basic block of `pc`."""
        index = np.searchsorted(self.leaders, pc, side="right")
        return self.leaders[index] if index < len(self.leaders) else len(self.steps)

    def _plain(self, pc: int) -> Plain | None:
        """Returns the instruction as part of a run, or None if wrappers other than looks change its step."""
        if self.steps[pc] is not self._fusible[pc]:
            return None
        return plain(
            self.insts[pc], self.builder, pc, self._bare[pc], sorted(self.reads[pc]), sorted(self.writes[pc])
        )

    def _run(self, instructions: list[Plain]) -> Step:
        key = instructions[0].pc, instructions[-1].pc
        if key not in self._runs:
            looks: dict[Watching, list[tuple[int, Look]]] = {}
            for one in instructions:
                for active, look in self._looks.get(one.pc, ()):
                    looks.setdefault(active, []).append((one.pc, look))
            alone = [(one.pc, self.steps[one.pc]) for one in instructions]
            self._runs[key] = Run(instructions).step(alone, list(looks.items()))
        return self._runs[key]

    # ---- liveness ------------------------------------------------------------------------------
    def live_at(self, pc: int) -> frozenset[int]:
        """Slots whose value at `pc` may still be read."""
        found = self._live_sets.get(pc)
        if found is None:
            end = self._end(pc) if pc < len(self.steps) else pc
            live = self._before(pc, end, self._live_out(end - 1)) if end > pc else 0
            found = self._live_sets[pc] = frozenset(i for i in range(live.bit_length()) if live >> i & 1)
        return found

    def _before(self, start: int, end: int, live: int) -> int:
        for pc in range(end - 1, start - 1, -1):
            live = live & ~_bits(self._kills[pc]) | _bits(self.reads[pc])
        return live

    def _live_out(self, last: int) -> int:
        block_live = self._solve() if self._block_live is None else self._block_live
        live = 0
        for successor in self._successors[last]:
            live |= block_live.get(successor, 0)
        return live

    def _solve(self) -> dict[int, int]:
        """Computes the live registers at every block start: the usual backward fixed point, on ints as bit sets."""
        blocks = []
        for start in self.leaders:
            end = self._end(start)
            uses = kills = 0
            for pc in range(end - 1, start - 1, -1):
                kill, read = _bits(self._kills[pc]), _bits(self.reads[pc])
                uses, kills = uses & ~kill | read, kills | kill
            blocks.append((start, uses, kills, self._successors[end - 1]))
        live = dict.fromkeys(self.leaders, 0)
        changed = True
        while changed:
            changed = False
            for start, uses, kills, successors in reversed(blocks):
                out = 0
                for successor in successors:
                    out |= live.get(successor, 0)
                new = uses | out & ~kills
                if new != live[start]:
                    live[start], changed = new, True
        self._block_live = live
        return live

    def undefined(self, warp: "Warp", pc: int) -> list[int]:
        """Returns the slots of registers that instruction `pc` reads and that were never written."""
        return [slot for slot in sorted(self.reads[pc]) if warp.regs[slot] is None]


def _bits(slots: Iterable[int]) -> int:
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits


def _guarded(step: Step, slot: int, wanted: bool, writes: frozenset[int]) -> Step:
    """Returns `step` under a predicate: skipped, run, or run for the lanes whose predicate holds."""

    def run(warp: "Warp") -> "Wait | Signal | int | None":
        predicate = warp.regs[slot]
        if predicate.__class__ is bool:
            return step(warp) if predicate is wanted else None
        if predicate is None:
            raise TypeError("undefined predicate")
        mask = warp.active & (predicate if wanted else ~predicate)
        count = int(np.count_nonzero(mask))
        if count == 0:
            return None
        if count == warp.num_active:
            return step(warp)
        saved: Any = (warp.active, warp.num_active, warp.all_active, warp.protected)
        warp.active, warp.num_active, warp.all_active = mask, count, False
        warp.protected = warp.protected | writes
        try:
            return step(warp)
        finally:
            warp.active, warp.num_active, warp.all_active, warp.protected = saved

    return run


def _refreshing(step: Step, dynamic: tuple[tuple[int, str], ...]) -> Step:
    """Returns `step` preceded by a fresh read of its clock-like special registers."""

    def run(warp: "Warp") -> "Wait | Signal | int | None":
        for slot, name in dynamic:
            warp.regs[slot] = warp.clock(name)
        return step(warp)

    return run

"""Runs of plain instructions as one step: Python code generated for the values that their registers hold.

A run is a sequence of instructions of one basic block that only read and write registers. Most of them compute
addresses from values that all lanes share. Others are rows of one instruction on different registers, as in an
epilogue. After a run has been executed a few times, a function is generated for the classes of its inputs (one value
for all lanes, or 32 values). Shared values become plain Python expressions, and independent instructions of one form
become one call. The order of instructions changes only where no register depends on it. A run executes its steps
one by one if it has no such function, for example while waiting lanes still need a register that it overwrites.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Step
from nvfp4_cute.emulator.isa.moves import INTEGER_COMPARE
from nvfp4_cute.emulator.ptx import TYPE_BYTES, Imm, Inst, Operand, Reg, Vector

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

TRIALS, LONG, LONG_TRIALS = 24, 32, 6
"""Executions of a run, step by step, before a function is generated: of any, and of one of many instructions, which gains more.

Generation takes as long as hundreds of steps.
"""

LEAST_ROWS = 3
"""Least number of instructions of one form that become one call."""

MOST_LANES = 512
"""Of one instruction: warps in lockstep gain nothing from more."""

INTEGERS = ("u32", "s32", "b32", "u64", "s64", "b64")
SYMBOLS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
PURE = frozenset(
    "mov add sub mul mad fma min max neg abs and or xor not shl shr shf lop3 prmt bfe bfi popc selp setp cvt ex2 lg2 rcp rsqrt "
    "sqrt tanh".split()
)
"""Opcodes of instructions that only compute, and never fail."""

ONE, BOOL, LANES, UNKNOWN = "one", "bool", "lanes", "unknown"
"""Contents of a register: an int or a bool for all lanes, an array of 32 lanes, or any of these."""
HELD = {int: ONE, bool: BOOL, np.ndarray: LANES}


class InRun(Exception):
    """An instruction of a run failed. `pc`: the instruction; the second argument is its error."""

    def __init__(self, pc: int, error: Exception):
        """`pc`: index of the instruction. `error`: the exception that it raised."""
        super().__init__(pc)
        self.pc, self.error = pc, error


@dataclass(frozen=True)
class Plain:
    """An instruction that only reads and writes registers.

    Attributes:
        pc: index of the instruction.
        step: function that executes it.
        reads: slots that it reads.
        writes: slots that it writes.
        shared: expression of its result for operands that are ints and bools, with `{0}` for the first operand, or "".
        sources: operands of the expression: slots, or literals as text.
        predicate: the expression is a bool.
        choice: the result is one of its first two operands, or its only one, whatever these hold.
        form: what several instructions that become one call have in common, or None.
        parts: slots of its operands, destinations first, each once.  targets: how many of them are destinations.
        template: initial registers of a warp.
    """

    pc: int
    step: Step
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shared: str = ""
    sources: tuple[int | str, ...] = ()
    predicate: bool = False
    choice: bool = False
    form: Any = None
    parts: tuple[int, ...] = ()
    targets: int = 0
    template: "Sequence[Any]" = ()

    @property
    def columns(self) -> list[int]:
        """Positions in `parts` of the slots that it reads."""
        return [i for i, slot in enumerate(self.parts) if slot in self.reads]


class _Form:
    """One instruction during its analysis."""

    def __init__(self, inst: Inst, b: Builder):
        self.inst, self.b = inst, b
        types = [m for m in inst.mods if m in TYPE_BYTES]
        self.types = types
        self.type = types[0] if len(types) == 1 else ""
        self.others = tuple(m for m in inst.mods if m not in TYPE_BYTES)

    def source(self, operand: Operand, type_: str) -> int | str | None:
        """Returns a slot of the type's width, the text of a literal, or None for any other operand."""
        if isinstance(operand, Imm):
            if operand.kind != "int":
                return None
            return str(bool(operand.value)) if type_ == "pred" else str(operand.value & _mask(type_))
        if isinstance(operand, Reg):
            slot = self.b.slot(operand, type_)
            return slot if self.b.width(slot) == TYPE_BYTES[type_] else None
        return None

    def is_register(self, operand: Operand, type_: str) -> bool:
        return isinstance(operand, Reg) and self.b.width(self.b.slot(operand, type_)) == TYPE_BYTES[type_]


def _mask(type_: str) -> int:
    return (1 << 8 * TYPE_BYTES[type_]) - 1


def _signed(type_: str) -> str:
    """Returns the expression of `{}`, an unsigned value of the type, as a signed int."""
    half = 1 << 8 * TYPE_BYTES[type_] - 1
    return f"(({{}} ^ {half}) - {half})"


def plain(
    inst: Inst, b: Builder, pc: int, step: Step, reads: Sequence[int], writes: Sequence[int]
) -> Plain | None:
    """Returns the instruction as part of a run, or None if it does more than compute or has an uncommon form."""
    if inst.pred is not None or not writes or inst.opcode not in PURE or "cc" in inst.mods:
        return None
    form = _Form(inst, b)
    common, parts, targets = _alike(inst, b)
    text, given, predicate = "", tuple[int | str, ...](), False
    found = _expression(form)
    if found is not None:
        expression, operands, result = found
        sources = [form.source(operand, type_) for operand, type_ in operands]
        if form.is_register(inst.operands[0], result) and all(s is not None for s in sources):
            text, predicate = expression, result == "pred"
            given = tuple(s for s in sources if s is not None)
    choice = bool(text) and inst.opcode in ("mov", "selp")
    return Plain(
        pc,
        step,
        tuple(reads),
        tuple(writes),
        text,
        given,
        predicate,
        choice,
        common,
        parts,
        targets,
        b.template,
    )


def _alike(inst: Inst, b: Builder) -> tuple[Any, tuple[int, ...], int]:
    """Returns the form of an instruction, the slots of its operands, and the number of destinations; (None, (), 0) if unknown."""
    words: list[Any] = [inst.opcode, *inst.mods]
    slots: dict[int, int] = {}
    targets = 0
    for number, operand in enumerate(inst.operands):
        items = operand.items if isinstance(operand, Vector) else (operand,)
        words.append(len(items))
        for item in items:
            if isinstance(item, Reg):
                slot = b.slot(item, "b32")
                words += [slots.setdefault(slot, len(slots)), b.dtypes[slot].str]
            elif isinstance(item, Imm):
                words.append(item)
            else:
                return None, (), 0
        if not number:
            targets = len(slots)
    if inst.opcode == "mov" and not any(isinstance(operand, Vector) for operand in inst.operands):
        return None, (), 0  # an assignment
    return tuple(words), tuple(slots), targets


def _expression(form: _Form) -> tuple[str, list[tuple[Operand, str]], str] | None:
    """Returns (expression, its operands with their types, type of the result) of an instruction, or None."""
    inst, type_, others = form.inst, form.type, form.others
    rest = list(inst.operands[1:])
    typed = [(operand, type_) for operand in rest]
    name = inst.opcode
    if name == "mov" and type_ in (*INTEGERS, "f32", "pred") and not others:
        packs = isinstance(rest[0], Vector) or isinstance(inst.operands[0], Vector)
        return None if packs else ("{0}", typed, type_)
    if name == "selp" and type_ in (*INTEGERS, "f32") and not others:
        if type_ == "f32" and any(isinstance(operand, Imm) for operand in rest):
            return None
        return "({0} if {2} else {1})", [*typed[:2], (rest[2], "pred")], type_
    if name in SYMBOLS and not others:
        if type_ == "pred" and name != "add":
            return f"{{0}} {SYMBOLS[name]} {{1}}", typed, type_
        if type_ in INTEGERS:
            mask = f" & {_mask(type_)}" if name in ("add", "sub") else ""
            return f"({{0}} {SYMBOLS[name]} {{1}}){mask}", typed, type_
    if name == "not" and not others:
        if type_ == "pred":
            return "not {0}", typed, type_
        return (f"~{{0}} & {_mask(type_)}", typed, type_) if type_ in INTEGERS else None
    if name in ("mul", "mad") and others == ("lo",) and type_ in INTEGERS:
        return f"({{0}} * {{1}}{' + {2}' if name == 'mad' else ''}) & {_mask(type_)}", typed, type_
    if name == "mul" and others == ("wide",) and type_ in ("u32", "s32"):
        x = _signed(type_) if type_ == "s32" else "{}"
        return f"{x.format('{0}')} * {x.format('{1}')} & {_mask('b64')}", typed, "b64"
    if name in ("shl", "shr") and not others and type_ in INTEGERS and isinstance(rest[1], Imm):
        return _shift(name, type_, rest)
    if name == "setp" and len(others) == 1 and type_ in INTEGERS and others[0] in INTEGER_COMPARE:
        x = _signed(type_) if type_[0] == "s" else "{}"
        return f"{x.format('{0}')} {COMPARISONS[others[0]]} {x.format('{1}')}", typed, "pred"
    if name == "cvt" and not others and form.types in (["s64", "s32"], ["u64", "u32"]):
        result, source = form.types
        text = f"{_signed(source).format('{0}')} & {_mask('b64')}" if source == "s32" else "{0}"
        return text, [(rest[0], source)], result
    return None


def _shift(
    name: str, type_: str, operands: list[Operand]
) -> tuple[str, list[tuple[Operand, str]], str] | None:
    count, size = operands[1], 8 * TYPE_BYTES[type_]
    if not isinstance(count, Imm) or not 0 <= count.value < size:
        return None
    if name == "shl":
        text = f"{{0}} << {count.value} & {_mask(type_)}"
    elif type_[0] == "s":
        text = f"{_signed(type_).format('{0}')} >> {count.value} & {_mask(type_)}"
    else:
        text = f"{{0}} >> {count.value}"
    return text, [(operands[0], type_)], type_


# ---- several instructions at once ---------------------------------------------------------------------------------
class MergedInstructions:
    """Instructions of one form as one: the step of the first one takes the lanes of all.

    Attributes:
        regs, active, num_active, all_active, protected, warps: what steps ask a warp for.
    """

    num_active, all_active, warps = 0, True, 1
    protected: frozenset[int] = frozenset()

    def __init__(self, group: Sequence[Plain], columns: Sequence[int], shared: Sequence[int]):
        """`columns`: positions in `parts` of the sources with lanes.  `shared`: slots of those that are one value."""
        first = group[0]
        self._step, self._group = first.step, group
        self._targets = first.parts[: first.targets]
        self._columns, self._shared = [first.parts[i] for i in columns], shared
        self.regs = list(first.template)
        self.active = np.ones(0, bool)

    def __call__(self, warp: "Warp", columns: Sequence[Sequence[np.ndarray]]) -> list[Any]:
        """Returns the results: those of the first destination of all instructions, then those of the second one."""
        if any(value.__class__ is not np.ndarray for column in columns for value in column):
            return self._singly(warp)
        count, width = len(columns[0]), len(columns[0][0])
        if width > MOST_LANES:
            return self._singly(warp)
        regs = self.regs
        for slot, column in zip(self._columns, columns, strict=True):
            regs[slot] = np.concatenate(column)
        for slot in self._shared:
            regs[slot] = warp.regs[slot]
        if self.active.size != count * width:
            self.active = np.ones(count * width, bool)
            self.num_active = count * width
        self._step(self)  # type: ignore[arg-type]
        found = [regs[slot] for slot in self._targets]
        if any(
            value.__class__ is not np.ndarray for value in found
        ):  # all lanes agree, perhaps not in each row
            return self._singly(warp)
        return [row for value in found for row in value.reshape(count, width)]

    def _singly(self, warp: "Warp") -> list[Any]:
        """Executes the instructions one by one."""
        for one in self._group:
            one.step(warp)
        return [warp.regs[one.parts[i]] for i in range(len(self._targets)) for one in self._group]


# ---- generation ----------------------------------------------------------------------------------------------------
class Run:
    """A step that executes a run.

    Attributes:
        functions: state by the classes of the inputs: a function, the number of executions so far, or None if no
            function is possible.
    """

    def __init__(self, instructions: Sequence[Plain]):
        """Consecutive instructions of a basic block."""
        self.instructions = tuple(instructions)
        written: set[int] = set()
        inputs: dict[int, None] = {}
        for one in instructions:
            inputs.update(dict.fromkeys(slot for slot in one.reads if slot not in written))
            written.update(one.writes)
        self.inputs, self.writes = tuple(inputs), frozenset(written)
        self.functions: dict[tuple[type, ...], Any] = {}

    def step(self, alone: Sequence[tuple[int, Step]], looks: "Sequence[tuple[Any, Sequence[Any]]]") -> Step:
        """Returns the step that a warp calls.

        Args:
            alone: index of each instruction, and its step when it is executed by itself.
            looks: functions to call before a generated function if a predicate of the warp holds, by instruction; steps
                contain them.
        """
        inputs, writes, functions = self.inputs, self.writes, self.functions
        trials = TRIALS if len(self.instructions) < LONG else LONG_TRIALS

        def run(warp: "Warp") -> None:
            regs = warp.regs
            if not warp.protected or warp.protected.isdisjoint(writes):
                classes = tuple([regs[slot].__class__ for slot in inputs])
                function = functions.get(classes, 0)
                if function.__class__ is int:
                    functions[classes] = function + 1 if function < trials else self.generate(classes)
                elif function is not None:
                    for active, calls in looks:
                        if active(warp):
                            _one_by_one(warp, calls)
                    function(warp, regs)
                    return
            _one_by_one(warp, alone)

        return run

    def generate(self, classes: tuple[type, ...]) -> "Callable[[Warp, list[Any]], None] | None":
        """Generates the function for these input classes; None if one is unknown or the steps are as good."""
        holds = {slot: HELD.get(cls, "") for slot, cls in zip(self.inputs, classes, strict=True)}
        if "" in holds.values():
            return None
        source = _Source(holds)
        for one in self._rearranged(dict(holds)):
            source.add(one)
        if not source.gains:
            return None
        names: dict[str, Any] = {f"s{one.pc}": one.step for one in self.instructions}
        names |= source.calls
        exec("def run(warp, regs):\n  " + "\n  ".join(source.lines), names)
        found: Callable[[Warp, list[Any]], None] = names["run"]
        return found

    def _rearranged(self, holds: dict[int, str]) -> list[list[Plain]]:
        """Reorders the instructions as far as registers allow, so that those of one form become one call."""
        level_of: dict[int, int] = {}  # by slot: level after its last write
        read_at: dict[int, int] = defaultdict(int)  # by slot: level after all reads since then
        levels: dict[int, dict[Any, list[Plain]]] = defaultdict(dict)
        for one in self.instructions:
            level = max(
                [
                    0,
                    *(level_of.get(s, 0) for s in one.reads),
                    *(max(level_of.get(s, 0), read_at[s]) for s in one.writes),
                ]
            )
            levels[level].setdefault(_together(one, holds) or one.pc, []).append(one)
            kind = result_of(one, holds)
            for slot in one.reads:
                read_at[slot] = max(read_at[slot], level + 1)
            for slot in one.writes:
                level_of[slot], holds[slot] = level + 1, kind
        groups = [group for level in sorted(levels) for group in levels[level].values()]
        return [
            part
            for group in groups
            for part in ([group] if len(group) >= LEAST_ROWS else [[one] for one in group])
        ]


def _together(one: Plain, holds: dict[int, str]) -> Any:
    """What instructions that become one call have in common: form, and sources without lanes. None for an instruction alone."""
    sources = [(one.parts[i], holds.get(one.parts[i])) for i in one.columns]
    if one.form is None or not any(kind == LANES for _, kind in sources):
        return None
    if one.form[0] == "selp" and holds.get(one.parts[-1]) != LANES:
        return None  # the result is one of the operands, which all lanes may share
    if not all(kind in (LANES, ONE, BOOL) for _, kind in sources):
        return None
    return (one.form, *(None if kind == LANES else slot for slot, kind in sources))


def _one_by_one(warp: "Warp", steps: "Sequence[tuple[int, Any]]") -> None:
    for pc, step in steps:
        try:
            step(warp)
        except Exception as error:
            raise InRun(pc, error) from error


def result_of(one: Plain, holds: dict[int, str]) -> str:
    """Returns the class of the value in an instruction's target register."""
    inputs = [holds[s] if isinstance(s, int) else ONE for s in (one.sources or one.reads)]
    if one.choice and _shared(one, holds):
        return inputs[0] if len(set(inputs[:2])) == 1 else UNKNOWN
    if LANES in (inputs[2:] if one.choice else inputs):
        return LANES
    if _shared(one, holds):
        return BOOL if one.predicate else ONE
    return UNKNOWN


def _shared(one: Plain, holds: dict[int, str]) -> bool:
    """Whether the expression of an instruction may compute it."""
    if not one.shared:
        return False
    inputs = [holds[s] if isinstance(s, int) else ONE for s in one.sources]
    if one.choice:
        return len(inputs) == 1 or inputs[2] == BOOL
    return all(kind in (ONE, BOOL) for kind in inputs)


class _Source:
    """Lines of the function that is being generated. `gains`: whether any line is faster than the steps."""

    def __init__(self, holds: dict[int, str]):
        self.holds = holds
        self.calls: dict[str, MergedInstructions] = {}
        self.lines: list[str] = []
        self.named: set[int] = set()
        self.gains = False

    def add(self, group: list[Plain]) -> None:
        """Adds one instruction, or several of one form."""
        if len(group) > 1:
            self._rows(group)
        elif _shared(group[0], self.holds):
            self._expression(group[0])
        else:
            self.lines.append(f"s{group[0].pc}(warp)")
            self.named.difference_update(group[0].writes)
        for one in group:
            kind = result_of(one, self.holds)
            self.holds.update(dict.fromkeys(one.writes, kind))

    def _name(self, source: int | str) -> str:
        if isinstance(source, str):
            return source
        if source not in self.named:
            self.named.add(source)
            self.lines.append(f"r{source} = regs[{source}]")
        return f"r{source}"

    def _expression(self, one: Plain) -> None:
        text = one.shared.format(*(self._name(s) for s in one.sources))
        (target,) = one.writes
        self.lines.append(f"regs[{target}] = r{target} = {text}")
        self.named.add(target)
        self.gains = True

    def _rows(self, group: list[Plain]) -> None:
        first = group[0]
        columns = [i for i in first.columns if self.holds[first.parts[i]] == LANES]
        shared = [first.parts[i] for i in first.columns if i not in columns]
        name = f"rows{first.pc}"
        self.calls[name] = MergedInstructions(group, columns, shared)
        targets = ", ".join(f"regs[{one.parts[i]}]" for i in range(first.targets) for one in group)
        texts = ("[" + ", ".join(f"regs[{one.parts[i]}]" for one in group) + "]" for i in columns)
        self.lines.append(f"{targets} = {name}(warp, ({', '.join(texts)},))")
        for one in group:
            self.named.difference_update(one.writes)
        self.gains = True

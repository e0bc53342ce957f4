"""Cost of straight-line PTX for a warp, by basic block: issue slots, dependent latency, and time of the matrix pipe.

Hardware does not execute PTX: the assembler drops moves, folds addresses and reorders. A block is therefore charged
only the cost that no order can avoid: the slots of its instructions, and the longest chain of dependent latencies that
its last instruction or the next one waits for.
"""

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from nvfp4_cute.emulator.ptx import Inst, Label

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code


SHORT_SKIP = 8
"""Largest number of skipped instructions for which a predicate replaces a branch."""


class InstCost(NamedTuple):
    """Cycles of one warp instruction.

    slots: issue slots of its scheduler.
    latency: cycles until a dependent instruction may issue.
    pipe: the part of the SM's quarter that executes it, where instructions may queue.
    busy: cycles that it occupies the pipe.
    """

    slots: float
    latency: float
    pipe: str = ""
    busy: float = 0


class BlockCost(NamedTuple):
    """Cost of a run of instructions, in cycles.

    Attributes:
        slots: issue slots, or the time of its busiest pipe outside this list if that is longer.
        alu: time of its scheduler's ALU.
        port: time of the SM's path to shared memory.
        path: length of the dependence chain up to its end.
        instructions: number of instructions.
    """

    slots: float
    alu: float
    port: float
    path: float
    instructions: int


# Cycles, from bench/probes/h200_issue_probe.txt. A quarter of an SM has two integer pipes, each with an instruction
# every two cycles: the ALU (logic, permutations, right shifts, comparisons and conversions), and a pipe that
# multiplies. Additions and left shifts use whichever is free, so only the issue of instructions limits them. fp32 and
# fp16x2 run at full rate. The probe does not cover loads (29: published microbenchmarks, with the guide's 128 bytes per
# cycle and SM), divisions, ldmatrix and stmatrix (published, 32 for each stmatrix.x4), votes, and branches. Elections:
# 4.7 with the instruction that they predicate, bench/probes/h200_probe.txt.
ADD = InstCost(1, 4)
FREE = InstCost(0, 0)
ALU = InstCost(1, 4, "alu", 2)
WIDE = InstCost(2, 6, "alu", 4)
FLOAT = InstCost(1, 4)
FLOAT_PAIR = InstCost(2, 4)
HALF_PAIR = InstCost(1, 8)
MULTIPLY = InstCost(1, 4, "multiplier", 2)
COUNT = InstCost(1, 17, "special", 8)
SPECIAL_FUNCTION = InstCost(1, 17, "special", 8)
BRANCH = InstCost(1, 8)
SHUFFLE = InstCost(1, 26, "port", 1)
VOTE = InstCost(1, 12, "alu", 2)
SHARED_LATENCY = 29
STORE_LATENCY = 4
WORD_BUSY = 1
"""Cycles of the SM's path to shared memory for 4 bytes per lane: 128 bytes per cycle."""
CONSTANT = InstCost(1, 8)
DIVIDE = InstCost(24, 80)
MATRIX = InstCost(1, 33)
PROXY_FENCE = InstCost(2, 30)

_FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
_BY_OPCODE: dict[str, InstCost] = {
    **dict.fromkeys(("mov", "cvta", "mapa", "pragma", "isspacep", "getctarank"), FREE),
    **dict.fromkeys(_FUNCTIONS, SPECIAL_FUNCTION),
    **dict.fromkeys(("div", "rem"), DIVIDE),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24"), MULTIPLY),
    **dict.fromkeys(("popc", "brev", "clz"), COUNT),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call"), BRANCH),
    **dict.fromkeys(("shfl", "redux"), SHUFFLE),
    "elect": InstCost(1, 4),
    **dict.fromkeys(("vote", "match", "activemask"), VOTE),
    **dict.fromkeys(("ldmatrix", "movmatrix"), InstCost(4, 33)),
    "stmatrix": InstCost(32, 32),
    "mma": MATRIX,
}
_ARITHMETIC = {"add", "sub", "mul", "mad", "fma", "neg", "abs", "min", "max"}
_LOGIC = {"and", "or", "xor", "not"}
_ALU = {
    "and", "or", "xor", "not", "lop3", "prmt", "shr", "shf", "setp", "set", "selp", "slct", "min", "max", "abs", "cvt",
    "bfe", "bfi", "bfind", "sad", "testp", "copysign", "cnot", "szext", "dp4a", "dp2a",
}  # fmt: skip
_INTEGERS = {sign + bits for sign in "usb" for bits in ("16", "32")}
_HALF_TYPES = {"f16", "f16x2", "bf16", "bf16x2"}
_WIDE_TYPES = {"s64", "u64", "b64"}


@lru_cache(4096)
def inst_cost(inst: Inst) -> InstCost:
    """Returns the cost of an instruction, without the time of memory and barriers."""
    opcode, words = inst.opcode.split(".")[0], set(inst.mods)
    if opcode in ("ld", "ldu"):
        constant = any(w.startswith(("param", "const")) for w in words)
        return CONSTANT if constant else _shared(inst, SHARED_LATENCY)
    if opcode == "st":
        return _shared(inst, STORE_LATENCY)
    if inst.opcode.startswith("fence.proxy"):
        return PROXY_FENCE
    if opcode in _ARITHMETIC and "f32x2" in words:
        return FLOAT_PAIR
    if opcode in _ARITHMETIC and "f32" in words:
        return FLOAT
    if opcode in _ARITHMETIC and _HALF_TYPES & words:
        return HALF_PAIR
    found = _BY_OPCODE.get(opcode)
    if found is not None:
        return found
    if _WIDE_TYPES & words:
        return WIDE
    if opcode == "cvt" and all(word in _INTEGERS for word in inst.mods[-2:]):
        return FREE  # integers of other widths use the same registers
    return ALU if opcode in _ALU else ADD


def _shared(inst: Inst, latency: float) -> InstCost:
    """Returns the cost of an access to shared memory without bank conflicts."""
    words = next((int(word[1:]) for word in inst.mods if word in ("v2", "v4", "v8")), 1)
    return InstCost(1, latency, "port", WORD_BUSY * words)


def block_cost(code: "Code", start: int, end: int) -> BlockCost:
    """Returns the cost of the instructions `start` to `end` - 1, which run one after the other."""
    ready: dict[int, float] = {}

    def operands(pc: int) -> float:
        """Returns the time at which the last operand of an instruction is ready."""
        return max([ready.get(slot, 0.0) for slot in code.reads[pc]], default=0.0)

    slots, fused = 0.0, _fused(code, start, end)
    pipes: dict[str, float] = defaultdict(float)
    for pc in range(start, end):
        cost = FREE if pc in fused else inst_cost(code.insts[pc])
        slots += cost.slots
        pipes[cost.pipe] += cost.busy
        done = operands(pc) + cost.latency
        for slot in code.writes[pc]:
            ready[slot] = done
    last = end - 1
    path = operands(last)
    if inst_cost(code.insts[last]) is BRANCH:
        path += 0 if _predicates(code, last) else BRANCH.latency
    elif end < len(code.insts):
        path = max(path, operands(end))
    alu, port = pipes.pop("alu", 0.0), pipes.pop("port", 0.0)
    return BlockCost(max([slots, *pipes.values()]), alu, port, path, end - start)


def _fused(code: "Code", start: int, end: int) -> set[int]:
    """Returns logic instructions that the assembler merges into a later one: lop3 computes any function of three inputs."""
    made: dict[int, int] = {}  # slot -> the logic instruction that wrote it
    users: dict[int, list[int]] = defaultdict(list)
    for pc in range(start, end):
        for slot in code.reads[pc] & made.keys():
            users[made[slot]].append(pc)
        for slot in code.writes[pc]:
            made.pop(slot, None)
            if code.insts[pc].opcode in _LOGIC:
                made[slot] = pc
    fused: dict[int, int] = {}  # instruction -> the last instruction that it absorbs
    for source, using in users.items():
        if len(using) == 1 and code.insts[using[0]].opcode in _LOGIC:
            fused[using[0]] = source
    return set(fused.values())


def _predicates(code: "Code", pc: int) -> bool:
    """Whether a branch skips only a few instructions, which the assembler predicates instead."""
    inst = code.insts[pc]
    targets = [code.entry.labels[op.name] for op in inst.operands if isinstance(op, Label)]
    return inst.pred is not None and all(pc < target <= pc + SHORT_SKIP for target in targets)

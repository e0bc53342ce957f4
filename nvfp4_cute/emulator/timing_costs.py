"""What straight-line PTX costs a warp: issue slots, dependent latency, and time of the matrix pipe, by basic block.

PTX is not what the hardware executes: the assembler drops moves, folds addresses and reorders. A block is therefore
charged what no order can avoid: the slots of its instructions, and the longest chain of dependent latencies that its last
instruction or the one after it waits for.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from nvfp4_cute.emulator.ptx import Inst, Label

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code


SHORT_SKIP = 8
"""Instructions that a predicate replaces a branch around."""


class InstCost(NamedTuple):
    """Cycles of one warp instruction: `slots` of its scheduler, `latency` until a dependent one may issue."""

    slots: float
    latency: float


class BlockCost(NamedTuple):
    """Cycles of a run of instructions: issue slots, chain up to its end, and how many instructions it has."""

    slots: float
    path: float
    instructions: int


# Cycles. Rates: CUDA C++ programming guide, arithmetic instructions (results a clock and SM: 128 -> 1 slot, 64 -> 2,
# 16 -> 8). Latencies: published microbenchmarks (4 for arithmetic, 24 for shuffles, 29 for shared memory, 32 for each
# stmatrix.x4); elect: 4.7 with the instruction that it predicates, bench/h200_probe.cu.
ALU = InstCost(1, 4)
FREE = InstCost(0, 0)
WIDE = InstCost(2, 6)
MULTIPLY = InstCost(2, 5)
CONVERT = InstCost(2, 10)
NARROW_CONVERT = InstCost(4, 12)
SPECIAL_FUNCTION = InstCost(8, 20)
BRANCH = InstCost(1, 8)
SHUFFLE = InstCost(2, 24)
VOTE = InstCost(1, 12)
SHARED = InstCost(1, 29)
CONSTANT = InstCost(1, 8)
DIVIDE = InstCost(24, 80)
MATRIX = InstCost(1, 33)
STORE = InstCost(1, 4)

_FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
_BY_OPCODE: dict[str, InstCost] = {
    **dict.fromkeys(("mov", "cvta", "mapa", "pragma", "isspacep", "getctarank"), FREE),
    **dict.fromkeys(_FUNCTIONS, SPECIAL_FUNCTION),
    **dict.fromkeys(("div", "rem"), DIVIDE),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24", "bfe", "bfi", "popc", "brev", "clz"), MULTIPLY),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call"), BRANCH),
    **dict.fromkeys(("shfl", "redux"), SHUFFLE),
    "elect": InstCost(1, 4),
    **dict.fromkeys(("vote", "match", "activemask"), VOTE),
    **dict.fromkeys(("ldmatrix", "movmatrix"), InstCost(4, 33)),
    "stmatrix": InstCost(32, 32),
    "mma": MATRIX,
}
_WIDE_TYPES = {"s64", "u64", "b64"}
_FLOAT_TYPES = {"f32", "f16", "f16x2", "bf16", "bf16x2"}


@lru_cache(4096)
def inst_cost(inst: Inst) -> InstCost:
    """Cost of an instruction, without what memory and barriers add to it."""
    opcode, words = inst.opcode.split(".")[0], inst.mods
    if opcode == "cvt":
        narrow = any(word.startswith(("e2m", "e3m", "e4m", "e5m", "ue")) for word in words)
        return NARROW_CONVERT if narrow else CONVERT if _FLOAT_TYPES & set(words) else ALU
    if opcode in ("ld", "ldu"):
        return CONSTANT if any(w.startswith(("param", "const")) for w in words) else SHARED
    if opcode == "st":
        return STORE
    if opcode in ("mul", "mad") and _FLOAT_TYPES & set(words):
        return ALU
    found = _BY_OPCODE.get(opcode)
    if found is not None:
        return found
    if "f32x2" in words or _WIDE_TYPES & set(words):
        return WIDE
    return ALU


def block_cost(code: "Code", start: int, end: int) -> BlockCost:
    """Cost of the instructions `start` to `end` - 1, which run one after the other."""
    ready: dict[int, float] = {}

    def operands(pc: int) -> float:
        """When the last operand of an instruction is there."""
        return max([ready.get(slot, 0.0) for slot in code.reads[pc]], default=0.0)

    slots = 0.0
    for pc in range(start, end):
        cost = inst_cost(code.insts[pc])
        slots += cost.slots
        done = operands(pc) + cost.latency
        for slot in code.writes[pc]:
            ready[slot] = done
    last = end - 1
    path = operands(last)
    if inst_cost(code.insts[last]) is BRANCH:
        path += 0 if _predicates(code, last) else BRANCH.latency
    elif end < len(code.insts):
        path = max(path, operands(end))
    return BlockCost(slots, path, end - start)


def _predicates(code: "Code", pc: int) -> bool:
    """Whether a branch only skips a few instructions, which the assembler then predicates instead."""
    inst = code.insts[pc]
    targets = [code.entry.labels[op.name] for op in inst.operands if isinstance(op, Label)]
    return inst.pred is not None and all(pc < target <= pc + SHORT_SKIP for target in targets)

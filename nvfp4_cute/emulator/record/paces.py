"""Issue rate of machine code relative to PTX: in loops that multiply, and in all other code.

Control words state how long a warp waits before its next instruction. Their mean over a kernel does not describe a
loop, because the code before and after it (addresses and results) waits longer. Loops that multiply are matched in both
texts by their number of products.
"""

from nvfp4_cute.emulator.cubin import MachineCode, Stretch, main_loops
from nvfp4_cute.emulator.ptx import Inst, Label
from nvfp4_cute.emulator.record.costs import inst_cost
from nvfp4_cute.emulator.record.events import Pace
from nvfp4_cute.emulator.state import Executable


def main_instructions(code: Executable) -> list[int]:
    """Returns the program counters of the innermost loops that multiply."""
    labels = code.entry.labels
    loops = [
        (labels[op.name], pc + 1)
        for pc, inst in enumerate(code.insts)
        if inst.opcode.split(".")[0] == "bra"
        for op in inst.operands
        if isinstance(op, Label) and labels[op.name] <= pc
    ]
    return main_loops(loops, [_multiplies(inst) for inst in code.insts])


def paces(code: Executable, made: MachineCode | None) -> tuple[Pace, Pace]:
    """Returns the pace of loops that multiply, and of other code; the kernel's mean if the loops do not match PTX."""
    if made is None:
        return Pace(), Pace()
    slots = sum(inst_cost(inst).slots for inst in code.insts)
    whole, main = made.whole, [code.insts[pc] for pc in main_instructions(code)]
    if not main or sum(map(_multiplies, main)) != made.main.products:
        return _pace(whole, slots), _pace(whole, slots)
    inside = sum(inst_cost(inst).slots for inst in main)
    rest = Stretch(whole.instructions - made.main.instructions, whole.stalls - made.main.stalls)
    return _pace(made.main, inside), _pace(rest, slots - inside)


def _multiplies(inst: Inst) -> bool:
    return inst.opcode == "mma" or (inst.opcode == "wgmma" and "mma_async" in inst.mods)


def _pace(stretch: Stretch, slots: float) -> Pace:
    return Pace(stretch.instructions / slots, stretch.stalls / slots) if slots else Pace()

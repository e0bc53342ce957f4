"""Loads from global memory that the assembler moved after mma.sync instructions, and the places where warps wait for them.

PTX requests the next data before it multiplies the current data. The assembler may keep that order, or issue a load
between or after products, which themselves wait for data: the load then begins a latency later than in PTX. The number
of mma.sync before a load is counted in both texts. Loads of one kind (equal bytes per lane and use of L1) are matched
in order. Nothing is known of a kind with different numbers of loads in the two texts, or of kernels in which products
were copied or dropped.

The assembler also has only six scoreboards, fewer than the loads under way. A warp that waits for activations waits for
all loads on their scoreboard, including the next weights. At its end a loop moves the data loaded for its next
iteration to other registers. In machine code such a move waits; in PTX it only passes the `Deferred` on.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from nvfp4_cute.emulator.cubin import MachineCode, PlacedLoad
from nvfp4_cute.emulator.isa import type_bytes
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.state import Executable

WAITS_OF = "sm_90"
"""Architectures with measured launches that have such waits."""


@dataclass(frozen=True)
class Moved:
    """Place of a load in machine code, relative to PTX.

    Attributes:
        later: number of additional mma.sync instructions before the load.
        waited: number of mma.sync instructions before the wait for it, beyond those before it in PTX; None if no wait
            is known.
    """

    later: int
    waited: int | None


def moved_loads(code: Executable, made: MachineCode | None) -> dict[int, Moved]:
    """Returns the place of each load in machine code by program counter, and for Hopper the place of its wait."""
    products = sum(inst.opcode == "mma" for inst in code.insts)
    if made is None or not products or made.products != products:
        return {}
    in_ptx: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for pc, load in _loads(code):
        in_ptx[load.nbytes, load.allocates].append((pc, load.multiplied))
    in_machine_code: dict[tuple[int, bool], list[PlacedLoad]] = defaultdict(list)
    for load in made.loads:
        in_machine_code[load.nbytes, load.allocates].append(load)
    is_known = str(code.builder.arch).startswith(WAITS_OF)
    waits = lambda load, before: load.waited - before if is_known and load.waited is not None else None
    return {
        pc: Moved(max(0, load.multiplied - before), waits(load, before))
        for kind, loads in in_ptx.items()
        if len(loads) == len(in_machine_code[kind])
        for (pc, before), load in zip(loads, in_machine_code[kind], strict=True)
    }


def _loads(code: Executable) -> Iterator[tuple[int, PlacedLoad]]:
    multiplied = 0
    for pc, inst in enumerate(code.insts):
        if inst.opcode == "mma":
            multiplied += 1
        elif inst.opcode == "ld" and "global" in inst.mods:
            types = memory_mods(inst)[0].types()
            width = next((int(word[1:]) for word in inst.mods if word in ("v2", "v4", "v8")), 1)
            allocates = not any("no_allocate" in word for word in inst.mods)
            yield pc, PlacedLoad(type_bytes(types[-1]) * width, allocates, multiplied)

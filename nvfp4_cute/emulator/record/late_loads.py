"""Loads of global memory that the assembler moved behind mma.sync, and where it has a warp wait for them.

PTX asks for the next data before it multiplies what it has. The assembler keeps that order where it likes, and else issues a load
between or behind products, which wait for data themselves: the load begins a latency later than the PTX says. How many mma.sync
are in front of a load is counted in both texts. Loads of a kind, with as many bytes a lane and as much use of L1, are matched in
order; of a kind that has more or fewer in the machine code nothing is known, nor where products were copied or dropped.

It also has six scoreboards, fewer than there are loads under way. A warp that waits for activations waits for all that shares
their scoreboard, the next weights, too. And at its end a loop moves what it loaded for its next trip to the registers where that
expects it: a move waits, which in PTX only passes the promise on.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from nvfp4_cute.emulator.cubin import MachineCode, PlacedLoad
from nvfp4_cute.emulator.isa import type_bytes
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.state import Executable

WAITS_OF = "sm_90"
"""Architectures where launches with such waits were measured."""


@dataclass(frozen=True)
class Moved:
    """Of a load: behind how many more mma.sync machine code has it, and behind how many it is waited for, after those before it
    in PTX; None where no wait is known.
    """

    behind: int
    waited: int | None


def moved_loads(code: Executable, made: MachineCode | None) -> dict[int, Moved]:
    """By program counter of a load, where it comes in machine code, and of Hopper's where it is waited for."""
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

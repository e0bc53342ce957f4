"""Loads of global memory that the assembler moved behind mma.sync.

PTX asks for the next data before it multiplies what it has. The assembler keeps that order where it likes, and else issues a load
between or behind products, which wait for data themselves: the load begins a latency later than the PTX says. How many mma.sync
are in front of a load is counted in both texts. Loads of a kind, with as many bytes a lane and as much use of L1, are matched in
order; of a kind that has more or fewer in the machine code nothing is known, nor where products were copied or dropped.
"""

from collections import defaultdict
from collections.abc import Iterator

from nvfp4_cute.emulator.cubin import MachineCode, PlacedLoad
from nvfp4_cute.emulator.isa import type_bytes
from nvfp4_cute.emulator.isa.memory import memory_mods
from nvfp4_cute.emulator.state import Executable


def late_loads(code: Executable, made: MachineCode | None) -> dict[int, int]:
    """By program counter of a load that comes later in machine code: behind how many more mma.sync."""
    products = sum(inst.opcode == "mma" for inst in code.insts)
    if made is None or not products or made.products != products:
        return {}
    in_ptx: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for pc, load in _loads(code):
        in_ptx[load.nbytes, load.allocates].append((pc, load.multiplied))
    in_machine_code: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for load in made.loads:
        in_machine_code[load.nbytes, load.allocates].append(load.multiplied)
    return {
        pc: later - before
        for kind, loads in in_ptx.items()
        if len(loads) == len(in_machine_code[kind])
        for (pc, before), later in zip(loads, in_machine_code[kind], strict=True)
        if later > before
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

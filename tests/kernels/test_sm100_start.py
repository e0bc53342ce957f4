"""How soon the sm_100a kernel asks for its first operands: instructions of the load warp, counted on the emulator."""

import cases
from grouped_gemm_check import run

from nvfp4_cute.arch import sm100
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator import watch

# 131 were counted: of each value of a group, a select for each of 8 slots; tensor maps are an array.
MOST_INSTRUCTIONS = 150


def test_instructions_before_the_first_tma(monkeypatch):
    """PTX instructions of one warp with 8 groups, without loads of parameters, which are operands in machine code."""
    counts = []

    def watcher(inst, builder, step):
        def count(warp):
            if not counts:
                code = warp.code.insts
                here = next(pc for pc, other in enumerate(code) if other.line == inst.line)
                # A warp counts a block when it has run it; this one began behind the last branch.
                block = 1 + max(pc for pc in range(here) if code[pc].opcode == "bra")
                loads = sum(other.opcode == "ld" and "param" in other.mods for other in code[:here])
                counts.append(warp.executed + here - block - loads)
            return step(warp)

        return count

    monkeypatch.setitem(watch.WATCHERS, "cp.async.bulk.tensor", watcher)
    case = cases.Case("start", ((64, 128, 256),) * 8)
    with observe(check=True):
        run(case, cases.make_operands(case), "emulator", sm100.CANDIDATES[0])
    assert 100 < counts[0] <= MOST_INSTRUCTIONS

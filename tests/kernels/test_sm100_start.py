"""How soon the sm_100a kernel asks for its first operands: instructions of the load warp, counted on the emulator."""

import cases
import pytest
from grouped_gemm_check import run

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.bench.cases import select
from nvfp4_cute.emulator.check.watch import WATCHERS
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.problem import GroupedProblem

# 131 were counted with 8 groups: of each value of a group, a select for each slot; tensor maps are an array.
MOST_INSTRUCTIONS = 150


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(4))
def test_instructions_before_the_first_tma(monkeypatch, number):
    """PTX instructions of one warp with the config and as many groups as a competition case has, without loads of
    parameters, which are operands in machine code.
    """
    (competition,) = select(("competition",), f"nvfp4_group_gemm case {number}")
    config = choose_config(GroupedProblem(competition.sizes), B200.arch, B200.num_sms)
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

    # A pair has L2 fetch its first K tiles before both CTAs are ready for loads.
    for opcode in ("cp.async.bulk.tensor", "cp.async.bulk.prefetch.tensor"):
        monkeypatch.setitem(WATCHERS.by_prefix, opcode, watcher)
    case = cases.Case("start", ((64, 128, 256),) * len(competition.sizes))
    with observe(check=True):
        run(case, cases.make_operands(case), "emulator", config)
    assert 75 < counts[0] <= MOST_INSTRUCTIONS

"""Instructions of the sm_100a kernel's load warp before its first load, counted on the emulator."""

import cases
import pytest
from grouped_gemm_check import run

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.bench.cases import select
from nvfp4_cute.emulator.check.watch import WATCHERS
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.problem import GroupedProblem

# 131 were counted with 8 groups: one select per slot for each value of a group. Tensor maps are an array.
MOST_INSTRUCTIONS = 150


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(4))
def test_instructions_before_the_first_tma(monkeypatch, number):
    """Counts PTX instructions of one warp, with the config and number of groups of a competition case.

    Loads of parameters do not count, because they are operands in machine code.
    """
    (competition,) = select(("competition",), f"nvfp4_group_gemm case {number}")
    config = choose_config(GroupedProblem(competition.sizes), B200.arch, B200.num_sms)
    counts = []

    def watcher(inst, builder, step):
        def count(warp):
            if not counts:
                code = warp.code.insts
                here = next(pc for pc, other in enumerate(code) if other.line == inst.line)
                # A warp counts a block after running it; this block starts after the last branch.
                block = 1 + max(pc for pc in range(here) if code[pc].opcode == "bra")
                loads = sum(other.opcode == "ld" and "param" in other.mods for other in code[:here])
                counts.append(warp.executed + here - block - loads)
            return step(warp)

        return count

    # A pair prefetches its first K tiles into L2 before both CTAs are ready for loads.
    for opcode in ("cp.async.bulk.tensor", "cp.async.bulk.prefetch.tensor"):
        monkeypatch.setitem(WATCHERS.by_prefix, opcode, watcher)
    case = cases.Case("start", ((64, 128, 256),) * len(competition.sizes))
    with observe(check=True):
        run(case, cases.make_operands(case), "emulator", config)
    assert 75 < counts[0] <= MOST_INSTRUCTIONS

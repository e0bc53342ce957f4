"""record.paces reads control words of loops with and without products; the timing model derives how long they delay warps."""

import dataclasses

import numpy as np
import pytest
import small_kernels as small

from nvfp4_cute.emulator.cubin import MachineCode, Stretch, main_loops
from nvfp4_cute.emulator.record.events import Op
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.timing.clock import record_ptx
from nvfp4_cute.timing.replay import replay

H100 = dataclasses.replace(constants_of(lookup("H100"), multiplies=False), launch=0.0)
TRIPS, WORK = 64, 40
LOOP = (
    "mov.u32 %r20, 0;\nTRIP:\n"
    + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%v8,%v9,%v10,%v11}, {%v0,%v1,%v2,%v3}, {%v4,%v5}, {%v8,%v9,%v10,%v11};\n"
    + "add.u32 %v20, %v20, %v21;\n" * WORK
    + f"add.u32 %r20, %r20, 1;\nsetp.lt.u32 %p5, %r20, {TRIPS};\n@%p5 bra TRIP;\n"
)


def recorded(body: str, made: MachineCode | None = None):
    operands = (np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8))
    return record_ptx(132, small.kernel(body, "sm_90a"), args=operands, smem_bytes=65536, machine_code=made)


def test_the_smallest_loops_that_multiply():
    multiplies = [False] * 20
    multiplies[5] = multiplies[12] = True
    loops = [(0, 20), (4, 8), (3, 9), (10, 16), (17, 19)]
    assert main_loops(loops, multiplies) == [*range(4, 8), *range(10, 16)]


def test_a_loop_that_multiplies_has_its_own_pace():
    instructions = WORK + 4
    whole, main = Stretch(2 * instructions, 10 * instructions, 1), Stretch(instructions, 2 * instructions, 1)
    slow, fast = (recorded(LOOP, MachineCode(32, whole, *known)) for known in ((), (main,)))
    slots = instructions / fast.main.issue
    assert fast.main.cycles * slots == pytest.approx(2 * instructions) and fast.rest.cycles > slow.rest.cycles
    saved = replay(H100, slow).cycles - replay(H100, fast).cycles
    assert saved == pytest.approx(TRIPS * slots * (slow.main.cycles - fast.main.cycles), rel=0.05)


def test_loops_with_another_number_of_products_say_nothing():
    whole = Stretch(100, 250, 1)
    trace = recorded(LOOP, MachineCode(32, whole, Stretch(40, 50, 2)))
    assert trace.main == trace.rest and trace.rest.cycles == pytest.approx(2.5 * trace.rest.issue)
    assert recorded(LOOP).main.cycles == 1


def test_bank_conflicts_take_the_path_to_shared_memory():
    store = "shl.b32 %r20, %r0, {};\nadd.u32 %r20, %r20, %r1;\n" + "st.shared.b32 [%r20], %r0;\n" * 16
    cycles = []
    for shift, conflicts in ((2, 0), (4, 3 * 16), (7, 31 * 16)):
        trace = recorded(store.format(shift))
        (events,) = trace.clusters[0].warps[0]
        assert sum(event[1] for event in events if event[0] is Op.CONFLICTS) == conflicts
        cycles.append(replay(H100, trace).cycles)
        elsewhere = dataclasses.replace(H100, follows_stalls=False)
        assert replay(elsewhere, trace).cycles == replay(elsewhere, recorded(store.format(2))).cycles
    assert cycles[1] - cycles[0] == pytest.approx(3 * 16) and cycles[2] - cycles[0] == pytest.approx(31 * 16)

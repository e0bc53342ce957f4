"""Bank conflicts of shared memory, by access pattern and by instruction."""

import numpy as np
import pytest

from nvfp4_cute.emulator.banks import Accesses, cycles_of
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine

LANE = np.arange(32)
KERNEL = """.version 8.8
.target sm_120a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k()
{{
.reg .b32 %r<16>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
shl.b32 %r2, %r0, {shift};
add.u32 %r1, %r1, %r2;
{body}
ret;
}}
"""


@pytest.mark.parametrize(
    ("offsets", "nbytes", "passes", "cycles", "ways"),
    [
        (4 * LANE, 4, 1, 1, 1),  # consecutive words
        (4 * LANE + 4096, 4, 1, 1, 1),
        (0 * LANE, 4, 1, 1, 1),  # one word for all lanes
        (LANE, 1, 1, 1, 1),  # four lanes share a word
        (8 * LANE, 4, 1, 2, 2),
        (16 * LANE, 4, 1, 4, 4),  # a column of 32 scale words in the 128x4 layout
        (128 * LANE, 4, 1, 32, 32),
        (LANE // 4 * 16 + LANE % 4 * 4, 4, 1, 1, 1),  # 8 rows of 4 words
        (8 * LANE, 8, 2, 2, 1),
        (16 * LANE, 8, 2, 4, 2),
        (16 * LANE, 16, 4, 4, 1),
        (128 * LANE, 16, 4, 32, 8),
        (64 * LANE[:8] + (LANE[:8] // 2 % 4) * 16, 16, 1, 1, 1),  # eight 64-byte rows, swizzled
        (64 * LANE[:8], 16, 1, 4, 4),  # the same without swizzle
        (32 * LANE, 32, 8, 8, 1),
    ],
)
def test_cycles_of_an_access(offsets, nbytes, passes, cycles, ways):
    assert cycles_of(offsets, nbytes) == Accesses(1, passes, cycles, ways)


@pytest.mark.parametrize(
    ("shift", "body", "expected"),
    [
        (2, "st.shared.b32 [%r1], %r0;", Accesses(1, 1, 1, 1)),
        (4, "ld.shared.b32 %r1, [%r1];", Accesses(1, 1, 4, 4)),  # its own address is replaced
        (4, "st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};", Accesses(1, 4, 4, 1)),
        (4, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r1];", Accesses(1, 4, 4, 1)),
        (7, "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r1];", Accesses(1, 2, 16, 8)),
        (4, "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r4};", Accesses(1, 1, 1, 1)),
    ],
)
def test_instructions_are_counted(shift, body, expected):
    machine = Machine(count_banks=True)
    source = KERNEL.format(shift=shift, body="mov.b32 %r4, 0;\n" + body)
    run_ptx(source, block=32, smem_bytes=4096, machine=machine)
    ((place, accesses),) = machine.stats.banks.items()
    assert accesses == expected
    assert body.rstrip(";") in place and place.startswith("PTX line 13 ")
    assert bool(machine.stats.banks.conflicts()) == (expected.ways > 1)
    found = (
        "conflict-free: 1 instruction"
        if expected.ways == 1
        else f"{expected.ways}-way conflicts: PTX line 13"
    )
    assert found in machine.stats.banks.table()


def test_nothing_is_counted_unless_asked_for():
    stats = run_ptx(KERNEL.format(shift=2, body="st.shared.b32 [%r1], %r0;"), block=32, smem_bytes=4096)
    assert not stats.banks


def test_readings_add_and_subtract():
    machine = Machine(count_banks=True)
    source = KERNEL.format(shift=2, body="st.shared.b32 [%r1], %r0;")
    run_ptx(source, block=64, smem_bytes=4096, machine=machine)
    once = machine.stats.banks + type(machine.stats.banks)()
    run_ptx(source, block=64, smem_bytes=4096, machine=machine)
    (place,) = once
    assert once[place] == Accesses(2, 2, 2, 1)
    assert machine.stats.banks[place] == Accesses(4, 4, 4, 1)
    assert machine.stats.banks - once == once
    assert machine.stats.banks - machine.stats.banks == {}

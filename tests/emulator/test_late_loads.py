"""record.late_loads: loads that machine code moves after mma.sync, and waits that it moves forward, are recorded there."""

from dataclasses import replace

import numpy as np
import pytest
import small_kernels as small
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.simt_keys import W4A16Key
from nvfp4_cute.emulator.cubin import MachineCode, PlacedLoad, Stretch, loops, placed_loads, read_machine_code
from nvfp4_cute.emulator.record.events import Op
from nvfp4_cute.timing.clock import record_ptx

PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%v8,%v9,%v10,%v11}, {%v0,%v1,%v2,%v3}, {%v4,%v5}, {%v8,%v9,%v10,%v11};\n"
)
FIRST, SECOND = "ld.global.b32 %v0, [%rd1];\n", "ld.global.L1::no_allocate.v2.b32 {%v6, %v7}, [%rd1+128];\n"
USE = "add.u32 %v3, %v6, %v7;\n"
KEPT, READ_ONCE = PlacedLoad(4, True, 0), PlacedLoad(8, False, 0)


def order(body: str, *loads: PlacedLoad, products: int = 3, arch: str = "sm_90a") -> list[tuple]:
    """Returns the order in which the only warp has loads by number, waits for them, and products."""
    made = MachineCode(32, Stretch(100, 200, products), loads=loads, products=products)
    operands = (np.zeros(1024, np.uint8), np.zeros(1024, np.uint8))
    trace = record_ptx(132, small.kernel(body, arch), args=operands, smem_bytes=4096, machine_code=made)
    (events,) = trace.clusters[0].warps[0]
    shown = {Op.READ: "load", Op.USE: "wait", Op.SCOREBOARD: "scoreboard"}
    return [
        (shown[event[0]], event[1]) if event[0] in shown else ("products", event[2] // 4096)
        for event in events
        if event[0] in (*shown, Op.MATRIX)
    ]


def later(load: PlacedLoad, products: int) -> PlacedLoad:
    return replace(load, multiplied=products)


def awaited(load: PlacedLoad, products: int) -> PlacedLoad:
    return replace(load, waited=products)


def test_without_machine_code_of_another_order_the_text_says_when():
    expected = [("load", 1), ("load", 2), ("wait", 1), ("products", 3)]
    assert order(FIRST + SECOND + 3 * PRODUCT, KEPT, READ_ONCE) == expected
    assert order(FIRST + SECOND + 3 * PRODUCT) == expected
    moved = later(READ_ONCE, 2)
    assert order(FIRST + SECOND + 3 * PRODUCT, KEPT, moved, products=6) == expected, "products were copied"
    assert order(FIRST + SECOND + 3 * PRODUCT, KEPT, moved, moved) == expected, "a load was copied"


def test_a_load_behind_products_begins_behind_them():
    assert order(FIRST + SECOND + 3 * PRODUCT, KEPT, later(READ_ONCE, 2)) == [
        ("load", 1), ("wait", 1), ("products", 2), ("load", 2), ("products", 1),
    ]  # fmt: skip


def test_a_load_begins_before_it_is_waited_for_and_before_the_end():
    moved = later(READ_ONCE, 3)
    assert order(FIRST + SECOND + PRODUCT + USE + 2 * PRODUCT, KEPT, moved) == [
        ("load", 1), ("wait", 1), ("products", 1), ("load", 2), ("wait", 2), ("products", 2),
    ]  # fmt: skip
    assert order(FIRST + 3 * PRODUCT + SECOND, KEPT, later(READ_ONCE, 9))[-1] == ("load", 2)


def test_machine_code_waits_where_its_scoreboard_does_though_ptx_moves_what_comes():
    moved = "mov.b32 %v12, %v6;\n"
    body = FIRST + SECOND + PRODUCT + moved + 2 * PRODUCT
    assert ("scoreboard", (2,)) not in order(body, KEPT, READ_ONCE)
    elsewhere = order(body, KEPT, awaited(READ_ONCE, 2), arch="sm_120a")
    assert elsewhere == order(body, KEPT, READ_ONCE, arch="sm_120a"), (
        "no such launch was measured on Blackwell"
    )
    assert order(body, KEPT, awaited(READ_ONCE, 2)) == [
        ("load", 1), ("load", 2), ("wait", 1), ("products", 2), ("scoreboard", (2,)), ("products", 1),
    ]  # fmt: skip


def test_loads_of_a_scoreboard_are_waited_for_together_and_not_before_they_begin():
    both = awaited(KEPT, 1), awaited(later(READ_ONCE, 1), 1)
    assert order(FIRST + SECOND + 3 * PRODUCT, *both) == [
        ("load", 1), ("wait", 1), ("products", 1), ("load", 2), ("scoreboard", (1, 2)), ("products", 2),
    ]  # fmt: skip


def machine_words(*instructions: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Instructions from (low word, scoreboard that the result raises, mask of scoreboards to wait for)."""
    return [(low, counts << 46 | waits << 52 | 1 << 41 | 6 << 9) for low, counts, waits in instructions]


LOAD, MULTIPLY, OTHER, NONE = 0x981, 0x23C, 0x210, 7


def branch_back(instructions: int) -> int:
    """Low word of a branch back by ``instructions``, counted from the instruction after the branch."""
    far, near = divmod(-16 * instructions, 1024)
    return 0x947 | near // 4 << 16 | (far % (1 << 30)) << 34


def branch(instructions: int) -> tuple[int, int]:
    """Both words of that branch."""
    return branch_back(instructions), 0x3FFFF | NONE << 46 | 1 << 41


def test_machine_code_says_where_a_loop_waits_for_its_loads():
    loop = machine_words(
        (OTHER, NONE, 1 << 3), (LOAD, 2, 0), (MULTIPLY, NONE, 0), (LOAD, 3, 0), (MULTIPLY, NONE, 1 << 2), (MULTIPLY, NONE, 0),
    )  # fmt: skip
    behind = machine_words((OTHER, NONE, 1 << 3))
    words = [*machine_words((LOAD, 3, 0)), *loop, branch(len(loop) + 1), *behind]
    assert list(loops(words)) == [(1, 8)]
    found = [(load.multiplied, load.waited) for load in placed_loads(words)]
    assert found == [(0, 0), (0, 1), (1, None)], (
        "the last is waited for in the next trip, where its use in PTX is"
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_loops_of_a_kernel_lie_in_its_text(arch):
    """Before sm_90 a branch's distance is one field; later, its low bits are in a separate field."""
    kernel = get_kernel(W4A16Key(arch, torch.bfloat16, torch.bfloat16, True, 8))
    (made,) = read_machine_code(kernel.cubin).values()
    assert made.products > 0 and made.main.products == made.products
    assert 0 < made.main.instructions < made.whole.instructions
    assert all(load.waited is None or load.waited <= made.products for load in made.loads)

"""record.late_loads: loads that machine code has behind mma.sync are recorded there."""

import numpy as np
import small_kernels as small

from nvfp4_cute.emulator.cubin import MachineCode, PlacedLoad
from nvfp4_cute.emulator.record.events import Op
from nvfp4_cute.timing.clock import record_ptx

PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%v8,%v9,%v10,%v11}, {%v0,%v1,%v2,%v3}, {%v4,%v5}, {%v8,%v9,%v10,%v11};\n"
)
FIRST, SECOND = "ld.global.b32 %v0, [%rd1];\n", "ld.global.L1::no_allocate.v2.b32 {%v6, %v7}, [%rd1+128];\n"
USE = "add.u32 %v3, %v6, %v7;\n"
KEPT, READ_ONCE = PlacedLoad(4, True, 0), PlacedLoad(8, False, 0)


def order(body: str, *loads: PlacedLoad, products: int = 3) -> list[tuple]:
    """Loads by number, waits for them, and products, as the only warp has them."""
    made = MachineCode(32, 100, 200, loads, products)
    operands = (np.zeros(1024, np.uint8), np.zeros(1024, np.uint8))
    trace = record_ptx(132, small.kernel(body, "sm_90a"), args=operands, smem_bytes=4096, machine_code=made)
    (events,) = trace.clusters[0].warps[0]
    shown = {Op.READ: "load", Op.USE: "wait"}
    return [
        (shown[event[0]], event[1]) if event[0] in shown else ("products", event[2] // 4096)
        for event in events
        if event[0] in (Op.READ, Op.USE, Op.MATRIX)
    ]


def later(load: PlacedLoad, products: int) -> PlacedLoad:
    return PlacedLoad(load.nbytes, load.allocates, products)


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

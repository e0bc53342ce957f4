"""Lanes of a warp that exchange data through shared memory without a warp barrier: a warning; ordered accesses are clean."""

import numpy as np
import pytest
import small_kernels as small
from small_kernels import DATA

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine

OWN = "shl.b32 %r9, %r8, 2;\nadd.u32 %r9, %r9, %r1;\n"
NEXT = "xor.b32 %r11, %r8, 1;\nshl.b32 %r11, %r11, 2;\nadd.u32 %r11, %r11, %r1;\n"
STORE, LOAD = f"st.shared.b32 [%r9+{DATA}], %r8;\n", f"ld.shared.b32 %r10, [%r11+{DATA}];\n"
OWN_LOAD = f"ld.shared.b32 %r10, [%r9+{DATA}];\n"
FIRST_LANE = f"@%p1 st.shared.b32 [%r1+{DATA}], %r7;\n"
ALL_LOAD = f"ld.shared.b32 %r10, [%r1+{DATA}];\n"


SMALL_COPY = "cp.async.ca.shared.global [{to}], [%rd1], 4;\ncp.async.wait_all;\n"


def warnings(body):
    machine = Machine(148, check=True)
    out = np.zeros(64, np.uint32)
    run_ptx(small.kernel(OWN + NEXT + body), None, 1, 32, [out, out], smem_bytes=4096, machine=machine)
    return [h.text for h in machine.checker.hazards if "another lane of the warp" in h.text]


@pytest.mark.parametrize(
    "between",
    [
        "bar.warp.sync 0xffffffff;\n",
        "bar.sync 0;\n",
        "shfl.sync.bfly.b32 %r12, %r8, 1, 31, 0xffffffff;\n",
        "vote.sync.any.pred %p3, %p1, 0xffffffff;\n",
        "tcgen05.wait::ld.sync.aligned;\n",
        "mov.b32 %r13, 0;\nmma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        "{%r14, %r15}, {%r13, %r13, %r13, %r13}, {%r13, %r13}, {%r13, %r13};\n",
    ],
    ids=["bar.warp", "bar", "shfl", "vote", "tcgen05", "mma"],
)
def test_a_meeting_orders_lanes(between: str) -> None:
    assert not warnings(STORE + between + LOAD)
    (text,) = warnings(STORE + LOAD)
    assert text.startswith("ld.shared") and "accessed in st.shared" in text


def test_a_store_over_what_another_lane_loaded() -> None:
    before = STORE + "bar.warp.sync 0xffffffff;\n" + LOAD
    assert not warnings(before + "bar.warp.sync 0xffffffff;\n" + STORE)
    (text,) = warnings(before + STORE)
    assert text.startswith("st.shared") and "accessed in ld.shared" in text


def test_one_lane_tells_the_others() -> None:
    assert len(warnings(FIRST_LANE + ALL_LOAD)) == 1
    told = FIRST_LANE + "bar.warp.sync 0xffffffff;\n" + ALL_LOAD
    assert not warnings(told)
    assert len(warnings(told + FIRST_LANE)) == 1


def test_a_lane_sees_its_own_store() -> None:
    assert not warnings(STORE + OWN_LOAD + STORE)
    half = STORE.replace("b32", "b16").replace("%r8", "%h1").replace("%r9", "%r13")
    assert not warnings("shl.b32 %r13, %r8, 1;\nadd.u32 %r13, %r13, %r1;\nmov.b16 %h1, 7;\n" + half + half)
    everybody = f"st.shared.b32 [%r1+{DATA}], 5;\n"
    assert not warnings(everybody + ALL_LOAD)


@pytest.mark.parametrize(
    "between, told",
    [
        ("", False),
        ("bar.warp.sync 0xffffffff;\n", True),
        ("bar.sync 0;\n", True),
        (small.wait(0), True),
        ("fence.acq_rel.cta;\n", False),
    ],
    ids=["nothing", "bar.warp", "bar", "their own wait", "fence"],
)
def test_one_lane_waits_for_a_copy(between: str, told: bool) -> None:
    copy = small.init(1) + f"@!%p1 bra AFTER;\n{small.load(128)}{small.wait(0)}AFTER:\n"
    assert bool(warnings(copy + between + OWN_LOAD)) is not told
    assert not warnings(copy + f"@%p1 ld.shared.b32 %r10, [%r1+{DATA}];\n")
    assert not warnings(copy + between + OWN_LOAD.replace(str(DATA), str(DATA + 256)))


def test_what_a_lane_copied() -> None:
    copy = SMALL_COPY.format(to=f"%r9+{DATA}")
    assert not warnings(copy + OWN_LOAD)
    assert not warnings(copy + "bar.warp.sync 0xffffffff;\n" + LOAD)
    (text,) = warnings(copy + LOAD)
    assert text.startswith("ld.shared") and "accessed in cp.async" in text
    everybody = SMALL_COPY.format(to=f"%r1+{DATA}")
    assert not warnings(everybody + ALL_LOAD)


def test_one_lane_waits_for_a_bulk_store() -> None:
    save = f"""bar.warp.sync 0xffffffff;
    fence.proxy.async.shared::cta;
    @!%p1 bra AFTER;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+{DATA}], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    AFTER:
    """
    assert not warnings(STORE + save + "bar.warp.sync 0xffffffff;\n" + STORE)
    assert not warnings(STORE + save + OWN_LOAD)
    assert not warnings(STORE + save + STORE.replace(str(DATA), str(DATA + 256)))
    (text,) = warnings(STORE + save + STORE)
    assert "stores over the copy of bulk store" in text

"""Atomics and plain accesses on the same bytes of shared memory, and shuffles from lanes in another branch."""

import numpy as np
import pytest
from small_kernels import DATA, in_warp, kernel

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine

MODES = ("eager", "lazy", "random:3")
BAR = "bar.sync 0;\n"
PLACE = "shl.b32 %r9, %r8, 2;\nadd.u32 %r9, %r9, %r1;\n"
STORE = f"{PLACE}st.shared.b32 [%r9+{DATA}], 0;\n"
STRONG = f"{PLACE}st.volatile.shared.b32 [%r9+{DATA}], 0;\n"
ADD = f"{PLACE}red.shared.add.u32 [%r9+{DATA}], 1;\n"
LOAD = f"{PLACE}ld.shared.b32 %r10, [%r9+{DATA}];\nmad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %r10;\n"
FLAG = f"st.volatile.shared.b32 [%r1+{DATA + 512}], 1;\n"
SPIN = f"SPIN:\nld.volatile.shared.b32 %r11, [%r1+{DATA + 512}];\nsetp.ne.u32 %p5, %r11, 1;\n@%p5 bra SPIN;\n"


def findings(body, mode="eager"):
    machine = Machine(148, mode=mode, check=True)
    try:
        run_ptx(
            kernel(body),
            block=64,
            args=[np.zeros(8, np.uint32), np.zeros(64, np.uint32)],
            smem_bytes=8192,
            machine=machine,
        )
    except Exception:
        assert machine.checker.failed
    return machine.checker.hazards


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "body",
    [
        in_warp(0, STORE) + BAR + ADD + BAR + in_warp(0, LOAD),
        in_warp(0, STRONG) + ADD + BAR + in_warp(0, LOAD),
        in_warp(0, STORE) + in_warp(0, FLAG) + in_warp(1, SPIN) + ADD + BAR + in_warp(1, LOAD),
        in_warp(0, f"{PLACE}atom.shared.exch.b32 %r10, [%r9+{DATA}], 1;\n") + BAR + in_warp(1, LOAD),
        in_warp(0, FLAG) + in_warp(1, SPIN + FLAG.replace("volatile.", "").replace(", 1", ", 0")),
    ],
    ids=["barriers", "strong store", "flag", "exchange", "flag taken back"],
)
def test_clean(body, mode):
    assert findings(body, mode) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (in_warp(0, STORE) + ADD, ("red.shared", "st.shared")),
        (in_warp(1, STORE) + ADD, ("red.shared", "st.shared")),
        (in_warp(0, STORE) + BAR + ADD + in_warp(1, LOAD), ("red.shared", "ld.shared")),
        (in_warp(0, STORE) + BAR + in_warp(1, ADD) + in_warp(0, LOAD), ("red.shared", "ld.shared")),
        (STRONG.replace("volatile.", "").replace("st.shared", "@%p1 st.shared") + in_warp(0, ADD) + in_warp(1, STORE), ("red.shared", "st.shared")),
    ],
    ids=["added over zeros", "zeros over sums", "read under additions", "read before additions", "two stores"],
)  # fmt: skip
def test_found(body, words, mode):
    races = [h for h in findings(body, mode) if h.kind == "race" and h.severity == "error"]
    assert any(all(word in h.text for word in words) for h in races)


def test_nobody_wrote_what_is_added_to():
    (found,) = findings(ADD)
    assert (found.kind, found.severity) == ("uninitialised", "warning")
    assert "red.shared" in found.text


@pytest.mark.parametrize(
    ("mode", "distance", "count"), [("bfly", 8, 0), ("bfly", 16, 1), ("idx", 16, 1), ("down", 8, 0)]
)
def test_shuffles_from_lanes_elsewhere(mode, distance, count):
    body = f"setp.ge.u32 %p5, %r8, 16;\n@%p5 bra AFTER;\nshfl.sync.{mode}.b32 %r9, %r8, {distance}, 31, 0xffff;\nAFTER:\n"
    found = findings(body)
    assert [(h.severity, "do not execute it" in h.text) for h in found] == [("warning", True)] * count

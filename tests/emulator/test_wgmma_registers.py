"""Registers of wgmma that are written while a product may read them, or without wgmma.fence before the next product."""

import numpy as np
import pytest
import small_kernels as small
from small_kernels import DATA, init, load, wait

from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.fronts.driver import run_ptx

MODES = ("eager", "lazy", "random:3")
ONES = np.ones((64 + 8) * 16, np.float16)
B = DATA + 1024 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
DONE = "wgmma.wait_group.sync.aligned 0;\n"
PREPARE = "".join(f"mov.b32 %v{i}, {word};\n" for i, word in enumerate([0] * 4 + [0x3C003C00] * 4)) + (
    f"mov.b64 %rd21, {B};\nsetp.eq.u32 %p5, 1, 0;\nsetp.ne.u32 %p6, 1, 0;\n"
)


def product(accumulate=False):
    """D (%v0 to %v3) = A (%v4 to %v7) @ B, in a separate group."""
    flag = "%p6" if accumulate else "%p5"
    return (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%v0, %v1, %v2, %v3}, {%v4, %v5, %v6, %v7}, "
        f"%rd21, {flag}, 1, 1, 0;\n{COMMIT}"
    )


def write(register, guard=""):
    return f"{guard} xor.b32 %v{register}, %v{register}, 0x4000;\n"


def findings(body):
    """Texts of a checked launch, which are the same in every mode except for the named warp."""
    body = init(1) + small.in_thread(0, load(ONES.nbytes)) + wait(0) + PREPARE + body + DONE
    ptx = small.kernel(body, "sm_90a")
    counts = []
    for mode in MODES:
        found = []
        try:
            run_ptx(
                ptx, block=128, args=[ONES, np.zeros(64, np.uint32)], smem_bytes=8192, mode=mode, check=True
            )
        except HazardError as error:
            found = error.hazards
        assert {(h.kind, h.severity) for h in found} <= {("register", "error")}
        counts.append([h.text for h in found])
    assert len({len(texts) for texts in counts}) == 1
    return counts[0]


@pytest.mark.parametrize(
    "body",
    [
        FENCE + product() + product(True),
        FENCE + product() + DONE + write(4) + FENCE + product(),
        write(4) + FENCE + product() + "mov.b32 %v5, %v8;\n".replace("%v8", "0"),
        FENCE + product() + DONE + write(0) + product(),
        FENCE + product() + write(4, "@%p5"),
        FENCE + write(4, "@%p5") + product(),
        FENCE + product() + write(8),
        FENCE + product() + write(0, "@%p5") + "@%p5 xor.b32 %v1, %v0, %v2;\n",
    ],
    ids=["one after the other", "waited and fenced", "a move", "not accumulated", "not executed", "not executed before", "another", "not executed on D"],
)  # fmt: skip
def test_clean(body):
    assert findings(body) == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (product(), "the first one of its warp, and no wgmma.fence"),
        (FENCE + product() + write(7), "writes a register of A while wgmma.mma_async"),
        (FENCE + product() + product(True) + "wgmma.wait_group.sync.aligned 1;\n" + write(7), "writes a register of A while"),
        (FENCE + write(6) + product(), "uses a register of A that xor.b32"),
        (FENCE + product() + DONE + write(1) + product(True), "uses a register of D that xor.b32"),
        (FENCE + write(6, "@%p6") + product(), "uses a register of A that xor.b32"),
    ],
    ids=["no fence at all", "in flight", "the newest in flight", "behind the fence", "accumulated", "executed"],
)  # fmt: skip
def test_found(body, text):
    found = findings(body)
    assert len(found) == 1
    assert text in found[0]

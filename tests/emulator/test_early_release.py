"""Reads under way when their memory is released: the fault observed on an H200, and kernels without it."""

import re

import numpy as np
import pytest
import small_kernels as small
from small_kernels import DATA, in_thread, in_warp, init, load, wait

from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.fronts.driver import run_ptx

MODES = ("eager", "lazy", "random:3")
WORDS = np.arange(1, 1025, dtype=np.uint32)
READ = f"mad.lo.u32 %r9, %r8, 4, %r1;\nld.shared.b32 %r10, [%r9+{DATA}];\n"
STORE = "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], {value};\n"
ARRIVE = "bar.warp.sync -1;\n@%p1 mbarrier.arrive.shared.b64 _, [%r1+8];\n"
TEXT = (
    r"ld\.shared \(cta 0,0,0 warp 1, PTX line \d+\) reads smem\+0x800\.\.0x87f, {release} \(cta 0,0,0 warp 1, PTX line \d+\) "
    r"releases it before any value of the read is used, and {writer} \(cta 0,0,0 warp 0.* overwrites it"
)


def run(body, mode, **launch):
    arguments = {"cluster": 1, "grid": 1, "block": 64, "smem_bytes": 32768, **launch}
    grid, block = arguments.pop("grid"), arguments.pop("block")
    out = np.zeros(2048, np.uint32)
    run_ptx(small.kernel(body, "sm_90a"), None, grid, block, [WORDS, out], mode=mode, check=True, **arguments)
    return out


def found(body, mode, **launch):
    with pytest.raises(HazardError) as error:
        run(body, mode, **launch)
    return [hazard for hazard in error.value.hazards if hazard.kind == "early-release"]


REFILL, REFILLED = wait(8) + load(256, at=16), wait(16)


def refilled(consume, *, refill=REFILL, then=REFILLED):
    """Warp 1 consumes a stage that warp 0 filled, and warp 0 fills it again after its release."""
    start = init(1, 1, 1) + in_thread(0, load(256) + wait(0))
    return start + in_warp(1, wait(0) + consume) + in_thread(0, refill) + in_warp(1, then)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "between", ["", "mov.b32 %r10, %r10;\n", "mov.b64 %rd11, {%r10, %r8};\n"], ids=["nothing", "mov", "pack"]
)
def test_released_before_the_value_is_used(between, mode):
    value = "%r10"
    if "rd11" in between:
        between, value = between + ARRIVE + "mov.b64 {%r11, %r12}, %rd11;\n", "%r11"
    else:
        between += ARRIVE
    hazards = found(refilled(READ + between + STORE.format(value=value)), mode)
    assert len(hazards) == 1
    assert re.match(TEXT.format(release=r"mbarrier\.arrive", writer="bulk load"), hazards[0].text)
    assert "mbarrier.arrive.shared.b64 _, [%r1+8]" in str(hazards[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "use",
    [
        STORE.format(value="%r10"),
        "st.shared.b32 [%r9+8192], %r10;\n",
        "add.u32 %r10, %r10, 1;\n",
        "fence.proxy.async.shared::cta;\n",
        "fence.acq_rel.cta;\n",
    ],
    ids=["stored", "staged", "added to", "proxy fence", "fence"],
)
def test_released_after_the_value_was_used(use, mode):
    out = run(refilled(READ + use + ARRIVE + STORE.format(value="%r10")), mode)
    np.testing.assert_array_equal(out[32:64], WORDS[:32] + use.startswith("add"))


@pytest.mark.parametrize("mode", MODES)
def test_what_does_no_harm(mode):
    """Harmless cases: a value that nobody uses, and memory that is not overwritten or that ordinary stores overwrite."""
    run(refilled(READ + ARRIVE), mode)
    run(refilled(READ + ARRIVE + STORE.format(value="%r10"), refill=wait(8), then=""), mode)
    stored = wait(8) + f"st.shared.b32 [%r1+{DATA}], 7;\n"
    run(refilled(READ + ARRIVE + STORE.format(value="%r10"), refill=stored, then=""), mode)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_released_place_counts(mode):
    """Software pipelining: the read under way at the arrival is of a stage that is released later."""
    other = f"ld.shared.b32 %r11, [%r9+{DATA + 256}];\n"
    use = "add.u32 %r10, %r10, %r8;\n"
    ahead = READ + other + use + ARRIVE + "add.u32 %r10, %r10, %r11;\n" + STORE.format(value="%r10")
    first = init(1, 1, 1) + in_thread(0, load(512) + wait(0)) + in_warp(1, wait(0) + ahead)
    clean = first + in_thread(0, wait(8) + load(256, at=16)) + in_warp(1, wait(16))
    run(clean, mode)
    (hazard,) = found(
        clean.replace("load(256, at=16)", "")
        .replace("], 256, [%r1+16]", "], 512, [%r1+16]")
        .replace("[%r1+16], 256;", "[%r1+16], 512;"),
        mode,
    )
    assert "smem+0x900..0x97f" in hazard.text


@pytest.mark.parametrize("mode", MODES)
def test_released_through_a_named_barrier(mode):
    """Warp 1 arrives on a named barrier; then warp 0 fills the stage."""
    consume = READ + "bar.arrive 1, 64;\n" + STORE.format(value="%r10")
    body = init(1, 1, 1) + in_thread(0, load(256) + wait(0)) + in_warp(1, wait(0) + consume)
    body += in_warp(0, "bar.sync 1, 64;\n") + in_thread(0, load(256, at=16)) + in_warp(1, wait(16))
    (hazard,) = found(body, mode)
    assert re.match(TEXT.format(release=r"bar\.arrive", writer="bulk load"), hazard.text)


SEND = f"""mapa.shared::cluster.u32 %r12, %r1, 1;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r12+{DATA}], %r8, [%r12+16];
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("scope", "is_fault"), [("", True), (".release.cluster", False)])
def test_released_to_another_cta(scope, is_fault, mode):
    """A thread of CTA 1 releases a slot, and one of CTA 0 sends the next value there.

    A cluster-scope release starts with a fence.
    """
    give = (
        f"mapa.shared::cluster.u32 %r12, %r1, 0;\nmbarrier.arrive{scope}.shared::cluster.b64 _, [%r12+8];\n"
    )
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{at}], 4;\n"
    read = f"ld.shared.b32 %r10, [%r1+{DATA}];\n"
    sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    body = init(1, 1, 1, sync=sync.strip()) + "setp.ne.u32 %p6, %r6, 0;\n@%p6 bra OTHER;\n"
    body += in_thread(0, SEND.replace("%r12+16", "%r12") + wait(8) + SEND) + "bra END;\nOTHER:\n"
    body += in_thread(
        0,
        expect.format(at=0)
        + expect.format(at=16)
        + wait(0)
        + read
        + give
        + STORE.format(value="%r10")
        + wait(16),
    )
    body += f"END:\n{sync}"
    if not is_fault:
        run(body, mode, grid=2, cluster=2, block=32)
        return
    (hazard,) = found(body, mode, grid=2, cluster=2, block=32)
    assert re.search(
        r"ld\.shared \(cta 1,0,0 .* mbarrier\.arrive \(cta 1,0,0 .* and st\.async \(cta 0,0,0",
        hazard.text,
    )

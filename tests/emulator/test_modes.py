"""Modes: correct kernels give the same result in all modes; a kernel with a missing wait gives a different one in some."""

import numpy as np
import pytest
import small_kernels as small
from small_kernels import DATA

from nvfp4_cute.emulator.fronts.driver import Emulator, run_ptx
from nvfp4_cute.emulator.modes import make_queue
from nvfp4_cute.errors import EmulatorError

ALL = ("eager", "lazy", *(f"random:{seed}" for seed in range(6)))
LATE = ALL[1:]
POISON = 0xFFFFFFFF


def run(body, src, words, mode, *, block=32, target="sm_100a", **kwargs):
    out = np.zeros(words, np.uint32)
    run_ptx(small.kernel(body, target), None, 1, block, [src, out], smem_bytes=32768, mode=mode, **kwargs)
    return out


WORDS = np.arange(1, 33, dtype=np.uint32)


@pytest.mark.parametrize("mode", ALL)
def test_a_waited_load_arrives(mode):
    body = small.init(1) + small.in_thread(0, small.load(128)) + small.wait(0) + small.save()
    np.testing.assert_array_equal(run(body, WORDS, 32, mode), WORDS)


def test_an_unwaited_load_is_late():
    body = small.init(1) + small.in_thread(0, small.load(128)) + small.save()
    np.testing.assert_array_equal(run(body, WORDS, 32, "eager"), WORDS)
    np.testing.assert_array_equal(run(body, WORDS, 32, "lazy"), POISON)


def test_loads_of_one_thread_overtake_each_other():
    """Two loads signal separate barriers. The word that both write shows which one came last."""
    twice = "".join(
        f"""mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{8 * i}], 16;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+{DATA}], [%rd1+{16 * i}], 16, [%r1+{8 * i}];
        """
        for i in range(2)
    )
    body = small.init(1, 1) + small.in_thread(0, twice) + small.wait(0) + small.wait(8) + small.save()
    seen = {int(run(body, WORDS, 32, f"random:{seed}")[0]) for seed in range(20)}
    assert seen == {int(WORDS[0]), int(WORDS[4])}


STORE = """mad.lo.u32 %r9, %r0, 4, %r1;
st.shared.b32 [%r9+1024], %r0;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1024], 128;
@%p0 cp.async.bulk.commit_group;
{wait}
bar.sync 0;
st.shared.b32 [%r9+1024], 99;
"""


@pytest.mark.parametrize("mode", ALL)
def test_a_bulk_store_reads_before_wait_group_read_returns(mode):
    body = STORE.format(wait="@%p0 cp.async.bulk.wait_group.read 0;")
    np.testing.assert_array_equal(run(body, WORDS, 32, mode), np.arange(32))


@pytest.mark.parametrize("wait", ["", "@%p0 cp.async.bulk.wait_group.read 1;"])
def test_a_bulk_store_that_nobody_waits_for_reads_late(wait):
    body = STORE.format(wait=wait)
    np.testing.assert_array_equal(run(body, WORDS, 32, "eager"), np.arange(32))
    np.testing.assert_array_equal(run(body, WORDS, 32, "lazy"), 99)


@pytest.mark.parametrize(("wait", "late"), [("wait_group", False), ("wait_group.read", True)])
def test_a_bulk_store_writes_before_wait_group_returns(wait, late):
    """The thread reads its own output, which is visible after wait_group, but not after wait_group.read."""
    body = (
        STORE.format(wait=f"@%p0 cp.async.bulk.{wait} 0;")
        + "mad.wide.u32 %rd10, %r0, 4, %rd2;\nld.global.b32 %r11, [%rd10];\nst.global.b32 [%rd10+128], %r11;"
    )
    seen = run(body, WORDS, 64, "lazy")[32:]
    np.testing.assert_array_equal(seen, 0 if late else np.arange(32))


SMALL = "mad.lo.u32 %r9, %r0, 4, %r1;\nmad.wide.u32 %rd10, %r0, 4, %rd1;\ncp.async.ca.shared.global [%r9+1024], [%rd10], 4;\n"


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize(
    "wait",
    [
        "cp.async.commit_group;\ncp.async.wait_group 0;\n",
        "cp.async.wait_all;\n",
        f"cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n{small.wait(0)}",
        f"cp.async.mbarrier.arrive.shared.b64 [%r1];\nmbarrier.arrive.shared.b64 _, [%r1];\n{small.wait(0)}",
    ],
    ids=["wait_group", "wait_all", "noinc", "counted"],
)
def test_cp_async(mode, wait):
    body = small.init(32) + SMALL + wait + small.save()
    np.testing.assert_array_equal(run(body, WORDS, 32, mode), WORDS)


def test_cp_async_waits_for_older_groups_only():
    two = SMALL + "cp.async.commit_group;\n" + SMALL.replace("+1024", "+2048") + "cp.async.commit_group;\n"
    body = (
        two
        + "cp.async.wait_group 1;\n"
        + small.save()
        + small.save("%rd2", 2048).replace("%rd10]", "%rd10+128]")
    )
    out = run(body, WORDS, 64, "lazy")
    np.testing.assert_array_equal(out[:32], WORDS)
    np.testing.assert_array_equal(out[32:], POISON)


# ---- tensor memory ------------------------------------------------------------------------------------------------
OPERANDS = np.ones((small.A_BYTES + small.B_BYTES) // 2, np.float16)
SETUP = small.init(1, 1) + small.alloc(64)
MULTIPLY = small.load(OPERANDS.nbytes) + small.wait(0) + small.mma() + small.commit(8)


@pytest.mark.parametrize("mode", ALL)
def test_multiply_commit_wait_load(mode):
    body = SETUP + small.in_thread(0, MULTIPLY) + small.wait(8) + small.read_tmem() + small.save_registers()
    body += "bar.sync 0;\n" + small.dealloc(64)
    out = run(body, OPERANDS, 128 * 16, mode, block=128)
    np.testing.assert_array_equal(out.view(np.float32), 16)


def test_a_load_before_the_commit_sees_poison():
    body = SETUP + small.in_thread(0, MULTIPLY) + small.read_tmem() + small.save_registers() + small.wait(8)
    body += "bar.sync 0;\n" + small.dealloc(64)
    out = run(body, OPERANDS, 128 * 16, "lazy", block=128)
    assert (out == POISON).all()


STORE_TMEM = "mov.b32 %v0, %r0;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r23], {%v0};\n"


@pytest.mark.parametrize("waited", [True, False])
def test_tensor_memory_stores_land_at_their_wait(waited):
    body = (
        small.init(1) + small.alloc(32) + "shl.b32 %r23, %r7, 21;\nadd.u32 %r23, %r23, %r20;\n" + STORE_TMEM
    )
    body += "tcgen05.wait::st.sync.aligned;\n" if waited else ""
    body += "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v1}, [%r23];\ntcgen05.wait::ld.sync.aligned;\n"
    body += "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %v1;\nbar.sync 0;\n" + small.dealloc(
        32
    )
    for mode in ALL if waited else ("lazy",):
        out = run(body, OPERANDS, 128, mode, block=128)
        np.testing.assert_array_equal(out, np.arange(128) if waited else POISON)


@pytest.mark.parametrize("mode", ALL)
def test_registers_of_a_load_travel_through_moves(mode):
    """Compilers move registers before tcgen05.wait::ld; a use after the wait gets the loaded value."""
    body = SETUP + small.in_thread(0, MULTIPLY) + small.wait(8) + small.read_tmem(wait_ld=False)
    body += "mov.b64 %rd20, {%v1, %v2};\nmov.b32 %v20, %v3;\n"
    body += "mov.b64 {%v21, %v22}, %rd20;\ntcgen05.wait::ld.sync.aligned;\nadd.f32 %v23, %v22, %v20;\n"
    body += "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %v23;\nbar.sync 0;\n" + small.dealloc(
        64
    )
    out = run(body, OPERANDS, 128, mode, block=128)
    np.testing.assert_array_equal(out.view(np.float32), 32)


# ---- wgmma --------------------------------------------------------------------------------------------------------
def wgmma(waits: str) -> str:
    """Two chained products of ones with D = 32. B follows A in memory."""
    a = DATA + 1024 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
    b = DATA + 1024 + 64 * 32 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
    registers = ", ".join(f"%v{i}" for i in range(4))
    first, second = (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{registers}}}, %rd20, %rd21, {p}, 1, 1, 0, 0;\n"
        for p in ("%p6", "%p5")
    )
    return f"""setp.eq.u32 %p5, 0, 0;
    setp.ne.u32 %p6, 0, 0;
    mov.b64 %rd20, {a};
    mov.b64 %rd21, {b};
    wgmma.fence.sync.aligned;
    {first}{second}wgmma.commit_group.sync.aligned;
    {waits}
    mad.wide.u32 %rd10, %r0, 4, %rd2;
    st.global.b32 [%rd10], %v3;
    """


ONES = np.ones((64 + 8) * 16, np.float16)
FILL = small.init(1) + small.in_thread(0, small.load(ONES.nbytes)) + small.wait(0)


@pytest.mark.parametrize("mode", ALL)
def test_wgmma_chain(mode):
    body = FILL + wgmma("wgmma.wait_group.sync.aligned 0;")
    out = run(body, ONES, 128, mode, block=128, target="sm_90a")
    np.testing.assert_array_equal(out.view(np.float32), 32)


@pytest.mark.parametrize("waits", ["", "wgmma.wait_group.sync.aligned 1;"])
def test_wgmma_accumulators_are_not_there_before_the_wait(waits):
    with pytest.raises(EmulatorError, match=r"st\.global.*no wgmma\.wait_group has waited for"):
        run(FILL + wgmma(waits), ONES, 128, "lazy", block=128, target="sm_90a")


# ---- the modes themselves -----------------------------------------------------------------------------------------
def test_a_random_execution_is_repeatable():
    """Warps append their indices to a list in the order in which the scheduler runs them."""
    body = "mov.u32 %r3, 0;\nLOOP:\n@!%p1 bra NEXT;\natom.global.add.u32 %r4, [%rd1], 1;\n"
    body += "mad.wide.u32 %rd10, %r4, 4, %rd2;\nst.global.b32 [%rd10], %r7;\nNEXT:\nbar.warp.sync -1;\n"
    body += "add.u32 %r3, %r3, 1;\nsetp.lt.u32 %p3, %r3, 8;\n@%p3 bra LOOP;"

    def order(mode):
        return tuple(run(body, np.zeros(1, np.uint32), 32, mode, block=128).tolist())

    assert order("random:5") == order("random:5")
    assert len({order(f"random:{seed}") for seed in range(4)}) == 4
    assert order("eager") == tuple(np.repeat(range(4), 8).tolist())


@pytest.mark.parametrize("mode", ["", "late", "random", "random:", "random:x", "lazy:1"])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r'must be "eager", "lazy", or "random:SEED"'):
        make_queue(mode)
    with pytest.raises(ValueError, match=r"random:SEED"):
        Emulator(mode=mode)


def test_an_error_of_a_late_operation_names_its_instruction():
    body = small.init(1) + small.in_thread(0, small.load(128, to=40000)) + small.wait(0)
    for mode in ("eager", "lazy", "random:0"):
        with pytest.raises(EmulatorError, match=r"warp 0: PTX line \d+ `cp\.async\.bulk\..*is outside"):
            run(body, WORDS, 32, mode)


@pytest.mark.parametrize("mode", ALL)
def test_hangs_are_found(mode):
    body = small.init(1) + small.in_thread(0, small.load(128, expect=256)) + small.wait(0)
    with pytest.raises(EmulatorError, match=r"128 tx bytes outstanding"):
        run(body, WORDS, 32, mode)

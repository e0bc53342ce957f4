"""Hazards: for each kind a small faulty kernel with the expected report, and a repaired version without one.

`test_global_hazards` has those of global memory.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import small_kernels as small
from hazard_checks import MODES, WORDS, assert_clean, assert_found, hazards, remarks, run
from small_kernels import DATA, in_thread, in_warp, init, load, save, wait

from nvfp4_cute.emulator.check.global_races import MOST_FENCES
from nvfp4_cute.emulator.check.ledger import HazardError, by_cause, merged
from nvfp4_cute.emulator.fronts.driver import Emulator, run_ptx
from nvfp4_cute.emulator.machine import Machine


# ---- shared memory ----------------------------------------------------------------------------------------------------
def handover(between):
    """Warp 0 writes and warp 1 reads the same words. Both execute `between`."""
    write = f"shl.b32 %r9, %r8, 2;\nadd.u32 %r9, %r9, %r1;\nst.shared.b32 [%r9+{DATA}], %r8;\n"
    read = f"shl.b32 %r9, %r8, 2;\nadd.u32 %r9, %r9, %r1;\nld.shared.b32 %r10, [%r9+{DATA}];\n"
    return in_warp(0, write) + between + in_warp(1, read)


@pytest.mark.parametrize("form", ["shared.b16", "b16"])
def test_matrices_stored_in_either_form(form):
    """Older compilers omit .shared in stores to 32-bit shared addresses."""
    write = f"shl.b32 %r9, %r8, 4;\nadd.u32 %r9, %r9, %r1;\nstmatrix.sync.aligned.m8n8.x1.{form} [%r9+{DATA}], {{%r8}};\n"
    read = f"ld.shared.b32 %r10, [%r1+{DATA}];\n"
    assert_found(in_warp(0, write) + in_warp(1, read), "race", "ld.shared.*stmatrix", modes=MODES[:1])
    assert_clean(in_warp(0, write) + "bar.sync 0;\n" + in_warp(1, read), modes=MODES[:1])


@pytest.mark.parametrize(
    "between",
    [
        "bar.sync 0;\n",
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
        in_warp(0, "bar.arrive 1, 64;") + in_warp(1, "bar.sync 1, 64;"),
    ],
    ids=["bar.sync", "cluster barrier", "bar.arrive"],
)
def test_barriers_order(between):
    assert_clean(handover(between))


@pytest.mark.parametrize(
    "between",
    [
        "",
        in_warp(0, "bar.sync 1, 32;") + in_warp(1, "bar.sync 2, 32;"),
        in_warp(1, "bar.arrive 1, 64;") + in_warp(0, "bar.sync 1, 64;"),
    ],
    ids=["nothing", "two barriers", "the wrong way round"],
)
def test_missing_barrier_between_warps(between):
    assert_found(
        handover(between),
        "race",
        r"ld\.shared \(cta 0,0,0 warp 1, PTX line \d+\) reads smem\+0x800\.\.0x87f that st\.shared .*warp 0.* writes"
        r"|st\.shared .*warp 0.* writes smem\+0x800\.\.0x87f while ld\.shared .*warp 1.* may still read",
    )


def byte_address(lane_bytes, offset="0"):
    """Sets %r9 to the lane's byte at smem+DATA; bytes of lanes are `lane_bytes` apart."""
    return f"mul.lo.u32 %r9, %r8, {lane_bytes};\nadd.u32 %r9, %r9, %r1;\nadd.u32 %r9, %r9, {offset};\ncvt.u16.u32 %h1, %r0;\n"


@pytest.mark.parametrize(("size", "step"), [("b8", 2), ("b8", 4), ("b16", 4)])
def test_warps_store_neighbouring_parts_of_words(size, step):
    """Bytes are tracked separately: those of one word may belong to several warps."""
    nbytes = int(size[1:]) // 8
    store = lambda warp, at: in_warp(warp, byte_address(step, at) + f"st.shared.{size} [%r9+{DATA}], %h1;\n")
    load = lambda warp, at: in_warp(warp, byte_address(step, at) + f"ld.shared.{size} %h2, [%r9+{DATA}];\n")
    apart = store(0, 0) + store(1, nbytes)
    assert_clean(apart, modes=MODES[:1])
    assert_clean(load(0, 0).replace("AFTER", "A") + apart, modes=MODES[:1])  # unwritten bytes are warnings
    assert_found(store(0, 0) + store(1, 0), "race", "st.shared.*may still be writing", modes=MODES[:1])
    assert_found(store(0, 0) + load(1, 0), "race", r"smem\+0x800", modes=MODES[:1])
    # Accesses of whole words, rows and copies overlap the parts.
    assert_found(
        apart + in_warp(0, handover_read()),
        "race",
        r"ld\.shared.*st\.shared|st\.shared.*ld\.shared",
        modes=MODES[:1],
    )
    assert_clean(apart + "bar.sync 0;\n" + in_warp(0, handover_read()), modes=MODES[:1])
    copy = (
        FENCE
        + "\nbar.sync 0;\n"
        + f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+{DATA}], 64;\n"
    )
    done = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"
    clear = handover_read().replace("ld.shared.b32 %r10, ", "st.shared.b32 ").replace("];", "], 0;")
    start = in_warp(0, clear) + "bar.sync 0;\n"
    assert_clean(start + apart + copy + done, modes=MODES[:1])
    late = copy + store(1, nbytes).replace("AFTER", "LATE") + done
    assert_found(
        start + apart + late,
        "race",
        "st.shared.*while bulk store|bulk store.*that st.shared",
        modes=MODES[:1],
    )


def handover_read():
    return f"shl.b32 %r9, %r8, 2;\nadd.u32 %r9, %r9, %r1;\nld.shared.b32 %r10, [%r9+{DATA}];\n"


def test_atomics_meet_parts_of_words():
    """An atomic on a word and a store to a part of it."""
    add = in_warp(0, in_thread(0, f"red.shared.add.u32 [%r1+{DATA}], 1;"))
    part = in_warp(1, in_thread(1, f"mov.u16 %h1, 1;\nst.shared.b8 [%r1+{DATA + 1}], %h1;"))
    start = f"@%p0 st.shared.b32 [%r1+{DATA}], 0;\nbar.sync 0;\n"
    assert_found(start + add + part, "race", r"smem\+0x801\.\.0x801", modes=MODES[:1])
    assert_clean(start + add + part.replace(str(DATA + 1), str(DATA + 5)), modes=MODES[:1])


def test_a_warp_arrives_and_waits_in_one_round():
    """One warp arrives twice in a round, as in flash-attention's epilogue."""
    assert_clean(handover("bar.arrive 1, 96;\n" + in_warp(1, "bar.sync 1, 96;")))


LATE = "mov.u32 %r12, 0;\nLATE:\nadd.u32 %r12, %r12, 1;\nsetp.lt.u32 %p6, %r12, 3000;\n@%p6 bra LATE;\n"
"""Takes longer than a warp's turn of the scheduler, so that others run in between."""


def test_a_parity_is_that_of_two_phases():
    """A wait for parity 1 may return before phase 0, unless the thread knows that phase 0 is complete."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r1];\n"
    write = f"st.shared.b32 [%r9+{DATA}], %r8;\n"
    wrote = handover("").replace(write, write + 2 * arrive)
    read = wrote.index("shl.b32", wrote.index(write))
    early = init(32) + wrote[:read] + LATE + wait(0, 1) + wrote[read:]
    assert_found(
        early, "race", "ld.shared.*st.shared.*try_wait.*may pass two phases earlier", modes=MODES[:2]
    )
    # All synchronise after phase 0: warp 1 knows of every arrival that completed it.
    met = early.replace(write + 2 * arrive, write + arrive)
    assert_clean(met.replace(init(32), init(32) + in_warp(0, arrive) + "bar.sync 0;\n"))


def test_mbarrier_orders():
    body = init(32) + handover(in_warp(0, "mbarrier.arrive.shared.b64 _, [%r1];") + in_warp(1, wait(0)))
    assert_clean(body)
    assert_found(body.replace(wait(0), wait(0, 1)), "race", r"smem\+0x800")


def test_atomics_order():
    """The reader polls a flag in shared memory."""
    flag = in_warp(0, in_thread(0, "atom.shared.exch.b32 %r11, [%r1+256], 1;"))
    spin = in_warp(
        1, "SPIN:\nld.acquire.cta.shared.b32 %r11, [%r1+256];\nsetp.ne.u32 %p5, %r11, 1;\n@%p5 bra SPIN;\n"
    )
    start = "@%p0 st.shared.b32 [%r1+256], 0;\nbar.sync 0;\n"
    assert_clean(start + handover(flag + spin))
    assert_found(start + handover(flag), "race", r"smem\+0x800")


LOADED = init(1) + in_thread(0, load(256)) + "{wait}" + save()


def test_tma_data_before_its_barrier():
    assert_clean(LOADED.format(wait=wait(0)))
    assert_found(
        LOADED.format(wait=""),
        "race",
        r"(ld\.shared .* reads smem\+.*bulk load .* writes|bulk load .* writes .*ld\.shared .* may still read)|nobody wrote",
        modes=("eager",),
    )
    # In the late mode nobody has written yet, and the same fault is reported at the other access.
    assert_found(
        LOADED.format(wait=""), "race", r"bulk load .* writes smem\+.* while ld\.shared", modes=("lazy",)
    )
    assert_found(LOADED.format(wait=""), "uninitialised", r"ld\.shared .* nobody wrote", modes=("lazy",))


def test_overwriting_a_stage_that_is_still_read():
    """Warp 1 reads the stage, and warp 0 loads it again, with or without a wait for warp 1's release."""
    release = "bar.warp.sync -1;\n@%p1 mbarrier.arrive.shared.b64 _, [%r1+8];\n"
    body = init(1, 1, 1) + in_thread(0, load(256) + wait(0)) + in_warp(1, wait(0) + save() + release)
    faulty = body + in_thread(0, load(256, at=16)) + in_warp(1, wait(16))
    assert_clean(body + in_thread(0, wait(8) + load(256, at=16)) + in_warp(1, wait(16)))
    race = r"bulk load .* writes smem\+0x\w+\.\.0x\w+ while ld\.shared .* may still read it|ld\.shared .* that bulk load"
    assert_found(faulty, "race", race)


STAGED = f"""shl.b32 %r9, %r0, 2;
add.u32 %r9, %r9, %r1;
st.shared.b32 [%r9+{DATA}], %r0;
{{fence}}
bar.sync 0;
{{late}}
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+{DATA}], 256;
@%p0 cp.async.bulk.commit_group;
{{wait}}
bar.sync 0;
st.shared.b32 [%r9+{DATA}], 7;
@%p0 cp.async.bulk.wait_group.read 0;
"""
FENCE = "fence.proxy.async.shared::cta;"
READ = "@%p0 cp.async.bulk.wait_group.read 0;"


def test_proxy_fence():
    assert_clean(STAGED.format(fence=FENCE, late="", wait=READ))
    assert_clean(STAGED.format(fence="", late=FENCE, wait=READ))  # any place between the accesses is right
    assert_found(
        STAGED.format(fence="", late="", wait=READ),
        "proxy-fence",
        r"bulk store .* reads smem\+0x800\.\.0x87f through the async proxy, st\.shared .* wrote .* generic proxy",
    )


def test_a_proxy_fence_is_one_of_its_space():
    """Fences of shared memory, of global memory, or of both."""
    put = f"mad.lo.u32 %r9, %r0, 4, %r1;\nst.shared.b32 [%r9+{DATA}], %r0;\nmad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %r0;\n"
    out = f"cp.async.bulk.global.shared::cta.bulk_group [%rd2+1024], [%r1+{DATA}], 256;\ncp.async.bulk.commit_group;\n"
    shared = in_thread(0, out + "cp.async.bulk.wait_group 0;")
    for copy, good, bad in (
        (shared, ".shared::cta", ".global"),
        (LOAD_BACK + wait(0), ".global", ".shared::cta"),
    ):
        with_fence = f"{init(1)}{put}fence.proxy.async{{}};\nbar.sync 0;\n".format
        assert_clean(with_fence("") + copy)
        assert_clean(with_fence(good) + copy)
        assert_found(with_fence(bad) + copy, "proxy-fence", "no fence.proxy.async")


LOAD_BACK = in_thread(0, load(256, to=DATA + 512).replace("[%rd1]", "[%rd2]"))


def test_a_proxy_fence_counts_however_many_follow():
    fences, arrive = MOST_FENCES + 8, "mbarrier.arrive.shared.b64 _, [%r1+8];\n"
    put, fence = "st.global.b32 [%rd2], 7;\n", "fence.proxy.async.global;\n"
    back = wait(8) + LOAD_BACK + wait(0)
    assert_clean(init(1, 1) + in_thread(1, put + fence + arrive + fence * fences) + back)
    unfenced = init(1, 1) + in_thread(1, fence * fences + put + arrive) + back
    assert_found(unfenced, "proxy-fence", "no fence.proxy.async of global memory")


def test_who_finds_a_flag_may_take_it_back():
    """The store that raises the flag happened before everything that its reader does."""
    spin = "SPIN:\nld.acquire.gpu.global.b32 %r11, [%rd2];\nsetp.ne.u32 %p5, %r11, 1;\n@%p5 bra SPIN;\n"
    back = in_thread(1, "{}st.global.b32 [%rd2], 0;\n")
    flag = in_thread(0, "st.release.gpu.global.b32 [%rd2], 1;\n")
    assert_clean(flag + back.format(spin))
    assert_found(flag + back.format(""), "double-store", "writes too: nothing orders them")


def test_a_fence_before_the_write_does_not_help():
    text = STAGED.format(fence="", late="", wait=READ).replace("st.shared", FENCE + "\nst.shared", 1)
    assert_found(text, "proxy-fence", r"no fence\.proxy\.async")


def test_overwriting_what_a_bulk_store_still_reads():
    assert_found(
        STAGED.format(fence=FENCE, late="", wait=""),
        "race",
        r"st\.shared .* writes smem\+0x800.* while bulk store .* may still read it|bulk store .* reads .* that st\.shared",
    )


def test_unwritten_shared_memory():
    """Only a warning, because kernels also load rows outside a tensor and discard them."""
    body = "st.shared.b32 [%r1+1024], 1;\nld.shared.b32 %r9, [%r1+{at}];"
    assert remarks(body.format(at=1024), block=32) == []
    for mode in MODES:
        ((severity, kind, text),) = remarks(body.format(at=1028), block=32, mode=mode)
        assert (severity, kind) == ("warning", "uninitialised")
        assert re.search(r"ld\.shared .* reads shared memory .* nobody wrote", text)


def test_unwritten_bytes_are_stored():
    assert_found(
        f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+{DATA}], 256;\n"
        "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;",
        "uninitialised",
        "bulk store .* nobody wrote",
    )


# ---- mbarriers ---------------------------------------------------------------------------------------------------------
def test_barrier_initialisation():
    assert_clean(init(1) + in_thread(0, load(256)) + wait(0) + save())
    assert_found(
        init(1, sync="") + in_thread(0, load(256)) + wait(0) + save(),
        "mbarrier",
        r"mbarrier\.try_wait .*warp 1.* uses mbarrier smem\+0x400, which mbarrier\.init .* initialises: nothing orders",
        modes=("eager", "lazy"),
    )
    assert_found(
        init(1, fence="") + in_thread(0, load(256)) + wait(0) + save(),
        "mbarrier",
        r"bulk load .* without a fence\.mbarrier_init after mbarrier\.init",
    )


@pytest.mark.parametrize("arrive", ("arrive", "arrive.relaxed"))
def test_a_barrier_of_another_cta_behind_a_cluster_barrier(arrive):
    """A cluster barrier with release semantics makes the initialisation visible; a relaxed one does not."""
    body = init(1, fence="", sync="") + f"barrier.cluster.{arrive};\nbarrier.cluster.wait;\n"
    body += "xor.b32 %r10, %r6, 1;\nmapa.shared::cluster.u32 %r11, %r1, %r10;\n"
    body += in_thread(0, "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];") + wait(0)
    body += "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    if arrive == "arrive":
        assert_clean(body, grid=2, cluster=2)
    else:
        assert_found(
            body,
            "mbarrier",
            "uses mbarrier .* without a fence.mbarrier_init",
            grid=2,
            cluster=2,
        )


def test_an_own_barrier_of_st_async_needs_no_fence():
    """st.async uses the generic proxy."""
    send = f"""mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1+{DATA}], 7, [%r1];"""
    read = f"ld.shared.b32 %r9, [%r1+{DATA}];\n@%p0 st.global.b32 [%rd2], %r9;\n"
    assert_clean(init(1, fence="") + in_thread(0, send) + wait(0) + read)


def test_a_fence_makes_relaxed_arrivals_and_waits_order():
    relaxed = wait(0).replace("parity.shared", "parity.relaxed.cluster.shared::cta")
    arrive = "mbarrier.arrive.relaxed.cluster.shared.b64 _, [%r1];"
    fences = [
        f"{fence};\n" for fence in ("fence.acq_rel.cluster", "fence.acq_rel.cta", "fence.gpu", "membar.cta")
    ]
    release = "fence.release.sync_restrict::shared::cta.cluster;\n"
    acquire = "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
    pairs = [*((fence, fence) for fence in fences), (release, acquire)]
    for before, after in (*pairs, ("", fences[0]), (fences[0], ""), ("", acquire), (release, "")):
        store = in_thread(0, f"st.shared.b32 [%r1+{DATA}], 7;\n{before}{arrive}")
        body = (
            init(1)
            + store
            + relaxed
            + after
            + f"ld.shared.b32 %r9, [%r1+{DATA}];\n@%p0 st.global.b32 [%rd2], %r9;\n"
        )
        if before and after:
            assert_clean(body)
        else:
            assert_found(body, "race", r"ld\.shared .* warp 1.* st\.shared .* nothing orders them")


TEST = "mbarrier.test_wait.parity.shared.b64 %p5, [%r1], 0;\nselp.u32 %r10, 1, 0, %p5;\n"


@pytest.mark.parametrize(
    "between, answers",
    [
        (in_thread(0, "mbarrier.arrive.shared.b64 _, [%r1];"), (1, 0)),
        (in_thread(0, "mbarrier.arrive.shared.b64 _, [%r1];") + "bar.sync 0;\n", (1, 1)),
        (in_thread(0, load(256)) + wait(0), (1, 1)),
        (in_thread(0, load(256)) + "bar.sync 0;\n", (0, 0)),
        ("", (0, 0)),
    ],
    ids=["own arrival", "arrival behind a barrier", "own wait", "copy", "nothing"],
)
def test_a_test_is_true_where_its_warp_knows_the_phase(between, answers):
    """Before that, the test returns false once."""
    body = init(1) + between + TEST + "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %r10;\n"
    out = run(body + (in_thread(0, "mbarrier.arrive.shared.b64 _, [%r1];") if not between else "") + wait(0))
    assert (out[0], out[32]) == answers


def test_use_before_initialisation():
    assert_found(
        in_thread(0, "mbarrier.arrive.shared.b64 _, [%r1];"), "mbarrier", "no mbarrier was initialised"
    )


def test_too_many_arrivals():
    body = init(1) + "@%p0 mbarrier.arrive.shared.b64 _, [%r1], 1;\n" + wait(0)
    assert_clean(body)
    assert_found(body.replace("[%r1], 1;", "[%r1], 2;"), "mbarrier", r"2 arrivals with 1 of 1 pending")


def test_too_few_arrivals_hang_with_a_wait_graph():
    body = init(2) + "@%p0 mbarrier.arrive.shared.b64 _, [%r1];\n" + wait(0)
    assert_found(
        body,
        "hang",
        r"(?s)warps 0, 1: PTX line.*pending 1 of 2 arrivals.*arrivals came from mbarrier\.arrive .*warp 0",
    )


def test_a_warp_that_missed_a_phase():
    twice = "mbarrier.arrive.shared.b64 _, [%r1];\n" * 2
    text = r"warp 1: PTX line .*; the warp has found 0 of the 2 complete phases: the barrier passed on twice before it looked"
    assert_found(init(1) + in_thread(0, twice) + "bar.sync 0;\n" + in_warp(1, wait(0)), "hang", text)


def test_initialised_again_while_in_use():
    again = "@%p0 mbarrier.init.shared.b64 [%r1], 1;\n"
    body = init(1) + in_thread(0, load(256)) + wait(0) + "{sync}" + again + save()
    assert_clean(body.replace("{sync}", "bar.sync 0;\n"))
    assert_found(
        init(2) + in_thread(0, "mbarrier.arrive.shared.b64 _, [%r1];") + again,
        "mbarrier",
        r"initialises mbarrier smem\+0x400 again while it is in use",
    )


def test_transaction_bytes_that_never_balance():
    body = (
        init(1, 1)
        + in_thread(0, load(256) + "mbarrier.expect_tx.shared.b64 [%r1+8], {bytes};\n")
        + wait(0)
        + save()
    )
    assert_clean(body.replace("{bytes}", "0"))
    for mode in MODES:  # nobody waits for them any more
        ((severity, kind, text),) = remarks(body.replace("{bytes}", "16"), mode=mode)
        assert (severity, kind) == ("note", "mbarrier")
        assert (
            "mbarrier smem+0x408 has an unbalanced transaction count (16 bytes expected but not copied"
            in text
        )
    copied = body.replace("mbarrier.expect_tx", "mbarrier.complete_tx").replace("{bytes}", "16")
    assert_found(copied, "mbarrier", r"smem\+0x408 has an unbalanced .*16 bytes copied but not expected")


# ---- warps -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "inst",
    ["shfl.sync.bfly.b32 %r9, %r8, 8, 31, {}", "vote.sync.ballot.b32 %r9, %p0, {}", "bar.warp.sync {}"],
)
def test_lanes_outside_their_mask(inst):
    assert_clean(inst.format("0xffffffff") + ";\n")
    half = "shl.b32 %r10, 0xffff, %r11;\n" + inst.format("%r10") + ";\n"
    assert_clean("and.b32 %r11, %r8, 16;\n" + half)
    assert_found(
        "mov.b32 %r11, 0;\n" + half, "rule", r"lanes \[16, .* with the mask 0xffff, which does not name them"
    )


# ---- registers ---------------------------------------------------------------------------------------------------------------
def test_unwritten_register():
    ((severity, kind, text),) = remarks("add.u32 %r10, %r11, 1;")
    assert (severity, kind) == ("warning", "register") and "reads %r11, which was never written" in text


def test_unwritten_float_beside_a_number():
    ((severity, kind, text),) = remarks("add.f32 %r10, %r11, 0f3F800000;")
    assert (severity, kind) == ("warning", "register") and "reads %r11, which was never written" in text


# ---- an instruction and itself --------------------------------------------------------------------------------------------
def test_a_copy_that_every_lane_issues():
    announce, copy, _ = load(256).split("\n")
    body = init(1) + in_thread(0, announce.replace("256", "8192")) + in_warp(0, copy + "\n") + wait(0)
    text = r"bulk load .* may still be writing: nothing orders them \(the same instruction, in another lane"
    assert_found(body, "race", text)
    assert_clean(init(1) + in_thread(0, load(256)) + wait(0))


# ---- the end of a CTA ----------------------------------------------------------------------------------------------------------
def test_exit_with_a_load_in_flight():
    assert_found(init(1) + in_thread(0, load(256)), "exit", r"cta 0,0,0 may exit before bulk load .* is done")


def test_exit_with_a_store_in_flight():
    good = STAGED.format(fence=FENCE, late="", wait=READ)
    cut = good[: good.index("bar.sync 0;\nst.shared")]
    assert_clean(cut)
    assert_found(cut.replace(READ, ""), "exit", r"may exit before bulk store")


@pytest.mark.parametrize("waited", [True, False])
def test_exit_with_a_small_copy_in_flight(waited):
    """PTX ISA does not forbid it, and CUTLASS's sgemm_sm80 tutorial does it: a note."""
    copy = f"cp.async.ca.shared.global [%r1+{DATA}], [%rd1], 4;\n"
    body = in_thread(0, copy) + ("cp.async.wait_all;\n" if waited else "")
    notes = [(severity, kind) for severity, kind, _ in remarks(body)]
    assert notes == ([] if waited else [("note", "exit")])


REMOTE = (
    init(1, sync="barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;")
    + """setp.eq.and.u32 %p5, %r6, 1, %p0;
mapa.shared::cluster.u32 %r9, %r1, 0;
@%p5 mbarrier.arrive.shared::cluster.b64 _, [%r9];
setp.ne.u32 %p6, %r6, 0;
@%p6 bra END;
{wait}
END:
"""
)


def test_remote_arrival_into_a_cta_that_may_be_gone():
    assert_clean(REMOTE.replace("{wait}", wait(0)), grid=2, cluster=2)
    assert_found(
        REMOTE.replace("{wait}", ""),
        "exit",
        r"cta 0,0,0 may exit before mbarrier\.arrive \(cta 1,0,0",
        grid=2,
        cluster=2,
    )


# ---- reports -----------------------------------------------------------------------------------------------------------------
def test_reports_are_deduplicated_and_complete():
    loop = (
        "mov.u32 %r12, 0;\nLOOP:\n"
        + handover("")
        + "add.u32 %r12, %r12, 1;\nsetp.lt.u32 %p6, %r12, 5;\n@%p6 bra LOOP;"
    )
    found = [h for h in hazards(loop) if h.kind == "race"]
    assert len({(h.site.inst.line, h.other.inst.line) for h in found}) == len(found)
    assert max(h.count for h in found) > 1
    text = str(HazardError(found))
    assert re.search(r"kernel `k`:\n", text)
    assert all(f"PTX line {h.site.inst.line}" in text for h in found)


def test_a_report_has_one_entry_for_a_pair_of_source_lines():
    """An unrolled loop makes many hazards of one mistake, and every CTA leaves its own tensor memory allocated."""
    body = handover("") + handover("").replace("AFTER", "NEXT")
    body = body.replace("st.shared", ".loc 1 40 0\nst.shared").replace("ld.shared", ".loc 1 48 0\nld.shared")
    ptx = small.kernel(body).replace(".visible", '.file 1 "load.py"\n.visible', 1)
    with pytest.raises(HazardError) as error:
        run_ptx(ptx, None, 1, 64, [WORDS, np.zeros(64, np.uint32)], smem_bytes=8192, check=True)
    found = [h for h in error.value.hazards if h.kind == "race"]
    shown = merged(found)
    assert len(found) > len(shown) == 1
    assert shown[0].count == sum(h.count for h in found) and shown[0].pairs == len(found)
    assert f"[{shown[0].count} times, {len(found)} places in PTX]" in str(HazardError(found))
    left = [replace(found[0], site=None, other=None, text=f"cta {cta},0,0 exits") for cta in range(3)]
    assert [str(h) for h in merged(left)] == ["race: cta 0,0,0 exits [3 times]"]


def test_findings_of_one_cause_are_one():
    """Three lines read the data of one store: the report is one finding that names all lines."""
    body = handover("").replace("st.shared", ".loc 1 40 0\nst.shared")
    start = body.index("ld.shared")
    line = body[start : body.index(";", start) + 1]
    loads = "".join(f".loc 1 {number} 0\n{line}\n" for number in (48, 51, 60))
    ptx = small.kernel(body.replace(line, loads)).replace(".visible", '.file 1 "load.py"\n.visible', 1)
    with pytest.raises(HazardError) as error:
        run_ptx(ptx, None, 1, 64, [WORDS, np.zeros(64, np.uint32)], smem_bytes=8192, check=True)
    found = [h for h in error.value.hazards if h.kind == "race"]
    (shown,) = by_cause(found)
    assert len(merged(found)) == 3 and shown.count == sum(h.count for h in found)
    assert "1 error in kernel `k`" in str(error.value) and "the same at load.py:51, load.py:60" in str(shown)
    separate = [replace(h, other=None) for h in found]
    assert len(by_cause(separate)) == 3


def test_python_lines_are_named():
    body = handover("").replace("ld.shared", ".loc 1 48 0\nld.shared")
    ptx = small.kernel(body).replace(".visible", '.file 1 "somewhere/load.py"\n.visible', 1)
    out = np.zeros(64, np.uint32)
    with pytest.raises(HazardError, match=r"ld\.shared \(cta 0,0,0 warp 1, PTX line \d+, load\.py:48\)"):
        run_ptx(ptx, None, 1, 64, [WORDS, out], smem_bytes=8192, check=True)


def test_a_machine_collects_over_launches():
    machine = Machine(4, check=True)
    out = np.zeros(64, np.uint32)
    for body, count in ((handover(""), 1), (handover("bar.sync 0;\n"), 1), (handover(""), 2)):
        try:
            run_ptx(small.kernel(body), None, 1, 64, [WORDS, out], smem_bytes=8192, machine=machine)
        except HazardError as error:
            assert len(error.hazards) == 1
        assert len(machine.checker.hazards) == count


def test_unchecked_emulators_have_no_hazards():
    assert Emulator().hazards == []


NEIGHBOUR = """mov.u32 %r9, %ctaid.x;
mad.wide.u32 %rd10, %r9, 4, %rd2;
setp.eq.u32 %p5, %r9, 3;
@%p5 bra LAST;
POLL:
{poll}
setp.eq.u32 %p6, %r10, 0;
@%p6 bra POLL;
ld.global.b32 %r11, [%rd10+260];
LAST:
@%p0 st.global.b32 [%rd10+256], %r9;
bar.sync 0;
@%p0 st.release.gpu.global.b32 [%rd10], 1;
"""


def test_a_load_that_begins_in_a_read_only_tensor():
    """Lane 0 reads the source, which is below the output in memory; lane 1 reads the output that warp 0 writes."""
    both = np.zeros(64, np.uint32)
    source, out = both[:32], both[32:]
    source.flags.writeable = False
    body = (
        in_warp(0, "st.global.b32 [%rd2+4], %r8;\n")
        + "{between}"
        + in_warp(
            1, "and.b32 %r9, %r8, 1;\nmad.wide.u32 %rd10, %r9, 132, %rd1;\nld.global.b32 %r10, [%rd10];\n"
        )
    )
    launch = lambda between: run_ptx(
        small.kernel(body.format(between=between)), None, 1, 64, [source, out], smem_bytes=8192, check=True
    )
    launch("bar.sync 0;\n")
    with pytest.raises(HazardError, match=r"ld\.global.*reads global memory.*st\.global.*writes"):
        launch("")


def test_clusters_that_run_side_by_side():
    """Each CTA waits for its right neighbour's flag and reads that neighbour's data."""
    assert_clean(
        NEIGHBOUR.format(poll="ld.acquire.gpu.global.b32 %r10, [%rd10+4];"), grid=4, cooperative=True
    )


ACQUIRE, RELEASE = "ld.acquire.gpu.global.b32 %r10, [%rd10+4];", "st.release.gpu.global.b32 [%rd10], 1;"
RELAXED_LOAD, RELAXED_STORE = ACQUIRE.replace("acquire", "relaxed"), RELEASE.replace("release", "relaxed")


@pytest.mark.parametrize(
    ("poll", "store"),
    [
        (RELAXED_LOAD, RELEASE),
        (RELAXED_LOAD.replace(".relaxed.gpu", ".volatile"), RELEASE),
        (ACQUIRE, RELAXED_STORE),
        (ACQUIRE, "fence.acq_rel.cta;\n@%p0 " + RELAXED_STORE),
        ("fence.acq_rel.gpu;\n" + RELAXED_LOAD, RELEASE),
    ],
    ids=["relaxed load", "volatile load", "relaxed store", "narrow fence", "fence before the load"],
)
def test_relaxed_accesses_between_clusters(poll, store):
    body = NEIGHBOUR.replace("@%p0 " + RELEASE, "@%p0 " + store if store[:2] == "st" else store)
    assert_found(
        body.format(poll=poll), "race", r"ld\.global .*relaxed accesses order nothing without", grid=4
    )


@pytest.mark.parametrize("fence", ["fence.acq_rel.gpu;\n", "fence.sc.sys;\n", "membar.gl;\n"])
def test_fences_make_relaxed_accesses_order(fence):
    body = NEIGHBOUR.replace("@%p0 " + RELEASE, fence + "@%p0 " + RELAXED_STORE)
    assert_clean(body.format(poll=RELAXED_LOAD + "\n" + fence), grid=4, cooperative=True)

"""Rules of the chip: for each a kernel that breaks it, with a report by name, and a correct version without one."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import small_kernels as small
from small_kernels import in_thread, in_warp, init, wait

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.fronts import driver
from nvfp4_cute.emulator.fronts.driver import Emulator, run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.tensormap import encode
from nvfp4_cute.errors import EmulatorError

CLUSTER_BARRIER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
BOUNDED = ".reqntid {threads}, 1, 1\n.minnctapersm 1\n"


def checked(machine=None, body="", *, target="sm_100a", block=64, src=None, out=None, **launch):
    """Runs a checked kernel k(src, out). Returns its findings, including notes."""
    machine = machine or Machine(check=True)
    src = np.ones(1024, np.uint32) if src is None else src
    out = np.zeros(1024, np.uint32) if out is None else out
    ptx = body if ".entry" in body else small.kernel(body, target)
    try:
        run_ptx(ptx, None, block=block, args=[src, out], smem_bytes=32768, machine=machine, **launch)
    except HazardError:
        pass
    return machine.checker.of_this_launch()


def assert_named(found, name, text, severity=None):
    """Checks that a finding has the rule's name and severity and a text that matches `text`."""
    assert [h.rule for h in found] == [name], found
    rule = silicon.BY_NAME[name]
    assert (found[0].kind, found[0].severity) == ("silicon", severity or rule.severity)
    assert re.search(f"{name}: .*{text}", found[0].text, re.S), found[0].text
    assert rule.fix in found[0].text


def assert_raised(name, text, body, *, block=32, **launch):
    """Checks that the rule raises in every mode and with the checker, and that the error names rule, PTX line and value."""
    args = [np.ones(1024, np.uint32), np.zeros(1024, np.uint32)]
    ptx = body if ".entry" in body else small.kernel(body)
    for mode in ("eager", "lazy", "random:3"):
        with pytest.raises(
            EmulatorError, match=rf"(?s)PTX line \d+.*{name}: .*{text}|{name}: PTX line .*{text}"
        ):
            run_ptx(ptx, None, block=block, args=args, smem_bytes=32768, mode=mode, **launch)


def run_clean(body, *, block=32, **launch):
    """Checks that neither a mode nor the checker finds anything."""
    args = [np.ones(1024, np.uint32), np.zeros(1024, np.uint32)]
    ptx = body if ".entry" in body else small.kernel(body)
    for mode in ("eager", "lazy"):
        run_ptx(ptx, None, block=block, args=args, smem_bytes=32768, mode=mode, **launch)
    assert not checked(body=body, block=block, **launch)


# ---- scale factors -----------------------------------------------------------------------------------------------------
def scaled(sfa=64, sfb=68, n=64, copies=None):
    """A block-scaled MMA whose scales at these columns were written by copies."""
    fill = in_thread(
        0, "".join(f"st.shared.b32 [%r1+{small.DATA + 4 * i}], 0x38383838;\n" for i in range(128))
    )
    zero = "mov.u32 %r30, %r0;\nZERO:\nshl.b32 %r31, %r30, 2;\nadd.u32 %r31, %r31, %r1;\n"
    zero += f"st.shared.b32 [%r31+{small.DATA + 512}], 0;\nadd.u32 %r30, %r30, 32;\n"
    zero += "setp.lt.u32 %p6, %r30, 3072;\n@%p6 bra ZERO;\n"
    copies = copies or (sfa, sfb, sfb + 4)
    body = init(1) + small.alloc(128) + fill + zero + "fence.proxy.async;\nbar.sync 0;\n"
    body += f"mov.b64 %rd22, {small.descriptor(0, stride=128)};\nmov.b64 %rd20, {small.descriptor(512)};\n"
    body += f"mov.b64 %rd21, {small.descriptor(512 + 4096)};\nmov.b32 %r21, {0x08000480 | n // 8 << 17:#x};\n"
    body += f"add.u32 %r22, %r20, {sfa};\nadd.u32 %r23, %r20, {sfb};\nsetp.ne.u32 %p4, 0, 0;\n"
    issue = "".join(
        f"add.u32 %r24, %r20, {c};\ntcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %rd22;\n" for c in copies
    )
    issue += "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r20], %rd20, %rd21, %r21, [%r22], [%r23], %p4;\n"
    return body + in_thread(0, issue + small.commit(0)) + wait(0) + "bar.sync 0;\n" + small.dealloc(128)


def test_scales_begin_at_even_columns():
    run_clean(scaled())
    run_clean(scaled(sfb=70, copies=(64, 70, 74)))
    assert_raised(
        "even-scale-column",
        "SFA with scale factors at tensor-memory column 65",
        scaled(sfa=65, copies=(64, 68)),
    )
    assert_raised(
        "even-scale-column",
        "SFB with scale factors at tensor-memory column 69",
        scaled(sfb=69, copies=(64, 68, 72)),
    )
    assert_raised(
        "even-scale-column", r"tcgen05\.cp\.32x128b\.warpx4 .* column 71", scaled(copies=(64, 68, 71))
    )
    found = checked(body=scaled(sfb=69, copies=(64, 68, 72)), block=32)
    assert [(h.kind, h.rule) for h in found if h.kind == "silicon"] == [("silicon", "even-scale-column")]


def test_widths_of_public_kernels():
    """Only a note: the launch succeeds."""
    assert_named(checked(body=scaled(n=48), block=32), "scale-width", "has N = 48")
    machine = Machine(check=True)
    run_ptx(
        small.kernel(scaled(n=48)),
        None,
        block=32,
        args=[np.ones(64, np.uint32)] * 2,
        smem_bytes=32768,
        machine=machine,
    )
    assert [h.severity for h in machine.checker.hazards] == ["note"]


# ---- pairs of CTAs -------------------------------------------------------------------------------------------------------
PAIR_ALLOC = in_warp(0, "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1+512], 64;")
PAIR_DEALLOC = in_warp(
    0, "ld.shared.b32 %r20, [%r1+512];\ntcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, 64;"
)
PAIR = {"grid": 2, "cluster": 2}


def test_pairs_allocate_when_both_run():
    run_clean(CLUSTER_BARRIER + PAIR_ALLOC + CLUSTER_BARRIER + PAIR_DEALLOC, **PAIR)
    found = checked(body=PAIR_ALLOC + CLUSTER_BARRIER + PAIR_DEALLOC, **PAIR)
    assert_named(
        found, "pair-alloc-order", r"tcgen05\.alloc \(cta 0,0,0 .* does not know that the CTA of rank 1 runs"
    )
    # An arrival of the peer also proves that it runs.
    told = init(1) + CLUSTER_BARRIER.replace("arrive", "arrive.relaxed")
    assert not checked(body=told + PAIR_ALLOC + CLUSTER_BARRIER + PAIR_DEALLOC, **PAIR)


@pytest.mark.parametrize(
    "access", ["st.shared::cluster.b32 [%r9+1024], %r0;", "ld.shared::cluster.b32 %r10, [%r9+1024];"]
)
def test_memory_of_a_cta_that_may_not_run_yet(access):
    remote = "xor.b32 %r9, %r6, 1;\nmapa.shared::cluster.u32 %r9, %r1, %r9;\n" + in_thread(0, access)
    fill = "@%p0 st.shared.b32 [%r1+1024], 0;\n" if access[:2] == "ld" else ""
    run_clean(fill + CLUSTER_BARRIER + remote + CLUSTER_BARRIER, **PAIR)
    found = checked(body=remote + CLUSTER_BARRIER, **PAIR)
    found = [hazard for hazard in found if hazard.rule]  # the test leaves the loaded data unwritten
    assert_named(found, "remote-access-order", r"does not know that the CTA of rank 1 runs")


def test_pairs_free_when_both_have_allocated():
    body = CLUSTER_BARRIER + PAIR_ALLOC + PAIR_DEALLOC
    assert_raised(
        "pair-dealloc-order", "rank 0 frees columns before that of rank 1 has allocated", body, **PAIR
    )
    # Only the schedule puts the peer's allocation first, because the even CTA is slow.
    late = "mov.u32 %r30, 0;\nLATE:\nadd.u32 %r30, %r30, 1;\nsetp.lt.u32 %p6, %r30, 5000;\n@%p6 bra LATE;\n"
    found = checked(body=CLUSTER_BARRIER + PAIR_ALLOC + late + PAIR_DEALLOC, **PAIR)
    assert_named(
        found, "pair-dealloc-order", r"tcgen05\.dealloc .* does not know that the CTA of rank 1 has allocated"
    )


def test_one_cta_group_a_kernel():
    one = PAIR_DEALLOC.replace("cta_group::2", "cta_group::1")
    for body in (PAIR_ALLOC + one, PAIR_ALLOC + "bra END;\n" + one + "END:\n"):
        assert_raised(
            "one-cta-group",
            r"dealloc\.cta_group::1.* and PTX line \d+ .tcgen05\.alloc\.cta_group::2",
            body,
            **PAIR,
        )


def multiply(group=2, committing=2, rank=0):
    """An MMA of a pair that one of its CTAs issues and commits to both."""
    zero = "mov.u32 %r30, %r0;\nZERO:\nshl.b32 %r31, %r30, 2;\nadd.u32 %r31, %r31, %r1;\n"
    zero += f"st.shared.b32 [%r31+{small.DATA}], 0;\nadd.u32 %r30, %r30, 32;\n"
    zero += "setp.lt.u32 %p6, %r30, 2048;\n@%p6 bra ZERO;\nfence.proxy.async;\n"
    issue = small.mma().replace("cta_group::1", f"cta_group::{group}") + "mov.b16 %h1, 3;\n"
    issue += f"tcgen05.commit.cta_group::{committing}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;\n"
    body = (
        init(1) + zero + CLUSTER_BARRIER + PAIR_ALLOC + "ld.shared.b32 %r20, [%r1+512];\n" + CLUSTER_BARRIER
    )
    body += f"setp.ne.u32 %p7, %r6, {rank};\n@%p7 bra ISSUED;\n" + in_thread(0, issue) + "ISSUED:\n"
    return body + wait(0) + CLUSTER_BARRIER + PAIR_DEALLOC


def test_commits_have_the_group_of_their_mmas():
    run_clean(multiply(), **PAIR)
    text = r"tcgen05\.commit\.cta_group::1.* and PTX line \d+ .tcgen05\.mma\.cta_group::2"
    assert_raised("commit-group", text, multiply(committing=1), **PAIR)


@pytest.mark.parametrize(
    "code",
    [
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
        "tcgen05.cp.cta_group::2.128x128b [%r20], %rd20;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r20], %rd20, %rd20, %r20, %p4;",
    ],
)
def test_the_leader_issues(code):
    start = init(1) + CLUSTER_BARRIER + "mov.b32 %r20, 0;\nmov.b64 %rd20, 0;\nsetp.ne.u32 %p4, 0, 0;\n"
    start += "setp.ne.u32 %p7, %r6, 1;\n@%p7 bra ISSUED;\n"
    body = start + in_thread(0, code) + "ISSUED:\n"
    assert_raised("pair-leader", "the CTA of rank 1 issues", body, **PAIR)
    assert_raised("pair-leader", "the CTA of rank 1 issues", multiply(rank=1), **PAIR)


def test_a_multicast_commit_has_something_to_wait_for():
    commit = "mov.b16 %h1, 3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    body = init(1) + CLUSTER_BARRIER + "setp.ne.u32 %p7, %r6, 0;\n@%p7 bra ISSUED;\n"
    body += in_thread(0, commit + "[%r1], %h1;") + "ISSUED:\n"
    found = checked(body=body + wait(0) + CLUSTER_BARRIER, **PAIR)
    assert_named(found, "empty-multicast-commit", "with nothing pending")
    twice = (
        multiply().replace("[%r1], %h1;", f"[%r1], %h1;\n{commit}[%r1+8], %h1;").replace(init(1), init(1, 1))
    )
    twice = twice.replace(
        wait(0), wait(0) + wait(8).replace("DONE", "DONE_2").replace("LAB_WAIT", "LAB_WAIT_2")
    )
    assert not checked(
        body=twice, block=32, **PAIR
    )  # directly after each other, nobody knows whether the MMA is done


# ---- dependent launches ----------------------------------------------------------------------------------------------------
TRIGGER, WAIT = "griddepcontrol.launch_dependents;\n", "griddepcontrol.wait;\n"
WRITE = "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %r0;\n"
READ = (
    "mad.wide.u32 %rd10, %r0, 4, %rd1;\nld.global.b32 %r10, [%rd10];\nst.global.b32 [%rd2], %r10;\n".replace(
        "st.global", "@%p0 st.global"
    )
)


def sequence(*launches, machine=None):
    """Runs launches (body, indices of buffers, programmatic) one after another. Returns the findings of each."""
    machine = machine or Machine(check=True)
    buffers = [np.zeros(64, np.uint32) for _ in range(6)]
    return [
        checked(machine, body, src=buffers[src], out=buffers[out], programmatic=programmatic)
        for body, src, out, programmatic in launches
    ]


@pytest.mark.parametrize("trigger", [TRIGGER, ""])
@pytest.mark.parametrize("programmatic", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_dependent_launches_wait_before_they_read(trigger, programmatic, waits):
    first = (trigger + WRITE, 0, 1, False)
    found = sequence(first, ((WAIT if waits else "") + READ + ("" if waits else WAIT), 1, 2, programmatic))
    if trigger and programmatic and not waits:
        assert_named(
            found[1], "pdl-order", r"ld\.global .* reads global memory .* launch of k writes, without griddep"
        )
    else:
        assert not any(found)


def test_other_work_lies_between_launches():
    """An operation of torch starts when the launch before it has ended, and before the launch after it starts."""
    machine, (a, b, c) = Machine(check=True), np.zeros((3, 64), np.uint32)
    for between in (False, True):
        assert not checked(machine, TRIGGER + WRITE, src=a, out=b)
        if between:
            machine.checker.dependencies.other_work()
        found = checked(machine, READ + WAIT, src=b, out=c, programmatic=True)
        assert [hazard.rule for hazard in found] == ([] if between else ["pdl-order"])


def test_dependent_launches_wait_before_they_write():
    first = (TRIGGER + READ, 0, 1, False)
    assert_named(
        sequence(first, (WRITE + WAIT, 2, 0, True))[1],
        "pdl-order",
        r"st\.global .* writes .* of k reads, without",
    )
    assert_named(
        sequence(first, (WRITE + WAIT, 2, 1, True))[1],
        "pdl-order",
        r"st\.global .* writes .* of k writes, without",
    )
    assert not any(sequence(first, (WAIT + WRITE, 2, 0, True), (WRITE + WAIT, 2, 3, True)))


def test_who_learns_from_a_warp_that_waited():
    waiting = in_warp(0, WAIT) + "bar.sync 0;\n"
    assert not any(sequence((TRIGGER + WRITE, 0, 1, False), (waiting + READ, 1, 2, True)))
    found = sequence((TRIGGER + WRITE, 0, 1, False), (waiting.replace("bar.sync 0;", "") + READ, 1, 2, True))
    assert_named(found[1], "pdl-order", r"ld\.global \(cta 0,0,0 warp 1")


def test_a_launch_that_never_waits_breaks_the_chain():
    first, reader = (TRIGGER + WRITE, 0, 1, False), (WAIT + READ, 1, 2, True)
    found = sequence(first, (TRIGGER + WRITE, 0, 3, True), reader)
    assert_named(found[1], "pdl-chain", "1 of 1 CTAs of k end without a wait")
    assert_named(found[2], "pdl-order", "and no launch in between waited for its end")
    assert not any(sequence(first, (WAIT + TRIGGER + WRITE, 0, 3, True), reader))
    # A launch without the attribute starts when all earlier ones are complete.
    assert not any(sequence(first, (TRIGGER + WRITE, 0, 3, False), reader))


def test_what_a_late_trigger_tells():
    """The third launch starts when the second one triggers. If that follows its wait, the first launch is complete."""
    first, reader = (TRIGGER + WRITE, 0, 1, False), (READ + WAIT, 1, 2, True)
    assert not any(sequence(first, (WAIT + TRIGGER + WRITE, 0, 3, True), reader))
    assert_named(
        sequence(first, (TRIGGER + WAIT + WRITE, 0, 3, True), reader)[2], "pdl-order", "without griddep"
    )


def test_processes_that_share_a_launch_tell_of_it():
    """Many clusters are divided among processes. The next launch is compared with the stores of all processes."""
    machine = Machine(check=True, jobs=2)
    write = "mov.u32 %r9, %ctaid.x;\nmad.lo.u32 %r9, %r9, 64, %r0;\nmad.wide.u32 %rd10, %r9, 4, %rd2;\nst.global.b32 [%rd10], %r9;\n"
    read = write.replace("%rd2", "%rd1").replace("st.global.b32 [%rd10], %r9", "ld.global.b32 %r9, [%rd10]")
    first, second = np.zeros(2048, np.uint32), np.zeros(2048, np.uint32)
    assert not checked(machine, TRIGGER + write, out=first, src=second, grid=32)
    found = checked(machine, read, out=second, src=first, grid=32, programmatic=True)
    assert {h.rule for h in found} == {"pdl-order", "pdl-chain"}
    assert not checked(machine, TRIGGER + write, out=first, src=second, grid=32)
    assert not checked(machine, WAIT + read, out=second, src=first, grid=32, programmatic=True)


def test_host_code_says_that_a_launch_is_programmatic():
    emulator = Emulator()
    emulator.register(".version 8.8\n.target sm_100a\n.visible .entry k() { ret; }")
    for bits, expected in ((0, (False, False)), (1, (True, False)), (2, (False, True)), (3, (True, True))):
        launch = emulator.decode(
            driver.LaunchRecord(name=b"k", grid=(1, 1, 1), block=(32, 1, 1), attributes=bits)
        )
        assert (launch.cooperative, launch.programmatic) == expected


# ---- scopes ------------------------------------------------------------------------------------------------------------------
def exchanged(arrive, before="", store="st.shared::cluster.b32 [%r11], %r8;\n", waiting=None):
    """Rank 1 stores to rank 0 and arrives there; rank 0 waits and reads."""
    remote = f"add.u32 %r11, %r1, {small.DATA};\nmapa.shared::cluster.u32 %r11, %r11, 0;\nmapa.shared::cluster.u32 %r12, %r1, 0;\n"
    send = in_thread(0, remote + store + before + arrive.format(at="[%r12]"))
    receive = (waiting or wait(0)) + f"ld.shared.b32 %r13, [%r1+{small.DATA}];\nadd.u32 %r13, %r13, 1;\n"
    body = (
        init(1)
        + CLUSTER_BARRIER
        + "setp.eq.u32 %p7, %r6, 0;\n@%p7 bra FIRST;\n"
        + send
        + "bra SENT;\nFIRST:\n"
    )
    return body + receive + "SENT:\n" + CLUSTER_BARRIER


ARRIVE = "mbarrier.arrive.shared::cluster.b64 _, {at};\n"


@pytest.mark.parametrize(
    ("arrive", "before"),
    [
        (ARRIVE, ""),
        (ARRIVE.replace("arrive.", "arrive.release.cta.", 1), ""),
        (ARRIVE, "fence.acq_rel.cta;\n"),
    ],
    ids=["default", "cta", "narrow fence"],
)
def test_narrow_arrivals_order_no_stores_of_other_ctas(arrive, before):
    found = checked(body=exchanged(arrive, before), block=32, **PAIR)
    text = r"ld\.shared \(cta 0,0,0 .* uses shared memory of cta 0,0,0 that st\.shared::cluster \(cta 1,0,0"
    assert_named(found, "remote-arrival-scope", text)


@pytest.mark.parametrize(
    ("arrive", "before"),
    [(ARRIVE.replace("arrive.", "arrive.release.cluster.", 1), ""), (ARRIVE, "fence.acq_rel.cluster;\n")],
    ids=["cluster", "fence"],
)
def test_wide_arrivals_do(arrive, before):
    assert not checked(body=exchanged(arrive, before), block=32, **PAIR)


def test_narrow_arrivals_that_nobody_needs():
    """The cluster barrier orders the stores; the arrival only releases a slot."""
    body = exchanged(ARRIVE, waiting=wait(0) + CLUSTER_BARRIER)
    assert not checked(body=body.replace("bra SENT;", CLUSTER_BARRIER + "bra SENT;"), block=32, **PAIR)


def test_stores_to_global_memory_and_to_the_own_cta():
    out = exchanged(ARRIVE, store="st.global.b32 [%rd2], 1;\n").replace(
        f"ld.shared.b32 %r13, [%r1+{small.DATA}]", "ld.global.b32 %r13, [%rd2]"
    )
    found = checked(body=out, block=32, **PAIR)
    assert_named(
        found, "remote-arrival-scope", r"ld\.global .* uses global memory at .* that st\.global \(cta 1"
    )


def test_async_stores_are_awaited_with_the_scope_of_the_cluster():
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r11], %r8, [%r12];\n"
    body = exchanged("", store=store).replace(
        "FIRST:\n", "FIRST:\n@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4;\n"
    )
    found = checked(body=body, block=32, **PAIR)
    assert_named(
        found,
        "async-store-scope",
        r"mbarrier\.try_wait .* waits for st\.async \(cta 1,0,0 .* with \.cta scope",
    )
    wide = body.replace("try_wait.parity.shared", "try_wait.parity.acquire.cluster.shared::cta")
    assert not checked(body=wide, block=32, **PAIR)


# ---- registers ---------------------------------------------------------------------------------------------------------------
def budgets(*actions, threads=None, head=BOUNDED):
    """Warpgroup i executes action i."""
    threads = threads or 128 * len(actions)
    body = "shr.u32 %r9, %r0, 7;\n"
    for i, action in enumerate(actions):
        body += f"setp.ne.u32 %p2, %r9, {i};\n@%p2 bra GROUP_{i};\n{action}\nGROUP_{i}:\n"
    return small.kernel(body + "bar.sync 0;").replace("out)\n", "out)\n" + head.format(threads=threads))


def change(action, count):
    return f"setmaxnreg.{action}.sync.aligned.u32 {count};"


def test_registers_fit():
    good = budgets(change("inc", 224), change("inc", 224), change("dec", 56))
    run_clean(good, block=384)
    assert_raised(
        "register-pool",
        r"setmaxnreg\.inc 240: the warps of the CTA would have 66304 registers, it was launched with 64512 \(168 a thread\)",
        good.replace("224", "240"),
        block=384,
    )
    run_clean(budgets(change("inc", 232), change("inc", 232), change("dec", 40)), block=384)
    assert_raised(
        "register-pool", "PTX ISA setmaxnreg", budgets(change("inc", 240), "", change("dec", 104)), block=384
    )


def test_registers_change_in_the_direction_that_was_said():
    lower = change("inc", 208) + "\nbar.sync 1, 128;\n" + change("inc", 200)
    body = budgets(lower, change("dec", 24), threads=256)
    assert_raised(
        "register-direction", r"setmaxnreg\.inc 200 by a warp whose threads have 208", body, block=256
    )
    body = budgets(change("dec", 32) + "\nbar.sync 1, 128;\n" + change("dec", 40), change("dec", 24))
    assert_raised(
        "register-direction", r"setmaxnreg\.dec 40 by a warp whose threads have 32", body, block=256
    )


def test_a_warpgroup_has_one_budget():
    body = budgets(in_warp(3, change("dec", 24)) + in_warp(0, change("dec", 40)), change("inc", 168))
    found = checked(body=body, block=256)
    assert_named(
        found, "register-warpgroup", r"cta 0,0,0: .* warp 0 \[40\], warp 1 none, warp 2 none, warp 3 \[24\]"
    )


@pytest.mark.parametrize("head", ["", ".reqntid {threads}, 1, 1\n", ".minnctapersm 1\n"])
def test_registers_are_bounded(head):
    """ptxas 13.0 prints for these: 'setmaxnreg' ignored; unable to determine register count at entry."""
    body = budgets(change("inc", 224), change("dec", 40), head=head)
    found = checked(body=body, block=256)
    assert_named(found[:1], "register-bounds", r"setmaxnreg\.inc .* without \.minnctapersm")
    assert [h.rule for h in found] == 2 * ["register-bounds"]
    assert not checked(
        body=body.replace("out)\n" + head.format(threads=256), "out)\n.maxnreg 168\n"), block=256
    )


@pytest.mark.parametrize(
    ("threads", "ctas", "count", "expected"),
    [(384, 1, 224, 168), (256, 1, 232, 232), (256, 2, 104, 104), (512, 1, 160, 128), (192, 1, 200, 200)],
)
def test_registers_at_the_entry(threads, ctas, count, expected):
    """As ptxas 13.0 reports them ("Used ... registers")."""
    from nvfp4_cute.emulator.isa.registers import entry_registers
    from nvfp4_cute.emulator.ptx import parse

    text = budgets(change("inc", count), change("dec", 40), threads=threads).replace(
        "ctapersm 1", f"ctapersm {ctas}"
    )
    assert entry_registers(parse(text).entries["k"]) == expected


# ---- launches ------------------------------------------------------------------------------------------------------------------
SPIN = """mov.u32 %r9, %ctaid.x;
setp.ne.u32 %p5, %r9, {first};
@%p5 bra WAITS;
@%p0 st.release.gpu.global.b32 [%rd2], 1;
bra END;
WAITS:
ld.acquire.gpu.global.b32 %r10, [%rd2];
setp.eq.u32 %p6, %r10, 0;
@%p6 bra WAITS;
END:
"""


def test_ctas_that_wait_for_later_ones_are_launched_cooperatively():
    found = checked(body=SPIN.format(first=1), grid=2, block=32)
    text = r"ld\.acquire \(cta 0,0,0 warp 0.* \(2 CTAs launched, this GPU holds"
    assert_named(found, "spin-without-co-residency", text)
    assert not checked(body=SPIN.format(first=1), grid=2, block=32, cooperative=True)
    # A wait for CTAs that started earlier needs nothing.
    assert not checked(body=SPIN.format(first=0), grid=2, block=32)


@pytest.mark.parametrize(
    ("pitch", "nbytes", "noted"), [(512, 65536, False), (1024, 65536, True), (1024, 131072, False)]
)
def test_tensor_maps_with_gaps_in_small_allocations(pitch, nbytes, noted):
    data = np.zeros(nbytes, np.uint8)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    dims, strides, box, steps = (u64 * 2)(256, 8), (u64 * 1)(pitch), (u32 * 2)(64, 4), (u32 * 2)(1, 1)
    descriptor = ctypes.create_string_buffer(256)
    aligned = ctypes.addressof(descriptor) + -ctypes.addressof(descriptor) % 128
    with Emulator(check=True) as emulator:
        emulator.add_range("weights", data.ctypes.data, nbytes)
        encode = ctypes.CDLL(driver.shim_path())._cuTensorMapEncodeTiled
        where = ctypes.c_void_p(data.ctypes.data + -data.ctypes.data % 16)
        assert encode(ctypes.c_void_p(aligned), 6, 2, where, dims, strides, box, steps, 0, 3, 2, 1) == 0
        found = emulator.hazards
    if noted:
        assert_named(found, "small-tensor-map", r"rows with gaps at 0x\w+ in `weights` of 65536 bytes")
    else:
        assert not found


# ---- work stealing
# ----------------------------------------------------------------------------------------------------------------
def ask(phase):
    return in_thread(
        0,
        f"""mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1+{small.DATA}], [%r1];
        {wait(0, phase).replace("DONE", f"DONE_{phase}").replace("LAB_WAIT", f"LAB_WAIT_{phase}")}fence.proxy.async;""",
    )


def test_who_saw_that_nothing_is_left_asks_no_more():
    assert not checked(body=init(1) + ask(0))
    assert_named(
        checked(body=init(1) + ask(0) + ask(1)), "cancel-after-failure", "asks again after an answer"
    )
    assert not checked(body=init(1) + ask(0) + ask(1), grid=3)  # the first CTA gets the work of both others


# ---- swizzles ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("swizzle", "rows", "offset", "found"),
    [("128B", 8, 128, True), ("128B", 8, 1024, False), ("128B", 7, 128, False), ("32B", 8, 128, True), ("32B", 8, 256, False)],
)  # fmt: skip
def test_swizzled_tiles_begin_with_the_pattern(swizzle, rows, offset, found):
    src = np.zeros(1200, np.uint32)
    at = -src.ctypes.data % 1024
    span = int(swizzle[:-1])
    words = encode(
        src.ctypes.data + at + 1024, "u32", (span // 4, 16), (span,), (span // 4, rows), swizzle=swizzle
    )
    src[at // 4 : at // 4 + 32] = np.frombuffer(words, np.uint32)
    body = init(1) + in_thread(
        0,
        f"""add.s64 %rd10, %rd1, {at};
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {span * rows};
        mov.b32 %r10, 0;
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1+{small.DATA + offset}], [%rd10, {{%r10, %r10}}], [%r1];
        """
        + wait(0),
    )
    hazards = [h for h in checked(body=body, src=src) if h.rule]
    if found:
        assert_named(hazards, "swizzle-phase", f"copies {rows} rows with a swizzle of {span} bytes", "note")
    else:
        assert not hazards
    hazards = [
        h
        for h in checked(body=body + f"ld.shared.b32 %r11, [%r1+{small.DATA + offset}];\n", src=src)
        if h.rule
    ]
    assert [hazard.severity for hazard in hazards] == ["warning"] * found


@pytest.mark.parametrize(
    ("pattern", "start", "severity"),
    [("%r12", 128, "note"), ("%r10", 128, "warning"), ("%r12", 256, "warning"), ("%r10", 256, "warning")],
)
def test_a_swizzled_tile_that_stores_fill(pattern, start, severity):
    """Lanes of a warp store quarters of 64-byte rows, permuted by address (note) or by distance from the tile's start."""
    dst = np.zeros(1200, np.uint32)
    at = -dst.ctypes.data % 1024
    words = encode(dst.ctypes.data + at + 128, "u32", (16, 32), (64,), (16, 32), swizzle="64B")
    dst[at // 4 : at // 4 + 32] = np.frombuffer(words, np.uint32)
    body = in_warp(
        0,
        f"""mov.u32 %r10, %tid.x;
        shl.b32 %r10, %r10, 6;
        add.s32 %r12, %r10, %r1;
        add.s32 %r12, %r12, {small.DATA + start};
        shr.u32 %r11, {pattern}, 3;
        and.b32 %r11, %r11, 48;
        xor.b32 %r12, %r12, %r11;
        """
        + "".join(
            f"xor.b32 %r13, %r12, {16 * i};\nst.shared.v4.b32 [%r13], {{%r10, %r10, %r10, %r10}};\n"
            for i in range(4)
        )
        + f"""
        fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        add.s64 %rd10, %rd2, {at};
        mov.b32 %r10, 0;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {{%r10, %r10}}], [%r1+{small.DATA + start}];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """,
    )
    hazards = [h for h in checked(body=body, out=dst) if h.rule]
    assert_named(hazards, "swizzle-phase", "copies 32 rows with a swizzle of 64 bytes", severity)


# ---- the table -----------------------------------------------------------------------------------------------------------------
def test_the_page_lists_the_rules():
    """The table in RULES.md is the one that the code generates."""
    page = (Path(silicon.__file__).parent / "RULES.md").read_text()
    assert silicon.markdown() in page, f"RULES.md lacks this table:\n{silicon.markdown()}"


@pytest.mark.parametrize("page", ["README", "START", "HAZARDS", "RULES", "TIMING"])
def test_guides_are_short(page):
    """Each has at most 2,000 words, and README.md names them all."""
    folder = Path(silicon.__file__).parent
    assert len((folder / f"{page}.md").read_text().split()) <= 2000
    assert page == "README" or f"`{page}.md`" in (folder / "README.md").read_text()


def test_names_are_unique_and_every_rule_is_tested():
    names = [rule.name for rule in silicon.RULES]
    assert len(set(names)) == len(names)
    text = Path(__file__).read_text()
    assert not [name for name in names if f'"{name}"' not in text]
    assert all(rule.severity in ("error", "warning", "note") for rule in silicon.RULES)
    assert all(rule.severity == "error" for rule in silicon.RULES if rule.everywhere)

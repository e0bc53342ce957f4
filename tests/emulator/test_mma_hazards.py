"""Hazards of tensor cores: wgmma's accumulators and operands, tensor memory, and stages that they read."""

import re

import numpy as np
import pytest
import small_kernels as small
from hazard_checks import MODES, OPERANDS, assert_clean, assert_found, hazards, remarks
from small_kernels import DATA, commit, in_thread, in_warp, init, load, wait

from nvfp4_cute.emulator import fused

LATE = "mov.u32 %r12, 0;\nLATE:\nadd.u32 %r12, %r12, 1;\nsetp.lt.u32 %p6, %r12, 3000;\n@%p6 bra LATE;\n"


# ---- wgmma ---------------------------------------------------------------------------------------------------------------
ONES = np.ones((64 + 8) * 16, np.float16)


def released_by_one_warp(*, wait_before=True):
    """Warp 3 delays its product. Warp 0 alone waits and releases the operands, which are then loaded again."""
    a, b = (DATA + 1024 + at >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32 for at in (0, 64 * 32))
    late = in_warp(
        3, "mov.u32 %r9, 0;\nLATE:\nadd.u32 %r9, %r9, 1;\nsetp.lt.u32 %p5, %r9, 300;\n@%p5 bra LATE;"
    )
    product = f"""setp.ne.u32 %p6, 0, 0;
    mov.b64 %rd20, {a};
    mov.b64 %rd21, {b};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%v0, %v1, %v2, %v3}}, %rd20, %rd21, %p6, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    """
    release = "mbarrier.arrive.shared.b64 _, [%r1+8];\n"
    ends = "wgmma.wait_group.sync.aligned 0;\n"
    out = "mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %v3;\n"
    body = init(1, 1) + in_thread(0, load(ONES.nbytes)) + wait(0) + late + product
    again = in_thread(0, release) + in_thread(0, wait(8) + load(ONES.nbytes) + wait(0, 1))
    return body + (ends + again if wait_before else again + ends) + out


WARPGROUP = {"src": ONES, "block": 128, "target": "sm_90a"}

ACCUMULATORS = "{%v0, %v1, %v2, %v3}"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {d}, {a}, %rd21, %p5, 1, 1, 0{more};\n"
AWAITED = "wgmma.wait_group.sync.aligned 0;\n"


def accumulated(behind, *, before="", awaited=True):
    """Products in a loop long enough for fused runs, with accesses `before` and `behind` the wait, which the last trip may omit."""
    b = DATA + 1024 + 64 * 32 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
    fill = "".join(f"mov.b32 %v{i}, 0;\n" for i in range(8))
    product = PRODUCT.format(d=ACCUMULATORS, a="%rd20", more=", 0")
    return f"""{init(1)}{in_thread(0, load(ONES.nbytes))}{wait(0)}{fill}setp.eq.u32 %p5, 0, 0;
    mov.b64 %rd20, {b - (64 * 32 >> 4)};
    mov.b64 %rd21, {b};
    mov.u32 %r9, 0;
    LOOP:
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p6, %r9, {fused.TRIALS + 5};
    wgmma.fence.sync.aligned;
    {product}{product}wgmma.commit_group.sync.aligned;
    {before}
    @!%p6 bra LAST;
    {AWAITED}LAST:
    @%p6 bra TOUCH;
    {AWAITED if awaited else ""}TOUCH:
    {behind}{AWAITED}@%p6 bra LOOP;
    mad.wide.u32 %rd10, %r0, 4, %rd2;
    st.global.b32 [%rd10], %v3;
    """


ADDED = "".join(f"add.u32 %v{i}, %v{i}, 1;\n" for i in range(4))
TOUCHES = {
    "store": ("mad.wide.u32 %rd10, %r0, 4, %rd2;\nst.global.b32 [%rd10], %v3;\n", r"st\.global"),
    "arithmetic": (ADDED, r"add\.u32 .*%v0"),
    "moved": ("mov.b32 %v4, %v2;\nadd.u32 %v5, %v5, 1;\nadd.u32 %v6, %v4, 1;\n", r"add\.u32 .*%v6"),
    "overwritten": ("mov.b32 %v1, 7;\n", r"mov\.b32 .*%v1"),
    "factor": (PRODUCT.format(d="{%v4, %v5, %v6, %v7}", a=ACCUMULATORS, more="") + "wgmma.commit_group.sync.aligned;\n", "wgmma"),
}  # fmt: skip


@pytest.mark.parametrize("touch", TOUCHES)
def test_accumulators_are_touched_behind_the_wait(touch):
    text, where = TOUCHES[touch]
    modes = ("eager", "lazy")
    assert_clean(accumulated(text), modes=modes, **WARPGROUP)
    unawaited = where + r".* that no wgmma\.wait_group has waited for"
    assert_found(accumulated(text, awaited=False), "register", unawaited, modes=modes, **WARPGROUP)


def test_accumulators_may_be_moved_before_the_wait():
    moved = "mov.b32 %v4, %v2;\nmov.b64 %rd11, {%v0, %v1};\n"
    body = accumulated("add.u32 %v5, %v4, 1;\n", before=moved)
    assert_clean(body, modes=("eager", "lazy"), **WARPGROUP)


def test_a_wait_of_one_warp_is_one_for_its_warpgroup():
    assert_clean(released_by_one_warp(), **WARPGROUP)
    race = r"bulk load .* writes smem\+.* while wgmma\.mma_async .* may still read it|wgmma\.mma_async .* that bulk load"
    assert_found(released_by_one_warp(wait_before=False), "race", race, **WARPGROUP)


# ---- tensor memory -------------------------------------------------------------------------------------------------------
def multiply(*, wait_full, columns=64):
    """Thread 0 loads operands and multiplies, and the warps read the accumulator."""
    produce = load(OPERANDS.nbytes) + wait(0) + small.mma() + commit(8)
    body = init(1, 1) + small.alloc(columns) + in_thread(0, produce) + wait_full + small.read_tmem()
    return body + small.save_registers() + "bar.sync 0;\n" + small.dealloc(columns)


TMEM = {"src": OPERANDS, "block": 128}


@pytest.mark.parametrize(("copy", "severity"), [("cp.async", "warning"), ("st.shared", "error")])
def test_operands_that_ordinary_instructions_wrote_need_a_fence(copy, severity):
    """Public Blackwell kernels multiply cp.async data without a proxy fence and work, so this is only a warning."""
    if copy == "cp.async":
        one = f"cp.async.ca.shared.global [%r9+{DATA}], [%rd5], 16;\n"
        done = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n"
    else:
        one = f"ld.global.v4.b32 {{%v0,%v1,%v2,%v3}}, [%rd5];\nst.shared.v4.b32 [%r9+{DATA}], {{%v0,%v1,%v2,%v3}};\n"
        done = "mbarrier.arrive.shared.b64 _, [%r1];\n"
    pieces = "".join(
        f"add.u32 %r9, %r0, {first};\nshl.b32 %r9, %r9, 4;\ncvt.u64.u32 %rd5, %r9;\nadd.u64 %rd5, %rd5, %rd1;\nadd.u32 %r9, %r9, %r1;\n{one}"
        for first in range(0, OPERANDS.nbytes // 16, 128)
    )
    body = multiply(wait_full=wait(8)).replace(init(1, 1), init(128, 1) + pieces + done + "{fence}")
    body = body.replace(load(OPERANDS.nbytes), "")
    fenced = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    met = body.replace("{fence}", wait(0).replace("LAB_WAIT", "ALL").replace("DONE", "THERE") + fenced)
    assert_clean(met, modes=MODES[:1], **TMEM)
    bare = body.replace("{fence}", "")
    if severity == "error":
        assert_found(bare, "proxy-fence", "tcgen05.mma.*st.shared", modes=MODES[:1], **TMEM)
    else:
        found = remarks(bare, src=OPERANDS, block=128)
        assert ("warning", "proxy-fence") in [one[:2] for one in found], found


def test_accumulator_before_the_commit():
    assert_clean(multiply(wait_full=wait(8)), **TMEM)
    body = multiply(wait_full="") + wait(8)
    assert_found(
        body,
        "race",
        r"tcgen05\.ld .* reads tensor memory columns 0\.\.15, lanes .* that tcgen05\.mma|tcgen05\.mma .* writes tensor memory "
        r".* while tcgen05\.ld",
        modes=("eager",),
        **TMEM,
    )


def test_operands_before_they_are_loaded():
    body = multiply(wait_full=wait(8)).replace(wait(0) + "mov.b64 %rd20", "mov.b64 %rd20")
    assert body != multiply(wait_full=wait(8))
    assert_found(
        body,
        "race",
        r"tcgen05\.mma .* smem\+.*bulk load|bulk load .* writes smem\+.* while tcgen05\.mma",
        **TMEM,
    )


def test_stage_released_before_its_multiply():
    """An ordinary arrival signals the empty barrier instead of the commit."""
    produce = load(OPERANDS.nbytes) + wait(0) + small.mma() + "{release}" + wait(16)
    again = load(OPERANDS.nbytes) + wait(0, 1)
    body = (
        init(1, 1, 1)
        + small.alloc(64)
        + in_thread(0, produce + again + commit(8))
        + wait(8)
        + "bar.sync 0;\n"
        + small.dealloc(64)
    )
    assert_clean(body.replace("{release}", commit(16)), **TMEM)
    assert_found(
        body.replace("{release}", "mbarrier.arrive.shared.b64 _, [%r1+16];\n"),
        "race",
        r"bulk load .* writes smem\+.* while tcgen05\.mma .* may still read it|tcgen05\.mma .* reads smem\+.* that bulk load",
        **TMEM,
    )


def accumulator_reuse(wait_ld, early):
    """A second product overwrites the accumulator after the readers arrived on the barrier at smem+16."""
    first = load(OPERANDS.nbytes) + wait(0) + small.mma() + commit(8)
    release = "@%p1 mbarrier.arrive.shared.b64 _, [%r1+16];\n"
    read = small.read_tmem(wait_ld=False)
    body = init(1, 1, 4) + small.alloc(64) + in_thread(0, first) + wait(8)
    body += (release if early else "") + read + ("tcgen05.wait::ld.sync.aligned;\n" if wait_ld else "")
    body += ("" if early else release) + small.save_registers()
    body += in_thread(0, wait(16) + small.mma() + commit(8)) + wait(8, 1) + "bar.sync 0;\n"
    return body + small.dealloc(64)


@pytest.mark.parametrize(
    ("wait_ld", "early"), [(False, False), (True, True)], ids=["no wait::ld", "released early"]
)
def test_accumulator_released_too_early(wait_ld, early):
    assert_clean(accumulator_reuse(True, False), **TMEM)
    assert_found(
        accumulator_reuse(wait_ld, early),
        "race",
        r"tcgen05\.mma .* writes tensor memory .* while tcgen05\.ld .* may still read it|tcgen05\.ld .* reads tensor memory "
        r".* that tcgen05\.mma .* writes",
        **TMEM,
    )


@pytest.mark.parametrize("trials", [fused.TRIALS, 0], ids=["step by step", "as one function"])
def test_a_use_of_the_registers_does_not_release_what_was_read(monkeypatch, trials):
    """The values are there, so results are right in every mode, but only tcgen05.wait::ld orders the memory access."""
    monkeypatch.setattr(fused, "TRIALS", trials)
    release = "@%p1 mbarrier.arrive.shared.b64 _, [%r1+16];\n"
    body = accumulator_reuse(False, False).replace(release, "")
    uses = "".join(f"cvt.rn.f16x2.f32 %v{20 + i}, %v{2 * i}, %v{2 * i + 1};\n" for i in range(4))
    used = body.replace(small.save_registers(), uses + release + small.save_registers())
    race = r"tcgen05\.mma .* while tcgen05\.ld .* put tcgen05\.wait::ld before the release"
    for mode in MODES:
        found = remarks(used, src=OPERANDS, block=128, mode=mode)
        assert any(s == "warning" and k == "race" and re.search(race, t) for s, k, t in found), found
    waited = used.replace(release, "tcgen05.wait::ld.sync.aligned;\n" + release)
    assert not remarks(waited, src=OPERANDS, block=128)


def test_a_use_of_the_registers_is_enough_before_the_end():
    """A warp that knows only of the uses frees the columns: a note. The exit of the CTA requires no more than the uses."""
    body = multiply(wait_full=wait(8)).replace("tcgen05.wait::ld.sync.aligned;", "")

    def remark(text, mode="eager"):
        ((severity, kind, said),) = remarks(text, src=OPERANDS, block=128, mode=mode)
        assert kind == "race" and "frees tensor memory" in said and "wait::ld" in said
        return severity

    assert [remark(body, mode) for mode in MODES] == ["note"] * 3
    # Only some lanes use the registers: a warning.
    some = "setp.lt.u32 %p9, %r8, 7;\n@!%p9 bra FEW;\n" + small.save_registers() + "FEW:\n"
    assert remark(body.replace(small.save_registers(), some)) == "warning"


def test_a_cta_exits_before_its_own_commit():
    """Attention kernels of CUTLASS and FlashAttention do so and run: a warning."""
    body = multiply(wait_full=wait(8))
    assert not remarks(body, src=OPERANDS, block=128)
    ((severity, kind, text),) = remarks(body + in_thread(0, commit(0)), src=OPERANDS, block=128)
    assert (severity, kind) == ("warning", "exit") and "may exit before tcgen05.commit" in text


def test_unwritten_operands_of_16_bits():
    """Their NaN patterns spread to results that use them: a warning."""
    copied = load(OPERANDS.nbytes) + wait(0)
    body = multiply(wait_full=wait(8))
    assert copied in body
    found = remarks(body.replace(copied, ""), src=OPERANDS, block=128)
    assert {(severity, kind) for severity, kind, _ in found} == {("warning", "uninitialised")}
    assert all("tcgen05.mma" in text for _, _, text in found)


def test_unwritten_accumulator_columns():
    assert_found(
        multiply(wait_full=wait(8), columns=128).replace("[%r23+0]", "[%r23+64]"),
        "uninitialised",
        r"a register that tcgen05\.ld .* loaded is used",
        **TMEM,
    )


def test_accumulating_onto_nothing():
    body = multiply(wait_full=wait(8)).replace("setp.ne.u32 %p4, 0, 0", "setp.ne.u32 %p4, 1, 0")
    assert_found(
        body,
        "uninitialised",
        r"tcgen05\.mma .* uses the accumulator in tensor memory columns 0\.\.63",
        **TMEM,
    )


def test_leak_and_early_free():
    good = multiply(wait_full=wait(8))
    free = small.dealloc(64)
    assert_found(
        good.replace(free, ""), "tensor-memory", r"exits with 64 columns at 0 still allocated", **TMEM
    )
    early = good.replace(free, "").replace(small.read_tmem(), free + small.read_tmem())
    both = r"PTX line \d+ `tcgen05\.ld.*not allocated.*columns 0\.\.63 were freed before, by warp 0 at PTX line \d+ `tcgen05\.dealloc"
    assert_found(early, "tensor-memory", both, modes=("eager",), **TMEM)
    twice = good.replace(free, free + "bar.sync 0;\n" + free.replace("AFTER", "AGAIN"))
    (again,) = remarks(twice, **TMEM)
    assert again[:2] == ("warning", "tensor-memory") and "frees columns 0..63 again, which" in again[2]
    unordered = good.replace("bar.sync 0;\n" + free, free)
    found = [h for h in hazards(unordered, **TMEM) if h.kind in ("race", "tensor-memory")]
    assert found, "freed while other warps may still read"


def test_outside_the_allocation_and_the_quadrant():
    good = multiply(wait_full=wait(8))
    assert_found(good.replace("[%r23+0]", "[%r23+64]"), "tensor-memory", "not allocated", **TMEM)
    assert_found(
        good.replace("shl.b32 %r23, %r7, 21", "mov.b32 %r23, 0x200000"),
        "tensor-memory",
        "can reach lanes",
        **TMEM,
    )


def test_tensor_memory_is_not_freed_after_a_wait_for_the_wrong_parity():
    """The freeing warp waits for parity 1 while phase 0 may be open, as in a split-K GEMM of FlashInfer."""
    arrive = in_warp(0, "mbarrier.arrive.shared.b64 _, [%r1+16];").replace("setp.ne", "setp.eq")
    free = in_warp(0, LATE + wait(16, 1)).rstrip() + "\n" + small.dealloc(64)
    body = multiply(wait_full=wait(8) + arrive).replace(init(1, 1), init(1, 1, 96))
    body = body.replace("bar.sync 0;\n" + small.dealloc(64), arrive.replace("AFTER", "AGAIN") + free)
    assert_clean(body.replace(arrive, arrive + "bar.sync 0;\n"), modes=MODES[:2], **TMEM)
    assert_found(body, "race", "dealloc.*frees.*may pass two phases earlier", modes=MODES[:1], **TMEM)

"""Planted faults: the PTX of the grouped GEMMs is edited, and the hazard checker must name each fault.

Most are in the sm_100a kernel; every kernel gets one that releases a stage or slot before the data read from it is
used.

Each fault is a small edit that finds instructions by their form, not by register numbers. The problem is small, but
uses every stage and the accumulator several times, so that each fault has an effect.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import cases
import pytest
import torch
from flat_parts import grouped_gemm
from mutations import edit, every, matches, move, run_mutant, splice
from oracle import assert_bitwise_equal, poisoned

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.check.ledger import HazardError

CASE = cases.Case("mutations", ((130, 136, 768), (60, 128, 768)), seed=5)
CONFIG = KernelConfig(num_ab_stage=2, num_acc_stage=1, num_cta=2)
STAGE_BYTES = 36864  # of A, B and their scales: 128 x 128 x 256 with one scale per 16
MODES = ("eager", "lazy", "random:7")


def run(monkeypatch, mode, mutate=lambda ptx: ptx, *, case=CASE, backend="emulator", config=CONFIG, **more):
    """Returns the outputs of the kernel whose PTX went through `mutate`, under the checker."""
    return run_mutant(monkeypatch, mode, mutate, case=case, backend=backend, config=config, **more)


# ---- editing PTX ------------------------------------------------------------------------------------------------------
WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, \[(?P<at>\S+)\], (?P<parity>\S+),"
    r"[^}]*\}"
)
NUM_WAITS = 7
_, ACC_EMPTY, AB_FULL, TMEM_UNUSED, _, AB_EMPTY, ACC_FULL = range(NUM_WAITS)
"""The kernel's waits, in program order; the first is the load warp's tail, the fifth the epilogue's of later tiles."""


def drop_wait(which: int) -> Callable[[str], str]:
    return lambda ptx: splice(ptx, matches(ptx, WAIT, NUM_WAITS)[which], "")


def swap_parity(which: int) -> Callable[[str], str]:
    def mutate(ptx: str) -> str:
        match = matches(ptx, WAIT, NUM_WAITS)[which]
        block = match.group().replace(match["parity"] + ",", "SWAPPED,")
        swapped = f".reg .b32 SWAPPED;\nxor.b32 SWAPPED, {match['parity']}, 1;\n"
        return splice(ptx, match, block.replace("{", "{\n" + swapped, 1))

    return mutate


COMMIT = r"tcgen05\.commit\S+\s+(\[[^\]]+\]);\n"
RELEASE = r"mbarrier\.arrive\.shared\.b64\s+\S+, (\[[^\]]+\]), (\S+);"
# A CTA without tiles releases all tensor memory. The loop over slices releases an accumulator, or all after the last
# one.
NUM_RELEASES = 3
EXPECT = rf"mov\.b32 \s*(\S+), {STAGE_BYTES};"
CP = r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4 .*;\n"
MMA = r"(tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\S+) \[(\S+)\], (.*), \[(\S+)\], \[(\S+)\], (\S+);"
WAIT_LD = r"tcgen05\.wait::ld\.sync\.aligned;"
TMA = r"(cp\.async\.bulk\.tensor\.3d\S+) \[(\S+?)\], (.*);"


@dataclass(frozen=True)
class Fault:
    """A planted fault. `kinds`: hazards that name it; `text`: regular expression for the report; `severity`: of the finding."""

    name: str
    mutate: Callable[[str], str]
    kinds: tuple[str, ...]
    text: str
    severity: str = "error"


def early_release(ptx: str) -> str:
    """The epilogue releases the accumulator before it has read it."""
    match = matches(ptx, RELEASE, NUM_RELEASES)[1]
    arrive = f"elect.sync _|EARLY, -1;\n@EARLY mbarrier.arrive.shared.b64 _, {match[1]}, 1;\n"
    ptx = splice(ptx, match, "")
    # The first slices of the first tile, and of later ones
    for place in (ptx.rindex("tcgen05.ld."), ptx.index("tcgen05.ld.")):
        ptx = ptx[:place] + arrive + ptx[place:]
    return re.sub(r"(\.reg \.pred\s+%p<\d+>;)", r"\1\n.reg .pred EARLY;", ptx, count=1)


def same_tile(ptx: str) -> str:
    """Every second CTA computes its neighbour's tiles, so the same bytes are stored twice."""
    last = list(re.finditer(r"mov\.u32 \s*(%r\d+), %ctaid\.x;", ptx[: ptx.index("tcgen05.ld.")]))[-1]
    return splice(ptx, last, f"{last.group()}\nand.b32 {last[1]}, {last[1]}, -2;")


FAULTS = (
    Fault("no wait for the operands", drop_wait(AB_FULL), ("race", "uninitialised"), r"tcgen05\.(cp|mma).*(TMA load|nobody wrote)"),
    Fault("no wait for a free stage", drop_wait(AB_EMPTY), ("race", "mbarrier"), r"TMA load|mbarrier"),
    Fault("no wait for the accumulator", drop_wait(ACC_FULL), ("race", "uninitialised"), r"register that tcgen05\.ld|tcgen05\.ld.*tcgen05\.mma|tcgen05\.mma.*tcgen05\.ld"),
    Fault("no wait for a free accumulator", drop_wait(ACC_EMPTY), ("race",), r"tcgen05\.mma.*tcgen05\.ld|tcgen05\.ld.*tcgen05\.mma"),
    Fault("swapped parity of the operands", swap_parity(AB_FULL), ("race", "uninitialised", "hang"), r"tcgen05\.(cp|mma)|hangs"),
    Fault("swapped parity of the free accumulator", swap_parity(ACC_EMPTY), ("hang",), r"(?s)hangs.*mbarrier smem"),
    Fault("swapped parity of the accumulator", swap_parity(ACC_FULL), ("race", "hang"), r"tcgen05\.ld|hangs"),
    Fault("stage released before its MMAs", move(COMMIT, 2, 0, CP), ("race",), r"TMA load.*(tcgen05\.cp|tcgen05\.mma)|tcgen05\.(cp|mma).*TMA load"),
    Fault("stage released by an ordinary arrival", edit(COMMIT, r"mbarrier.arrive.shared.b64 _, \1;\n", count=2), ("race",), r"TMA load"),
    Fault("accumulator committed before its MMAs", move(COMMIT, 2, 1, r"tcgen05\.cp"), ("race", "mbarrier"), r"tcgen05|mbarrier"),
    Fault("stage never released", edit(COMMIT, "", count=2), ("hang",), r"(?s)hangs.*pending 1 of 1 arrivals"),
    Fault("no tcgen05.wait::ld before the release", every(WAIT_LD, "", count=1), ("race",), r"tcgen05\.mma.*tcgen05\.ld|tcgen05\.ld.*tcgen05\.mma"),
    Fault("accumulator released early", early_release, ("race",), r"tcgen05\.mma.*tcgen05\.ld|tcgen05\.ld.*tcgen05\.mma"),
    Fault("too many transaction bytes", edit(EXPECT, rf"mov.b32 \1, {STAGE_BYTES + 16};", count=2), ("hang",), r"16 tx bytes outstanding"),
    Fault("too few transaction bytes", edit(EXPECT, rf"mov.b32 \1, {STAGE_BYTES - 16};", count=2), ("hang",), r"-16 tx bytes outstanding"),
    Fault("no fence after the initialisation", edit(r"fence\.mbarrier_init\S+;", "", count=3), ("mbarrier",), r"without a fence\.mbarrier_init"),
    Fault("no barrier after the initialisation", every(r"bar\.(sync|arrive)\s+1, 192;", "", count=3), ("mbarrier",), r"nothing orders them|no mbarrier was init"),
    Fault("no barrier after the allocation", move(r"tcgen05\.alloc.*;\n", 1, 0, r"tcgen05\.relinquish"), ("race", "uninitialised"), r"ld\.shared.*(tcgen05\.alloc|nobody wrote)|tcgen05\.alloc.*ld\.shared"),
    Fault("a tile stored by two CTAs", same_tile, ("double-store",), r"`out\[\d\]`.*that st\.global.*the same bytes", "warning"),
    Fault("rows shifted by one in the descriptor of A", edit(r"or\.b32 (.*), 65536;", r"or.b32 \1, 65544;", count=2), ("race", "uninitialised"), r"tcgen05\.mma|TMA load"),
    Fault("B loaded to the wrong place", edit(TMA, r"\1 [\2+128], \3;", count=4, index=1), ("race", "uninitialised"), r"tcgen05\.mma|TMA load"),
    Fault("the MMAs of every stage read stage 0", edit(r"shl\.b32 (\s*\S+, \S+), 10;", r"and.b32 \1, 0;"), ("race", "uninitialised"), r"tcgen05\.mma"),
    Fault("a scale copy left out", edit(CP, "", count=8, index=3), ("uninitialised",), r"tcgen05\.mma.*uses scale factors in tensor memory"),
    Fault("scales taken from the accumulator's columns", edit(MMA, r"\1 [\2], \3, [\2], [\5], \6;", count=4), ("uninitialised", "race", "rule"), r"scale factors"),
    Fault("accumulator beyond the allocation", edit(MMA, r"\1 [\2+192], \3, [\4], [\5], \6;", count=4), ("tensor-memory",), r"not allocated"),
    Fault("accumulator over the scales", edit(MMA, r"\1 [\2+64], \3, [\4], [\5], \6;", count=4), ("uninitialised",), r"accumulator|tcgen05\.ld"),
    Fault("another warp's quadrant", edit(r"shl\.b32 (\s*\S+), (\S+), 21;", r"mov.b32 \1, 2097152;"), ("tensor-memory",), r"which can reach lanes"),
    Fault("tensor memory never freed", edit(r"tcgen05\.dealloc.*;", ""), ("tensor-memory",), r"256 columns at 0 still allocated"),
    Fault("tensor memory freed too early", drop_wait(TMEM_UNUSED), ("race", "tensor-memory"), r"tcgen05\.dealloc.*tcgen05\.(ld|mma)|not allocated"),
    Fault("an arrival too many", every(RELEASE, r"mbarrier.arrive.shared.b64 _, \1, 3;", count=NUM_RELEASES), ("mbarrier",), r"more arrivals than the barrier expects"),
    Fault("an arrival too few", edit(r"(mov\.b32 \s*\S+), 4;(?=\s*mbarrier\.init)", r"\1, 5;"), ("hang",), r"(?s)hangs.*pending 1 of 5 arrivals.*arrivals came from"),
    Fault("rows below the output stored", every(r"(setp\.lt\.s32 \s*(%p\d+), )%r\d+(, \d+;\s*@\2 bra[^;]*;[^$@]*?st\.global\.v4)", r"\g<1>127\3", count=6), ("out-of-bounds", "double-store"), r"outside every live range|is read-only|writes too"),
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_is_clean(monkeypatch, mode):
    expected = [poisoned(m, n, dtype=CASE.out_dtype) for m, n, _ in CASE.sizes]
    operands = cases.make_operands(CASE)
    grouped_gemm(*list(operands)[:4], out=expected, out_dtype=CASE.out_dtype, backend="reference")
    for got, want in zip(run(monkeypatch, mode), expected, strict=True):
        assert_bitwise_equal(got, want, mode=mode)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(monkeypatch, fault, mode):
    found = []
    with pytest.raises(HazardError) if fault.severity == "error" else nullcontext():
        run(monkeypatch, mode, fault.mutate, found=found)
    named = [h for h in found if h.kind in fault.kinds and re.search(fault.text, h.text)]
    assert any(h.severity == fault.severity for h in named), "reported instead:\n" + "\n".join(
        map(str, found)
    )


def released_behind_uses(ptx: str) -> str:
    """Without tcgen05.wait::ld, the accumulator is released only after the slice has been converted."""
    match = matches(ptx, RELEASE, NUM_RELEASES)[1]
    *_, not_yet, _ = re.findall(r"@(%p\d+) bra", ptx[: match.start()])  # not an accumulator's last slice
    arrive = f"@{not_yet} bra KEPT;\nelect.sync _|LATE, -1;\n@LATE mbarrier.arrive.shared.b64 _, {match[1]}, 1;\nKEPT:\n"
    last = list(re.finditer(r"cvt\.rn\.(?:bf16x2|f16x2|bf16|f16)\.f32[^;]*;\n", ptx[match.end() :]))
    after = next(
        a for a, b in zip(last, last[1:], strict=False) if b.start() - a.end() > 1000
    )  # the slice's last one
    place = match.end() + after.end()
    ptx = ptx[: match.start()] + ptx[match.end() : place] + arrive + ptx[place:]
    ptx = every(WAIT_LD, "", count=1)(ptx)
    return re.sub(r"(\.reg \.pred\s+%p<\d+>;)", r"\1\n.reg .pred LATE;", ptx, count=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_use_in_the_place_of_the_wait(monkeypatch, mode):
    """The accumulator's release is a warning. The release of all tensor memory, which precedes the uses, stays an error."""
    with pytest.raises(HazardError) as error:
        run(monkeypatch, mode, released_behind_uses)
    race = r"tcgen05\.mma.*while tcgen05\.ld.*put tcgen05\.wait::ld before the release"
    warnings = [h for h in error.value.hazards if h.severity == "warning"]
    assert any(h.kind == "race" and re.search(race, h.text) for h in warnings), str(error.value)


def test_outputs_may_be_fp32(monkeypatch):
    """The checker works for every output type."""
    case = cases.Case("fp32", ((130, 136, 512),), seed=6, out_dtype=torch.float32)
    operands = cases.make_operands(case)
    with observe(check=True):
        grouped_gemm(*list(operands)[:4], out_dtype=case.out_dtype, backend="emulator", config=CONFIG)


# ---- released before the data is used --------------------------------------------------------------------------------
ONE_LANE = r"bar\.warp\.sync\s+-1;\s*(?:elect\.sync[^;]*;\s*not\.pred[^;]*;\s*)?@(?P<other>%p\d+) bra\s+(?P<end>\S+);"
LOCAL = rf"{ONE_LANE}[^$@]*?mbarrier\.arrive\.shared\.b64 [^;]*;\s*(?P=end):\n"
REMOTE = rf"setp\.ge\.s32[^;]*;\s*@%p\d+ bra[^;]*;\s*setp[^;]*;\s*{ONE_LANE}[^$@]*?shared::cluster\.b64 _,[^;]*;\s*(?P=end):\n"


def release_math(ptx: str) -> str:
    """sm_120a, every K tile: releases the stage before the MMAs of its last block."""
    for block in list(re.finditer(LOCAL, ptx))[-2:]:
        found = re.search(rf"setp\.ne\.b32\s+{block['other']}, [^;]*;\n", ptx)
        ptx = splice(ptx, block, "").replace(found.group(), found.group() + block.group())
    return ptx


def release_weights(ptx: str) -> str:
    """sm_90a: releases the packed stage before its weights are decoded, at the start of the loop over K tiles."""
    block = re.search(
        rf"(?:(?:shl|add)\.[bs]32[^;]*;\s*)*{LOCAL}", ptx
    )  # including the address of the barrier
    ptx = splice(ptx, block, "")
    head = ptx.index(".pragma", ptx.rindex("$L__", 0, ptx.rindex("wgmma.fence", 0, block.start())))
    return ptx[:head] + block.group() + ptx[head:]


def release_sums(ptx: str) -> str:
    """sm_100a: lets other CTAs send the next sums before a warp has added the current ones."""
    block = matches(ptx, REMOTE, 1)[0]
    early = block.group().replace(block["end"], "EARLY_END")
    ptx = splice(ptx, block, f"@EARLY bra LATE_END;\n{block.group()}LATE_END:\nsetp.ne.u32 EARLY, 0, 0;\n")
    place = ptx.index("\n", ptx.index("ld.shared.v4.f32")) + 1
    place = ptx.index("\n", place) + 1  # after the end of the inline assembly
    ptx = ptx[:place] + "setp.eq.u32 EARLY, 0, 0;\n" + early + ptx[place:]
    return re.sub(
        r"(\.reg \.pred\s+%p<\d+>;)", r"\1\n.reg .pred EARLY;\nsetp.ne.u32 EARLY, 0, 0;", ptx, count=1
    )


RELEASES = {
    "sm_90a": (release_weights, "t128x32x128_s2a1_swap", r"ld\.shared.*mbarrier\.arrive.*TMA load"),
    "sm_100a": (release_sums, "t128x64x256_s2a1_swap_k2", r"ld\.shared.*mbarrier\.arrive.*st\.async"),
    "sm_120a": (release_math, "t128x64x128_s2a1", r"ld(matrix|\.shared).*mbarrier\.arrive.*TMA load"),
}


@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        pytest.param(arch, mode, marks=[] if (arch, mode) == ("sm_120a", "eager") else pytest.mark.slow)
        for arch in RELEASES
        for mode in MODES
    ],
)
def test_released_before_what_was_read_is_used(monkeypatch, arch, mode):
    mutate, name, text = RELEASES[arch]
    config = replace(KernelConfig.from_name(name), num_cta=2)
    kernel = {"case": CASE, "backend": f"emulator:{arch}", "config": config}
    run(monkeypatch, mode, **kernel)
    with pytest.raises(HazardError) as error:
        run(monkeypatch, mode, mutate, **kernel)
    found = error.value.hazards
    assert [h for h in found if h.kind == "early-release" and re.search(text, h.text)], str(error.value)

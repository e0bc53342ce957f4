"""Warps in lockstep have the same results and counts as warps that run one by one, for every instruction of single lanes."""

import re

import numpy as np
import pytest

from nvfp4_cute.emulator import lockstep, machine
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

CTAS, THREADS = 3, 128

# Destination type, then the instruction. Operands are %a and %b, per lane or uniform, with types by letter: r, f, d, h,
# l (64 bits), p.
FORMS = """
r add.s32 r r|r sub.u32 r r|r mul.lo.s32 r r|r mul.hi.u32 r r|l mul.wide.s32 r r|r mad.lo.u32 r r r|r min.s32 r r|r max.u32 r r
r and.b32 r r|r or.b32 r r|r xor.b32 r r|r not.b32 r|r shl.b32 r r|r shr.s32 r r|r shr.u32 r r|r neg.s32 r|r abs.s32 r
r div.s32 r r|r rem.u32 r r|r popc.b32 r|r clz.b32 r|r brev.b32 r|r bfe.u32 r r r|r bfi.b32 r r r r|r prmt.b32 r r r
r shf.l.wrap.b32 r r r|r add.sat.s32 r r|l add.s64 l l|l mul.lo.s64 l l|l shl.b64 l r|r lop3.b32 r r r 0x96
f add.f32 f f|f sub.rz.f32 f f|f mul.f32 f f|f fma.rn.f32 f f f|f fma.rm.f32 f f f|f div.rn.f32 f f|f min.f32 f f|f max.NaN.f32 f f
f abs.f32 f|f neg.ftz.f32 f|f sqrt.rn.f32 f|f rcp.rn.f32 f|f ex2.approx.f32 f|f mul.sat.f32 f f|f add.ftz.f32 f f|d add.f64 d d
r max.NaN.bf16x2 r r|r min.f16x2 r r|r fma.rn.f16x2 r r r|r fma.rn.bf16x2 r r r|r add.f16x2 r r|r mul.bf16x2 r r|f fma.rn.f32.bf16 h h f
r cvt.rni.s32.f32 f|f cvt.rn.f32.s32 r|r cvt.rn.bf16x2.f32 f f|r cvt.rn.f16x2.f32 f f|h cvt.rn.satfinite.e4m3x2.f32 f f|f cvt.f32.bf16 h
h cvt.rp.satfinite.ue8m0x2.f32 f f|r cvt.rn.f16x2.e4m3x2 h|h cvt.rn.f16.f32 f|f cvt.f32.f16 h|r cvt.u32.u16 h|l cvt.s64.s32 r
d cvt.f64.f32 f|r selp.b32 r r p|f selp.f32 f f p|r slct.s32.f32 r r f|f copysign.f32 f f|r set.lt.u32.f32 f f|l mov.b64 l
r shfl.sync.bfly.b32 r 3 31 -1|r vote.sync.ballot.b32 p -1|r match.any.sync.b32 r -1|r dp4a.s32.s32 r r r
""".replace("\n", "|")
SOURCES = {
    "lanes": {"r": ("%r1", "%r2", "%r3", "%r4"), "f": ("%f1", "%f2", "%f3"), "d": ("%d1", "%d2"), "h": ("%h1", "%h2"), "l": ("%l1", "%l2")},
    "one of them": {"r": ("%r1", "%r9", "7", "%r8"), "f": ("%f1", "%f9", "%f8"), "d": ("%d1", "%d9"), "h": ("%h1", "%h9"), "l": ("%l1", "%l9")},
    "the other": {"r": ("%r9", "%r2", "%r8", "%r1"), "f": ("%f9", "%f2", "%f8"), "d": ("%d9", "%d2"), "h": ("%h9", "%h2"), "l": ("%l9", "%l2")},
}  # fmt: skip
STORE = {"r": "st.global.b32 [%rd8], %R;", "f": "st.global.f32 [%rd8], %F;", "d": "st.global.f64 [%rd8], %D;", "l": "st.global.b64 [%rd8], %L;",
         "h": "st.global.b16 [%rd8], %H;"}  # fmt: skip
DEST = {"r": "%R", "f": "%F", "d": "%D", "l": "%L", "h": "%H"}
HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 words, .param .u64 out)
{
.reg .pred %p<8>;
.reg .b16 %h<16>, %H;
.reg .b32 %r<32>, %R, %f<16>, %F;
.reg .b64 %rd<16>, %l<16>, %L, %d<16>, %D;
ld.param.u64 %rd1, [words];
ld.param.u64 %rd2, [out];
mov.u32 %r20, %tid.x;
mov.u32 %r21, %ctaid.x;
mov.u32 %r22, %ntid.x;
mad.lo.u32 %r23, %r21, %r22, %r20;
mad.wide.u32 %rd3, %r23, 32, %rd1;
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3];
ld.global.v4.b32 {%f1, %f2, %f3, %r5}, [%rd3+16];
and.b32 %r3, %r3, 31;
mov.b64 %l1, {%r1, %r2};
mov.b64 %l2, {%r2, %r5};
cvt.f64.f32 %d1, %f1;
cvt.f64.f32 %d2, %f2;
cvt.u16.u32 %h1, %r1;
cvt.u16.u32 %h2, %r2;
mov.u32 %r9, 0x40490fdb;
mov.u32 %r8, 5;
mov.f32 %f9, 0f40490fdb;
mov.f32 %f8, 0fbf000000;
mov.b64 %l9, 77;
mov.f64 %d9, 0d400921fb54442d18;
mov.u16 %h9, 0x3f80;
setp.lt.s32 %p1, %r1, %r2;
"""
WORDS = 8


def kernel(body: str, stride: int) -> str:
    return f"{HEAD}mad.wide.u32 %rd8, %r23, {stride}, %rd2;\n{body}\nret;\n}}\n"


def words() -> np.ndarray:
    """Bit patterns, with every special float value."""
    data = np.random.default_rng(1).integers(0, 1 << 32, (CTAS * THREADS, WORDS), np.uint32)
    floats = np.random.default_rng(2).normal(0, 5, (CTAS * THREADS, 3)).astype(np.float32)
    floats[::7, 0], floats[::11, 1], floats[3::13, 2] = np.nan, -0.0, np.inf
    floats[5::17, 0], floats[2::19, 1] = 1e-40, 3e38
    data[:, 4:7] = floats.view(np.uint32)
    return data


def counting(patch, owner, name: str) -> list[int]:
    """Counts the calls of a method."""
    calls, original = [], getattr(owner, name)

    def count(*args):
        calls.append(1)
        return original(*args)

    patch.setattr(owner, name, count)
    return calls


def both(monkeypatch, ptx: str, nbytes: int):
    """Returns outputs, counts, and how often warps ran one by one, without and with lockstep."""
    results = []
    for together in (False, True):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(machine, "runs_together", lambda launch: False)
            out = np.full(nbytes, 0xCC, np.uint8)
            alone = counting(patch, machine.Machine, "_run_clusters")
            stats = run_ptx(ptx, None, CTAS, THREADS, [words(), out], machine=machine.Machine(jobs=1))
            counts = stats.instructions, stats.load_bytes, stats.store_bytes
            results.append((out.tobytes(), counts, len(alone)))
    return results


@pytest.mark.parametrize("operands", SOURCES)
def test_forms(monkeypatch, operands):
    """One kernel per form: results and counts agree, and no warp ran by itself."""
    forms = [form.split() for form in FORMS.split("|") if form]
    lines = []
    for dest, name, *kinds in forms:
        taken = dict.fromkeys("rfdhl", 0)
        given = []
        for kind in kinds:
            if kind in taken:
                given.append(SOURCES[operands][kind][taken[kind]])
                taken[kind] += 1
            else:
                given.append("%p1" if kind == "p" else kind)
        if "dp4a" not in name:
            lines.append(f"{name} {DEST[dest]}, {', '.join(given)};\n{STORE[dest]}\nadd.u64 %rd8, %rd8, 8;")
    stride = 8 * len(lines)
    one, together = both(monkeypatch, kernel("\n".join(lines), stride), CTAS * THREADS * stride)
    differ = np.flatnonzero(np.frombuffer(one[0], np.uint8) != np.frombuffer(together[0], np.uint8))
    assert not differ.size, lines[int(differ[0]) % stride // 8]
    assert one[1] == together[1]
    assert (one[2], together[2]) == (CTAS, 0)


def test_ways_that_differ(monkeypatch):
    """Branches of whole warps, branches of single lanes, a loop with different trip counts, and stores to one address."""
    body = """
st.global.b32 [%rd2], %r1;
shr.u32 %r10, %r23, 5;
and.b32 %r10, %r10, 3;
setp.eq.u32 %p2, %r10, 2;
@%p2 bra WHOLE;
add.u32 %r1, %r1, 1;
WHOLE:
mov.u32 %r12, %ctaid.x;
mad.lo.u32 %r1, %r12, 77, %r1;
mov.u32 %r11, 0;
LOOP:
add.u32 %r1, %r1, %r11;
add.u32 %r11, %r11, 1;
setp.lt.u32 %p3, %r11, %r10;
@%p3 bra LOOP;
@%p1 bra LANES;
add.u32 %r1, %r1, 1000;
LANES:
st.global.b32 [%rd8+16], %r1;
"""
    one, together = both(monkeypatch, kernel(body, 32), CTAS * THREADS * 32)
    assert one[:2] == together[:2]


DIVERGED = """
setp.lt.u32 %p2, %r23, 40;
@%p2 exit;
and.b32 %r12, %r20, 3;
mov.u32 %r11, 0;
LOOP:
shfl.sync.bfly.b32 %r13, %r1, 8, 31, -1;
add.u32 %r1, %r1, %r13;
add.u32 %r11, %r11, 1;
setp.lt.u32 %p3, %r11, 3;
@%p3 bra LOOP;
@%p1 bra ONE;
brx.idx %r12, TARGETS;
ONE:
add.u32 %r1, %r1, 1000;
bra END;
TWO:
mul.lo.u32 %r1, %r1, %r20;
bra ONE;
THREE:
setp.eq.u32 %p4, %r20, 39;
@%p4 exit;
END:
st.global.b32 [%rd8], %r1;
"""


def test_lanes_that_differ(monkeypatch):
    """Lanes of a warp exit early, take three targets of a table and join again; no warp runs by itself."""
    body = "TARGETS: .branchtargets ONE, TWO, THREE, TWO;\n" + DIVERGED
    one, together = both(monkeypatch, kernel(body, 4), CTAS * THREADS * 4)
    assert one[:2] == together[:2]
    assert (one[2], together[2]) == (CTAS, 0)


def test_a_vote_that_waits_for_lanes(monkeypatch):
    """Some lanes wait at a vote for others, which reach it later, so their warps leave the lockstep."""
    body = "@!%p1 bra LATER;\nVOTE:\nvote.sync.ballot.b32 %r2, %p1, -1;\nadd.u32 %r1, %r1, %r2;\nbra END;\n"
    body += "LATER:\nadd.u32 %r1, %r1, 7;\nbra VOTE;\nEND:\nst.global.b32 [%rd8], %r1;"
    one, together = both(monkeypatch, kernel(body, 4), CTAS * THREADS * 4)
    assert one[:2] == together[:2]
    assert together[2] == CTAS


def test_an_error_names_its_warp(monkeypatch):
    body = "setp.eq.u32 %p2, %r23, 300;\n@%p2 add.u64 %rd8, %rd8, 1000000;\nst.global.b32 [%rd8], %r1;"
    with pytest.raises(EmulatorError, match=r"cta \(2, 0, 0\).*warp 1.*outside every live range"):
        run_ptx(kernel(body, 4), None, CTAS, THREADS, [words(), np.zeros(CTAS * THREADS, np.uint32)])


CHECKED = {
    "clean": ("", True),
    "diverged": ("@%p1 bra A;\nadd.u32 %r1, %r1, 3;\nA:", True),
    "shuffle": ("shfl.sync.bfly.b32 %r1, %r1, 3, 31, -1;", True),
    "vector": ("st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};", True),
    "its own words": ("ld.global.b32 %r2, [%rd3];\nst.global.b32 [%rd3], %r1;", True),
    "others' words": ("xor.b32 %r12, %r23, 32;\nmad.wide.u32 %rd4, %r12, 32, %rd1;\nst.global.b32 [%rd4+28], %r1;", False),
    "one word": ("st.global.b32 [%rd2], 7;", False),
    "one word, other values": ("st.global.b32 [%rd2], %r23;", False),
    "a byte of a word": ("shr.u32 %r12, %r23, 5;\ncvt.u64.u32 %rd4, %r12;\nadd.u64 %rd4, %rd4, %rd1;\nst.global.b8 [%rd4], %r1;", False),
    "read-only path": ("st.global.b32 [%rd3], %r1;\nld.global.nc.b32 %r2, [%rd3];", False),
    "unwritten register": ("add.u32 %r1, %r1, %r19;", False),
    "mask": ("shfl.sync.bfly.b32 %r1, %r1, 3, 31, 15;", False),
    "misaligned": ("add.u64 %rd4, %rd3, 2;\nst.global.b32 [%rd4], %r1;", False),
}  # fmt: skip
"""A kernel's body, and whether no warp of it has to run by itself when it is checked."""


ADDRESS = re.compile("0x[0-9a-f]+")


@pytest.mark.parametrize("what", CHECKED)
def test_checked(monkeypatch, what):
    """Findings, results and counts equal those of warps that run one by one."""
    body, clean = CHECKED[what]
    results = []
    for together in (False, True):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(machine, "runs_together", lambda launch: False)
            data, out, failure = words(), np.full(CTAS * THREADS, 0xCC, np.uint32), ""
            alone = counting(patch, machine.Machine, "_run_clusters")
            one = machine.Machine(jobs=1, check=True)
            try:
                run_ptx(
                    kernel(f"{body}\nst.global.b32 [%rd8], %r1;", 4),
                    None,
                    CTAS,
                    THREADS,
                    [data, out],
                    machine=one,
                )
            except EmulatorError as error:
                failure = ADDRESS.sub("", str(error))
            counts = one.stats.instructions, one.stats.load_bytes, one.stats.store_bytes
            results.append(
                (
                    data.tobytes(),
                    out.tobytes(),
                    failure,
                    [ADDRESS.sub("", str(hazard)) for hazard in one.checker.hazards],
                    counts,
                )
            )
    assert results[0] == results[1]
    assert (not alone) == clean
    assert not (clean and results[0][3])


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_every_mode_runs_them_together(monkeypatch, mode):
    calls = counting(monkeypatch, lockstep.Lockstep, "run")
    outs = [np.zeros(CTAS * THREADS, np.uint32) for _ in range(2)]
    for one, out in zip((machine.Machine(jobs=1), machine.Machine(jobs=1, mode=mode)), outs, strict=True):
        run_ptx(kernel("st.global.b32 [%rd8], %r1;", 4), None, CTAS, THREADS, [words(), out], machine=one)
    assert len(calls) == 2 and np.array_equal(*outs)


@pytest.mark.parametrize(
    ("body", "together"),
    [("add.u32 %r1, %r1, 1;", True), ("bar.sync 0;", False), ("red.global.add.u32 [%rd2], 1;", False)],
)
def test_which_kernels_run_together(monkeypatch, body, together):
    calls = counting(monkeypatch, lockstep.Lockstep, "run")
    run_ptx(kernel(body, 4), None, CTAS, THREADS, [words(), np.zeros(CTAS * THREADS, np.uint32)])
    assert bool(calls) == together

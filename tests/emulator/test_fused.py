"""Runs of plain instructions: the generated function leaves the same registers as the single steps."""

import dataclasses
import re

import numpy as np
import pytest

from nvfp4_cute.emulator import fused
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.state import Cluster, Launch
from nvfp4_cute.errors import EmulatorError

SHARED = """
add.s32 %r10, %r1, -7;
sub.u32 %r11, %r2, %r1;
and.b32 %r12, %r10, 65535;
or.b32 %r13, %r12, %r2;
xor.b32 %r14, %r13, -1;
not.b32 %r15, %r14;
mul.lo.s32 %r16, %r15, %r1;
mad.lo.s32 %r17, %r16, %r2, %r3;
mul.wide.s32 %rd10, %r17, %r2;
mul.wide.u32 %rd11, %r17, 12;
cvt.s64.s32 %rd12, %r10;
cvt.u64.u32 %rd13, %r10;
mad.lo.s64 %rd14, %rd12, %rd13, %rd10;
add.s64 %rd15, %rd14, -1;
shl.b32 %r18, %r17, 5;
shr.u32 %r19, %r10, 3;
shr.s32 %r20, %r10, 3;
setp.lt.s32 %p1, %r10, %r2;
setp.ge.u32 %p2, %r10, %r2;
setp.eq.b32 %p3, %r1, %r1;
setp.ne.s32 %p4, %r20, 5;
or.pred %p5, %p1, %p2;
and.pred %p6, %p5, %p3;
xor.pred %p7, %p6, %p4;
not.pred %p8, %p7;
selp.b32 %r21, %r20, %r19, %p1;
selp.b32 %r22, 1, 0, %p2;
selp.b32 %r23, %r3, %r1, %p8;
mov.b32 %r24, %r23;
mov.b32 %r1, %r24;
add.s32 %r2, %r1, %r2;
add.s32 %r1, %r2, 1;
"""
# By one predicate, where the second input is one value.
CHOICES = "\n".join(
    ["setp.ne.s32 %p1, %r2, %r2;"]
    + [f"selp.b32 %r{10 + i}, %r{1 + i % 3}, 7, %p1;\nadd.s32 %r{20 + i}, %r{10 + i}, 2;" for i in range(6)]
)
ROWS = "\n".join(
    [f"mov.b64 %rd{20 + i}, {{%r{1 + i % 3}, %r{1 + (i + 1) % 3}}};" for i in range(5)]
    + [
        f"mov.b64 {{%r{30 + 2 * i}, %r{31 + 2 * i}}}, %rd{20 + i};\nmov.b32 %r{50 + i}, %r{30 + 2 * i};\n"
        f"cvt.rn.{'bf16x2' if i % 2 else 'f16x2'}.f32 %r{60 + i}, %r{50 + i}, %r{31 + 2 * i};\n"
        f"cvt.rn.f16x2.f32 %r{70 + i}, %r{31 + 2 * i}, %r{50 + i};"
        for i in range(5)
    ]
    + ["add.f32 %r80, %r30, %r31;", "mov.b64 {%r1, %r2}, %rd24;", "add.s32 %r81, %r1, %r2;"]
)


COMMON = [
    "fma.rn.ftz.f32x2 %rd{40}, %rd{20}, %rd{20}, %rd{40};", "add.rn.f32x2 %rd{50}, %rd{20}, %rd{40};", "ex2.approx.ftz.f32 %r{30}, %r{40};",
    "max.f32 %r{50}, %r{40}, %r{30};", "max.f32 %r{60}, %r{50}, %r{40}, %r{30};", "cvt.rn.satfinite.e4m3x2.f32 %h{20}, %r{30}, %r{40};",
    "fma.rn.f32 %r{70}, %r{30}, %r1, %r{40};", "prmt.b32 %r{50}, %r{50}, %r{40}, 0x5410;", "shl.b32 %r{60}, %r{60}, 3;", "mul.f32 %r{70}, %r{70}, %r{70};",
    "lop3.b32 %r{60}, %r{60}, %r{50}, %r{40}, 0x96;", "setp.lt.f32 %p{1}, %r{30}, %r{40};", "selp.f32 %r{50}, %r{40}, 0f3F800000, %p{1};",
    "add.s32 %r{60}, %r{60}, %r2;", "fma.rn.bf16x2 %r{70}, %r{30}, %r{50}, %r{60};", "cvt.rn.f16x2.e4m3x2 %r{80}, %h{20};",
]  # fmt: skip
"""Instructions, each of which is repeated with every number in braces counted up."""
FORMS = ROWS + "\n" + "\n".join(
    [f"add.f32 %r{30 + i}, %r1, %r{60 + i};\nadd.f32 %r{40 + i}, %r{60 + i}, %r3;\nmov.b64 %rd{40 + i}, {{%r{30 + i}, %r{40 + i}}};" for i in range(5)]
    + [re.sub(r"\{(\d+)\}", lambda found, i=i: str(int(found[1]) + i), line) for line in COMMON for i in range(5)]
)  # fmt: skip


TEXT = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k()
{{
.reg .pred %p<16>;
.reg .b16 %h<64>;
.reg .b32 %r<99>;
.reg .b32 %many<160>;
.reg .b64 %rd<64>;
{}
ret;
}}
"""


def _code(body):
    program = parse(TEXT.format(body))
    return Code(program, program.entries["k"])


def _warp(code):
    launch = Launch(code, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, np.zeros(64, np.uint8))
    return Cluster(Machine(), launch, (0, 0, 0)).ctas[0].warps[0]


def _registers(warp, values):
    names = {name: slot for slot, name in enumerate(warp.code.builder.names)}
    for name, value in values.items():
        warp.regs[names[name]] = value
    return names


def _equal(a, b):
    if a.__class__ is np.ndarray or b.__class__ is np.ndarray:
        return a.__class__ is b.__class__ and a.dtype == b.dtype and np.array_equal(a, b)
    return a == b and a.__class__ is b.__class__


@pytest.fixture(autouse=True)
def _quiet():
    """Sets NumPy's error state as a machine does for kernels."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("body", [SHARED, ROWS, FORMS, CHOICES], ids=["shared", "rows", "forms", "choices"])
@pytest.mark.parametrize("lanes", range(8))
def test_a_function_gives_what_the_steps_give(body, lanes):
    """Each of the three inputs is one value or 32."""
    code = _code(body)
    plain = [code._plain(pc) for pc in range(len(code.steps) - 1)]
    assert None not in plain
    run = fused.Run(plain)
    rng, special = (
        np.random.default_rng(lanes),
        np.array([0x7FC00000, 0x7F800000, 0x80000000, 0x00000001], np.uint32),
    )
    for _ in range(20):
        values = {}
        for i in range(3):
            data = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
            data[rng.integers(0, 32, 4)] = special
            values[f"%r{1 + i}"] = data if lanes >> i & 1 else int(data[0])
        one, other = _warp(code), _warp(code)
        _registers(one, values), _registers(other, values)
        for each in plain:
            each.step(one)
        function = run.generate(tuple(other.regs[slot].__class__ for slot in run.inputs))
        assert function is not None
        function(other, other.regs)
        for name, a, b in zip(code.builder.names, one.regs, other.regs, strict=True):
            assert _equal(a, b), (name, a, b)


@pytest.mark.parametrize("form", ["f16x2", "bf16x2"])
def test_a_call_takes_any_number_of_rows(form):
    """As in an unrolled epilogue of 300 columns: PTX code may name any number of registers."""
    body = "\n".join(f"cvt.rn.{form}.f32 %r{10 + i}, %r1, %r2;" for i in range(150))
    code = _code(body.replace("%r", "%many"))
    plain = [code._plain(pc) for pc in range(len(code.steps) - 1)]
    run, one, other = fused.Run(plain), _warp(code), _warp(code)
    values = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32).view(np.uint32)
    for warp in (one, other):
        _registers(warp, {"%many1": values[0], "%many2": values[1]})
    for each in plain:
        each.step(one)
    run.generate((np.ndarray,) * 2)(other, other.regs)
    assert all(map(_equal, one.regs, other.regs))


def test_rows_of_one_form_become_one_call():
    code = _code(ROWS)
    run = fused.Run([code._plain(pc) for pc in range(len(code.steps) - 1)])
    groups = run._rearranged(dict.fromkeys(run.inputs, fused.LANES))
    assert sorted(len(group) for group in groups if len(group) > 1) == [5, 6, 8]


def test_a_run_becomes_a_function_after_some_executions_and_not_where_lanes_need_old_values():
    code = _code(SHARED)
    (step, _), places = code.tail(0)
    assert places == (0, len(code.steps) - 1, len(code.steps))
    warp = _warp(code)
    names = _registers(warp, {"%r1": 3, "%r2": 4, "%r3": 5})
    calls = []
    run = next(iter(code._runs.values()))
    assert run is step
    original = fused.Run.generate

    def noting(self, classes):
        calls.append(classes)
        return original(self, classes)

    fused.Run.generate = noting
    try:
        for _ in range(3 * fused.TRIALS):
            step(warp)
        assert len(calls) == 1
    finally:
        fused.Run.generate = original
    warp.active = np.arange(32) < 8
    warp.num_active, warp.all_active = 8, False
    warp.protected = frozenset([names["%r10"]])
    before = warp.regs[names["%r10"]]
    step(warp)
    after = warp.regs[names["%r10"]]
    assert after.__class__ is np.ndarray and (after[8:] == before).all() and (after[:8] != before).all()


def test_a_register_that_nobody_wrote_is_poison_within_a_run():
    """The instruction that reads it is reported and continues with all ones, as outside of a run."""
    code = _code("mov.b32 %r1, 4;\nadd.s32 %r2, %r1, 3;\nadd.s32 %r4, %r3, %r2;\nadd.s32 %r5, %r4, 1;")
    warp = _warp(code)
    Machine()._run_warp(warp, 1 << 10)
    names = _registers(warp, {})
    assert warp.done and warp.regs[names["%r3"]] == 0xFFFFFFFF
    assert warp.regs[names["%r5"]] == 7 and warp.executed == 5


def test_a_failing_step_of_a_run_is_named(monkeypatch):
    code = _code("mov.b32 %r1, 4;\nadd.s32 %r2, %r1, 3;\nadd.s32 %r4, %r1, %r2;\nadd.s32 %r5, %r4, 1;")

    def fails(warp):
        raise ValueError("broken")

    code.steps[2] = code._bare[2] = fails
    with pytest.raises(EmulatorError, match=r"add.s32 %r4.*broken"):
        Machine()._run_warp(_warp(code), 1 << 10)


def test_rows_whose_result_or_source_is_one_value_are_executed_one_by_one():
    """Steps may find that all lanes agree, and a source may hold one value although lanes were expected."""
    code = _code("\n".join(f"add.f32 %r{10 + i}, %r{1 + i}, %r5;" for i in range(3)))
    plain = [code._plain(pc) for pc in range(3)]
    one, other = _warp(code), _warp(code)
    lanes = np.arange(32, dtype=np.float32).view(np.uint32)
    values = {"%r1": lanes, "%r2": 0x3F800000, "%r3": lanes, "%r5": lanes}
    _registers(one, values), _registers(other, values)
    for each in plain:
        each.step(one)
    rows = fused.MergedInstructions(plain, [1, 2], [])
    columns = [[other.regs[each.parts[i]] for each in plain] for i in (1, 2)]
    for each, result in zip(plain, rows(other, columns), strict=True):
        assert _equal(one.regs[each.parts[0]], result)
    agreeing = [
        dataclasses.replace(each, step=lambda warp, slot=each.parts[0]: warp.regs.__setitem__(slot, 7))
        for each in plain
    ]
    columns = [[lanes] * 3] * 2
    assert fused.MergedInstructions(agreeing, [1, 2], [])(other, columns) == [7, 7, 7]

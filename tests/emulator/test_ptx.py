"""The parser: operands, scopes, parameters, variables, and its error messages."""

import pytest

from nvfp4_cute.emulator.ptx import (
    Address,
    Imm,
    Label,
    Not,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vector,
    parse,
)
from nvfp4_cute.errors import EmulatorError


def instructions(ptx_kernel, body: str):
    return next(iter(parse(ptx_kernel(body, params=0)).entries.values())).insts


def test_operand_forms(ptx_kernel) -> None:
    body = """
    mov.b64 {%r1, _}, %rd1;
    @!%p1 ld.shared.v2.b32 {%r1, %r2}, [%r3+-8];
    elect.sync %r4|%p2, -1;
    setp.lt.and.s32 %p3|%p4, %r1, 0x1F, !%p5;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r3}], [%r4];
    mov.f32 %r5, 0f3F800000;
    mov.u32 %r6, %tid.x;
    mov.f64 %rd3, 1.5;
    """
    insts = instructions(ptx_kernel, body)
    r = lambda n: Reg(f"%r{n}", "b32")
    assert insts[0].operands == (Vector((r(1), Sink())), Reg("%rd1", "b64"))
    assert insts[1].pred == (Reg("%p1", "pred"), True)
    assert insts[1].mods == ("shared", "v2", "b32")
    assert insts[1].operands[1] == Address(r(3), -8)
    assert insts[2].operands == (Pair(r(4), Reg("%p2", "pred")), Imm(-1))
    assert insts[3].operands[2:] == (Imm(31), Not(Reg("%p5", "pred")))
    assert insts[4].operands[1] == TensorAddress(Reg("%rd2", "b64"), (r(2), r(3)))
    assert insts[4].mods[-1] == "mbarrier::complete_tx::bytes"
    assert insts[5].operands[1] == Imm(0x3F800000, "f32")
    assert insts[6].operands[1] == Special("%tid.x")
    assert insts[7].operands[1] == Imm(0x3FF8000000000000, "f64")


def test_scopes_have_registers_and_labels_of_their_own(ptx_kernel) -> None:
    block = """
    { .reg .pred P1;
    LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE: }
    """
    entry = next(iter(parse(ptx_kernel(block + block, params=0)).entries.values()))
    first, second = entry.insts[0:3], entry.insts[3:6]
    assert first[0].operands[0] != second[0].operands[0]
    assert first[1].pred[0] == first[0].operands[0]
    targets = [entry.labels[i.operands[0].name] for i in (first[1], first[2], second[1], second[2])]
    assert targets == [3, 0, 6, 3]


def test_inner_scope_sees_outer_names(ptx_kernel) -> None:
    insts = instructions(ptx_kernel, "OUT: { .reg .b32 t; mov.b32 t, %r1; bra OUT; }")
    assert insts[0].operands == (Reg("t#1", "b32"), Reg("%r1", "b32"))
    assert insts[1].operands == (Label("OUT"),)


def test_vector_registers_have_components(ptx_kernel) -> None:
    body = """
    { .reg .v2 .b32 ab; .reg .v4 .f32 c;
    mov.b32 ab.x, %r1; add.s32 %r2, ab.r, ab.y; mov.b64 %rd1, ab; mov.f32 c.w, c.b; }
    """
    entry = next(iter(parse(ptx_kernel(body, params=0)).entries.values()))
    first, add, whole, four = (inst.operands for inst in entry.insts[:4])
    x, y = first[0], add[2]
    assert (x.type, y.type) == ("b32", "b32") and x != y and x.name.startswith("ab.x#")
    assert add[1] == x and whole[1] == Vector((x, y))
    assert four[0].name.startswith("c.w#") and four[1].name.startswith("c.z#")


def test_parameters_are_laid_out_by_alignment() -> None:
    program = parse("""
.version 8.8
.target sm_100a
.visible .entry one(
  .param .u32 n,
  .param .align 64 .b8 map[128],
  .param .u64 .ptr .global .align 16 out,
  .param .align 8 .b8 pair[12]
)
.reqntid 192, 1, 1
.minnctapersm 1
{ ret; }
.visible .entry two() { ret; }
""")
    one = program.entries["one"]
    assert [(p.offset, p.nbytes) for p in one.params] == [(0, 4), (64, 128), (192, 8), (200, 12)]
    assert one.param_bytes == 212
    assert one.directives == {"reqntid": (192, 1, 1), "minnctapersm": (1,)}
    assert program.entries["two"].params == ()
    assert (program.version, program.target) == ("8.8", "sm_100a")


def test_variables() -> None:
    program = parse(
        """
.version 8.8
.target sm_100a
.extern .shared .align 1024 .b8 dynamic[];
.global .align 4 .u16 table[3] = {1, 0x203, -1};
.const .b32 zeros[4];
.visible .entry k() { .local .align 16 .b8 depot[40]; mov.b64 %rd1, table+2; .reg .b64 %rd<2>; ret; }
""".replace("mov.b64 %rd1, table+2; .reg .b64 %rd<2>;", ".reg .b64 %rd<2>; mov.b64 %rd1, table+2;")
    )
    assert program.variables["dynamic"].nbytes is None
    assert program.variables["dynamic"].align == 1024
    assert program.variables["table"].init == bytes([1, 0, 3, 2, 0xFF, 0xFF])
    assert program.variables["zeros"].nbytes == 16
    entry = program.entries["k"]
    assert (entry.variables["depot"].space, entry.variables["depot"].nbytes) == ("local", 40)
    assert entry.insts[0].operands[1] == Symbol("table", 2)


def test_source_lines_and_ptx_lines(ptx_kernel) -> None:
    text = ptx_kernel(
        "// a comment; with { braces\n.loc 1 42 7\nmov.b32 %r1, 0; /* two\nlines */ mov.b32 %r2, 0;", 0
    )
    text = text.replace(".address_size 64\n", '.address_size 64\n.file 1 "kernel.py"\n')
    insts = next(iter(parse(text).entries.values())).insts
    lines = text.split("\n")
    assert "mov.b32 %r1" in lines[insts[0].line - 1]
    assert "mov.b32 %r2" in lines[insts[1].line - 1]
    assert insts[0].source == ("kernel.py", 42)


def test_debug_sections_are_skipped() -> None:
    text = ".version 8.8\n.target sm_100a, debug\n.section .debug_str { $info: .b8 1,2,3 }\n.visible .entry k() { ret; }\n"
    assert list(parse(text).entries) == ["k"]


@pytest.mark.parametrize(
    "body, message",
    [
        ("mov.b32 %q1, 0;", "unknown register `%q1`"),
        ("mov.b32 %r64, 0;", "unknown register `%r64`"),
        ("X: X: ret;", "label defined twice"),
        (".weird 3;", "unknown directive"),
        ("mov.b32 %r1, 3!4;", "cannot parse operand"),
    ],
)
def test_errors_name_the_line(ptx_kernel, body: str, message: str) -> None:
    text = ptx_kernel(body, 0)
    line = next(i for i, t in enumerate(text.split("\n"), 1) if t == body)
    with pytest.raises(EmulatorError, match=f"PTX line {line}") as caught:
        parse(text)
    assert message in str(caught.value)


def test_not_ptx() -> None:
    with pytest.raises(EmulatorError, match="no .version"):
        parse("")

"""printf and assertions of kernels, in the form in which the compiler emits them."""

import numpy as np
import pytest

from nvfp4_cute.emulator import parallel
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.errors import EmulatorError

VPRINTF = ".extern .func (.param .b32 func_retval0) vprintf (.param .b64 p0, .param .b64 p1);\n"
ASSERTFAIL = ".extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);\n"
LOCAL = ".local .align 8 .b8 depot[64];\n.reg .b64 %SP;\n.reg .b64 %SPL;\n.reg .b64 %text;"
CALL = """{
.param .b64 param0;
.param .b64 param1;
.param .b32 retval0;
st.param.b64 [param1], %SP;
mov.b64 %text, FORMAT;
cvta.global.u64 %text, %text;
st.param.b64 [param0], %text;
call.uni (retval0), vprintf, (param0, param1);
ld.param.b32 %r50, [retval0];
}
"""


def text_variable(name: str, text: str) -> str:
    data = (*text.encode(), 0)
    return f".global .align 1 .b8 {name}[{len(data)}] = {{{', '.join(map(str, data))}}};\n"


def printing(ptx_kernel, text: str, stores: str, params: int = 0) -> str:
    """A kernel that fills the argument buffer with `stores` (to [%SPL+...]) and calls vprintf(text, buffer)."""
    body = f"mov.b64 %SPL, depot;\ncvta.local.u64 %SP, %SPL;\n{stores}\n{CALL}"
    return ptx_kernel(body, params, LOCAL, VPRINTF + text_variable("FORMAT", text))


def test_every_active_lane_prints_in_lane_order(ptx_kernel, capsys) -> None:
    stores = """mov.u32 %r0, %tid.x;
    st.local.b32 [%SPL], %r0;
    setp.lt.u32 %p1, %r0, 29;
    @%p1 bra END;"""
    run_ptx(printing(ptx_kernel, "t=%d\n", stores).replace("ret;", "END:\nret;"), block=64)
    lanes = [29, 30, 31, *range(32, 64)]
    assert capsys.readouterr().out == "".join(f"t={lane}\n" for lane in lanes)


CONVERSIONS = [
    ("%d|%i|%u", [("b32", -5), ("b32", -6), ("b32", -1)], "-5|-6|4294967295"),
    ("%x %X %o %#x %08x", [("b32", 0xBEEF), ("b32", 0xBEEF), ("b32", 8), ("b32", 255), ("b32", 17)],
     "beef BEEF 10 0xff 00000011"),
    ("%d %lld %llu %ld", [("b32", 1), ("b64", -2), ("b64", -1), ("b64", 1 << 40)],
     "1 -2 18446744073709551615 1099511627776"),
    ("%hhd %hd %hx", [("b32", 0x1FF), ("b32", 0x18000), ("b32", 0x12345)], "-1 -32768 2345"),
    ("%c%c%%", [("b32", 72), ("b32", 105)], "Hi%"),
    ("%f %.2f %e %g", [("f64", 1.5), ("f64", 2.345), ("f64", 12345.678), ("f64", 1e-7)],
     "1.500000 2.35 1.234568e+04 1e-07"),
    ("%5d|%-5d|%+d|%05.1f", [("b32", 42), ("b32", 42), ("b32", 42), ("f64", 3.25)], "   42|42   |+42|003.2"),
    ("%*d %.*f", [("b32", 4), ("b32", 7), ("b32", 1), ("f64", 0.25)], "   7 0.2"),
    ("%a", [("f64", 1.5)], "0x1.8000000000000p+0"),
    ("%p", [("b64", 0x7F00)], "0x7f00"),
    ("%s", [("b64", 0)], "(null)"),
    ("no arguments", [], "no arguments"),
]  # fmt: skip


def buffer_stores(arguments) -> str:
    """Stores the values one after another, each aligned to its size, as the compiler places them."""
    lines, at = [], 0
    for type_, value in arguments:
        size = 4 if type_ == "b32" else 8
        at = -(-at // size) * size
        bits = int(np.float64(value).view(np.uint64)) if type_ == "f64" else value & ((1 << 8 * size) - 1)
        register = "%r1" if size == 4 else "%rd9"
        lines.append(f"mov.b{8 * size} {register}, {bits:#x};\nst.local.b{8 * size} [%SPL+{at}], {register};")
        at += size
    return "\n".join(lines)


@pytest.mark.parametrize("text, arguments, expected", CONVERSIONS)
def test_conversions(text: str, arguments, expected: str, ptx_kernel, capsys) -> None:
    ptx = printing(ptx_kernel, text, buffer_stores(arguments), 1).replace(
        "ret;", "st.global.b32 [%rd0], %r50;\nret;"
    )
    counted = np.zeros(1, np.int32)
    run_ptx(ptx, block=1, args=[counted])
    assert capsys.readouterr().out == expected
    assert counted[0] == len(arguments)


def test_string_arguments(ptx_kernel, capsys) -> None:
    stores = "mov.b64 %rd9, NAME;\ncvta.global.u64 %rd9, %rd9;\nst.local.b64 [%SPL], %rd9;"
    ptx = printing(ptx_kernel, "<%s>", stores).replace("sm_100a\n", "sm_100a\n", 1)
    ptx = ptx.replace(VPRINTF, VPRINTF + text_variable("NAME", "stage one"))
    run_ptx(ptx, block=1)
    assert capsys.readouterr().out == "<stage one>"


def test_a_conversion_that_does_not_exist_is_an_error(ptx_kernel) -> None:
    with pytest.raises(EmulatorError, match="no conversion at character 3"):
        run_ptx(printing(ptx_kernel, "ab %y", ""), block=1)


def test_a_checked_machine_prints_too(ptx_kernel, capsys) -> None:
    run_ptx(printing(ptx_kernel, "%d", buffer_stores([("b32", 3)])), block=1, mode="lazy", check=True)
    assert capsys.readouterr().out == "3"


def test_kernels_that_print_run_in_one_process(ptx_kernel) -> None:
    program = parse(printing(ptx_kernel, "x", ""))
    assert parallel.communicates(Code(program, program.entries["k"]))


def test_assertions_name_place_and_condition(ptx_kernel) -> None:
    names = {"MESSAGE": "x < 3", "FILE": "gemm.py", "FUNCTION": "kernel"}
    module = ASSERTFAIL + "".join(text_variable(name, text) for name, text in names.items())
    addresses = "".join(
        f"mov.b64 %rd{i}, {name};\ncvta.global.u64 %rd{i}, %rd{i};\n" for i, name in enumerate(names)
    )
    body = f"""{addresses}
    mov.b64 %rd5, 1;
    {{
    .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
    st.param.b64 [a], %rd0; st.param.b64 [b], %rd1; st.param.b32 [c], 17; st.param.b64 [d], %rd2; st.param.b64 [e], %rd5;
    call.uni __assertfail, (a, b, c, d, e);
    }}"""
    with pytest.raises(EmulatorError, match=r"gemm.py:17: kernel: lane 0: assertion `x < 3` failed"):
        run_ptx(ptx_kernel(body, 0, module=module), block=1)


def test_other_functions_are_refused(ptx_kernel) -> None:
    with pytest.raises(EmulatorError, match="a call of anything but __assertfail, vprintf"):
        run_ptx(ptx_kernel("{ .param .b32 x; call.uni something, (x); }", 0))

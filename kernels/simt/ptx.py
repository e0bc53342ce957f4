"""The few PTX instructions that CuTe has no name for, each as one function. Words are Uint32, addresses Int64."""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

# What is read once goes past L1; what every CTA reads again stays there.
STREAM = "ld.global.nc.L1::no_allocate"
KEEP = "ld.global.nc"


def load_words(address: Int64, num_words: int, opcode: str, predicate=None) -> list:
    """``num_words`` consecutive words of global memory in one instruction, aligned to their own size.

    Where ``predicate`` is false nothing is read and the words are undefined.
    """
    vector = "" if num_words == 1 else f".v{num_words}"
    names = ", ".join(f"{{$w{i}}}" for i in range(num_words))
    loaded = inline_ptx(
        f"{opcode}{vector}.b32 {names if num_words == 1 else '{' + names + '}'}, [{{$r0}}];",
        write_only_types=[Uint32] * num_words,
        read_only_args=[address],
        predicate=predicate,
    )
    return [loaded] if num_words == 1 else list(loaded)


def prmt(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Four bytes of the eight in (high, low), chosen by the four low nibbles of ``selector``; bit 3 of a nibble asks
    for copies of the chosen byte's sign instead (PTX ISA 9.7.9.7)."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def dp4a(a: Uint32, b: Uint32, acc: Int32) -> Int32:
    """``acc`` plus the four products of signed bytes (PTX ISA 9.7.1.23)."""
    return inline_ptx(
        "dp4a.s32.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, acc]
    )


def fma_f16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """Two halves: a * b + c, each rounded once."""
    return inline_ptx(
        "fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, c]
    )


def mul_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """Two halves: a * b, each rounded once."""
    return inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def scale_f16x2(a: Uint32, factor: int) -> Uint32:
    """Two halves times a constant pair (PTX takes no literals here)."""
    return inline_ptx(
        f"{{\n.reg .b32 factor;\nmov.b32 factor, {factor:#x};\nmul.rn.f16x2 {{$w0}}, {{$r0}}, factor;\n}}",
        write_only_types=[Uint32],
        read_only_args=[a],
    )


def unpack_f16x2(word: Uint32) -> tuple[Float32, Float32]:
    """The low and the high half as floats."""
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, {$r0};\ncvt.f32.f16 {$w0}, lo;\ncvt.f32.f16 {$w1}, hi;\n}",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def e2m1x8_to_f16x2(word: Uint32) -> list:
    """Eight e2m1 values, lowest nibble first, as four words of two halves. sm_100a and later."""
    converts = "\n".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i};" for i in range(4))
    return list(
        inline_ptx(
            f"{{\n.reg .b8 b0, b1, b2, b3;\nmov.b32 {{b0, b1, b2, b3}}, {{$r0}};\n{converts}\n}}",
            write_only_types=[Uint32] * 4,
            read_only_args=[word],
        )
    )


def ue4m3x2_to_f16x2(word: Uint32) -> Uint32:
    """The two block scales in the low half of ``word`` as two halves; their sign bits are ignored."""
    return inline_ptx(
        "{\n.reg .b32 t;\n.reg .b16 lo, hi;\nand.b32 t, {$r0}, 0x7F7F;\nmov.b32 {lo, hi}, t;\n"
        "cvt.rn.f16x2.e4m3x2 {$w0}, lo;\n}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def fma_f32(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )

"""PTX instructions that CuTe has no name for, one function each. Words are Uint32."""

from cutlass import Float32, Int32, Uint32

from .versions import compiles_for, inline_ptx

# From here on bf16 has additions and products besides fma (PTX ISA 9.7.4).
BF16_PRODUCTS_FROM = 90
# Pairs of bf16: -0, -1.
MINUS_ZEROS, MINUS_ONES = 0x80008000, 0xBF80BF80


def mul_text(target: str, a: str, b: str, type_name: str) -> str:
    """Two f16 or bf16, ``a`` times ``b``: of bf16 before sm_90 with -0 added, which changes no bit."""
    if type_name == "bf16" and not compiles_for(BF16_PRODUCTS_FROM):
        return f"{{ .reg .b32 c; mov.b32 c, {MINUS_ZEROS:#x}; fma.rn.bf16x2 {target}, {a}, {b}, c; }}"
    return f"mul.rn.{type_name}x2 {target}, {a}, {b};"


def prmt(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Selects four of the eight bytes in (high, low) by the four low nibbles of ``selector`` (PTX ISA 9.7.9.7).

    Bit 3 of a nibble replicates the selected byte's sign instead.
    """
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def transpose_8x8(word: Uint32) -> Uint32:
    """Transposes an 8 x 8 matrix of 16-bit elements; lane 4g + t has row g, columns 2t and 2t + 1. All lanes must call it."""
    return inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def keep_before(values: tuple) -> None:
    """Forces values to be computed here; the compiler would move their computation past a following wait.

    Emits no instruction.
    """
    for value in values:
        inline_ptx("// {$r0}", read_only_args=[value])


def mul_hi(a: Uint32, b: Uint32) -> Uint32:
    """Returns the upper half of a product (PTX ISA 9.7.1.3)."""
    return inline_ptx("mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def dp4a(a: Uint32, b: Uint32, acc: Int32) -> Int32:
    """Returns ``acc`` plus the four products of signed bytes (PTX ISA 9.7.1.23)."""
    return inline_ptx(
        "dp4a.s32.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, acc]
    )


def fma_f16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """Returns a * b + c of two halves, each rounded once."""
    return inline_ptx(
        "fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, c]
    )


def mul_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """Returns a * b of two halves, each rounded once."""
    return inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def scale_x2(a: Uint32, factor: int, type_name: str) -> Uint32:
    """Returns two f16 or bf16 times a constant. The constant goes through a register, because PTX takes no literals here."""
    return inline_ptx(
        f"{{\n.reg .b32 factor;\nmov.b32 factor, {factor:#x};\n{mul_text('{$w0}', '{$r0}', 'factor', type_name)}\n}}",
        write_only_types=[Uint32],
        read_only_args=[a],
    )


def unpack_f16x2(word: Uint32) -> tuple[Float32, Float32]:
    """Returns the low and the high half as floats."""
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, {$r0};\ncvt.f32.f16 {$w0}, lo;\ncvt.f32.f16 {$w1}, hi;\n}",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def e2m1x8_to_f16x2(word: Uint32) -> list:
    """Converts eight e2m1 values, lowest nibble first, to four words of two halves. Needs sm_100a or later."""
    converts = "\n".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i};" for i in range(4))
    return list(
        inline_ptx(
            f"{{\n.reg .b8 b0, b1, b2, b3;\nmov.b32 {{b0, b1, b2, b3}}, {{$r0}};\n{converts}\n}}",
            write_only_types=[Uint32] * 4,
            read_only_args=[word],
        )
    )


def fp8x4_to_f16x2(word: Uint32, element: str) -> list:
    """Converts four e4m3 or e5m2 codes to two fp16 pairs, in order."""
    return list(
        inline_ptx(
            "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; "
            f"cvt.rn.f16x2.{element}x2 {{$w0}}, l; cvt.rn.f16x2.{element}x2 {{$w1}}, h; }}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[word],
        )
    )


def s8x4_to_f16x2(word: Uint32) -> list:
    """Converts four int8 to two fp16 pairs, in order, exactly: builds 1024 + 128 + integer and subtracts 1152."""
    return list(
        inline_ptx(
            "{ .reg .b32 t, ones, bias; mov.b32 ones, 0x3C003C00; mov.b32 bias, 0xE480E480; xor.b32 t, {$r0}, 0x80808080; "
            "prmt.b32 {$w0}, t, 0x64646464, 0x4140; prmt.b32 {$w1}, t, 0x64646464, 0x4342; "
            "fma.rn.f16x2 {$w0}, {$w0}, ones, bias; fma.rn.f16x2 {$w1}, {$w1}, ones, bias; }",
            write_only_types=[Uint32, Uint32],
            read_only_args=[word],
        )
    )


def ue4m3x2_to_f16x2(word: Uint32) -> Uint32:
    """Converts the two e4m3 block scales in the low half of ``word`` to two halves; ignores their sign bits."""
    return inline_ptx(
        "{\n.reg .b32 t;\n.reg .b16 lo, hi;\nand.b32 t, {$r0}, 0x7F7F;\nmov.b32 {lo, hi}, t;\n"
        "cvt.rn.f16x2.e4m3x2 {$w0}, lo;\n}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def fma_f32(a: Float32, b: Float32, c: Float32) -> Float32:
    """Returns a * b + c, rounded once."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def unpack_bf16x2(word: Uint32) -> tuple[Float32, Float32]:
    """Returns the low and the high bfloat16 as floats."""
    return inline_ptx(
        "{\n.reg .b32 t;\nshl.b32 t, {$r0}, 16;\nmov.b32 {$w0}, t;\nand.b32 t, {$r0}, 0xFFFF0000;\nmov.b32 {$w1}, t;\n}",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def max_nan_x2(a: Uint32, b: Uint32, is_bf16: bool) -> Uint32:
    """Returns the larger of two halves or bfloat16 in each half of a word; NaN if either is NaN."""
    return inline_ptx(
        f"max.NaN.{'bf16x2' if is_bf16 else 'f16x2'} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def max_nan(a: Float32, b: Float32) -> Float32:
    """Returns the larger of two floats; NaN if either is NaN."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def abs_f32(a: Float32) -> Float32:
    """Returns the magnitude of a float."""
    return inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def min_nan(a: Float32, b: Float32) -> Float32:
    """Returns the smaller of two floats; NaN if either is NaN."""
    return inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def least(a: Float32, b: Float32) -> Float32:
    """Returns the smaller of two floats; the other one if one is NaN."""
    return inline_ptx("min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def div_f32(a: Float32, b: Float32) -> Float32:
    """Returns a / b, rounded to nearest even; keeps subnormals."""
    return inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def sqrt_f32(a: Float32) -> Float32:
    """Returns the square root, rounded to nearest even; keeps subnormals."""
    return inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def rcp_f32(a: Float32) -> Float32:
    """Returns 1 / a, rounded to nearest even; keeps subnormals."""
    return inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def f32_to_e4m3(value: Float32) -> Uint32:
    """Returns the nearest e4m3 code, ties to even, saturating at 448; NaN gives 0x7F."""
    return inline_ptx(
        "{\n.reg .b16 t;\n.reg .b32 zero;\nmov.b32 zero, 0;\ncvt.rn.satfinite.e4m3x2.f32 t, zero, {$r0};\n"
        "cvt.u32.u16 {$w0}, t;\n}",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def f32x8_to_e2m1(values: list) -> Uint32:
    """Converts eight floats to the nearest e2m1, ties to even, saturating at 6, the first in the lowest nibble (sm_100a on)."""
    converts = "\n".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    return inline_ptx(
        f"{{\n.reg .b8 b0, b1, b2, b3;\n{converts}\nmov.b32 {{$w0}}, {{b0, b1, b2, b3}};\n}}",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def f32x4_to_fp8(values: list, type_name: str) -> Uint32:
    """Converts four floats to the nearest e4m3 or e5m2, the first in the lowest byte.

    Ties go to even, large values saturate, and NaN gives 0x7F.
    """
    converts = "\n".join(
        f"cvt.rn.satfinite.{type_name}x2.f32 h{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(2)
    )
    return inline_ptx(
        f"{{\n.reg .b16 h0, h1;\n{converts}\nmov.b32 {{$w0}}, {{h0, h1}};\n}}",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def f32x4_to_s8(values: list) -> Uint32:
    """Converts four floats to the nearest int8, ties to even, saturating at plus or minus 127, the first in the lowest byte.

    NaN gives 0 (PTX ISA 9.7.9.21: conversions to integers clamp and turn NaN into 0).
    """
    rounded = "\n".join(
        f"cvt.rni.s32.f32 i{i}, {{$r{i}}};\nmin.s32 i{i}, i{i}, 127;\nmax.s32 i{i}, i{i}, -127;"
        for i in range(4)
    )
    return inline_ptx(
        f"{{\n.reg .b32 i<4>;\n{rounded}\nprmt.b32 i0, i0, i1, 0x40;\nprmt.b32 i2, i2, i3, 0x40;\n"
        "prmt.b32 {$w0}, i0, i2, 0x5410;\n}",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def bits_of(value: Float32) -> Uint32:
    """Returns the bits of a float."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def mul_x2(a: Uint32, b: Uint32, type_name: str) -> Uint32:
    """Returns a * b of two f16 or bf16, each rounded once; keeps subnormals."""
    return inline_ptx(
        mul_text("{$w0}", "{$r0}", "{$r1}", type_name), write_only_types=[Uint32], read_only_args=[a, b]
    )


def sub_x2(a: Uint32, b: Uint32, type_name: str) -> Uint32:
    """Returns a - b of two f16 or bf16, each rounded once; keeps subnormals. ``b`` may be a constant."""
    difference = f"sub.rn.{type_name}x2 {{$w0}}, {{$r0}}, t;"
    if type_name == "bf16" and not compiles_for(BF16_PRODUCTS_FROM):
        difference = f".reg .b32 c; mov.b32 c, {MINUS_ONES:#x}; fma.rn.bf16x2 {{$w0}}, t, c, {{$r0}};"
    return inline_ptx(
        f"{{ .reg .b32 t; mov.b32 t, {{$r1}}; {difference} }}",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def pair_of(value: Float32, type_name: str) -> Uint32:
    """Returns a float, rounded to f16 or bf16, in both halves of a word."""
    return inline_ptx(
        f"cvt.rn.{type_name}x2.f32 {{$w0}}, {{$r0}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def mma_m16n8k16(a: list, b: list, c: list, type_name: str) -> list:
    """Returns A (16 x 16) @ B (16 x 8) + C of a warp, f16 or bf16 with float32 sums (PTX ISA 9.7.14.5.8).

    a, b, c: 4, 2 and 4 registers per lane.
    """
    names = [f"{{$r{i}}}" for i in range(10)]
    operands = (f"{{{', '.join(names[first:last])}}}" for first, last in ((0, 4), (4, 6), (6, 10)))
    return list(
        inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{type_name}.{type_name}.f32 "
            f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {', '.join(operands)};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def mul_f32(a: Float32, b: Float32) -> Float32:
    """Returns the rounded a * b, which the compiler never contracts with an addition."""
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add_f32(a: Float32, b: Float32) -> Float32:
    """Returns the rounded a + b, which the compiler never contracts with a multiplication."""
    return inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def float_of(word: Uint32) -> Float32:
    """Returns the float with these bits."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def pack_16x2(low: Float32, high: Float32, is_bf16: bool) -> Uint32:
    """Converts two floats to bfloat16 or half, to nearest even, in one word."""
    return inline_ptx(
        f"cvt.rn.{'bf16x2' if is_bf16 else 'f16x2'}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )

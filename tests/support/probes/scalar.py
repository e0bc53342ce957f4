"""Probes of instructions that use only registers of one thread: arithmetic, logic, comparison, conversion.

A `Group` is one kernel: every thread loads its operands once, executes every row (one or a few instructions), and
stores the result of each. Operands are corner cases and random values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from probes.backends import HEADER, Backend, Bound, Probe, Results

REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
BLOCK = 32
Rng = np.random.Generator


@dataclass(frozen=True)
class Group:
    """Rows that share operands.

    Attributes:
        inputs: operand name -> function (rng, count) -> codes (unsigned words).
        rows: PTX that computes ``%d`` from the operands.
        bits: width of ``%d``; 1 means a predicate.
        bound: bound for results that the emulator computes more exactly than the device; `bounds` gives it by row.
    """

    inputs: dict[str, Callable[[Rng, int], np.ndarray]]
    rows: tuple[str, ...]
    bits: int = 32
    bound: Bound | None = None
    setup: str = ""
    bounds: dict[str, Bound] = field(default_factory=dict)


# ---- operands -----------------------------------------------------------------------------------------------------
def _mixed(
    corners: list[int], bits: int, random: Callable[[Rng, int], np.ndarray]
) -> Callable[[Rng, int], np.ndarray]:
    """Half corner cases, half random codes."""
    table = np.array([c & (1 << bits) - 1 for c in corners], np.uint64).astype(f"u{bits // 8}")

    def draw(rng: Rng, count: int) -> np.ndarray:
        codes = random(rng, count).astype(table.dtype)
        return np.where(rng.random(count) < 0.5, rng.choice(table, count), codes)

    return draw


def _any_bits(bits: int) -> Callable[[Rng, int], np.ndarray]:
    """Uniform codes, a third of them short."""

    def draw(rng: Rng, count: int) -> np.ndarray:
        codes = (
            rng.integers(0, 1 << bits, count, np.uint64, endpoint=False)
            if bits < 64
            else rng.integers(0, (1 << 64) - 1, count, np.uint64, endpoint=True)
        )
        shifts = rng.integers(0, bits, count, np.uint64) * (rng.random(count) < 0.33)
        return codes >> shifts

    return draw


def integers(bits: int) -> Callable[[Rng, int], np.ndarray]:
    """Integers of a width."""
    top = 1 << bits - 1
    corners = [
        0,
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        128,
        255,
        256,
        257,
        top - 1,
        top,
        top + 1,
        -1,
        -2,
        -7,
    ]
    corners += [0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x01020384, 0x80818283]
    return _mixed(corners, bits, _any_bits(bits))


def _float_corners(exponent_bits: int, mantissa_bits: int) -> list[int]:
    """Zeros, ends of the ranges, infinities, NaNs quiet and signalling, small integers and halves; both signs."""
    m, bias = mantissa_bits, (1 << exponent_bits - 1) - 1
    one, infinity = bias << m, (1 << exponent_bits) - 1 << m
    half = 1 << m - 1
    positive = [
        0,
        1,
        (1 << m) - 1,
        1 << m,
        (1 << m) + 1,
        one,
        one + 1,
        one - 1,
        one + half,
        infinity - 1,
        infinity,
    ]
    positive += [
        infinity + 1,
        infinity + half,
        infinity + half + 3,
        (bias + 1 << m) + half // 2,
        (bias - 1) << m,
        (bias + 3) << m,
    ]
    positive += [
        (bias + 1 << m) + (half >> 1),
        (bias + 1 << m) + half + (half >> 1),
        2 << m,
        half,
        (bias - m - 1) << m,
        (bias - m - 2) << m,
    ]
    return positive + [p | 1 << exponent_bits + m for p in positive]


def _f32_of(values: list[float]) -> list[int]:
    both = np.array([s * v for v in values for s in (1, -1)], np.float32)
    return both.view(np.uint32).tolist()


_EDGES = [
    65504, 65519.996, 65520, 65536, 448, 464, 463.99997, 480, 57344, 61440, 61439.996, 65472, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14,
    2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17, 2.0**31, 2.0**32, 2.0**31 - 128, 2.0**63, 2.0**64, 127.5, 128.5, 255.5, 32767.5,
    65535.5, 3.38953139e38, 3.3961e38, 2.0**-126, 2.0**-133, 2.0**-134, 0.9999999,
]  # fmt: skip


def f32(rng: Rng, count: int) -> np.ndarray:
    """binary32 codes: corner cases, any bits, and values of moderate size."""
    return _f32(rng, count)


def _random_f32(rng: Rng, count: int) -> np.ndarray:
    moderate = (
        (rng.normal(0, 1, count) * 2.0 ** rng.integers(-18, 18, count)).astype(np.float32).view(np.uint32)
    )
    short = moderate & np.uint32(0xFFFFE000)
    choice = rng.integers(0, 4, count)
    anything = rng.integers(0, 1 << 32, count, np.uint32)
    return np.select([choice == 0, choice == 1], [anything, short], moderate)


_f32 = _mixed(_float_corners(8, 23) + _f32_of(_EDGES), 32, _random_f32)


def f64(rng: Rng, count: int) -> np.ndarray:
    """binary64 codes."""
    corners = _float_corners(11, 52)
    corners += np.array([s * v for v in _EDGES for s in (1, -1)]).view(np.uint64).tolist()
    wide = lambda rng, n: (rng.normal(0, 1, n) * 2.0 ** rng.integers(-60, 60, n)).view(np.uint64)
    return _mixed(corners, 64, wide)(rng, count)


def halves(name: str) -> Callable[[Rng, int], np.ndarray]:
    """f16 or bf16 codes: all of them in order if `count` allows."""
    exponent, mantissa = (5, 10) if name == "f16" else (8, 7)
    bias = (1 << exponent - 1) - 1
    near_one = lambda rng, n: (
        rng.integers(0, 2, n) << 15 | rng.integers(bias - 6 << mantissa, bias + 6 << mantissa, n)
    )
    either = lambda rng, n: np.where(rng.random(n) < 0.5, near_one(rng, n), rng.integers(0, 1 << 16, n))
    return _mixed(_float_corners(exponent, mantissa), 16, either)


def every_half(rng: Rng, count: int) -> np.ndarray:
    """16-bit codes: a permutation of all if `count` allows."""
    if count >= 1 << 16:
        return rng.permutation(np.arange(count) & 0xFFFF).astype(np.uint16)
    name = "f16" if rng.random() < 0.5 else "bf16"
    return halves(name)(rng, count)


def pairs(name: str) -> Callable[[Rng, int], np.ndarray]:
    """Two f16 or bf16 codes in a word."""
    draw = halves(name)
    return lambda rng, n: draw(rng, n).astype(np.uint32) << 16 | draw(rng, n)


def near(center: int, bits: int, spread: int = 6) -> Callable[[Rng, int], np.ndarray]:
    """Codes around `center`, of both signs."""

    def draw(rng: Rng, count: int) -> np.ndarray:
        codes = center + rng.integers(-spread, spread + 1, count) | rng.integers(0, 2, count) << bits - 1
        return codes.astype(f"u{bits // 8}")

    return draw


def addends(rng: Rng, count: int) -> np.ndarray:
    """binary32 codes of similar size as products of `f32` operands, so that sums cancel, tie and overflow."""
    return f32(rng, count)


# ---- kernels ------------------------------------------------------------------------------------------------------
def group_text(group: Group, widths: dict[str, int]) -> str:
    """Returns the kernel. Its parameters are the inputs, the output (rows, threads), and the bytes of an output row."""
    size = 4 if group.bits == 1 else group.bits // 8
    names = [*widths, "out"]
    lines = [
        "mov.u32 %i, %tid.x;",
        "mov.u32 %j, %ctaid.x;",
        "mov.u32 %k, %ntid.x;",
        "mad.lo.u32 %i, %j, %k, %i;",
    ]
    for name, width in widths.items():
        lines += [
            f"ld.param.u64 %at, [{name}];",
            f"mad.wide.u32 %at, %i, {width}, %at;",
            f"ld.global.b{8 * width} %{name}, [%at];",
        ]
    lines += [
        "ld.param.u64 %at, [out];",
        f"mad.wide.u32 %at, %i, {size}, %at;",
        "ld.param.u32 %j, [pitch];",
        "cvt.u64.u32 %pitch, %j;",
    ]
    if group.setup:
        lines.append(group.setup)
    for row in group.rows:
        if group.bits == 1:
            body = f".reg .pred %d; .reg .b32 %e; {row} selp.b32 %e, 1, 0, %d; st.global.b32 [%at], %e;"
        else:
            body = f".reg .{REGISTER[size]} %d; {row} st.global.b{8 * size} [%at], %d;"
        lines += [f"{{ {body} }}", "add.u64 %at, %at, %pitch;"]
    declared = "".join(f".reg .{REGISTER[w]} %{n};\n" for n, w in widths.items())
    params = ", ".join([*(f".param .u64 {n}" for n in names), ".param .u32 pitch"])
    text = "\n".join(lines)
    scratch = ".reg .pred %p<4>;\n.reg .b16 %h<8>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<8>;"
    return (
        f"{HEADER}.visible .entry k({params})\n{{\n.reg .b32 %i, %j, %k;\n.reg .b64 %at, %pitch;\n{scratch}\n{declared}{text}\n"
        "ret;\n}\n"
    )


def group_probe(name: str, group: Group, count: int, block: int = BLOCK) -> Probe:
    """Run the rows of a group on `count` operands."""

    def probe(backend: Backend) -> Results:
        rng = np.random.default_rng([len(name), *name.encode()])
        inputs = {n: np.ascontiguousarray(draw(rng, count)) for n, draw in group.inputs.items()}
        size = 4 if group.bits == 1 else group.bits // 8
        out = np.full((len(group.rows), count), 0x5A, f"u{size}")
        text = group_text(group, {n: x.itemsize for n, x in inputs.items()})
        backend.launch(text, [*inputs.values(), out, count * size], grid=count // block, block=block)
        if group.bits == 1:
            out = out.astype(np.uint8)
        return dict(zip(group.rows, out, strict=True))

    return probe


# ---- rows ---------------------------------------------------------------------------------------------------------
def _integer_rows() -> dict[str, Group]:
    i32, i64, i16 = integers(32), integers(64), integers(16)
    both = ("u32", "s32")
    words = [
        "add.s32 %d, %a, %b;", "sub.s32 %d, %a, %b;", "add.sat.s32 %d, %a, %b;", "sub.sat.s32 %d, %a, %b;",
        "mul.lo.s32 %d, %a, %b;", "mad.lo.s32 %d, %a, %b, %c;", "abs.s32 %d, %a;", "neg.s32 %d, %a;",
        *(f"{op}.{t} %d, %a, %b;" for t in both for op in ("mul.hi", "div", "rem", "min", "max")),
        *(f"mad.hi.{t} %d, %a, %b, %c;" for t in both),
        *(f"mul24.{p}.{t} %d, %a, %b;" for t in both for p in ("lo", "hi")),
        *(f"mad24.{p}.{t} %d, %a, %b, %c;" for t in both for p in ("lo", "hi")),
        *(f"{op}.b32 %d, %a, %b;" for op in ("and", "or", "xor")), "not.b32 %d, %a;", "cnot.b32 %d, %a;",
        *(f"{op} %d, %a, %b;" for op in ("shl.b32", "shr.u32", "shr.s32")),
        *(f"{op} %d, %a, {n};" for op in ("shl.b32", "shr.u32", "shr.s32") for n in (5, 31, 32, 40)),
        *(f"shf.{side}.{mode}.b32 %d, %a, %b, %c;" for side in "lr" for mode in ("wrap", "clamp")),
        *(f"bfe.{t} %d, %a, %b, %c;" for t in both),
        *(f"and.b32 %r0, %b, 63; and.b32 %r1, %c, 63; bfe.{t} %d, %a, %r0, %r1;" for t in both),
        "and.b32 %r0, %b, 63; and.b32 %r1, %c, 63; bfi.b32 %d, %a, %c, %r0, %r1;", "bfi.b32 %d, %a, %b, %c, %b;",
        "popc.b32 %d, %a;", "clz.b32 %d, %a;", "brev.b32 %d, %a;",
        *(f"bfind{s}.{t} %d, %a;" for t in both for s in ("", ".shiftamt")),
        *(f"lop3.b32 %d, %a, %b, %c, {lut};" for lut in (0x96, 0xE8, 0xCA, 0x1B, 0, 0xFF, 0x40)),
        *(f"prmt.b32{mode} %d, %a, %b, %c;" for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")),
        "prmt.b32 %d, %a, %b, 0x9C40;", "prmt.b32 %d, %a, %b, 0x5410;",
        "selp.b32 %d, %a, %b, %p0;", "slct.b32.s32 %d, %a, %b, %c;", "slct.b32.f32 %d, %a, %b, %c;", "slct.ftz.b32.f32 %d, %a, %b, %c;",
        *(f"set.{c}.u32.{t} %d, %a, %b;" for t in both for c in ("lt", "ge")), "set.lt.f32.s32 %d, %a, %b;", "set.lt.and.u32.s32 %d, %a, %b, %p0;",
        "cvt.pack.sat.s16.s32 %d, %a, %b;", "cvt.pack.sat.u16.s32 %d, %a, %b;", "cvt.pack.sat.u8.s32.b32 %d, %a, %b, %c;", "cvt.pack.sat.s8.s32.b32 %d, %a, %b, %c;",
        *(f"cvt{s}.{d}.{t} %d, %a;" for t in both for s in ("", ".sat") for d in ("u8", "s8", "u16", "s16")),
        "cvt.sat.u32.s32 %d, %a;", "cvt.sat.s32.u32 %d, %a;",
        *(f"cvt.{r}.f32.{t} %d, %a;" for t in both for r in ("rn", "rz", "rm", "rp")), "cvt.rn.sat.f32.s32 %d, %a;", "cvt.rn.sat.f32.u32 %d, %a;",
        *(f"cvt.rn.f32.{t} %d, %a;" for t in ("u8", "s8", "u16", "s16")),
    ]  # fmt: skip
    doubles = [
        *(f"mul.wide.{t} %d, %a, %b;" for t in both), *(f"cvt.u64.u32 %rd0, %c; mad.wide.{t} %d, %a, %b, %rd0;" for t in both),
        *(f"cvt.{d}.{t} %d, %a;" for t in both for d in ("u64", "s64")), "cvt.sat.u64.s32 %d, %a;",
        *(f"cvt.rn.f64.{t} %d, %a;" for t in both), "mov.b64 %d, {%a, %b};",
    ]  # fmt: skip
    half_words = [
        *(f"cvt.{r}.f16.{t} %d, %a;" for t in both for r in ("rn", "rz", "rm", "rp")), "cvt.rn.bf16.s32 %d, %a;", "cvt.rn.bf16.u32 %d, %a;",
        "cvt.rz.bf16.s32 %d, %a;", "cvt.rn.f16.s8 %d, %a;", "cvt.rn.f16.u16 %d, %a;", "cvt.rn.sat.f16.s32 %d, %a;", "mov.b32 {_, %d}, %a;",
        "cvt.s16.s32 %d, %a;", "cvt.sat.u8.s32 %d, %a;", "cvt.s8.u32 %d, %a;",
    ]  # fmt: skip
    compares = [
        *(f"setp.{c}.{t} %d, %a, %b;" for t in both for c in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(f"setp.{c}.u32 %d, %a, %b;" for c in ("lo", "ls", "hi", "hs")),
        *(f"setp.lt.{op}.s32 %d, %a, %b, %p0;" for op in ("and", "or", "xor")), "setp.lt.and.s32 %p1|%d, %a, %b, !%p0;",
        "setp.gt.s16 %d, %h0, %h1;", "setp.hi.u16 %d, %h0, %h1;",
    ]  # fmt: skip
    long = [
        "add.s64 %d, %a, %b;", "sub.s64 %d, %a, %b;", "mul.lo.s64 %d, %a, %b;", "mad.lo.s64 %d, %a, %b, %a;", "abs.s64 %d, %a;", "neg.s64 %d, %a;",
        *(f"{op}.{t} %d, %a, %b;" for t in ("u64", "s64") for op in ("mul.hi", "div", "rem", "min", "max")),
        *(f"mad.hi.{t} %d, %a, %b, %a;" for t in ("u64", "s64")),
        *(f"{op}.b64 %d, %a, %b;" for op in ("and", "or", "xor")), "not.b64 %d, %a;", "cnot.b64 %d, %a;",
        *(f"{op} %d, %a, %c;" for op in ("shl.b64", "shr.u64", "shr.s64")),
        *(f"{op} %d, %a, {n};" for op in ("shl.b64", "shr.u64", "shr.s64") for n in (33, 63, 64, 70)),
        *(f"and.b32 %r0, %c, 127; shr.u32 %r1, %c, 7; and.b32 %r1, %r1, 127; bfe.{t} %d, %a, %r0, %r1;" for t in ("u64", "s64")),
        "and.b32 %r0, %c, 127; shr.u32 %r1, %c, 7; and.b32 %r1, %r1, 127; bfi.b64 %d, %a, %b, %r0, %r1;", "brev.b64 %d, %a;",
        "cvt.sat.u64.s64 %d, %a;", "cvt.sat.s64.u64 %d, %a;", *(f"cvt.{r}.f64.{t} %d, %a;" for t in ("u64", "s64") for r in ("rn", "rz", "rm", "rp")),
        "slct.b64.s32 %d, %a, %b, %c;",
    ]  # fmt: skip
    from_long = [
        "popc.b64 %d, %a;", "clz.b64 %d, %a;", *(f"bfind{s}.{t} %d, %a;" for t in ("u64", "s64") for s in ("", ".shiftamt")),
        *(f"cvt{s}.{d}.{t} %d, %a;" for t in ("u64", "s64") for s in ("", ".sat") for d in ("u32", "s32", "u16", "s8")),
        *(f"cvt.{r}.f32.{t} %d, %a;" for t in ("u64", "s64") for r in ("rn", "rz", "rm", "rp")),
        *(f"cvt.{r}.f16.{t} %h0, %a; cvt.u32.u16 %d, %h0;" for t in ("u64", "s64") for r in ("rn", "rz")), "cvt.rn.bf16.s64 %h0, %a; cvt.u32.u16 %d, %h0;",
        *(f"set.{c}.u32.{t} %d, %a, %b;" for t in ("u64", "s64") for c in ("lt", "ge", "eq")),
    ]  # fmt: skip
    short = [
        "add.s16 %d, %a, %b;", "sub.s16 %d, %a, %b;", "mul.lo.s16 %d, %a, %b;", "mad.lo.s16 %d, %a, %b, %a;", "abs.s16 %d, %a;", "neg.s16 %d, %a;",
        *(f"{op}.{t} %d, %a, %b;" for t in ("u16", "s16") for op in ("mul.hi", "div", "rem", "min", "max")),
        *(f"{op}.b16 %d, %a, %b;" for op in ("and", "or", "xor")), "not.b16 %d, %a;", "cnot.b16 %d, %a;",
        *(f"cvt.u32.u16 %r0, %b; {op} %d, %a, %r0;" for op in ("shl.b16", "shr.u16", "shr.s16")),
        *(f"{op} %d, %a, {n};" for op in ("shl.b16", "shr.u16", "shr.s16") for n in (3, 15, 16, 20)),
    ]  # fmt: skip
    from_short = [
        *(f"mul.wide.{t} %d, %a, %b;" for t in ("u16", "s16")), *(f"mad.wide.{t} %d, %a, %b, 77;" for t in ("u16", "s16")),
        "cvt.s32.s16 %d, %a;", "cvt.u32.u16 %d, %a;", "cvt.s32.s8 %d, %a;", "mov.b32 %d, {%a, %b};", *(f"set.lt.u32.{t} %d, %a, %b;" for t in ("u16", "s16")),
    ]  # fmt: skip
    carries = [
        "add.cc.u32 %r0, %a, %b; addc.u32 %d, %c, %a;", "sub.cc.u32 %r0, %a, %b; subc.u32 %d, %c, %a;",
        "add.cc.s32 %r0, %a, %b; addc.cc.s32 %r0, %c, %a; addc.s32 %d, 0, 0;", "sub.cc.s32 %r0, %a, %b; subc.cc.s32 %r0, %c, %a; subc.s32 %d, 0, 0;",
        "sub.cc.u32 %r0, %a, %b; addc.u32 %d, 0, 0;", "add.cc.u32 %r0, %a, %b; subc.u32 %d, 0, 0;",
        *(f"mad.{p}.cc.{t} %r0, %a, %b, %c; addc.u32 %d, 0, 0;" for t in both for p in ("lo", "hi")),
        *(f"mad.lo.cc.{t} %r0, %a, %b, %c; madc.hi.{t} %d, %a, %b, %c;" for t in both),
        *(f"mad.lo.cc.{t} %r0, %a, %b, %c; madc.{p}.cc.{t} %r0, %a, %c, %b; addc.u32 %d, %r0, 0;" for t in both for p in ("lo", "hi")),
        *(f"add.cc.u64 %rd0, %rd1, %rd2; {op}.cc.u64 %rd0, %rd2, %rd1; addc.u32 %d, 0, 0;" for op in ("addc", "subc")),
    ]  # fmt: skip
    setup = "setp.lt.s32 %p0, %c, 0; mov.b32 {%h0, _}, %a; mov.b32 {%h1, _}, %b;"
    abc = {"a": i32, "b": i32, "c": i32}
    return {
        "integers": Group(abc, tuple(words), setup=setup),
        "carries": Group(abc, tuple(carries), setup="mov.b64 %rd1, {%a, %b}; mov.b64 %rd2, {%b, %c};"),
        "integers to 64 bits": Group(abc, tuple(doubles), 64),
        "integers to 16 bits": Group(abc, tuple(half_words), 16),
        "integer comparisons": Group(abc, tuple(compares), 1, setup=setup),
        "long integers": Group({"a": i64, "b": i64, "c": i32}, tuple(long), 64),
        "long integers to 32 bits": Group({"a": i64, "b": i64}, tuple(from_long)),
        "short integers": Group({"a": i16, "b": i16}, tuple(short), 16),
        "short integers to 32 bits": Group({"a": i16, "b": i16}, tuple(from_short)),
    }


ROUNDINGS = ("rn", "rz", "rm", "rp")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


_BOUNDS = {
    "tanh.approx.f32 %d, %a;": Bound(1 << 13),
    **{f"lg2.approx{z}.f32 %d, %a;": Bound(2, 2.0**-22) for z in ("", ".ftz")},
}
"""From the ISA, where a bound is wider than the usual two units: 2**-11 relative, 2**-22 absolute."""


def _float_rows() -> dict[str, Group]:
    ends = [(z, s) for z in ("", ".ftz") for s in ("", ".sat")]
    arithmetic = [
        *(f"{op}.{r}{z}{s}.f32 %d, %a, %b;" for op in ("add", "sub", "mul") for r in ROUNDINGS for z, s in ends),
        *(f"fma.{r}{z}{s}.f32 %d, %a, %b, %c;" for r in ROUNDINGS for z, s in ends),
        "mad.rn.f32 %d, %a, %b, %c;", "add.f32 %d, %a, %b;", "mul.f32 %d, %a, %b;",
        "neg.f32 %r0, %b; fma.rn.f32 %r1, %a, %a, %b; fma.rm.f32 %d, %a, %a, %r0;",
        "mul.rn.f32 %r0, %a, %b; neg.f32 %r0, %r0; fma.rn.f32 %d, %a, %b, %r0;", "mul.rn.f32 %r0, %a, %b; neg.f32 %r0, %r0; fma.rm.f32 %d, %a, %b, %r0;",
    ]  # fmt: skip
    selection = [
        *(f"{op}{z}{n}{x}.f32 %d, %a, %b;" for op in ("min", "max") for z in ("", ".ftz") for n in ("", ".NaN") for x in ("", ".xorsign.abs")),
        *(f"{op}{z}.f32 %d, %a;" for op in ("abs", "neg") for z in ("", ".ftz")), "copysign.f32 %d, %a, %b;",
        "set.lt.u32.f32 %d, %a, %b;", "set.ltu.ftz.f32.f32 %d, %a, %b;", "set.nan.and.u32.f32 %d, %a, %b, %p0;",
    ]  # fmt: skip
    compares = [
        *(f"setp.{c}{z}.f32 %d, %a, %b;" for c in COMPARISONS for z in ("", ".ftz")), "setp.lt.or.f32 %d|%p1, %a, %b, %p0;", "setp.lt.or.f32 %p1|%d, %a, %b, %p0;",
        *(f"testp.{c}.f32 %d, %a;" for c in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")),
    ]  # fmt: skip
    division = [
        *(f"div.{r}{z}.f32 %d, %a, %b;" for r in ROUNDINGS for z in ("", ".ftz")), *(f"{op}.{r}{z}.f32 %d, %a;" for op in ("rcp", "sqrt") for r in ROUNDINGS for z in ("", ".ftz")),
    ]  # fmt: skip
    approximate = [
        *(f"{op}.approx{z}.f32 %d, %a;" for op in ("rcp", "sqrt", "rsqrt", "ex2", "lg2") for z in ("", ".ftz")), "tanh.approx.f32 %d, %a;",
        "div.approx.f32 %d, %a, %b;", "div.approx.ftz.f32 %d, %a, %b;", "div.full.f32 %d, %a, %b;", "div.full.ftz.f32 %d, %a, %b;",
    ]  # fmt: skip
    trig = [f"{op}.approx{z}.f32 %d, %a;" for op in ("sin", "cos") for z in ("", ".ftz")]
    doubles = [
        *(f"{op}.{r}.f64 %d, %a, %b;" for op in ("add", "sub", "mul", "div") for r in ROUNDINGS), *(f"fma.{r}.f64 %d, %a, %b, %c;" for r in ROUNDINGS),
        *(f"{op}.{r}.f64 %d, %a;" for op in ("rcp", "sqrt") for r in ROUNDINGS), "min.f64 %d, %a, %b;", "max.f64 %d, %a, %b;", "abs.f64 %d, %a;", "neg.f64 %d, %a;", "copysign.f64 %d, %a, %b;",
    ]  # fmt: skip
    f64_compares = [
        *(f"setp.{c}.f64 %d, %a, %b;" for c in COMPARISONS),
        *(f"testp.{c}.f64 %d, %a;" for c in ("finite", "normal", "subnormal", "notanumber")),
    ]
    abc, moderate = (
        {"a": f32, "b": f32, "c": addends},
        lambda rng, n: rng.uniform(-30, 30, n).astype(np.float32).view(np.uint32),
    )
    setup = "setp.lt.f32 %p0, %c, 0f00000000;"
    tiny = [
        *(f"mul.{r}{z}.f32 %d, %a, %b;" for r in ROUNDINGS for z in ("", ".ftz")), *(f"fma.{r}{z}.f32 %d, %a, %b, %c;" for r in ROUNDINGS for z in ("", ".ftz")),
        *(f"div.{r}.ftz.f32 %d, %e, %f;" for r in ROUNDINGS), *(f"add.{r}.ftz.f32 %d, %e, %c;" for r in ROUNDINGS),
    ]  # fmt: skip
    places = {"a": 0x20000000, "b": 0x20000000, "c": 6, "e": 0x00800000, "f": 0x3F800000}
    return {
        "f32 smallest normal": Group({n: near(code, 32) for n, code in places.items()}, tuple(tiny)),
        "f32 arithmetic": Group(abc, tuple(arithmetic)),
        "f32 selection": Group(abc, tuple(selection), setup=setup),
        "f32 comparisons": Group(abc, tuple(compares), 1, setup=setup),
        "f32 division and roots": Group({"a": f32, "b": f32}, tuple(division)),
        "f32 approximations": Group({"a": f32, "b": f32}, tuple(approximate), bound=Bound(2), bounds=_BOUNDS),
        "f32 sine and cosine": Group({"a": moderate}, tuple(trig), bound=Bound(2, 2**-14.7)),
        "f64 arithmetic": Group({"a": f64, "b": f64, "c": f64}, tuple(doubles), 64),
        "f64 comparisons": Group({"a": f64, "b": f64}, tuple(f64_compares), 1),
    }


def _half_rows() -> dict[str, Group]:
    groups = {}
    for name in ("f16", "bf16"):
        saturating = [(z, s) for z in ("", ".ftz") for s in ("", ".sat")] if name == "f16" else [("", "")]
        flushing = ("", ".ftz") if name == "f16" else ("",)
        for suffix, draw, bits in (("", halves(name), 16), ("x2", pairs(name), 32)):
            type_ = name + suffix
            rows = [
                *(f"{op}{z}{s}.{type_} %d, %a, %b;" for op in ("add", "sub", "mul") for z, s in saturating),
                *(f"fma.rn{z}{s}.{type_} %d, %a, %b, %c;" for z, s in saturating),
                *(f"fma.rn{z}.relu.{type_} %d, %a, %b, %c;" for z in flushing),
                *(f"{op}{z}{n}{x}.{type_} %d, %a, %b;" for op in ("min", "max") for z in flushing for n in ("", ".NaN") for x in ("", ".xorsign.abs")),
                *(f"{op}.{type_} %d, %a;" for op in ("abs", "neg")),
            ]  # fmt: skip
            groups[f"{type_} arithmetic"] = Group({"a": draw, "b": draw, "c": draw}, tuple(rows), bits)
            flush = ".ftz" if name == "bf16" else ""
            approximate = [f"tanh.approx.{type_} %d, %a;", f"ex2.approx{flush}.{type_} %d, %a;"]
            groups[f"{type_} approximations"] = Group(
                {"a": draw}, tuple(approximate), bits, bound=Bound(1, dtype="u2")
            )
        if name == "f16":
            tiny = [
                "mul.ftz.f16 %d, %a, %b;",
                "mul.f16 %d, %a, %b;",
                "fma.rn.ftz.f16 %d, %a, %b, %c;",
                "fma.rn.f16 %d, %a, %b, %c;",
                "add.ftz.f16 %d, %e, %c;",
                "sub.ftz.f16 %d, %e, %a;",
            ]
            places = {"a": 0x2000, "b": 0x2000, "c": 6, "e": 0x0400}
            groups["f16 smallest normal"] = Group(
                {n: near(code, 16) for n, code in places.items()}, tuple(tiny), 16
            )
        draw = halves(name)
        compares = [f"setp.{c}.{name} %d, %a, %b;" for c in COMPARISONS]
        groups[f"{name} comparisons"] = Group({"a": draw, "b": draw}, tuple(compares), 1)
    return groups


def _conversion_rows() -> dict[str, Group]:
    whole = ("rni", "rzi", "rmi", "rpi")
    words, longs = ("u8", "s8", "u16", "s16", "u32", "s32"), ("u64", "s64")
    from_f32 = [
        *(f"cvt.{r}{z}.{t}.f32 %d, %a;" for t in words for r in whole for z in ("", ".ftz")), *(f"cvt.{r}{z}{s}.f32.f32 %d, %a;" for r in whole for z in ("", ".ftz") for s in ("", ".sat")),
        "cvt.rzi.sat.u8.f32 %d, %a;", "cvt.sat.f32.f32 %d, %a;", "cvt.ftz.f32.f32 %d, %a;",
        "cvt.rna.tf32.f32 %d, %a;", "cvt.rna.satfinite.tf32.f32 %d, %a;", *(f"cvt.{r}{u}.tf32.f32 %d, %a;" for r in ("rn", "rz") for u in ("", ".relu")),
        *(f"cvt.{r}{u}.{t}.f32 %d, %a, %b;" for t in ("f16x2", "bf16x2") for r in ("rn", "rz") for u in ("", ".relu")),
    ]  # fmt: skip
    to_half = [
        *(f"cvt.{r}{s}.f16.f32 %d, %a;" for r in ROUNDINGS for s in ("", ".ftz", ".sat", ".ftz.sat")), *(f"cvt.{r}.relu.f16.f32 %d, %a;" for r in ("rn", "rz")),
        *(f"cvt.{r}.bf16.f32 %d, %a;" for r in ("rn", "rz", "rm", "rp")), *(f"cvt.{r}.relu.bf16.f32 %d, %a;" for r in ("rn", "rz")),
        *(f"cvt.rn.satfinite{u}.{t}.f32 %d, %a, %b;" for t in ("e4m3x2", "e5m2x2") for u in ("", ".relu")),
        "mov.b32 %r0, %a; cvt.rn.satfinite.e4m3x2.f16x2 %d, %r0;", "cvt.rn.satfinite.e5m2x2.f16x2 %d, %a;", "cvt.rn.satfinite.relu.e4m3x2.f16x2 %d, %a;", "cvt.rn.satfinite.relu.e5m2x2.f16x2 %d, %a;",
    ]  # fmt: skip
    from_f32_long = [
        *(f"cvt.{r}{z}.{t}.f32 %d, %a;" for t in longs for r in whole for z in ("", ".ftz")),
        "cvt.f64.f32 %d, %a;",
        "cvt.ftz.f64.f32 %d, %a;",
        "cvt.sat.f64.f32 %d, %a;",
    ]
    from_half = [
        "cvt.f32.f16 %d, %a;", "cvt.f32.bf16 %d, %a;", "cvt.sat.f32.f16 %d, %a;", "cvt.ftz.f32.f16 %d, %a;", *(f"cvt.{r}.{t}.f16 %d, %a;" for t in words for r in whole), *(f"cvt.{r}.{t}.bf16 %d, %a;" for t in ("s32", "u32") for r in whole), *(f"cvt.{r}.{t}.bf16 %h0, %a; cvt.u32.u16 %d, %h0;" for t in ("u16", "s16") for r in whole),
        *(f"cvt.rn{u}.f16x2.{t} %d, %a;" for t in ("e4m3x2", "e5m2x2") for u in ("", ".relu")),
        *(f"cvt.{r}.f16.f16 %h0, %a; cvt.u32.u16 %d, %h0;" for r in whole), *(f"cvt.{r}.bf16.bf16 %h0, %a; cvt.u32.u16 %d, %h0;" for r in whole),
        "cvt.rn.bf16.f16 %h0, %a; cvt.u32.u16 %d, %h0;", "cvt.rn.f16.bf16 %h0, %a; cvt.u32.u16 %d, %h0;", "cvt.rz.f16.bf16 %h0, %a; cvt.u32.u16 %d, %h0;", "cvt.sat.f16.f16 %h0, %a; cvt.u32.u16 %d, %h0;",
    ]  # fmt: skip
    from_half_long = [
        *(f"cvt.{r}.{t}.{s} %d, %a;" for t in longs for r in ("rni", "rzi") for s in ("f16", "bf16")),
        "cvt.f64.f16 %d, %a;",
        "cvt.f64.bf16 %d, %a;",
    ]
    from_f64 = [
        *(f"cvt.{r}.{t}.f64 %d, %a;" for t in words for r in whole), *(f"cvt.{r}{z}.f32.f64 %d, %a;" for r in ROUNDINGS for z in ("", ".ftz")), "cvt.rn.sat.f32.f64 %d, %a;",
        *(f"cvt.{r}.f16.f64 %h0, %a; cvt.u32.u16 %d, %h0;" for r in ROUNDINGS), "cvt.rn.bf16.f64 %h0, %a; cvt.u32.u16 %d, %h0;",
    ]  # fmt: skip
    from_f64_long = [
        *(f"cvt.{r}.{t}.f64 %d, %a;" for t in longs for r in whole),
        *(f"cvt.{r}.f64.f64 %d, %a;" for r in whole),
    ]
    ab = {"a": f32, "b": f32}
    half = {"a": every_half}
    return {
        "cvt from f32": Group(ab, tuple(from_f32)),
        "cvt from f32 to 16 bits": Group(ab, tuple(to_half), 16),
        "cvt from f32 to 64 bits": Group({"a": f32}, tuple(from_f32_long), 64),
        "cvt from 16 bits": Group(half, tuple(from_half)),
        "cvt from 16 to 64 bits": Group(half, tuple(from_half_long), 64),
        "cvt from f64": Group({"a": f64}, tuple(from_f64)),
        "cvt from f64 to 64 bits": Group({"a": f64}, tuple(from_f64_long), 64),
    }


GROUPS = {**_integer_rows(), **_float_rows(), **_half_rows(), **_conversion_rows()}

"""Integer, logic, selection and float arithmetic, compared with definitions in Python and NumPy."""

from fractions import Fraction

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.isa import floats
from nvfp4_cute.errors import EmulatorError

EDGES = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
]
EDGES64 = [*EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def pairs(bits: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """All combinations of edge cases, and random words."""
    edges = sorted({e & ((1 << bits) - 1) for e in EDGES64})
    a, b = np.meshgrid(np.array(edges, np.uint64), np.array(edges, np.uint64))
    rng = np.random.default_rng(seed)
    words = (
        rng.integers(0, 1 << bits, (2, 64), np.uint64, endpoint=False)
        if bits < 64
        else rng.integers(0, 2**64 - 1, (2, 64), np.uint64)
    )
    dtype = np.dtype(f"u{bits // 8}")
    return np.concatenate([a.ravel(), words[0]]).astype(dtype), np.concatenate([b.ravel(), words[1]]).astype(
        dtype
    )


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGER = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "min": min,
    "max": max,
    "div": lambda x, y: truncated(x, y) if y else -1,
    "rem": lambda x, y: x - truncated(x, y) * y if y else -1,  # all ones on an H200
}


@pytest.mark.sampled(32)
@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("op", INTEGER)
def test_integer_arithmetic(elementwise, op: str, type_: str) -> None:
    bits = int(type_[1:])
    a, b = pairs(bits)
    view = (lambda v: signed(v, bits)) if type_[0] == "s" else (lambda v: v)
    want = [
        INTEGER[op](view(x), view(y)) & ((1 << bits) - 1) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    elementwise(f"{op}.{type_} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype}, {"d": np.array(want, a.dtype)})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_high_product(elementwise, type_: str) -> None:
    bits = int(type_[1:])
    a, b = pairs(bits)
    view = (lambda v: signed(v, bits)) if type_[0] == "s" else (lambda v: v)
    want = [
        view(x) * view(y) >> bits & ((1 << bits) - 1) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    elementwise(
        f"mul.hi.{type_} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype}, {"d": np.array(want, a.dtype)}
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32"])
def test_wide_product_and_sum(elementwise, type_: str) -> None:
    bits = int(type_[1:])
    a, b = pairs(bits)
    wide = np.dtype(f"u{bits // 4}")
    c = np.arange(len(a)).astype(wide) * wide.type(977)
    view = (lambda v: signed(v, bits)) if type_[0] == "s" else (lambda v: v)
    product = [view(x) * view(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    mask = (1 << 2 * bits) - 1
    total = [(p + z) & mask for p, z in zip(product, c.tolist(), strict=True)]
    elementwise(
        f"mul.wide.{type_} %d, %a, %b; mad.wide.{type_} %e, %a, %b, %c;",
        {"a": a, "b": b, "c": c},
        {"d": wide, "e": wide},
        {"d": np.array([p & mask for p in product], wide), "e": np.array(total, wide)},
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("types", ["s32.s32", "u32.u32", "s32.u32", "u32.s32"])
def test_products_of_bytes(elementwise, types: str) -> None:
    a, b = pairs(32)
    c = np.arange(len(a), dtype=np.uint32) * np.uint32(0x3FFFFFFF)
    views = [(lambda v: signed(v, 8)) if type_ == "s32" else (lambda v: v) for type_ in types.split(".")]

    def dot(x: int, y: int) -> int:
        shifts = range(0, 32, 8)
        return sum(views[0](x >> i & 255) * views[1](y >> i & 255) for i in shifts)

    cases = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    want = np.array([(dot(x, y) + z) & 0xFFFFFFFF for x, y, z in cases], np.uint32)
    elementwise(f"dp4a.{types} %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint32}, {"d": want})


def test_saturating_add(elementwise) -> None:
    a, b = pairs(32)
    total = a.view(np.int32).astype(np.int64) + b.view(np.int32)
    want = np.clip(total, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32)
    elementwise("add.sat.s32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32}, {"d": want})


@pytest.mark.parametrize("type_", ["b16", "b32", "b64"])
def test_logic(elementwise, type_: str) -> None:
    a, b = pairs(int(type_[1:]))
    dtype = a.dtype
    body = f"and.{type_} %d, %a, %b; or.{type_} %e, %a, %b; xor.{type_} %f, %a, %b; not.{type_} %g, %a;"
    want = {"d": a & b, "e": a | b, "f": a ^ b, "g": ~a}
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("defg", dtype), want)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_shifts_clamp_their_count(elementwise, type_: str) -> None:
    bits = int(type_[1:])
    a, _ = pairs(bits)
    count = np.resize(np.array([0, 1, bits - 1, bits, bits + 1, 255, 2**32 - 1], np.uint32), len(a))
    mask = (1 << bits) - 1

    def right(x: int, n: int) -> int:
        return (signed(x, bits) if type_[0] == "s" else x) >> min(n, bits) & mask

    cases = list(zip(a.tolist(), count.tolist(), strict=True))
    elementwise(
        f"shl.b{bits} %d, %a, %n; shr.{type_} %e, %a, %n;",
        {"a": a, "n": count},
        {"d": a.dtype, "e": a.dtype},
        {
            "d": np.array([x << n & mask if n < bits else 0 for x, n in cases], a.dtype),
            "e": np.array([right(x, n) for x, n in cases], a.dtype),
        },
    )


def test_funnel_shift(elementwise) -> None:
    a, b = pairs(32)
    n = np.resize(np.arange(0, 70, 3, dtype=np.uint32), len(a))

    def left(x: int, y: int, k: int) -> int:
        return ((y << 32 | x) << k >> 32) & 0xFFFFFFFF

    def right(x: int, y: int, k: int) -> int:
        return (y << 32 | x) >> k & 0xFFFFFFFF

    cases = list(zip(a.tolist(), b.tolist(), n.tolist(), strict=True))
    want = {
        "d": [left(x, y, k & 31) for x, y, k in cases],
        "e": [left(x, y, min(k, 32)) for x, y, k in cases],
        "f": [right(x, y, k & 31) for x, y, k in cases],
        "g": [right(x, y, min(k, 32)) for x, y, k in cases],
    }
    body = "".join(
        f"shf.{way}.{mode}.b32 %{d}, %a, %b, %n;"
        for d, way, mode in [("d", "l", "wrap"), ("e", "l", "clamp"), ("f", "r", "wrap"), ("g", "r", "clamp")]
    )
    arrays = {k: np.array(v, np.uint32) for k, v in want.items()}
    elementwise(body, {"a": a, "b": b, "n": n}, dict.fromkeys("defg", np.uint32), arrays)


def test_bit_fields(elementwise) -> None:
    rng = np.random.default_rng(3)
    a, b = pairs(32)
    pos = rng.integers(0, 40, len(a)).astype(np.uint32)
    size = rng.integers(0, 40, len(a)).astype(np.uint32)

    def extract(x: int, p: int, n: int) -> int:  # the pseudocode of the PTX manual, bit by bit
        bits = [x >> i & 1 for i in range(32)]
        sign = 0 if n == 0 else bits[min(p + n - 1, 31)]
        return sum((bits[p + i] if i < n and p + i <= 31 else sign) << i for i in range(32))

    def insert(x: int, y: int, p: int, n: int) -> int:
        bits = [y >> i & 1 for i in range(32)]
        for i in range(n):
            if p + i <= 31:
                bits[p + i] = x >> i & 1 if i < 32 else 0
        return sum(bit << i for i, bit in enumerate(bits))

    cases = list(zip(a.tolist(), b.tolist(), pos.tolist(), size.tolist(), strict=True))
    want = {
        "d": [x >> p & ((1 << n) - 1) for x, _, p, n in cases],
        "e": [extract(x, p, n) for x, _, p, n in cases],
        "f": [insert(x, y, p, n) for x, y, p, n in cases],
    }
    elementwise(
        "bfe.u32 %d, %a, %p_, %n; bfe.s32 %e, %a, %p_, %n; bfi.b32 %f, %a, %b, %p_, %n;".replace("%p_", "%q"),
        {"a": a, "b": b, "q": pos, "n": size},
        dict.fromkeys("def", np.uint32),
        {k: np.array(v, np.uint32) for k, v in want.items()},
    )


def test_bit_counts(elementwise) -> None:
    a, _ = pairs(32)
    words = a.tolist()

    def find_signed(x: int) -> int:
        y = ~signed(x, 32) if signed(x, 32) < 0 else x
        return y.bit_length() - 1 & 0xFFFFFFFF

    want = {
        "d": [x.bit_count() for x in words],
        "e": [32 - x.bit_length() for x in words],
        "f": [int(f"{x:032b}"[::-1], 2) for x in words],
        "g": [x.bit_length() - 1 & 0xFFFFFFFF for x in words],
        "h": [find_signed(x) for x in words],
        "i": [32 - x.bit_length() if x else 0xFFFFFFFF for x in words],
    }
    elementwise(
        "popc.b32 %d, %a; clz.b32 %e, %a; brev.b32 %f, %a; bfind.u32 %g, %a; bfind.s32 %h, %a; "
        "bfind.shiftamt.u32 %i, %a;",
        {"a": a},
        dict.fromkeys("defghi", np.uint32),
        {k: np.array(v, np.uint32) for k, v in want.items()},
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("table", [0x00, 0x96, 0xCA, 0xE8, 0xFF, 0x1B])
def test_lop3(elementwise, table: int) -> None:
    a, b = pairs(32)
    c = np.roll(a, 5)
    want = np.zeros_like(a)
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        want |= (np.uint32(table) >> index & 1).astype(np.uint32) << np.uint32(bit)
    elementwise(f"lop3.b32 %d, %a, %b, %c, {table};", {"a": a, "b": b, "c": c}, {"d": np.uint32}, {"d": want})


def picked(x: int, y: int, selector: int) -> int:
    """The result of prmt for {y, x}."""
    source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 0xF
        byte = source[nibble & 7]
        out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("selector", [0x3210, 0x7654, 0x5410, 0x0123, 0xBA98, 0xF0E4])
def test_prmt(elementwise, selector: int) -> None:
    a, b = pairs(32)
    want = np.array([picked(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)], np.uint32)
    elementwise(f"prmt.b32 %d, %a, %b, {selector};", {"a": a, "b": b}, {"d": np.uint32}, {"d": want})


def test_prmt_with_a_selector_for_each_lane(elementwise) -> None:
    """Selectors in registers, and a literal table."""
    a, b = pairs(32)
    c, low, high = np.arange(a.size, dtype=np.uint32) * np.uint32(0x9E3779B1), 0x87654321, 0x0F9E2DBC
    lanes = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    want = {
        "d": np.array([picked(*lane) for lane in lanes], np.uint32),
        "e": np.array([picked(low, high, s) for _, _, s in lanes], np.uint32),
        "f": np.array([picked(x, high, s) for x, _, s in lanes], np.uint32),
    }
    body = f"prmt.b32 %d, %a, %b, %c; prmt.b32 %e, {low}, {high}, %c; prmt.b32 %f, %a, {high}, %c;"
    elementwise(body, {"a": a, "b": b, "c": c}, dict.fromkeys("def", np.uint32), want)


def test_moves_pack_and_unpack(elementwise) -> None:
    a, b = pairs(32)
    body = (
        "mov.b64 %rd20, {%a, %b}; mov.b64 {_, %d}, %rd20; mov.b64 {%e, _}, %rd20; "
        "mov.b32 {%rs1, %rs2}, %a; mov.b32 %f, {%rs2, %rs1}; mov.b64 %g, %rd20;"
    )
    want = {"d": b, "e": a, "f": a >> 16 | a << 16, "g": a.astype(np.uint64) | b.astype(np.uint64) << 32}
    outputs = {"d": np.uint32, "e": np.uint32, "f": np.uint32, "g": np.uint64}
    elementwise(body, {"a": a, "b": b}, outputs, want)


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_comparison(elementwise, type_: str) -> None:
    a, b = pairs(int(type_[1:]))
    x, y = (v.view(v.dtype.name.replace("uint", "int")) if type_[0] == "s" else v for v in (a, b))
    names = dict(zip("defghi", COMPARE, strict=True))
    body = "".join(f"setp.{op}.{type_} %{d}, %a, %b;" for d, op in names.items())
    want = {d: eval(f"x {COMPARE[op]} y", {"x": x, "y": y}) for d, op in names.items()}
    elementwise(body, {"a": a, "b": b}, dict.fromkeys(names, bool), want)


def test_setp_combines_and_has_a_second_result(elementwise) -> None:
    a, b = pairs(32)
    body = "setp.ne.b32 %p1, %a, 0; setp.lt.and.u32 %d|%e, %a, %b, %p1; setp.lt.or.u32 %f, %a, %b, !%p1;"
    less, nonzero = a < b, a != 0
    want = {"d": less & nonzero, "e": ~less & nonzero, "f": less | ~nonzero}
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("def", bool), want)


def test_select(elementwise) -> None:
    a, b = pairs(32)
    want = {"d": np.where(a < b, a, b), "e": np.where(a.view(np.int32) >= 0, b, a)}
    body = "setp.lt.u32 %p1, %a, %b; selp.b32 %d, %a, %b, %p1; slct.b32.s32 %e, %b, %a, %a;"
    elementwise(body, {"a": a, "b": b}, {"d": np.uint32, "e": np.uint32}, want)


# ---- floats ---------------------------------------------------------------------------------------

SPECIAL32 = np.array(
    [0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
     0x7FC00000, 0x34000000, 0x33800000, 0xB3800001, 0x4B800000],
    np.uint32,
)  # fmt: skip


def float_pairs(count: int = 128, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bit patterns of f32 triples: all pairs of special values, and random values of similar size."""
    rng = np.random.default_rng(seed)
    a, b = (v.ravel() for v in np.meshgrid(SPECIAL32, SPECIAL32))
    random = rng.integers(0x3F000000, 0x41000000, (3, count)).astype(np.uint32)
    random ^= (rng.integers(0, 2, (3, count)) << 31).astype(np.uint32)
    a, b = np.concatenate([a, random[0]]), np.concatenate([b, random[1]])
    return a, b, np.concatenate([np.roll(SPECIAL32, 3).repeat(len(SPECIAL32)), random[2]])


def round_fraction(value: Fraction, mode: str) -> np.float32:
    """Rounds a fraction to float32 by definition, between its neighbours on the grid of its binade."""
    if value == 0:
        return np.float32(0)
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - 23)
    low = magnitude // step
    rest = magnitude / step - low
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1),
        "rz": False,
        "rm": value < 0 and rest > 0,
        "rp": value > 0 and rest > 0,
    }[mode]
    result = (low + up) * step
    if result > Fraction(float(np.finfo(np.float32).max)):
        down = mode == "rz" or (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
        return np.float32(np.sign(float(value))) * (np.finfo(np.float32).max if down else np.float32(np.inf))
    return np.float32(np.copysign(float(result), 1.0 if value > 0 else -1.0))


FLOAT = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", FLOAT)
def test_float_rounding(elementwise, op: str, mode: str) -> None:
    a, b, _ = float_pairs()
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(all="ignore"):
        plain = FLOAT[op](x, y)
    want = plain.copy()
    for i in np.flatnonzero(np.isfinite(x) & np.isfinite(y)):
        exact = FLOAT[op](Fraction(float(x[i])), Fraction(float(y[i])))
        if exact:
            want[i] = round_fraction(exact, mode)
        elif mode == "rm" and op != "mul" and x[i] != 0:
            want[i] = -0.0  # x - x is -0 only in this mode
    bits = np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32)).astype(np.uint32)
    zero = (want == 0) & (x == 0) & (y == 0)  # signs of zero sums of zeros are checked for rn only
    bits, keep = bits, ~zero if mode != "rn" else np.ones(len(a), bool)
    elementwise(
        f"{op}.{mode}.f32 %d, %a, %b;", {"a": a[keep], "b": b[keep]}, {"d": np.uint32}, {"d": bits[keep]}
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_rounds_once(elementwise, mode: str) -> None:
    a, b, c = float_pairs(512)
    # Products that nearly cancel, and sums just off a tie, where two roundings differ from one.
    a = np.concatenate([a, np.full(64, 0x3F800001, np.uint32)])
    b = np.concatenate([b, np.arange(0x3F800001, 0x3F800041, dtype=np.uint32)])
    c = np.concatenate(
        [c, np.resize(np.array([0x33800000, 0x4B800000, 0xBF800000, 0x2F000000], np.uint32), 64)]
    )
    x, y, z = (v.view(np.float32) for v in (a, b, c))
    finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    exact = [
        Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        for p, q, r in zip(x[finite], y[finite], z[finite], strict=True)
    ]
    nonzero = np.array([e != 0 for e in exact])
    want = np.array([round_fraction(e, mode) for e in exact if e], np.float32).view(np.uint32)
    inputs = {"a": a[finite][nonzero], "b": b[finite][nonzero], "c": c[finite][nonzero]}
    elementwise(f"fma.{mode}.f32 %d, %a, %b, %c;", inputs, {"d": np.uint32}, {"d": want})


def test_division_and_roots(elementwise) -> None:
    a, b, _ = float_pairs()
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(all="ignore"):
        values = {
            "d": x / y,
            "e": np.sqrt(x),
            "f": np.float32(1) / y,
            "g": (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
        }
    want = {
        k: np.where(np.isnan(v), 0x7FFFFFFF, v.view(np.uint32)).astype(np.uint32) for k, v in values.items()
    }
    body = "div.rn.f32 %d, %a, %b; sqrt.rn.f32 %e, %a; rcp.rn.f32 %f, %b; rsqrt.approx.f32 %g, %a;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("defg", np.uint32), want)


def test_approximate_functions_are_correctly_rounded(elementwise) -> None:
    x = np.linspace(-6, 6, 256, dtype=np.float32)
    wide = x.astype(np.float64)
    values = {"d": np.exp2(wide), "e": np.tanh(wide), "f": np.log2(np.abs(wide))}
    want = {k: v.astype(np.float32).view(np.uint32) for k, v in values.items()}
    body = "ex2.approx.ftz.f32 %d, %a; tanh.approx.f32 %e, %a; abs.f32 %r1, %a; lg2.approx.f32 %f, %r1;"
    elementwise(body, {"a": x.view(np.uint32)}, dict.fromkeys("def", np.uint32), want)


def test_flush_and_saturate(elementwise) -> None:
    a, b, _ = float_pairs()
    x, y = a.view(np.float32), b.view(np.float32)

    def flushed(v: np.ndarray) -> np.ndarray:
        return np.where(np.abs(v) < 2.0**-126, np.copysign(np.float32(0), v), v)

    with np.errstate(all="ignore"):
        product = flushed(flushed(x) * flushed(y))
        total = x + y
        clamped = np.where(np.isnan(total), 0, np.clip(total, 0, 1)).astype(np.float32)
    want = {"d": np.where(np.isnan(product), 0x7FFFFFFF, product.view(np.uint32)).astype(np.uint32)}
    elementwise("mul.ftz.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32}, want)
    got = {"d": clamped.view(np.uint32) & 0x7FFFFFFF}
    elementwise(
        "add.sat.f32 %e, %a, %b; and.b32 %d, %e, 0x7FFFFFFF;",
        {"a": a, "b": b},
        {"d": np.uint32, "e": np.uint32},
        got,
    )


def test_float_min_max(elementwise) -> None:
    a, b, _ = float_pairs()
    x, y = a.view(np.float32), b.view(np.float32)

    def pick(p: np.float32, q: np.float32, smaller: bool) -> np.float32:
        if np.isnan(p) or np.isnan(q):
            return q if np.isnan(p) else p
        key = (float(p), not np.signbit(p)), (float(q), not np.signbit(q))  # -0 sorts below +0
        return (p if key[0] <= key[1] else q) if smaller else (p if key[0] >= key[1] else q)

    low = np.array([pick(p, q, True) for p, q in zip(x, y, strict=True)], np.float32)
    high = np.array([pick(p, q, False) for p, q in zip(x, y, strict=True)], np.float32)
    any_nan = np.isnan(x) | np.isnan(y)
    canonical = lambda v: np.where(np.isnan(v), 0x7FFFFFFF, v.view(np.uint32)).astype(np.uint32)
    want = {
        "d": canonical(low),
        "e": canonical(high),
        "f": canonical(np.where(any_nan, np.float32(np.nan), high)),
    }
    body = "min.f32 %d, %a, %b; max.f32 %e, %a, %b; max.NaN.f32 %f, %a, %b;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("def", np.uint32), want)


def test_float_min_max_of_magnitudes_and_of_three(elementwise) -> None:
    rng = np.random.default_rng(3)
    x, y, z = (rng.choice([-3.0, -2.0, -0.5, 0.25, 1.0, 4.0, np.nan], (3, 200))).astype(np.float32)
    nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    top = np.fmax(np.fmax(x, y), z)
    magnitude = np.fmin(np.fmin(np.abs(x), np.abs(y)), np.abs(z))
    both = np.fmax(np.abs(x), np.abs(y))
    signed = np.where(np.signbit(x) != np.signbit(y), -both, both)
    canonical = lambda v: np.where(np.isnan(v), 0x7FFFFFFF, v.view(np.uint32)).astype(np.uint32)
    known = ~np.isnan(x) & ~np.isnan(y)  # PTX does not define the sign of a NaN
    want = {
        "d": canonical(top),
        "e": canonical(np.where(nan, np.float32(np.nan), top)),
        "f": canonical(magnitude),
        "g": np.where(known, canonical(signed), 0),
    }
    body = """max.f32 %d, %a, %b, %c; max.NaN.f32 %e, %a, %b, %c; min.abs.f32 %f, %a, %b, %c;
    max.xorsign.abs.f32 %g, %a, %b; setp.num.f32 %p1, %a, %b; @!%p1 mov.b32 %g, 0;"""
    inputs = {"a": x.view(np.uint32), "b": y.view(np.uint32), "c": z.view(np.uint32)}
    elementwise(body, inputs, dict.fromkeys("defg", np.uint32), want)


def test_a_part_of_a_register_that_nobody_wrote_may_be_moved() -> None:
    """Compilers leave undefined values that they do not use in packed pairs. Their moves are not errors."""
    text = """.version 8.8
.target sm_100a
.visible .entry k(.param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.b64 %rd1, [out];
mov.b64 {_, %r1}, %rd5;
mov.b64 %rd2, {7, %r1};
mov.b64 {%r2, _}, %rd2;
st.global.b32 [%rd1], %r2; ret; }"""
    out = np.zeros(1, np.uint32)
    run_ptx(text, args=[out])
    assert out.tolist() == [7]


def test_sign_operations(elementwise) -> None:
    """abs and neg make NaN canonical, in each half of a pair; copysign keeps its payload."""
    a, b, _ = float_pairs()
    a = np.concatenate([a, a[:4]])
    b = np.concatenate([b, np.array([0x7F800001, 0xFFC12345, 0x7E017C00, 0xFC01FE00], np.uint32)])
    a[-4:] = b[-4:]
    nan = (a & 0x7FFFFFFF) > 0x7F800000
    halves = a.view(np.uint16)
    want = {
        "d": np.where(nan, 0x7FFFFFFF, a & 0x7FFFFFFF),
        "e": np.where(nan, 0x7FFFFFFF, a ^ 0x80000000),
        "f": (a & 0x80000000) | (b & 0x7FFFFFFF),
        "g": np.where((halves & 0x7FFF) > 0x7C00, 0x7FFF, halves ^ 0x8000).astype(np.uint16).view(np.uint32),
    }
    body = "abs.f32 %d, %a; neg.f32 %e, %a; copysign.f32 %f, %a, %b; neg.f16x2 %g, %a;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("defg", np.uint32), want)


UNORDERED = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y),
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y),
    "neu": lambda x, y: x != y,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~np.isnan(x) & ~np.isnan(y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("op", UNORDERED)
def test_float_comparison(elementwise, op: str) -> None:
    a, b, _ = float_pairs(32)
    want = UNORDERED[op](a.view(np.float32), b.view(np.float32))
    elementwise(f"setp.{op}.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": bool}, {"d": want})


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_packed_f32x2(elementwise, op: str) -> None:
    a, b, c = float_pairs(256)
    x, y, z = (v.view(np.float32) for v in (a, b, c))
    keep = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    a, b, c = (v[keep][: keep.sum() // 2 * 2] for v in (a, b, c))
    x, y, z = (v.view(np.float32) for v in (a, b, c))
    with np.errstate(all="ignore"):
        result = {"add": x + y, "mul": x * y, "fma": None}[op]
    if result is None:
        result = np.array(
            [np.float32(0) if (e := Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))) == 0 else round_fraction(e, "rn")
             for p, q, r in zip(x, y, z, strict=True)], np.float32
        )  # fmt: skip
        nonzero = (result.reshape(-1, 2) != 0).all(1)
    else:
        nonzero = np.ones(len(x) // 2, bool)
    pack = lambda v: v.view(np.uint64)[nonzero]
    third = ", %c" if op == "fma" else ""
    inputs = {"a": pack(a), "b": pack(b), "c": pack(c)}
    elementwise(f"{op}.rn.f32x2 %d, %a, %b{third};", inputs, {"d": np.uint64}, {"d": pack(result)})


@pytest.mark.sampled(10)
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
@pytest.mark.parametrize("type_", ["f16x2", "bf16x2", "f16", "bf16"])
def test_narrow_floats_round_correctly(elementwise, op: str, type_: str) -> None:
    """Compares with exact fractions that are rounded once to the format."""
    rng = np.random.default_rng(5)
    name, packed = type_.removesuffix("x2"), type_.endswith("x2")
    base = 0x3C00 if name == "f16" else 0x3F80
    words = (
        base + rng.integers(-0x600 if name == "f16" else -0x100, 0x600 if name == "f16" else 0x100, (3, 256))
    ).astype(np.uint16)
    words ^= (rng.integers(0, 2, (3, 256)) << 15).astype(np.uint16)
    values = [floats.decode(w, name) for w in words]
    exact = {
        "add": lambda p, q, r: p + q,
        "mul": lambda p, q, r: p * q,
        "fma": lambda p, q, r: p * q + r,
    }[op]
    fractions = [exact(*(Fraction(float(v)) for v in t)) for t in zip(*values, strict=True)]
    f = floats.FORMATS[name]

    def code(value: Fraction) -> int:
        magnitude, e = abs(value), f.emin
        while magnitude >= Fraction(2) ** (e + 1):
            e += 1
        q = magnitude / Fraction(2) ** (e - f.mantissa_bits)
        return (e - f.emin << f.mantissa_bits) + round(q) | (f.sign if value < 0 else 0)

    want = np.array([code(v) for v in fractions], np.uint16)
    third = ", %c" if op == "fma" else ""
    rounding = ".rn" if op == "fma" else ""
    view = (lambda v: v.view(np.uint32)) if packed else (lambda v: v)
    keep = np.array([v != 0 for v in fractions])
    assert keep.all() or op != "mul"
    if not keep.all():  # the sign of an exact zero follows its own rule; skip these elements
        pairs_ok = keep.reshape(-1, 2).all(1) if packed else keep
    else:
        pairs_ok = np.ones(128 if packed else 256, bool)
    inputs = {k: view(np.ascontiguousarray(w))[pairs_ok] for k, w in zip("abc", words, strict=True)}
    result = view(want)[pairs_ok]
    elementwise(f"{op}{rounding}.{type_} %d, %a, %b{third};", inputs, {"d": result.dtype}, {"d": result})


def test_f64(elementwise) -> None:
    rng = np.random.default_rng(6)
    x, y, z = rng.normal(size=(3, 64))
    exact = [Fraction(p) * Fraction(q) + Fraction(r) for p, q, r in zip(x, y, z, strict=True)]
    want = {"d": x + y, "e": x * y, "f": x / y, "g": np.array([e.numerator / e.denominator for e in exact])}
    body = "add.f64 %d, %a, %b; mul.rn.f64 %e, %a, %b; div.rn.f64 %f, %a, %b; fma.rn.f64 %g, %a, %b, %c;"
    inputs = {k: v.view(np.uint64) for k, v in zip("abc", (x, y, z), strict=True)}
    elementwise(
        body, inputs, dict.fromkeys("defg", np.uint64), {k: v.view(np.uint64) for k, v in want.items()}
    )


@pytest.mark.parametrize(
    "text, named",
    [
        ("add.u32.wrong %r1, %r2, %r3;", ".wrong"),
        ("frobnicate.b32 %r1, %r2;", "frobnicate"),
        ("add.u64 %rd1, %rd2, %r3;", "32 bits wide"),
        ("mul.u32 %r1, %r2, %r3;", ".lo, .hi or .wide"),
    ],
)
def test_what_is_not_modelled_is_refused_when_built(ptx_kernel, text: str, named: str) -> None:
    with pytest.raises(EmulatorError, match="PTX line") as caught:
        run_ptx(ptx_kernel(text), args=[0], checked=False)
    assert named in str(caught.value)
    assert text.rstrip(";") in str(caught.value)


@pytest.mark.parametrize("mask", [0xFFFF0000, 0xFFFFE000])
def test_narrow_products_need_one_rounding(mask):
    """bf16 and f16 mantissas, with addends of all magnitudes and around the product's last place: the sum rounded once."""
    rng, n = np.random.default_rng(mask), 40000
    a, b = (
        (rng.integers(0, 1 << 32, n, dtype=np.uint32) & np.uint32(mask)).view(np.float32) for _ in range(2)
    )
    anywhere = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        exponents = np.clip(np.frexp(a.astype(np.float64) * b)[1], -148, 127) + rng.integers(-54, 7, n)
        near = np.ldexp(rng.choice([-1.0, 1.0], n) * rng.integers(1 << 23, 1 << 24, n), exponents)
        for c in (anywhere, near.astype(np.float32)):
            narrow, whole = floats.fma_narrow(a, b, c), floats.fma_f32(a, b, c)
            assert np.array_equal(narrow, whole, equal_nan=True)
            assert np.array_equal(np.signbit(narrow[narrow == 0]), np.signbit(whole[whole == 0]))

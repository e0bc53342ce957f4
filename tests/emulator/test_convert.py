"""cvt compared with definitions in this file: value tables, exact fractions, and nearest-neighbour searches."""

import math
from fractions import Fraction

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.isa import convert
from nvfp4_cute.errors import EmulatorError

ALL16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a code, without infinities and NaNs."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


SMALL = {
    "e4m3": {c: minifloat(c, 4, 3, 7) for c in range(256) if c & 0x7F != 0x7F},
    "e5m2": {c: minifloat(c, 5, 2, 15) for c in range(256) if c & 0x7F < 0x7C},
    "e2m1": {c: minifloat(c, 2, 1, 1) for c in range(16)},
    "e2m3": {c: minifloat(c, 2, 3, 1) for c in range(64)},
    "e3m2": {c: minifloat(c, 3, 2, 3) for c in range(64)},
}
"""Finite codes of the narrow formats and their values."""


def nearest_code(value: float, name: str) -> int:
    """Round to nearest, ties to the even code, saturating; signed zeros kept."""
    table = SMALL[name]
    sign = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 8, "e2m3": 32, "e3m2": 32}[name]
    codes = [c for c in table if c < sign]
    if np.isnan(value):
        return 0x7F if name in ("e4m3", "e5m2") else codes[-1]
    target = min(abs(value), table[codes[-1]])
    above = next(c for c in codes if table[c] >= target)
    near = codes[max(above - 1, 0) : above + 1]
    code = min(near, key=lambda c: (abs(Fraction(table[c]) - Fraction(target)), c & 1))
    return code | (sign if np.signbit(value) else 0)


def f32_samples(name: str) -> np.ndarray:
    """Every value of a format, every midpoint with its f32 neighbours, special values, and random values."""
    values = sorted({abs(v) for v in SMALL[name].values()})
    middles = [(p + q) / 2 for p, q in zip(values, values[1:], strict=False)]
    base = np.array(
        values + middles + [values[-1] * 1.06, values[-1] * 1.07, values[-1] * 2, 1e30], np.float32
    )
    near = np.concatenate([base, np.nextafter(base, np.float32(0)), np.nextafter(base, np.float32(np.inf))])
    special = np.array([0, np.inf, np.nan, 1e-45, 1e-30], np.float32)
    random = np.random.default_rng(0).normal(0, values[-1] / 3, 64).astype(np.float32)
    both = np.concatenate([near, special, random])
    return np.concatenate([both, -both])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SMALL)
def test_f32_to_narrow_pairs(elementwise, name: str) -> None:
    high = f32_samples(name)
    low = np.roll(high, 7)
    width = 4 if name == "e2m1" else 8
    one = [nearest_code(float(v), name) for v in high]
    two = np.roll(np.array(one), 7)
    word = (np.array(one) << width | two).astype(np.uint16)
    declared = ".reg .b8 %t; " if name == "e2m1" else ""
    convert = f"cvt.rn.satfinite.{name}x2.f32 %t, %a, %b; cvt.u16.u8 %d, %t;"
    if name != "e2m1":
        convert = f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;"
    inputs = {"a": high.view(np.uint32), "b": low.view(np.uint32)}
    elementwise(declared + convert, inputs, {"d": np.uint16}, {"d": word})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SMALL)
def test_narrow_pairs_to_f16x2_all_codes(elementwise, name: str) -> None:
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(name, 8)
    count = 1 << bits
    low, high = (v.ravel() for v in np.meshgrid(np.arange(count), np.arange(count)))
    table = np.full(count, np.nan)
    for code, value in SMALL[name].items():
        table[code] = value
    if name == "e5m2":
        table[0x7C], table[0xFC] = np.inf, -np.inf
    half = table.astype(np.float16).view(np.uint16)
    half[np.isnan(table)] = 0x7FFF
    want = half[high].astype(np.uint32) << 16 | half[low]
    keep = slice(None, None, 7) if count == 256 else slice(None)
    container = 4 if bits == 4 else 8
    words = (high << container | low).astype(np.uint16)[keep]
    body = ".reg .b8 %t; cvt.u8.u16 %t, %a; cvt.rn.f16x2.e2m1x2 %d, %t;"
    if name != "e2m1":
        body = f"cvt.rn.f16x2.{name}x2 %d, %a;"
    elementwise(body, {"a": words}, {"d": np.uint32}, {"d": want[keep]})


def test_ue8m0_to_bf16x2_all_codes(elementwise) -> None:
    codes = np.arange(256, dtype=np.uint16)
    values = np.array([2.0 ** min(int(c) - 127, 127) for c in codes], np.float64)
    bf16 = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)
    bf16[0], bf16[255] = 0x0040, 0x7FFF
    elementwise(
        "cvt.rn.bf16x2.ue8m0x2 %d, %a;", {"a": codes << 8 | codes}, {"d": np.uint32}, {"d": bf16 << 16 | bf16}
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_f32_to_ue8m0(elementwise, mode: str) -> None:
    powers = np.array([2.0**e for e in range(-126, 128)], np.float32)
    values = np.concatenate(
        [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    )
    values = np.concatenate([values, -values[:9], np.array([0, np.inf, np.nan], np.float32)])

    def code(v: float) -> int:
        if np.isnan(v):
            return 255
        if np.isinf(v):
            return 254
        if v == 0:
            return 0
        exponent = max(math.frexp(v)[1] - 1, -127)
        exact = Fraction(2) ** exponent >= Fraction(abs(v))
        return min(exponent + (mode == "rp" and not exact), 127) + 127

    want = np.array([code(float(v)) for v in values], np.uint16)
    body = f"cvt.{mode}.satfinite.ue8m0x2.f32 %d, %a, %a;"
    elementwise(body, {"a": values.view(np.uint32)}, {"d": np.uint16}, {"d": want << 8 | want})


def test_f16_and_bf16_widen_exactly_all_codes(elementwise) -> None:
    half = ALL16.view(np.float16).astype(np.float32)
    want = {
        "d": np.where(np.isnan(half), 0x7FFFFFFF, half.view(np.uint32)).astype(np.uint32),
        "e": ALL16.astype(np.uint32) << 16,  # NaN keeps its payload
    }
    body = "cvt.f32.f16 %d, %a; cvt.f32.bf16 %e, %a;"
    elementwise(body, {"a": ALL16}, {"d": np.uint32, "e": np.uint32}, want)


def rounded_code(value: float, mantissa_bits: int, emin: int, emax: int, mode: str) -> int:
    """Code of a finite f32 value in a format with infinities, from exact fractions."""
    magnitude, sign = Fraction(abs(value)), bool(np.signbit(value))
    exponent = max(math.frexp(value)[1] - 1, emin) if value else emin
    q = magnitude / Fraction(2) ** (exponent - mantissa_bits)
    low, rest = int(q), q - int(q)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low & 1),
        "rz": False,
        "rm": sign and rest > 0,
        "rp": not sign and rest > 0,
    }[mode]
    code = (exponent - emin << mantissa_bits) + low + up
    infinity = emax - emin + 2 << mantissa_bits
    if code >= infinity:
        stays = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        code = infinity - 1 if stays else infinity
    return code | (sign << (mantissa_bits + (5 if emax == 15 else 8)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_f32_to_16_bits(elementwise, name: str, mode: str) -> None:
    mantissa, emin, emax = (10, -14, 15) if name == "f16" else (7, -126, 127)
    words = ALL16[::37].astype(np.uint32)
    grid = (
        (words << 16)
        if name == "bf16"
        else words.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    )
    half = np.uint32(1 << (22 - mantissa))
    samples = np.concatenate([grid, grid + half, grid + half - 1, grid + half + 1, grid + 1])
    values = samples.view(np.float32)
    samples = samples[np.isfinite(values)]
    one = np.array(
        [rounded_code(float(v), mantissa, emin, emax, mode) for v in samples.view(np.float32)], np.uint32
    )
    other = np.roll(samples, 11)
    two = np.roll(one, 11)
    body = f"cvt.{mode}.{name}x2.f32 %d, %a, %b; cvt.{mode}.{name}.f32 %e, %a;"
    want = {"d": one << 16 | two, "e": one.astype(np.uint16)}
    elementwise(body, {"a": samples, "b": other}, {"d": np.uint32, "e": np.uint16}, want)


def test_pack_specials_relu_and_satfinite(elementwise) -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -1.5, 1.5, 7e4, -7e4, -0.0], np.float32)
    bits = values.view(np.uint32)
    want = {
        "d": [0x7FFF, 0x7FFF, 0x7C00, 0xFC00, 0xBE00, 0x3E00, 0x7C00, 0xFC00, 0x8000],
        "e": [0x7FFF, 0x7FFF, 0x7C00, 0x0000, 0x0000, 0x3E00, 0x7C00, 0x0000, 0x0000],
        "f": [0x7FFF, 0x7FFF, 0x7BFF, 0xFBFF, 0xBE00, 0x3E00, 0x7BFF, 0xFBFF, 0x8000],
    }
    body = "cvt.rn.f16.f32 %d, %a; cvt.rn.relu.f16.f32 %e, %a; cvt.rn.satfinite.f16.f32 %f, %a;"
    elementwise(
        body,
        {"a": bits},
        dict.fromkeys("def", np.uint16),
        {k: np.array(v, np.uint16) for k, v in want.items()},
    )


def test_tf32_rounds_half_away(elementwise) -> None:
    words = np.random.default_rng(1).integers(0, 0x7F000000, 256).astype(np.uint32)
    words[:8] = [0x3F801000, 0x3F800FFF, 0x3F803000, 0xBF801000, 0, 0x3F800000, 0x7F7FE000, 0x00001000]
    away = (words + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    elementwise("cvt.rna.tf32.f32 %d, %a;", {"a": words}, {"d": np.uint32}, {"d": away})


RANGES = {"u8": (0, 255), "s8": (-128, 127), "u16": (0, 65535), "s16": (-32768, 32767), "u32": (0, 2**32 - 1),
          "s32": (-(2**31), 2**31 - 1), "u64": (0, 2**64 - 1), "s64": (-(2**63), 2**63 - 1)}  # fmt: skip


@pytest.mark.sampled(22)
@pytest.mark.parametrize("dest", RANGES)
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(elementwise, mode: str, dest: str) -> None:
    whole = [
        0,
        0.5,
        1.5,
        2.5,
        3.49,
        126.5,
        127.5,
        254.5,
        255.5,
        32767.5,
        65535.5,
        2147483520,
        4294967040,
        1e10,
        1e20,
    ]
    values = np.array(whole + [-v for v in whole], np.float32)
    low, high = RANGES[dest]
    function = {"rni": round, "rzi": int, "rmi": lambda f: f.__floor__(), "rpi": lambda f: f.__ceil__()}[mode]
    want = [min(max(function(Fraction(float(v))), low), high) for v in values]
    size = max(int(dest[1:]) // 8, 2)
    dtype = np.dtype(f"u{size}")
    mask = (1 << 8 * size) - 1
    words = np.array([w & mask for w in want], dtype)
    elementwise(f"cvt.{mode}.{dest}.f32 %d, %a;", {"a": values.view(np.uint32)}, {"d": dtype}, {"d": words})


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64"])
def test_integer_to_f32(elementwise, source: str, mode: str) -> None:
    size = int(source[1:]) // 8
    dtype = np.dtype(f"u{size}")
    edges = [0, 1, 2**24 - 1, 2**24 + 1, 2**24 + 3, 2**25 + 2, 2**31 - 1, 2**31, 2**32 - 1]
    edges += [2**53 + 1, 2**54 + 2**30 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**40 + 2**16, 2**40 + 2**16 + 1]
    words = np.array([e & ((1 << 8 * size) - 1) for e in edges], dtype)
    numbers = words.view(dtype.name.replace("uint", "int")) if source[0] == "s" else words

    def convert(n: int) -> int:
        if n == 0:
            return 0
        magnitude = abs(n)
        exponent = magnitude.bit_length() - 1
        q = Fraction(magnitude) / Fraction(2) ** (exponent - 23)
        low, rest = int(q), q - int(q)
        up = {"rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low & 1), "rz": False,
              "rm": n < 0 and rest > 0, "rp": n > 0 and rest > 0}[mode]  # fmt: skip
        return ((exponent + 126) << 23) + low + up | (0x80000000 if n < 0 else 0)

    want = np.array([convert(int(n)) for n in numbers], np.uint32)
    elementwise(f"cvt.{mode}.f32.{source} %d, %a;", {"a": words}, {"d": np.uint32}, {"d": want})


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("dest", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_to_integer(elementwise, dest: str, source: str) -> None:
    bits, out = int(source[1:]), int(dest[1:])
    words = np.array(
        [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1],
        np.uint64,
    )
    held = words.astype(f"u{max(bits // 8, 2)}")
    numbers = [int(w) & ((1 << bits) - 1) for w in held]
    if source[0] == "s":
        numbers = [n - (1 << bits) if n >> (bits - 1) else n for n in numbers]
    low, high = RANGES[dest]
    mask = (1 << out) - 1
    dtype = np.dtype(f"u{out // 8}")
    want = {
        "d": np.array([n & mask for n in numbers], dtype),
        "e": np.array([min(max(n, low), high) & mask for n in numbers], dtype),
    }
    body = f"cvt.{dest}.{source} %d, %a; cvt.sat.{dest}.{source} %e, %a;"
    elementwise(body, {"a": held}, {"d": dtype, "e": dtype}, want)


def test_f64_and_round_to_integral(elementwise) -> None:
    values = np.array([0.5, 1.5, -2.5, 1e10 + 0.7, -0.3, 3.0], np.float64)
    want = {"d": values.astype(np.float32).view(np.uint32), "e": np.trunc(values).view(np.uint64)}
    body = "cvt.rn.f32.f64 %d, %a; cvt.rzi.f64.f64 %e, %a;"
    elementwise(body, {"a": values.view(np.uint64)}, {"d": np.uint32, "e": np.uint64}, want)


@pytest.mark.parametrize(
    "text", ["cvt.rn.f32.f32.u8 %r1, %r2;", "cvt.u32.f32 %r1, %r2;", "cvt.rn.bogus.f16.f32 %rs1, %r2;"]
)
def test_refuses_unknown_forms(ptx_kernel, text: str) -> None:
    with pytest.raises(EmulatorError, match="not modelled"):
        run_ptx(ptx_kernel(text), args=[0], checked=False)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize(
    ("name", "rounding"),
    [("e4m3", "rn"), ("e5m2", "rn"), ("e2m1", "rn"), ("e2m3", "rn"), ("e3m2", "rn"), ("ue8m0", "rz"), ("ue8m0", "rp")],
)  # fmt: skip
def test_steps_are_the_conversion(name, rounding, satfinite, relu):
    """Around every step, at every special value and at random patterns, the steps agree with the arithmetic."""
    firsts, codes = convert._steps(name, rounding, satfinite, relu)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF], np.uint32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 20000, np.uint32)
    patterns = np.concatenate([firsts - np.uint32(1), firsts, firsts + np.uint32(1), special, random])
    with np.errstate(all="ignore"):
        values = convert._clamp(patterns.view(np.float32).astype(np.float64), False, relu)
        want = convert._packed_encoder(name, rounding, satfinite)(values)
    np.testing.assert_array_equal(codes.take(firsts.searchsorted(patterns, "right") - 1), want)

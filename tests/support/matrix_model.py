"""A slow model of the matrix instructions for tests. It computes one element at a time in rational numbers."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

FORMATS = {  # exponent bits, mantissa bits, bias, what the top exponent means
    "f32": (8, 23, 127, "ieee"),
    "tf32": (8, 10, 127, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "f16": (5, 10, 15, "ieee"),
    "e5m2": (5, 2, 15, "ieee"),
    "e4m3": (4, 3, 7, "one nan"),
    "e3m2": (3, 2, 3, "finite"),
    "e2m3": (2, 3, 1, "finite"),
    "e2m1": (2, 1, 1, "finite"),
    "ue4m3": (4, 3, 7, "one nan"),
}
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "f32": 32, "s32": 32} | dict.fromkeys(
    ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), 8
)
"""Bits of the container of one element."""

Term = tuple[Fraction, int]


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def decode(code: int, fmt: str) -> Term | float:
    """Significand and exponent of a finite code (zero has exponent -126), or an infinity, or NaN."""
    if fmt == "ue8m0":
        return float("nan") if code == 255 else (Fraction(1), code - 127)
    if fmt == "tf32":
        code >>= 13
    exponent_bits, mantissa_bits, bias, specials = FORMATS[fmt]
    mantissa = code & (1 << mantissa_bits) - 1
    field = code >> mantissa_bits & (1 << exponent_bits) - 1
    negative = code >> (mantissa_bits + exponent_bits) & 1 and not fmt.startswith("u")
    top = field == (1 << exponent_bits) - 1
    if top and specials == "one nan" and mantissa == (1 << mantissa_bits) - 1:
        return float("nan")
    if top and specials == "ieee":
        return float("nan") if mantissa else float("-inf" if negative else "inf")
    significand = Fraction(mantissa, 1 << mantissa_bits) + (1 if field else 0)
    if not significand:
        return Fraction(0), -126
    return -significand if negative else significand, max(field, 1) - bias


def value(term: Term | float) -> Fraction | float:
    return term if isinstance(term, float) else term[0] * power(term[1])


def truncate(x: Fraction) -> int:
    return abs(x.numerator) // x.denominator * (-1 if x < 0 else 1)


def round_even(x: Fraction) -> int:
    return round(x)


def encode(x: Fraction, d: str, mantissa_bits: int | None = None) -> int:
    """Bits of the nearest float16, or of the float32 toward zero (with `mantissa_bits` mantissa bits if given)."""
    exponent_bits, full, bias, _ = FORMATS[d]
    kept = full if mantissa_bits is None else mantissa_bits
    if x == 0:
        return 0
    sign = 1 << (exponent_bits + full) if x < 0 else 0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < power(exponent)), 1 - bias)
    units = size / power(exponent - kept)
    steps = round_even(units) if d == "f16" else truncate(units)
    if steps == 0:
        return 0
    code = ((exponent - 1 + bias) << full) + (steps << (full - kept))  # a carry increments the exponent
    return sign | min(code, ((1 << exponent_bits) - 1) << full)


NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}
INFINITY = {"f32": 0x7F800000, "f16": 0x7C00}
SIGN = {"f32": 0x80000000, "f16": 0x8000}


def special(products: Sequence[Any], c: Any, d: str) -> int | None:
    """The result where an operand or a product is not finite, else None."""
    numbers = [float(p) if isinstance(p, float) else 0.0 for p in (*products, c)]
    if all(np.isfinite(numbers)):
        return None
    total = sum(numbers)
    return NAN[d] if total != total else INFINITY[d] | (SIGN[d] if total < 0 else 0)


def times(x: Any, y: Any) -> Any:
    """Product of two values, float as soon as one is not finite."""
    return x * y if isinstance(x, Fraction) and isinstance(y, Fraction) else float(x) * float(y)


def fused_dot(
    a: Sequence[int],
    b: Sequence[int],
    c: int,
    formats: tuple[str, str, str],
    *,
    fraction_bits: int = 25,
    mantissa_bits: int | None = None,
    scales: tuple[int, int] | None = None,
    signs: tuple[int, int] = (1, 1),
) -> int:
    """Bits of one element of D. a, b: codes; c: bits; formats: of A, of B, of C and D; scales: ue8m0 bytes."""
    fa, fb, d = formats
    left, right = [decode(int(x), fa) for x in a], [decode(int(x), fb) for x in b]
    accumulator = decode(int(c), d)
    factors = [decode(int(s), "ue8m0") for s in scales] if scales else []
    products = [times(value(x), value(y)) for x, y in zip(left, right, strict=True)]
    for factor in factors:
        products = [times(p, value(factor)) for p in products]
    sign = signs[0] * signs[1]
    found = special([p * sign for p in products], value(accumulator), d)
    if found is not None:
        return found
    shift = sum(f[1] for f in factors)  # type: ignore[index]
    terms = [(sign * x[0] * y[0], x[1] + y[1] + shift) for x, y in zip(left, right, strict=True)]  # type: ignore[index]
    return encode(aligned_sum([*terms, accumulator], fraction_bits), d, mantissa_bits)  # type: ignore[list-item]


def aligned_sum(terms: Sequence[Term], fraction_bits: int) -> Fraction:
    """Sums the terms after truncating each to `fraction_bits` bits below the largest exponent."""
    top = max(e for _, e in terms)
    return sum(truncate(s * power(fraction_bits + e - top)) for s, e in terms) * power(top - fraction_bits)


def fp4_dot(
    a: Sequence[int], b: Sequence[int], c: int, sfa: Sequence[int], sfb: Sequence[int], scale_type: str
) -> int:
    """Bits of one element of D for K = 64 e2m1 codes: four exact dot products of 16, scaled, then summed."""
    accumulator = decode(int(c), "f32")
    factors = [[decode(int(s), scale_type) for s in side] for side in (sfa, sfb)]
    if isinstance(accumulator, float) or any(isinstance(f, float) for side in factors for f in side):
        return special(
            [f for side in factors for f in side if isinstance(f, float)], value(accumulator), "f32"
        )  # type: ignore[return-value]
    terms: list[Any] = [accumulator]
    for group in range(4):
        dot = sum(
            value(decode(int(a[k]), "e2m1")) * value(decode(int(b[k]), "e2m1"))
            for k in range(16 * group, 16 * group + 16)
        )
        (sa, ea), (sb, eb) = (side[group * len(side) // 4] for side in factors)  # type: ignore[misc]
        terms.append((dot * sa * sb, ea + eb))
    return encode(aligned_sum(terms, 35), "f32")


def integer_dot(a: Sequence[int], b: Sequence[int], c: int, saturate: bool) -> int:
    """Signed 32-bit result of an integer dot product, clamped or wrapped."""
    total = int(c) + sum(int(x) * int(y) for x, y in zip(a, b, strict=True))
    if saturate:
        return max(-(2**31), min(2**31 - 1, total))
    return (total + 2**31) % 2**32 - 2**31


def integer_element(a: Any, b: Any, c: int, types: Sequence[str], saturate: bool) -> int:
    """Bits of one element of D from bytes of s8 or u8 elements and the bits of C."""
    left, right = (
        x.astype(np.uint8).astype(np.int8 if t == "s8" else np.uint8)
        for x, t in zip((a, b), types[:2], strict=True)
    )
    return integer_dot(left, right, int(np.uint32(c).view(np.int32)), saturate) & 0xFFFFFFFF


# ---- register fragments, as the ISA tabulates them: lane = 4g + t, element i -> (row, k) --------------------------
FRAGMENT_A = {
    (8, 16): lambda g, t, i: (g if i < 2 else g + 8, 2 * t + (i & 1)),
    (16, 16): lambda g, t, i: (
        g if i < 2 or 4 <= i < 6 else g + 8,
        2 * t + (i & 1) if i < 4 else 2 * t + (i & 1) + 8,
    ),
    (4, 32): lambda g, t, i: (g if i == 0 else g + 8, t),
    (8, 32): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    (16, 8): lambda g, t, i: (g if i < 4 else g + 8, 4 * t + (i & 3)),
    (32, 8): lambda g, t, i: (
        g if i < 4 or 8 <= i < 12 else g + 8,
        4 * t + (i & 3) if i < 8 else 4 * t + (i & 3) + 16,
    ),
    (64, 4): lambda g, t, i: (
        g if i < 8 or 16 <= i < 24 else g + 8,
        8 * t + (i & 7) if i < 16 else 8 * t + (i & 7) + 32,
    ),
}
FRAGMENT_B = {
    (8, 16): lambda g, t, i: (2 * t + i, g),
    (16, 16): lambda g, t, i: (2 * t + (i & 1) if i < 2 else 2 * t + (i & 1) + 8, g),
    (4, 32): lambda g, t, i: (t, g),
    (8, 32): lambda g, t, i: (t if i == 0 else t + 4, g),
    (16, 8): lambda g, t, i: (4 * t + i, g),
    (32, 8): lambda g, t, i: (4 * t + (i & 3) if i < 4 else 4 * t + (i & 3) + 16, g),
    (64, 4): lambda g, t, i: (8 * t + (i & 7) if i < 8 else 8 * t + (i & 7) + 32, g),
}


def _pack(codes: np.ndarray, place: Any, elements: int, bits: int) -> np.ndarray:
    """uint32 (registers, 32) of a fragment whose element i of a lane is codes[place(g, t, i)], low bits first."""
    per = 32 // bits
    words = np.zeros((elements // per, 32), np.uint32)
    for lane in range(32):
        for i in range(elements):
            code = int(codes[place(lane >> 2, lane & 3, i)]) & (1 << bits) - 1
            words[i // per, lane] |= np.uint32(code << bits * (i % per))
    return words


def pack_a(codes: np.ndarray, bits: int) -> np.ndarray:
    """A (16, K) of codes in containers of `bits` -> registers."""
    k = codes.shape[1]
    return _pack(codes, FRAGMENT_A[k, bits], 16 * k // 32, bits)


def pack_b(codes: np.ndarray, bits: int) -> np.ndarray:
    """B (K, 8) -> registers."""
    k = codes.shape[0]
    return _pack(codes, FRAGMENT_B[k, bits], 8 * k // 32, bits)


def place_c(g: int, t: int, i: int) -> tuple[int, int]:
    """Row and column of accumulator element i; from 4 on, the next 8 columns (wgmma)."""
    return (g if i % 4 < 2 else g + 8), 8 * (i // 4) + 2 * t + (i & 1)


def pack_c(bits_matrix: np.ndarray, bits: int) -> np.ndarray:
    """C (16, N) of bit patterns -> registers."""
    return _pack(bits_matrix, place_c, bits_matrix.size // 32, bits)


def unpack_c(words: np.ndarray, bits: int) -> np.ndarray:
    """Registers of D -> bit patterns (16, N), uint32."""
    per = 32 // bits
    elements = len(words) * per
    out = np.zeros((16, elements // 4 * 8), np.uint32)
    for lane in range(32):
        for i in range(elements):
            word = int(words[i // per, lane]) >> bits * (i % per)
            out[place_c(lane >> 2, lane & 3, i)] = word & (1 << bits) - 1
    return out


# ---- operands ----------------------------------------------------------------------------------------------------
def draw_codes(rng: np.random.Generator, fmt: str, shape: tuple[int, ...], regime: str) -> np.ndarray:
    """Codes of a format (uint32): "integers" -2..2, "moderate" finite values of nearby sizes, "tiny"
    subnormals and the smallest normals, "any" bit pattern.
    """
    if fmt in ("s8", "u8", "s32"):
        return rng.integers(0, 1 << WIDTH[fmt], shape).astype(np.uint32)
    exponent_bits, mantissa_bits, bias, _ = FORMATS[fmt]
    low = 13 if fmt == "tf32" else 0
    if regime == "any":
        return rng.integers(0, 1 << (1 + exponent_bits + mantissa_bits + low), shape).astype(np.uint32)
    sign = rng.integers(0, 2, shape) << (exponent_bits + mantissa_bits)
    if regime == "integers":
        magnitude = np.array([0, bias << mantissa_bits, (bias + 1) << mantissa_bits])[
            rng.integers(0, 3, shape)
        ]
        return ((sign | magnitude) << low).astype(np.uint32)
    spread = min(6, (1 << exponent_bits) - 2 - bias)
    low_field, high_field = (0, 2) if regime == "tiny" else (max(bias - 6, 0), bias + spread)
    field = rng.integers(low_field, high_field + 1, shape)
    mantissa = rng.integers(0, 1 << mantissa_bits, shape)
    noise = rng.integers(0, 1 << low, shape)
    return ((sign | field << mantissa_bits | mantissa) << low | noise).astype(np.uint32)


def container(codes: np.ndarray, fmt: str) -> np.ndarray:
    """Codes in their byte containers: e2m1 in bits 2-5; the surrounding bits are ones, since they must not matter."""
    if fmt == "e2m1":
        return codes << 2 | 0xC3
    return codes | 0xC0 if fmt in ("e2m3", "e3m2") else codes

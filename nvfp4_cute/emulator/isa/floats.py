"""Floating-point formats and correctly rounded arithmetic on arrays of bit patterns.

All functions take and return NumPy arrays of any shape. Formats narrower than binary32 are described by data
(`Format`). Conversions go through float64, which holds every value of every such format exactly. A float64 that stands
for an inexact sum is *rounded to odd* (Boldo and Melquiond, 2008), so that rounding it once more to a format with at
most 51 significant bits gives the correctly rounded result in every rounding mode.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")


@dataclass(frozen=True)
class Format:
    """A binary float format. `max_finite`: largest finite value. `nan`: code of the canonical NaN, None if none.

    Codes: sign, exponent (`exponent_bits`), mantissa (`mantissa_bits`); `emin`: exponent of the least normal.
    """

    bits: int
    mantissa_bits: int
    emin: int
    max_finite: float
    nan: int | None
    inf: int | None

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)


FORMATS = {
    "f16": Format(16, 10, -14, 65504.0, 0x7FFF, 0x7C00),
    "bf16": Format(16, 7, -126, float(2.0**127 * (2 - 2.0**-7)), 0x7FFF, 0x7F80),
    "tf32": Format(19, 10, -126, float(2.0**127 * (2 - 2.0**-10)), 0x3FFFF, 0x3FC00),
    "f32": Format(32, 23, -126, float(2.0**127 * (2 - 2.0**-23)), 0x7FFFFFFF, 0x7F800000),
    "e4m3": Format(8, 3, -6, 448.0, 0x7F, None),
    "e5m2": Format(8, 2, -14, 57344.0, 0x7F, 0x7C),
    "e2m1": Format(4, 1, 0, 6.0, None, None),
    "e2m3": Format(6, 3, 0, 7.5, None, None),
    "e3m2": Format(6, 2, -2, 28.0, None, None),
}


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Returns the float64 values of unsigned codes of format `name` (bits above the format are ignored)."""
    if name in ("f16", "f32", "bf16"):
        return _decode_wide(codes, name).astype(np.float64)
    return _table(name)[codes & np.asarray((1 << FORMATS[name].bits) - 1, codes.dtype)]


def _decode_wide(codes: np.ndarray, name: str) -> np.ndarray:
    if name == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    return codes.view(np.float16 if name == "f16" else np.float32)


_TABLES: dict[str, np.ndarray] = {}


def _table(name: str) -> np.ndarray:
    """Returns the value of every code of a format of at most 8 bits."""
    if name not in _TABLES:
        f = FORMATS[name]
        values = [_value_of(code, f) for code in range(1 << f.bits)]
        _TABLES[name] = np.array(values, np.float64)
    return _TABLES[name]


def _value_of(code: int, f: Format) -> float:
    magnitude = code & (f.sign - 1)
    exponent, mantissa = magnitude >> f.mantissa_bits, magnitude & ((1 << f.mantissa_bits) - 1)
    if f.nan is not None and (magnitude == f.nan or (f.inf is not None and magnitude > f.inf)):
        return float("nan")
    if f.inf is not None and magnitude == f.inf:
        value = float("inf")
    elif exponent == 0:
        value = mantissa * 2.0 ** (f.emin - f.mantissa_bits)
    else:
        value = (1 + mantissa / (1 << f.mantissa_bits)) * 2.0 ** (exponent - 1 + f.emin)
    return -value if code & f.sign else value


def encode(values: np.ndarray, name: str, rounding: str = "rn", saturate: bool = False) -> np.ndarray:
    """Returns uint32 codes of float64 `values` rounded to format `name`.

    `saturate`: magnitudes above the largest finite value (infinity included) become it. Formats without a NaN turn
    NaN into their largest positive value (PTX ISA, cvt). NaN results are the canonical code, sign cleared.
    """
    f = FORMATS[name]
    magnitude = np.abs(values)
    negative = np.signbit(values)
    finite = np.isfinite(values)
    safe = np.where(finite, magnitude, 0.0)
    exponent = np.maximum(np.frexp(safe)[1] - 1, f.emin)
    exponent = np.where(safe == 0.0, f.emin, exponent)
    steps = _round_integral(np.ldexp(safe, f.mantissa_bits - exponent), negative, rounding)
    codes = ((exponent - f.emin).astype(np.int64) << f.mantissa_bits) + steps.astype(np.int64)
    limit = _max_code(f)
    over = (codes > limit) | np.isinf(values)
    if over.any():
        to_max = saturate | (f.inf is None) | (finite & _keeps_finite(negative, rounding))
        codes = np.where(over, np.where(to_max, limit, f.inf if f.inf is not None else limit), codes)
    codes = np.where(negative, codes | f.sign, codes)
    nan = np.isnan(values)
    if nan.any():
        codes = np.where(nan, limit if f.nan is None else f.nan, codes)
    return codes.astype(np.uint32)


def _max_code(f: Format) -> int:
    return f.inf - 1 if f.inf is not None else f.nan - 1 if f.nan is not None else f.sign - 1


def _keeps_finite(negative: np.ndarray, rounding: str) -> Any:
    """Returns where a finite overflow rounds to the largest finite value instead of infinity."""
    return {"rz": True, "rm": ~negative, "rp": negative}.get(rounding, False)


def _round_integral(x: np.ndarray, negative: np.ndarray, rounding: str) -> np.ndarray:
    """Rounds non-negative magnitudes to integers in a rounding mode that depends on the sign."""
    if rounding == "rn":
        return np.rint(x)
    if rounding == "rz":
        return np.floor(x)
    if rounding == "rna":
        return np.floor(x + 0.5)
    up = negative if rounding == "rm" else ~negative
    return np.where(up, np.ceil(x), np.floor(x))


def round_f32(values: np.ndarray, rounding: str) -> np.ndarray:
    """float64 (exact or rounded to odd) -> float32 in a rounding mode."""
    nearest = values.astype(np.float32)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    zero, low, high = np.float32(0), np.float32(-np.inf), np.float32(np.inf)
    if rounding == "rz":
        wrong, towards = np.abs(back) > np.abs(values), zero
    elif rounding == "rm":
        wrong, towards = back > values, low
    else:
        wrong, towards = back < values, high
    return np.where(wrong, np.nextafter(nearest, towards), nearest)


def add_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = (error != 0) & np.isfinite(total)
    if not np.any(inexact):
        return total
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # Steps away from zero if the error has the sign of the sum, else towards zero.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact & even, bits + step, bits).view(np.float64)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c for float32, rounded once to nearest even.

    The product is exact in float64. Rounding the sum to float64 first changes the result only if it is midway between
    two float32 values (or subnormal). In that case the sum is computed again, rounded to odd.
    """
    total = a.astype(np.float64) * b + c
    bits = total.view(np.uint64)
    middle = (bits & _BELOW_F32) == _MIDDLE
    # For zero the subtraction wraps to the largest value, so it does not count as small.
    small = (bits + bits) - _ONE < _SMALL
    if np.count_nonzero(middle | small):
        total = fma_odd(a, b, c)
    return total.astype(np.float32)


def fma_narrow(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c for float32, rounded once to nearest even, where a and b have at most 14 significant bits each.

    The product has at most 28. The sum is exact in float64 unless one term is below a quarter of the other one's last
    place in float32, where the nearest float32 does not depend on its bits.
    """
    return (a.astype(np.float64) * b + c).astype(np.float32)


_BELOW_F32 = np.uint64((1 << 29) - 1)
_MIDDLE = np.uint64(1 << 28)
_ONE = np.uint64(1)
# Twice the bits of 2**-125: the bound for small magnitudes.
_SMALL = np.uint64(2 * (1023 - 125 << 52) - 1)


def fma_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64 rounded to odd; a and b have at most 26 significant bits."""
    return add_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bf16 codes of float32 values, round to nearest even; NaN becomes 0x7FFF."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = values != values
    if np.count_nonzero(nan):
        rounded = np.where(nan, np.uint32(0x7FFF), rounded)
    return rounded.astype(np.uint16)


def flush(values: np.ndarray) -> np.ndarray:
    """float32 values with subnormals replaced by zeros of the same sign (.ftz)."""
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values)


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Computes a * b + c in float64, exact and then rounded, element by element; an exact zero sum is -0 when rounding down."""
    function = lambda x, y, z: x * y + z
    result = exact_f64(function, a * b + c, rounding, a, b, c)
    mixed = (np.signbit(a) ^ np.signbit(b)) != np.signbit(c)
    if rounding == "rm" and np.any(zero := (result == 0) & mixed):
        for i in np.argwhere(zero):
            if function(*(Fraction(float(x[tuple(i)])) for x in np.broadcast_arrays(a, b, c))) == 0:
                result[tuple(i)] = -0.0
    return result


def exact_f64(function: Any, plain: np.ndarray, rounding: str, *args: np.ndarray) -> np.ndarray:
    """Applies `function` to exact fractions and rounds the result to float64.

    `plain`: the ordinary results. A result that is not finite stays, unless finite operands overflowed.
    """
    out = np.array(plain, np.float64, ndmin=1, copy=True)
    flat = [np.atleast_1d(x) for x in args]
    for i in range(out.size):
        operands = [float(x[i]) for x in flat]
        if all(np.isfinite(x) for x in operands) and out[i] == out[i]:
            exact = function(*(Fraction(x) for x in operands))
            if exact is not None and exact != 0:
                out[i] = _round_fraction(exact, rounding)
    return out.reshape(np.shape(plain))


_F64_MAX = float(np.finfo(np.float64).max)


def _round_fraction(exact: Fraction, rounding: str) -> float:
    towards = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}.get(rounding)
    try:
        nearest = exact.numerator / exact.denominator
    except OverflowError:
        nearest = np.inf if exact > 0 else -np.inf
    if np.isinf(nearest):
        inwards = rounding == "rz" or (rounding == "rm" and exact > 0) or (rounding == "rp" and exact < 0)
        return float(np.copysign(_F64_MAX, nearest)) if inwards else nearest
    if towards is None or Fraction(nearest) == exact:
        return nearest
    above = Fraction(nearest) > exact
    wrong = above if rounding == "rm" else not above if rounding == "rp" else above == (exact > 0)
    return float(np.nextafter(nearest, towards)) if wrong else nearest


def sqrt_f64(values: np.ndarray, rounding: str) -> np.ndarray:
    """Square roots of float64 numbers in a directed rounding mode."""
    nearest = np.array(np.sqrt(values), np.float64, ndmin=1)
    flat = np.atleast_1d(values)
    for i in range(nearest.size):
        root = float(nearest[i])
        if 0 < root < np.inf:
            square, exact = Fraction(root) ** 2, Fraction(float(flat[i]))
            if square > exact and rounding != "rp":
                nearest[i] = np.nextafter(root, 0.0)
            elif square < exact and rounding == "rp":
                nearest[i] = np.nextafter(root, np.inf)
    return nearest.reshape(np.shape(values))

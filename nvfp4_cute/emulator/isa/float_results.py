"""Post-processing of float results: flushing, saturation, and the choice of NaN.

PTX leaves some results open. There the rules are those of an H200 (recorded 2026-11-21):

* ``.ftz`` judges a result as if its exponent had no lower end: a result that rounds up to the smallest normal number
  only
  because subnormals are coarse is still flushed to zero.
* ``.sat`` turns -0 and NaN into +0.
* NaN results of 16- and 32-bit formats are canonical (0x7FFF, 0x7FFFFFFF), including those of abs and neg. binary64
  arithmetic returns its last NaN operand, made quiet; abs and neg keep its sign. A NaN that an operation makes of
  numbers is 0xFFF8000000000000, whatever the host's processor makes of them.
"""

from collections.abc import Callable

import numpy as np

from nvfp4_cute.emulator.isa import floats
from nvfp4_cute.emulator.nans import F64_QUIET

SMALLEST_NORMAL = {"f32": 2.0**-126, "f16": 2.0**-14}
"""Formats that `.ftz` affects."""

_NAN_CODES = {
    "f64": (0x7FF << 52, None),
    "f32": (0x7F800000, 0x7FFFFFFF),
    "f16": (0x7C00, 0x7FFF),
    "bf16": (0x7F80, 0x7FFF),
}
"""Code of infinity, and of the NaN that abs and neg return."""

_UNSCALED = 2.0**64

EXACT: dict[str, Callable[..., np.ndarray]] = {
    "mul": lambda a, b: a * b,
    "fma": floats.fma_odd,
    "mad": floats.fma_odd,
    # A quotient of binary32 numbers is never close enough to a tie for an earlier rounding to binary64 to matter.
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1.0 / a,
}
"""Operations whose results can be subnormal and inexact: float64 values, exact or close enough to decide the rounding."""


def flush(values: np.ndarray, name: str) -> np.ndarray:
    """Replaces subnormals of format `name` (held in float32 or float64) by zeros of the same sign."""
    small = np.abs(values) < SMALLEST_NORMAL[name]
    if not np.count_nonzero(small):
        return values
    return np.where(small, np.copysign(values.dtype.type(0), values), values)


def flush_result(
    values: np.ndarray, opcode: str, args: list[np.ndarray], name: str, rounding: str
) -> np.ndarray:
    """Applies `.ftz` to the rounded results of an operation on `args` (float32, subnormals already flushed)."""
    smallest = SMALLEST_NORMAL[name]
    values = flush(values, name)
    edge = np.abs(values) == smallest
    if opcode not in EXACT or not np.count_nonzero(edge):
        return values
    exact = EXACT[opcode](*(x.astype(np.float64) for x in args))
    tiny = np.abs(_round(exact * _UNSCALED, name, rounding)) < smallest * _UNSCALED
    return np.where(edge & tiny, np.copysign(np.float32(0), values), values)


def _round(values: np.ndarray, name: str, rounding: str) -> np.ndarray:
    """Rounds float64 to the precision of a format, with unlimited exponent."""
    mantissa, exponent = np.frexp(values)
    bits = floats.FORMATS[name].mantissa_bits + 1
    steps = floats._round_integral(np.ldexp(np.abs(mantissa), bits), np.signbit(values), rounding)
    return np.ldexp(steps, exponent - bits)


def saturate(values: np.ndarray) -> np.ndarray:
    """Clamps to [0, 1]; NaN and -0 become +0."""
    return np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))


def rectify(values: np.ndarray) -> np.ndarray:
    """Clamps below at zero (`.relu`); NaN stays."""
    return np.where((values > 0) | (values != values), values, values.dtype.type(0))


def canonical_nan(values: np.ndarray) -> np.ndarray:
    """Replaces binary32 NaN results by 0x7FFFFFFF."""
    nan = values != values
    if np.count_nonzero(nan) and values.dtype == np.float32:
        return np.where(nan, np.uint32(0x7FFFFFFF).view(np.float32), values)
    return values


def signed_nan(codes: np.ndarray, results: np.ndarray, name: str) -> np.ndarray:
    """Sets NaN results of abs and neg: canonical, except for binary64, which keeps the operand, made quiet.

    `codes`, `results`: operand and plain result, elements of format `name` as unsigned words.
    """
    infinity, canonical = _NAN_CODES[name]
    nan = (codes & codes.dtype.type((1 << 8 * codes.itemsize - 1) - 1)) > infinity
    if not np.count_nonzero(nan):
        return results
    return np.where(nan, codes | F64_QUIET if canonical is None else codes.dtype.type(canonical), results)

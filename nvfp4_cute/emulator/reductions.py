"""Elementwise reductions of asynchronous copies (PTX ISA "cp.reduce.async.bulk"), and of floats by atomics.

NaN, signed zeros and subnormals behave as on an H200 (recorded 2026-11-21): a NaN result is 0x7FFF or 0x7FFFFFFF, min
and max prefer a number to NaN and order -0 below +0, and only `atom` and `red` on global memory flush binary32
subnormals.
"""

import numpy as np

from nvfp4_cute.emulator.nans import nan_f64
from nvfp4_cute.errors import EmulatorError

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_BITWISE_TYPES = ("b32", "b64", "u8", "u16", "u32", "u64", "s32", "s64")
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ARITHMETIC_TYPES = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}
_FLOATS = {"f16": np.float16, "bf16": np.float32, "f32": np.float32, "f32.ftz": np.float32, "f64": np.float64}
"""Computation type of a float type. NumPy has no bf16, and rounds sums of f16 once."""

_NAN = {2: 0x7FFF, 4: 0x7FFFFFFF}
_SMALLEST_NORMAL = np.float32(2.0**-126)
_ARITHMETIC = {"add": np.add, "min": np.minimum, "max": np.maximum}


def reduce_elements(op: str, type_name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Combines elements of memory with elements of a copy.

    Args:
        op: one of REDUCTIONS.
        type_name: PTX type of the elements.
        old: uint8, contiguous, the bytes in memory.
        new: uint8, equally long, the bytes of the copy.

    Returns:
        uint8, the new bytes of memory.

    Raises:
        EmulatorError: the type has no such reduction.
    """
    if op in _BITWISE and type_name in _BITWISE_TYPES:
        return _BITWISE[op](old, new)
    if op in ("inc", "dec") and type_name == "u32":
        return _wrapping_step(op, old.view(np.uint32), new.view(np.uint32)).view(np.uint8)
    function = _ARITHMETIC.get(op)
    if function is None or type_name not in (*_ARITHMETIC_TYPES, *_FLOATS):
        raise EmulatorError(f"reduction .{op} does not exist for elements of type {type_name}")
    if type_name in _FLOATS:
        return combine_floats(op, type_name, old, new)
    dtype = _ARITHMETIC_TYPES[type_name]
    return function(old.view(dtype), new.view(dtype)).view(np.uint8)


def combine_floats(
    op: str, type_name: str, old: np.ndarray, new: np.ndarray, flush: bool = False
) -> np.ndarray:
    """add, min or max of float elements, rounded to nearest even.

    Args:
        op, type_name: see `reduce_elements`.
        old, new: contiguous arrays of any one dtype that hold the elements.
        flush: treat subnormal operands and results as zeros.

    Returns:
        The results, in the dtype of `old`.
    """
    a, b = (_widen(x, type_name) for x in (old, new))
    if flush:
        a, b = _flush(a), _flush(b)
    with np.errstate(invalid="ignore", over="ignore"):
        value = a + b if op == "add" else np.where(_first_wins(op, a, b), a, b)
    value = nan_f64(value, (b, a))
    if flush:
        value = _flush(value)
    return _narrow(value, type_name).view(old.dtype)


def _first_wins(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    before = (a < b) | ((a == b) & np.signbit(a)) if op == "min" else (a > b) | ((a == b) & ~np.signbit(a))
    return (before | np.isnan(b)) & ~np.isnan(a)


def _flush(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(values.dtype.type(0), values), values)


def _widen(data: np.ndarray, type_name: str) -> np.ndarray:
    if type_name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(_FLOATS[type_name])


def _narrow(values: np.ndarray, type_name: str) -> np.ndarray:
    """Returns the results as words; NaN is canonical in formats of up to 32 bits."""
    if type_name == "f64":
        return values
    words = values.view(f"u{values.itemsize}")
    if type_name == "bf16":
        words = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), words.dtype.type(_NAN[words.itemsize]), words)


def _wrapping_step(op: str, old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Increments or decrements, and wraps at a limit."""
    if op == "inc":
        return np.where(old >= limit, np.uint32(0), old + np.uint32(1))
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1))

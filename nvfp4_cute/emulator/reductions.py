"""Elementwise reductions of asynchronous copies (PTX ISA "cp.reduce.async.bulk")."""

import numpy as np

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
    "f16": np.float16,
    "f32": np.float32,
    "f32.ftz": np.float32,
    "f64": np.float64,
}
_ARITHMETIC = {"add": np.add, "min": np.minimum, "max": np.maximum}


def reduce_elements(op: str, type_name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Combine elements of memory and elements of the copy.

    Args:
        op: one of REDUCTIONS.
        type_name: PTX type of the elements.
        old: uint8, contiguous, what memory holds.
        new: uint8, as many.

    Returns:
        uint8, what memory shall hold. Floats are rounded to nearest even; 16-bit ones are added in float32, whose 24
        bits are at least twice their precision and two more, so that rounding twice is rounding once.

    Raises:
        EmulatorError: the type has no such reduction.
    """
    if op in _BITWISE and type_name in _BITWISE_TYPES:
        return _BITWISE[op](old, new)
    if op in ("inc", "dec") and type_name == "u32":
        return _wrapping_step(op, old.view(np.uint32), new.view(np.uint32)).view(np.uint8)
    function = _ARITHMETIC.get(op)
    if function is None or type_name not in (*_ARITHMETIC_TYPES, "bf16"):
        raise EmulatorError(f"reduction .{op} does not exist for elements of type {type_name}")
    if type_name == "bf16":  # NumPy has none
        wide = [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, new)]
        with np.errstate(invalid="ignore", over="ignore"):
            bits = function(*wide).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)
        return rounded.astype(np.uint16).view(np.uint8)
    dtype = _ARITHMETIC_TYPES[type_name]
    with np.errstate(invalid="ignore", over="ignore"):
        return function(old.view(dtype), new.view(dtype)).view(np.uint8)


def _wrapping_step(op: str, old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Increment or decrement that wraps at a limit."""
    if op == "inc":
        return np.where(old >= limit, np.uint32(0), old + np.uint32(1))
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1))

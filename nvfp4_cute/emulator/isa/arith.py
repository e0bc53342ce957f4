"""Integer and logic instructions: tables of (operation x type) over dual values."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import (
    UNSIGNED,
    Builder,
    Mods,
    Step,
    handler,
    invert,
    merge_lanes,
    type_bytes,
)
from nvfp4_cute.emulator.lanes import LANES
from nvfp4_cute.emulator.ptx import Inst, Operand

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

INTEGER_TYPES = ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64")


def same_width(b: Builder, operand: Operand, type_: str) -> int:
    """Returns the slot of a source operand whose register is exactly as wide as the type.

    Raises:
        EmulatorError: the register has another width, which PTX does not allow here.
    """
    slot = b.slot(operand, type_)
    if type_ != "pred" and b.width(slot) != type_bytes(type_):
        raise b.refuse(f"operand {operand} is {8 * b.width(slot)} bits wide, the type .{type_} is not")
    return slot


def binary_step(
    b: Builder, dest: Operand, x: int, y: int, operation: Callable[[Any, Any], Any], mask: int
) -> Step:
    """dest = operation(x, y), wrapped to `mask`; for operations that NumPy wraps by dtype."""
    d = b.target(dest)
    dtype = b.dtypes[d]
    literal = b.template[y]
    # NumPy is much faster with an array operand than with a Python int.
    lanes = np.full(LANES, literal, b.dtypes[y]) if literal.__class__ is int else None

    def step(warp: "Warp") -> None:
        regs = warp.regs
        left, right = regs[x], regs[y]
        if left.__class__ is int and right.__class__ is int:
            value = operation(left, right) & mask
        else:
            value = operation(left, right if lanes is None or len(left) != LANES else lanes)
        if d in warp.protected:
            value = merge_lanes(warp.active, value, regs[d], dtype)
        regs[d] = value

    return step


def put_step(b: Builder, dest: Operand, compute: "Callable[[Warp], Any]", type_: str) -> Step:
    """dest = compute(warp) through a typed writer."""
    put = b.write(dest, type_)

    def step(warp: "Warp") -> None:
        put(warp, compute(warp))

    return step


def as_array(value: Any, dtype: Any) -> np.ndarray:
    """Returns a dual value as 32 lanes of `dtype` (uniform values by broadcasting)."""
    if value.__class__ is np.ndarray:
        return value
    return np.full(LANES, value, dtype)


def as_lanes(value: Any, dtype: Any) -> np.ndarray:
    """Returns a dual value as an array that combines with any number of lanes: a uniform value has one element.

    Applies a function of Python ints: once if all operands are uniform, else lane by lane.
    """
    return value if value.__class__ is np.ndarray else np.array([value], dtype)


def per_lane(one: Callable[..., int], reads: Any, type_: str) -> "Callable[[Warp], Any]":
    """Apply a function of Python ints: once if all operands are uniform, else lane by lane."""
    size = type_bytes(type_)
    mask = (1 << 8 * size) - 1
    dtype = UNSIGNED[size]

    def compute(warp: "Warp") -> Any:
        values = [r(warp) for r in reads]
        if all(v.__class__ is not np.ndarray for v in values):
            return one(*values) & mask
        width = next(len(v) for v in values if v.__class__ is np.ndarray)
        columns = [v.tolist() if v.__class__ is np.ndarray else [v] * width for v in values]
        return np.array([one(*lane) & mask for lane in zip(*columns, strict=True)], dtype)

    return compute


# ---- operations that are the same for signed and unsigned -----------------------------------------

WRAPPING: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@handler("and", "or", "xor")
def logic(inst: Inst, b: Builder) -> Step:
    """and/or/xor on bits and predicates (PTX ISA 9.7.8)."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    dest, left, right = inst.operands
    x, y = same_width(b, left, type_), same_width(b, right, type_)
    if type_ != "pred":
        return binary_step(b, dest, x, y, WRAPPING[inst.opcode], (1 << 8 * type_bytes(type_)) - 1)
    operation = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[inst.opcode]
    read_x, read_y = b.read(left, "pred"), b.read(right, "pred")
    return put_step(b, dest, lambda warp: operation(read_x(warp), read_y(warp)), "pred")


@handler("not")
def not_(inst: Inst, b: Builder) -> Step:
    """Bitwise not; logical for predicates."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    read = b.read(inst.operands[1], type_)
    if type_ == "pred":
        return put_step(b, inst.operands[0], lambda warp: invert(read(warp)), "pred")
    return put_step(b, inst.operands[0], lambda warp: ~read(warp), type_)


@handler("cnot")
def cnot(inst: Inst, b: Builder) -> Step:
    """1 where the operand is 0, else 0."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    read = b.read(inst.operands[1], type_)
    return put_step(
        b, inst.operands[0], lambda warp: select(read(warp) == 0, 1, 0, UNSIGNED[type_bytes(type_)]), type_
    )


def select(condition: Any, yes: Any, no: Any, dtype: Any) -> Any:
    """Returns `yes` where `condition` holds, else `no`; uniform if the condition is."""
    if condition.__class__ is np.ndarray:
        return np.where(condition, as_lanes(yes, dtype), as_lanes(no, dtype))
    return yes if condition else no


# ---- integer arithmetic ---------------------------------------------------------------------------


def integer_add_sub(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """add/sub on integers; `.sat` clamps (s32 only)."""
    saturate = mods.flag("sat")
    mods.done()
    dest, left, right = inst.operands
    operation = WRAPPING[inst.opcode]
    if not saturate:
        slots = same_width(b, left, type_), same_width(b, right, type_)
        return binary_step(b, dest, *slots, operation, (1 << 8 * type_bytes(type_)) - 1)
    if type_ != "s32":
        raise inst.unsupported(f".sat with .{type_}")
    x, y = b.read(left, "s32"), b.read(right, "s32")

    def compute(warp: "Warp") -> Any:
        wide = operation(
            as_lanes(x(warp), np.int32).astype(np.int64), as_lanes(y(warp), np.int32).astype(np.int64)
        )
        return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return put_step(b, dest, compute, "s32")


def _multiply(part: str, type_: str) -> Callable[[Any, Any], Any]:
    """Returns the .lo, .hi, or .wide part of the product of two typed dual values."""
    size = type_bytes(type_)
    signed = type_[0] == "s"
    dtype, wide_dtype = (np.dtype(("i" if signed else "u") + str(n)) for n in (size, min(2 * size, 8)))

    def product(x: Any, y: Any) -> Any:
        if x.__class__ is not np.ndarray and y.__class__ is not np.ndarray:
            value = x * y
            return value >> 8 * size if part == "hi" else value
        if part == "lo":
            return x * y if size > 2 else np.multiply(x, y)
        if size == 8:
            return _high64(x, y, signed)
        value = np.asarray(x, wide_dtype) * np.asarray(y, wide_dtype)
        return value if part == "wide" else (value >> (8 * size)).astype(dtype)

    return product


def _high64(x: Any, y: Any, signed: bool) -> np.ndarray:
    dtype = np.int64 if signed else np.uint64
    left, right = as_array(x, dtype).tolist(), as_array(y, dtype).tolist()
    high = [(p * q >> 64) & 0xFFFFFFFFFFFFFFFF for p, q in zip(left, right, strict=True)]
    return np.array(high, np.uint64)


@handler("mul24", "mad24")
def mul24(inst: Inst, b: Builder) -> Step:
    """24-bit multiplication: the low (or bits 16..47) part of the product of the low 24 bits."""
    mods = Mods(inst)
    type_ = mods.type()
    high = mods.one_of("lo", "hi") == "hi"
    mods.done()
    reads = [b.read(o, type_) for o in inst.operands[1:]]
    bias = 1 << 23 if type_[0] == "s" else 0

    def low24(value: Any) -> Any:
        wide = np.asarray(value).astype(np.int64)
        return ((wide + bias) & 0xFFFFFF) - bias

    def compute(warp: "Warp") -> Any:
        x, y, *rest = (r(warp) for r in reads)
        value = low24(x) * low24(y)
        value = value >> 16 if high else value
        value = value + np.asarray(rest[0]).astype(np.int64) if rest else value
        return (value & 0xFFFFFFFF).astype(np.uint32) if value.ndim else int(value) & 0xFFFFFFFF

    return put_step(b, inst.operands[0], compute, "u32")


@handler("dp4a")
def dp4a(inst: Inst, b: Builder) -> Step:
    """dp4a.atype.btype d, a, b, c: c plus the products of the four bytes of a and b, wrapped (PTX ISA 9.7.1.23)."""
    mods = Mods(inst)
    types = mods.types()
    if len(types) != 2 or not set(types) <= {"u32", "s32"}:
        raise inst.unsupported(f"expected two of .u32 and .s32, found {types}")
    mods.done()
    dest, *factors, addend = inst.operands
    reads = [b.read(operand, "u32") for operand in factors]
    read_c = b.read(addend, "u32")
    bytes_ = [np.dtype(np.int8 if type_ == "s32" else np.uint8) for type_ in types]

    def compute(warp: "Warp") -> Any:
        x, y = (
            np.ascontiguousarray(as_array(read(warp), np.uint32)).view(dtype).reshape(32, 4).astype(np.int32)
            for read, dtype in zip(reads, bytes_, strict=True)
        )
        return (x * y).sum(axis=1, dtype=np.int32).view(np.uint32) + as_array(read_c(warp), np.uint32)

    return put_step(b, dest, compute, "u32")


def integer_mul_mad(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """mul/mad .lo/.hi/.wide on integers."""
    part = mods.one_of("lo", "hi", "wide")
    if part is None:
        raise inst.unsupported("integer multiplication without .lo, .hi or .wide")
    mods.done()
    dest, left, right, *addend = inst.operands
    size = type_bytes(type_)
    result = type_ if part != "wide" else f"{type_[0]}{16 * size}"
    mask = (1 << 8 * type_bytes(result)) - 1
    if part == "lo" and not addend:
        return binary_step(
            b, dest, same_width(b, left, type_), same_width(b, right, type_), operator.mul, mask
        )
    x, y = b.read(left, type_), b.read(right, type_)
    product = _multiply(part, type_)
    unsigned = UNSIGNED[type_bytes(result)]
    if not addend:
        return put_step(b, dest, lambda warp: product(x(warp), y(warp)), result)
    z = b.read(addend[0], f"u{8 * type_bytes(result)}")

    def multiply_add(warp: "Warp") -> Any:
        value = product(x(warp), y(warp))
        if value.__class__ is np.ndarray:
            return value.view(unsigned) + z(warp)
        return (value & mask) + z(warp)

    return put_step(b, dest, multiply_add, f"u{8 * type_bytes(result)}")


def _quotient(x: Any, y: Any, type_: str) -> Any:
    """Truncating division; x / 0 gives all ones (the hardware's value; PTX leaves it open)."""
    if x.__class__ is not np.ndarray and y.__class__ is not np.ndarray:
        if y == 0:
            return -1
        quotient = abs(x) // abs(y)
        return quotient if (x < 0) == (y < 0) else -quotient
    dtype = np.dtype(type_[0].replace("b", "u").replace("s", "i") + str(type_bytes(type_)))
    x, y = as_lanes(x, dtype), as_lanes(y, dtype)
    zero = y == 0
    safe = np.where(zero, dtype.type(1), y)
    quotient = x // safe
    if dtype.kind == "i":
        quotient = quotient + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    ones = dtype.type(-1) if dtype.kind == "i" else np.iinfo(dtype).max
    return np.where(zero, ones, quotient).astype(dtype)


def integer_div(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """Integer division, rounding towards zero."""
    mods.done()
    x, y = b.read(inst.operands[1], type_), b.read(inst.operands[2], type_)
    return put_step(b, inst.operands[0], lambda warp: _quotient(x(warp), y(warp), type_), type_)


@handler("rem")
def rem(inst: Inst, b: Builder) -> Step:
    """Remainder with the sign of the dividend; x rem 0 is all ones (the hardware's value; PTX leaves it open)."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    x, y = b.read(inst.operands[1], type_), b.read(inst.operands[2], type_)
    ones = np.array(-1).astype(f"{'i' if type_[0] == 's' else 'u'}{type_bytes(type_)}")

    def compute(warp: "Warp") -> Any:
        u, v = x(warp), y(warp)
        if u.__class__ is not np.ndarray and v.__class__ is not np.ndarray:
            return u - _quotient(u, v, type_) * v if v else -1
        return np.where(v == 0, ones, u - _quotient(u, v, type_) * v)

    return put_step(b, inst.operands[0], compute, type_)


def integer_min_max(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """min/max on integers; packed 16x2 forms per half; `.relu` clamps below at zero."""
    relu = mods.flag("relu")
    mods.done()
    x, y = b.read(inst.operands[1], type_), b.read(inst.operands[2], type_)
    scalar, array = (min, np.minimum) if inst.opcode == "min" else (max, np.maximum)

    def compute(warp: "Warp") -> Any:
        u, v = x(warp), y(warp)
        uniform = u.__class__ is not np.ndarray and v.__class__ is not np.ndarray
        value = scalar(u, v) if uniform else array(u, v)
        if not relu:
            return value
        return max(value, 0) if uniform else np.maximum(value, 0)

    return put_step(b, inst.operands[0], compute, type_)


def integer_abs_neg(inst: Inst, b: Builder, mods: Mods, type_: str) -> Step:
    """abs/neg on integers (two's complement: the least value is its own result)."""
    mods.done()
    x = b.read(inst.operands[1], type_)
    operation = abs if inst.opcode == "abs" else operator.neg
    return put_step(b, inst.operands[0], lambda warp: operation(x(warp)), type_)

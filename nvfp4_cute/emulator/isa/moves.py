"""Moves, selection, and comparison."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import (
    SIGNED,
    UNSIGNED,
    Builder,
    Mods,
    Step,
    handler,
    invert,
    merge_lanes,
    type_bytes,
)
from nvfp4_cute.emulator.isa.arith import INTEGER_TYPES, as_array, as_lanes, put_step, same_width, select
from nvfp4_cute.emulator.isa.floats import flush
from nvfp4_cute.emulator.memory import lane_constant
from nvfp4_cute.emulator.ptx import Inst, Operand, Pair, Sink, Vector

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp


@handler("mov")
def move(inst: Inst, b: Builder) -> Step:
    """mov: copy, pack a vector into one register, or unpack one register into a vector."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    dest, source = inst.operands
    if isinstance(source, Vector):
        return _pack(b, dest, source, type_)
    if isinstance(dest, Vector):
        return _unpack(b, dest, source, type_)
    if type_ == "pred" or isinstance(dest, Sink):
        read = b.read(source, type_)
        return put_step(b, dest, read, type_)
    s, d = b.slot(source, type_), b.target(dest)
    if b.width(d) != b.width(s):
        read = b.read(source, type_)
        return put_step(b, dest, read, type_)
    dtype = b.dtypes[d]

    def step(warp: "Warp") -> None:
        value = warp.regs[s]
        if d in warp.protected:
            value = merge_lanes(warp.active, value, warp.regs[d], dtype)
        warp.regs[d] = value

    return step


def _pack(b: Builder, dest: Operand, source: Vector, type_: str) -> Step:
    count = len(source.items)
    part = type_bytes(type_) // count
    if part * count != type_bytes(type_):
        raise b.refuse(f"{count} parts do not fill .{type_}")
    reads = [b.read(item, f"b{8 * part}") for item in source.items]
    slots = [b.slot(item, f"b{8 * part}") for item in source.items]
    plain = all(b.width(slot) == part for slot in slots)
    poison = (1 << 8 * part) - 1
    word, element = UNSIGNED.get(part * count), UNSIGNED[part]

    def compute(warp: "Warp") -> Any:
        # Compilers pack an unwritten register if only the other parts are used later.
        values = [poison if (v := r(warp)) is None else v for r in reads]
        if all(v.__class__ is not np.ndarray for v in values):
            return sum(v << 8 * part * i for i, v in enumerate(values))
        if word is None:
            return _wide_words(values, element)
        width = max(v.size for v in values if v.__class__ is np.ndarray)
        packed = np.empty(width * count, element)
        for i, value in enumerate(values):
            packed[i::count] = value
        return packed.view(word)

    general = put_step(b, dest, compute, f"b{8 * part * count}")
    if isinstance(dest, Sink) or not plain or word is None or b.width(b.target(dest)) != part * count:
        return general
    target = b.target(dest)

    def step(warp: "Warp") -> None:
        regs = warp.regs
        values = [regs[slot] for slot in slots]
        if warp.protected or not all(v.__class__ is np.ndarray for v in values):
            general(warp)
            return
        packed = np.empty(len(values[0]) * count, element)
        for i, value in enumerate(values):
            packed[i::count] = value
        regs[target] = packed.view(word)

    return step


def _wide_words(values: list[Any], element: np.dtype) -> np.ndarray:
    """Returns 128-bit lanes (Python ints) of dual parts, the low part first."""
    columns = [as_array(v, element).tolist() for v in values]
    words = np.empty(32, object)
    bits = 8 * element.itemsize
    words[:] = [sum(v << bits * i for i, v in enumerate(lane)) for lane in zip(*columns, strict=True)]
    return words


def _unpack(b: Builder, dest: Vector, source: Operand, type_: str) -> Step:
    count = len(dest.items)
    part = type_bytes(type_) // count
    read = b.read(source, type_)
    # (part number, destination slot, writer for the less common cases)
    parts = [
        (i, b.target(item), b.write(item, f"b{8 * part}"))
        for i, item in enumerate(dest.items)
        if not isinstance(item, Sink)
    ]
    mask, dtype = (1 << 8 * part) - 1, UNSIGNED[part]
    poison = (1 << 8 * part * count) - 1
    plain = all(b.width(d) == part for _, d, _ in parts)

    def step(warp: "Warp") -> None:
        value = read(warp)
        if value is None:
            value = poison  # as in _pack: the compiler may read an unused part
        if value.__class__ is not np.ndarray:
            for i, _, write in parts:
                write(warp, value >> 8 * part * i & mask)
        elif value.dtype == object:
            for i, _, write in parts:
                write(warp, np.array([v >> 8 * part * i & mask for v in value], dtype))
        elif warp.protected or not plain:
            elements = value.view(dtype)
            for i, _, write in parts:
                write(warp, elements[i::count].copy())
        else:
            rows, regs = np.ascontiguousarray(value.view(dtype).reshape(-1, count).T), warp.regs
            for i, d, _ in parts:
                regs[d] = rows[i]

    return step


@handler("selp")
def select_by_predicate(inst: Inst, b: Builder) -> Step:
    """d = p ? a : b."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    size = type_bytes(type_)
    bits = type_ if type_ == "pred" else f"b{8 * size}"
    yes, no = b.read_as(inst.operands[1], type_, bits), b.read_as(inst.operands[2], type_, bits)
    predicate = b.read(inst.operands[3], "pred")
    dtype = UNSIGNED[size]

    def compute(warp: "Warp") -> Any:
        p = predicate(warp)
        if p.__class__ is np.ndarray:
            return np.where(p, as_lanes(yes(warp), dtype), as_lanes(no(warp), dtype))
        return yes(warp) if p else no(warp)

    return put_step(b, inst.operands[0], compute, bits)


@handler("slct")
def select_by_sign(inst: Inst, b: Builder) -> Step:
    """d = c >= 0 ? a : b."""
    mods = Mods(inst)
    ftz = mods.flag("ftz")
    type_, selector = mods.types()
    mods.done()
    bits = f"b{8 * type_bytes(type_)}"
    yes, no = b.read_as(inst.operands[1], type_, bits), b.read_as(inst.operands[2], type_, bits)
    sign = b.read(inst.operands[3], selector)

    def compute(warp: "Warp") -> Any:
        chosen = flush(sign(warp)) if ftz else sign(warp)
        return select(chosen >= 0, yes(warp), no(warp), UNSIGNED[type_bytes(type_)])

    return put_step(b, inst.operands[0], compute, bits)


# ---- comparison -----------------------------------------------------------------------------------

INTEGER_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _nan(x: Any, y: Any) -> Any:
    return (x != x) | (y != y)


FLOAT_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "equ": lambda x, y: (x == y) | _nan(x, y),
    "neu": operator.ne,
    "ltu": lambda x, y: (x < y) | _nan(x, y),
    "leu": lambda x, y: (x <= y) | _nan(x, y),
    "gtu": lambda x, y: (x > y) | _nan(x, y),
    "geu": lambda x, y: (x >= y) | _nan(x, y),
    "num": lambda x, y: (x == x) & (y == y),
    "nan": _nan,
}
BOOLEAN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def comparison(inst: Inst, b: Builder, mods: Mods, type_: str) -> "Callable[[Warp], Any]":
    """Returns the comparison of setp/set: a dual bool of operands 1 and 2."""
    integer = type_ in INTEGER_TYPES
    name = mods.one_of(*(INTEGER_COMPARE if integer else FLOAT_COMPARE))
    if name is None:
        raise inst.unsupported(f"comparison of .{type_}")
    ftz = mods.flag("ftz")
    x, y = b.read(inst.operands[1], type_), b.read(inst.operands[2], type_)
    if integer:
        compare = INTEGER_COMPARE[name]
        return lambda warp: compare(x(warp), y(warp))
    compare = FLOAT_COMPARE[name]
    if ftz and type_ == "f32":
        return lambda warp: compare(flush(x(warp)), flush(y(warp)))
    return lambda warp: compare(x(warp), y(warp))


@handler("setp")
def set_predicate(inst: Inst, b: Builder) -> Step:
    """p|q = (a cmp b) op c | !(a cmp b) op c (PTX ISA 9.7.7)."""
    mods = Mods(inst)
    type_ = mods.type()
    compare = comparison(inst, b, mods, type_)
    combine = mods.one_of(*BOOLEAN)
    mods.done()
    dest = inst.operands[0]
    if combine is None and not isinstance(dest, Pair) and type_ in INTEGER_TYPES:
        return _set_predicate_fast(inst, b, type_)
    first, second = (dest.first, dest.second) if isinstance(dest, Pair) else (dest, Sink())
    put_p, put_q = b.write(first, "pred"), b.write(second, "pred")
    other = b.read(inst.operands[3], "pred") if combine else None
    join = BOOLEAN[combine] if combine else None

    def step(warp: "Warp") -> None:
        p: Any = compare(warp)
        p = p if p.__class__ is np.ndarray else bool(p)
        q = invert(p)
        if join is not None and other is not None:
            c = other(warp)
            p, q = join(p, c), join(q, c)
        put_p(warp, p)
        put_q(warp, q)

    return step


def _set_predicate_fast(inst: Inst, b: Builder, type_: str) -> Step:
    """Integer comparison into one predicate.

    It is the loop condition of every kernel, so it makes no calls but the comparison.
    """
    name = next(m for m in inst.mods if m in INTEGER_COMPARE)
    compare = INTEGER_COMPARE[name]
    x, y = same_width(b, inst.operands[1], type_), same_width(b, inst.operands[2], type_)
    d = b.target(inst.operands[0])
    size = type_bytes(type_)
    # Flipping the sign bit turns signed order into unsigned order.
    flip = 1 << (8 * size - 1) if type_[0] == "s" and name not in ("eq", "ne") else 0
    dtype, lane_type = b.dtypes[d], SIGNED[size] if flip else UNSIGNED[size]

    def lanes(value: Any, other: Any) -> np.ndarray:
        if value.__class__ is np.ndarray:
            return value.view(lane_type)
        return lane_constant(lane_type, (value ^ flip) - flip, len(other))

    def step(warp: "Warp") -> None:
        regs = warp.regs
        u, v = regs[x], regs[y]
        value: Any
        if u.__class__ is int and v.__class__ is int:
            value = compare(u ^ flip, v ^ flip)
        elif u is None or v is None:
            raise TypeError("undefined register")
        else:
            value = compare(lanes(u, v), lanes(v, u))
        if d in warp.protected:
            value = merge_lanes(warp.active, value, regs[d], dtype)
        regs[d] = value

    return step


@handler("set")
def set_register(inst: Inst, b: Builder) -> Step:
    """d = (a cmp b) as all ones or 1.0."""
    mods = Mods(inst)
    result, type_ = mods.types()
    compare = comparison(inst, b, mods, type_)
    combine = mods.one_of(*BOOLEAN)
    mods.done()
    other = b.read(inst.operands[3], "pred") if combine else None
    yes = 0x3F800000 if result == "f32" else 0xFFFFFFFF

    def compute(warp: "Warp") -> Any:
        value: Any = compare(warp)
        if combine and other is not None:
            value = BOOLEAN[combine](value, other(warp))
        return select(value, yes, 0, np.uint32)

    return put_step(b, inst.operands[0], compute, "b32")

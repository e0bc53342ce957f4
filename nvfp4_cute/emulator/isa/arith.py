"""Integer and logic instructions: tables of (operation x type) over dual values."""

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
from nvfp4_cute.emulator.isa.floats import flush
from nvfp4_cute.emulator.memory import lane_constant
from nvfp4_cute.emulator.ptx import Imm, Inst, Operand, Pair, Sink, Vector

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Warp

INTEGER_TYPES = ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64")


def same_width(b: Builder, operand: Operand, type_: str) -> int:
    """Slot of a source operand whose register is exactly as wide as the type.

    Raises:
        EmulatorError: another width, which PTX does not allow here.
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
    # NumPy takes an array operand much faster than a Python int.
    lanes = np.full(32, literal, b.dtypes[y]) if literal.__class__ is int else None

    def step(warp: "Warp") -> None:
        regs = warp.regs
        left, right = regs[x], regs[y]
        if left.__class__ is int and right.__class__ is int:
            value = operation(left, right) & mask
        else:
            value = operation(left, right if lanes is None else lanes)
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
    """A dual value as 32 lanes (uniform values by broadcasting) of `dtype`."""
    if value.__class__ is np.ndarray:
        return value
    return np.full(32, value, dtype)


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
    """yes where condition, else no; uniform if the condition is."""
    if condition.__class__ is np.ndarray:
        return np.where(condition, as_array(yes, dtype), as_array(no, dtype))
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
            as_array(x(warp), np.int32).astype(np.int64), as_array(y(warp), np.int32).astype(np.int64)
        )
        return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return put_step(b, dest, compute, "s32")


def _multiply(part: str, type_: str) -> Callable[[Any, Any], Any]:
    """Product of two typed dual values: .lo, .hi, or .wide of it."""
    size = type_bytes(type_)
    signed = type_[0] == "s"
    wide_dtype = np.dtype(("i" if signed else "u") + str(min(2 * size, 8)))

    def product(x: Any, y: Any) -> Any:
        if x.__class__ is not np.ndarray and y.__class__ is not np.ndarray:
            value = x * y
            return value >> 8 * size if part == "hi" else value
        if part == "lo":
            return x * y if size > 2 else np.multiply(x, y)
        if size == 8:
            return _high64(x, y, signed)
        value = np.asarray(x, wide_dtype) * np.asarray(y, wide_dtype)
        return value if part == "wide" else (value >> (8 * size)).astype(wide_dtype)

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
    x, y = as_array(x, dtype), as_array(y, dtype)
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
    """Remainder with the sign of the dividend; x rem 0 is x."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    x, y = b.read(inst.operands[1], type_), b.read(inst.operands[2], type_)

    def compute(warp: "Warp") -> Any:
        u, v = x(warp), y(warp)
        if u.__class__ is not np.ndarray and v.__class__ is not np.ndarray:
            return u - _quotient(u, v, type_) * v if v else u
        return u - _quotient(u, v, type_) * v

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


# ---- shifts and bit fields ------------------------------------------------------------------------


@handler("shl", "shr")
def shift(inst: Inst, b: Builder) -> Step:
    """Shifts with the count clamped to the width; shr on s types keeps the sign."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    size = 8 * type_bytes(type_)
    dest, value, count = inst.operands
    if isinstance(count, Imm):
        return _shift_by_literal(inst, b, type_, min(b.imm(count), size))
    y = b.read(count, "u32")
    dtype = UNSIGNED[size // 8].type
    if inst.opcode == "shr" and type_[0] == "s":
        x = b.read(value, type_)

        def arithmetic(warp: "Warp") -> Any:
            u, v = x(warp), y(warp)
            if u.__class__ is not np.ndarray and v.__class__ is not np.ndarray:
                return u >> min(v, size - 1)
            signed = np.dtype(f"i{size // 8}").type
            return as_array(u, signed) >> np.minimum(v, size - 1).astype(signed)

        return put_step(b, dest, arithmetic, type_)
    slot = same_width(b, value, type_)
    mask = (1 << size) - 1
    left = inst.opcode == "shl"

    def logical(warp: "Warp") -> Any:
        u, v = warp.regs[slot], y(warp)
        if v.__class__ is not np.ndarray:
            if v >= size:
                return 0
            return (
                (u << v if left else u >> v)
                if u.__class__ is np.ndarray
                else (u << v & mask if left else u >> v)
            )
        u = as_array(u, dtype)
        safe = np.minimum(v, size - 1).astype(dtype)
        return np.where(v >= size, dtype(0), u << safe if left else u >> safe)

    return put_step(b, dest, logical, f"u{size}")


def _shift_by_literal(inst: Inst, b: Builder, type_: str, count: int) -> Step:
    """A shift by a literal already clamped to the width: address arithmetic, so one step without calls."""
    size = 8 * type_bytes(type_)
    x, d = same_width(b, inst.operands[1], type_), b.target(inst.operands[0])
    mask, dtype = (1 << size) - 1, b.dtypes[d]
    signed = inst.opcode == "shr" and type_[0] == "s"
    lane_type = SIGNED[size // 8] if signed else UNSIGNED[size // 8]
    amount = np.full(32, min(count, size - 1), lane_type)
    shift_lanes = np.left_shift if inst.opcode == "shl" else np.right_shift
    vanishes = count == size and not signed
    half = 1 << (size - 1)

    def step(warp: "Warp") -> None:
        value = warp.regs[x]
        if value.__class__ is np.ndarray:
            value = 0 if vanishes else shift_lanes(value.view(lane_type), amount).view(dtype)
        elif signed:
            value = ((value ^ half) - half) >> count & mask
        else:
            value = value << count & mask if shift_lanes is np.left_shift else value >> count
        if d in warp.protected:
            value = merge_lanes(warp.active, value, warp.regs[d], dtype)
        warp.regs[d] = value

    return step


@handler("shf")
def funnel_shift(inst: Inst, b: Builder) -> Step:
    """shf.l/.r .clamp/.wrap: the high or low word of a shifted 64-bit pair {b, a}."""
    mods = Mods(inst)
    mods.type()
    left = mods.one_of("l", "r") == "l"
    wrap = mods.one_of("wrap", "clamp") == "wrap"
    mods.done()
    low, high, count = (b.read(o, "u32") for o in inst.operands[1:])

    def compute(warp: "Warp") -> Any:
        x, y, n = low(warp), high(warp), count(warp)
        if all(v.__class__ is not np.ndarray for v in (x, y, n)):
            n = n & 31 if wrap else min(n, 32)
            pair = y << 32 | x
            return (pair << n >> 32 if left else pair >> n) & 0xFFFFFFFF
        pair = np.asarray(y, np.uint64) << np.uint64(32) | np.asarray(x, np.uint64)
        n = np.asarray(n).astype(np.uint64)
        n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
        value = (pair << n) >> np.uint64(32) if left else pair >> n
        return (value & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return put_step(b, inst.operands[0], compute, "u32")


@handler("bfe")
def bit_field_extract(inst: Inst, b: Builder) -> Step:
    """Field of `len` bits at `pos`, zero- or sign-extended; the sign of a field past the end is the register's."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    size = 8 * type_bytes(type_)
    value, pos, length = b.read(inst.operands[1], type_), *(b.read(o, "u32") for o in inst.operands[2:])

    def one(word: int, start: int, count: int) -> int:
        start, count = start & 0xFF, count & 0xFF
        if count == 0:
            return 0
        field = (word >> start) & ((1 << count) - 1)
        if type_[0] == "s" and start + count <= size and field >> (count - 1) & 1:
            return field - (1 << count)
        return field if type_[0] == "u" or start + count <= size else word >> min(start, size - 1)

    return put_step(b, inst.operands[0], per_lane(one, (value, pos, length), type_), type_)


@handler("bfi")
def bit_field_insert(inst: Inst, b: Builder) -> Step:
    """Insert the low `len` bits of a into b at `pos`."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    size = 8 * type_bytes(type_)
    reads = (*(b.read(o, type_) for o in inst.operands[1:3]), *(b.read(o, "u32") for o in inst.operands[3:]))
    full = (1 << size) - 1

    def one(field: int, into: int, start: int, count: int) -> int:
        mask = ((1 << (count & 0xFF)) - 1) << (start & 0xFF) & full
        return into & ~mask | field << (start & 0xFF) & mask

    return put_step(b, inst.operands[0], per_lane(one, reads, type_), type_)


def per_lane(one: Callable[..., int], reads: Any, type_: str) -> "Callable[[Warp], Any]":
    """Apply a function of Python ints: once if all operands are uniform, else lane by lane."""
    size = type_bytes(type_)
    mask = (1 << 8 * size) - 1
    dtype = UNSIGNED[size]

    def compute(warp: "Warp") -> Any:
        values = [r(warp) for r in reads]
        if all(v.__class__ is not np.ndarray for v in values):
            return one(*values) & mask
        columns = [v.tolist() if v.__class__ is np.ndarray else [v] * 32 for v in values]
        return np.array([one(*lane) & mask for lane in zip(*columns, strict=True)], dtype)

    return compute


def _bfind(word: int, signed: bool, size: int, shift_amount: bool) -> int:
    word = ~word if signed and word < 0 else word
    top = word.bit_length() - 1
    if top < 0:
        return 0xFFFFFFFF
    return size - 1 - top if shift_amount else top


@handler("popc", "clz", "brev", "bfind")
def bit_count(inst: Inst, b: Builder) -> Step:
    """Population count, leading zeros, bit reversal, position of the most significant non-sign bit."""
    mods = Mods(inst)
    type_ = mods.type()
    shift_amount = mods.flag("shiftamt")
    mods.done()
    size = 8 * type_bytes(type_)
    functions: dict[str, Callable[[int], int]] = {
        "popc": lambda word: word.bit_count(),
        "clz": lambda word: size - word.bit_length(),
        "brev": lambda word: int(f"{word:0{size}b}"[::-1], 2),
        "bfind": lambda word: _bfind(word, type_[0] == "s", size, shift_amount),
    }
    result = type_ if inst.opcode == "brev" else "u32"
    return put_step(
        b,
        inst.operands[0],
        per_lane(functions[inst.opcode], (b.read(inst.operands[1], type_),), result),
        result,
    )


@handler("lop3")
def lop3(inst: Inst, b: Builder) -> Step:
    """Any logic function of three words: bit (4a + 2b + c) of the table `immLut`."""
    mods = Mods(inst)
    type_ = mods.type()
    mods.done()
    table = b.imm(inst.operands[4])
    reads = [b.read(o, type_) for o in inst.operands[1:4]]
    terms = [i for i in range(8) if table >> i & 1]

    def compute(warp: "Warp") -> Any:
        x, y, z = (r(warp) for r in reads)
        value: Any = 0
        for i in terms:
            value = value | ((x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z))
        return value

    # ~ of a Python int is negative; the writer wraps it. Mixed operands need arrays throughout.
    def mixed(warp: "Warp") -> Any:
        if len({r(warp).__class__ is np.ndarray for r in reads}) == 1:
            return compute(warp)
        x, y, z = (as_array(r(warp), UNSIGNED[4]) for r in reads)
        value = np.zeros(32, np.uint32)
        for i in terms:
            value |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return value

    return put_step(b, inst.operands[0], mixed, type_)


_PRMT_MODES = {
    "f4e": lambda s, i: s + i,
    "b4e": lambda s, i: (s - i) & 7,
    "rc8": lambda s, i: s,
    "ecl": lambda s, i: max(i, s),
    "ecr": lambda s, i: min(i, s),
    "rc16": lambda s, i: (s & 1) * 2 + (i & 1),
}


@handler("prmt")
def permute(inst: Inst, b: Builder) -> Step:
    """Pick four bytes of the pair {b, a}; bit 3 of a selector replicates the byte's sign."""
    mods = Mods(inst)
    type_ = mods.type()
    mode = mods.one_of(*_PRMT_MODES)
    mods.done()
    reads = [b.read(o, type_) for o in inst.operands[1:]]

    def one(low: int, high: int, selector: int) -> int:
        pair = high << 32 | low
        result = 0
        for i in range(4):
            pick = selector >> 4 * i & 0xF if mode is None else _PRMT_MODES[mode](selector & 3, i) & 7
            byte = pair >> 8 * (pick & 7) & 0xFF
            if pick & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << 8 * i
        return result

    lanes = per_lane(one, reads, type_)

    def fast(warp: "Warp") -> Any:
        x, y, selector = (r(warp) for r in reads)
        if mode is not None or selector.__class__ is np.ndarray or selector & 0x8888:
            return lanes(warp)
        if x.__class__ is not np.ndarray and y.__class__ is not np.ndarray:
            return one(x, y, selector)
        sources = np.empty((32, 2), np.uint32)
        sources[:, 0], sources[:, 1] = x, y
        picks = [selector >> 4 * i & 7 for i in range(4)]
        return np.ascontiguousarray(sources.view(np.uint8)[:, picks]).view(np.uint32).reshape(32)

    return put_step(b, inst.operands[0], fast, type_)


# ---- moves and selection --------------------------------------------------------------------------


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
    poison = (1 << 8 * part) - 1
    word, element = UNSIGNED.get(part * count), UNSIGNED[part]

    def compute(warp: "Warp") -> Any:
        # The compiler packs a register that nobody wrote where only the other parts are used later.
        values = [poison if (v := r(warp)) is None else v for r in reads]
        if all(v.__class__ is not np.ndarray for v in values):
            return sum(v << 8 * part * i for i, v in enumerate(values))
        if word is None:
            return _wide_words(values, element)
        packed = np.empty(32 * count, element)
        for i, value in enumerate(values):
            packed[i::count] = value
        return packed.view(word)

    return put_step(b, dest, compute, f"b{8 * part * count}")


def _wide_words(values: list[Any], element: np.dtype) -> np.ndarray:
    """128-bit lanes (Python ints) of dual parts, the low part first."""
    columns = [as_array(v, element).tolist() for v in values]
    words = np.empty(32, object)
    bits = 8 * element.itemsize
    words[:] = [sum(v << bits * i for i, v in enumerate(lane)) for lane in zip(*columns, strict=True)]
    return words


def _unpack(b: Builder, dest: Vector, source: Operand, type_: str) -> Step:
    count = len(dest.items)
    part = type_bytes(type_) // count
    read = b.read(source, type_)
    # (which part, destination slot, writer for the less common cases)
    parts = [
        (i, b.target(item), b.write(item, f"b{8 * part}"))
        for i, item in enumerate(dest.items)
        if not isinstance(item, Sink)
    ]
    mask, dtype = (1 << 8 * part) - 1, UNSIGNED[part]
    plain = all(b.width(d) == part for _, d, _ in parts)

    def step(warp: "Warp") -> None:
        value = read(warp)
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
            elements, regs = value.view(dtype), warp.regs
            for i, d, _ in parts:
                regs[d] = elements[i::count].copy()

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
            return np.where(p, as_array(yes(warp), dtype), as_array(no(warp), dtype))
        return yes(warp) if p else no(warp)

    return put_step(b, inst.operands[0], compute, bits)


@handler("slct")
def select_by_sign(inst: Inst, b: Builder) -> Step:
    """d = c >= 0 ? a : b."""
    mods = Mods(inst)
    mods.drop("ftz")
    type_, selector = mods.types()
    mods.done()
    bits = f"b{8 * type_bytes(type_)}"
    yes, no = b.read_as(inst.operands[1], type_, bits), b.read_as(inst.operands[2], type_, bits)
    sign = b.read(inst.operands[3], selector)

    def compute(warp: "Warp") -> Any:
        return select(sign(warp) >= 0, yes(warp), no(warp), UNSIGNED[type_bytes(type_)])

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
    """The compare part of setp/set: a dual bool of the operands 1 and 2."""
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
    """Integer compare into one predicate: the loop condition of every kernel, so no calls but the compare."""
    name = next(m for m in inst.mods if m in INTEGER_COMPARE)
    compare = INTEGER_COMPARE[name]
    x, y = same_width(b, inst.operands[1], type_), same_width(b, inst.operands[2], type_)
    d = b.target(inst.operands[0])
    size = type_bytes(type_)
    # Flipping the sign bit turns signed order into unsigned order.
    flip = 1 << (8 * size - 1) if type_[0] == "s" and name not in ("eq", "ne") else 0
    dtype, lane_type = b.dtypes[d], SIGNED[size] if flip else UNSIGNED[size]

    def lanes(value: Any) -> np.ndarray:
        if value.__class__ is np.ndarray:
            return value.view(lane_type)
        return lane_constant(lane_type, (value ^ flip) - flip)

    def step(warp: "Warp") -> None:
        regs = warp.regs
        u, v = regs[x], regs[y]
        value: Any
        if u.__class__ is int and v.__class__ is int:
            value = compare(u ^ flip, v ^ flip)
        elif u is None or v is None:
            raise TypeError("undefined register")
        else:
            value = compare(lanes(u), lanes(v))
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

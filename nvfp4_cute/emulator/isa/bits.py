"""Shifts, bit fields, bit counts, lop3, and prmt."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import SIGNED, UNSIGNED, Builder, Mods, Step, handler, merge_lanes, type_bytes
from nvfp4_cute.emulator.isa.arith import as_lanes, per_lane, put_step, same_width
from nvfp4_cute.emulator.lanes import LANES
from nvfp4_cute.emulator.ptx import Imm, Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp


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
            return as_lanes(u, signed) >> np.minimum(v, size - 1).astype(signed)

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
        u = as_lanes(u, dtype)
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
    amount = np.full(LANES, min(count, size - 1), lane_type)
    shift_lanes = np.left_shift if inst.opcode == "shl" else np.right_shift
    vanishes = count == size and not signed
    half = 1 << (size - 1)

    def step(warp: "Warp") -> None:
        value = warp.regs[x]
        if value.__class__ is np.ndarray:
            by = amount if len(value) == LANES else amount[:1]
            value = 0 if vanishes else shift_lanes(value.view(lane_type), by).view(dtype)
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
        x, y, z = (as_lanes(r(warp), UNSIGNED[4]) for r in reads)
        value = np.zeros(max(x.size, y.size, z.size), np.uint32)
        for i in terms:
            value |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return value

    return put_step(b, inst.operands[0], mixed, type_)


_NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)
_PRMT_MODES = {
    "f4e": lambda s, i: s + i,
    "b4e": lambda s, i: (s - i) & 7,
    "rc8": lambda s, i: s,
    "ecl": lambda s, i: max(i, s),
    "ecr": lambda s, i: min(i, s),
    "rc16": lambda s, i: (s & 1) * 2 + (i & 1),
}


@lru_cache(1024)
def _literal_picks(selector: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the bytes that a selector picks, and for which of them the sign; None if for none."""
    picks = selector >> _NIBBLES & 15
    signed = (picks & 8).astype(bool)
    return (picks & 7).astype(np.intp), signed if signed.any() else None


@lru_cache(1024)
def _pickable(low: int, high: int) -> np.ndarray:
    """Returns the bytes of {high, low} that the sixteen values of a selector's nibble pick."""
    plain = np.array([low, high], np.uint32).view(np.uint8)
    return np.concatenate([plain, (plain.view(np.int8) >> 7).view(np.uint8)])


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

    if mode is not None:
        return put_step(b, inst.operands[0], per_lane(one, reads, type_), type_)

    def fast(warp: "Warp") -> Any:
        x, y, selector = (r(warp) for r in reads)
        is_table = x.__class__ is not np.ndarray and y.__class__ is not np.ndarray
        if selector.__class__ is not np.ndarray:
            if is_table:
                return one(x, y, selector)
            indices, signed = _literal_picks(selector)
        else:
            picks = selector[:, None] >> _NIBBLES & np.uint32(15)
            if is_table:
                return _pickable(x, y).take(picks).view(np.uint32).reshape(-1)
            indices, signed = (picks & np.uint32(7)).astype(np.intp), (picks & np.uint32(8)).astype(bool)
        sources = np.empty((max(np.size(x), np.size(y), np.size(selector)), 2), np.uint32)
        sources[:, 0], sources[:, 1] = x, y
        if indices.ndim == 1:
            chosen = sources.view(np.uint8).take(indices, axis=1)
        else:
            chosen = np.take_along_axis(sources.view(np.uint8), indices, axis=1)
        if signed is not None:
            chosen = np.where(signed, (chosen.view(np.int8) >> 7).view(np.uint8), chosen)
        return chosen.view(np.uint32).reshape(-1)

    return put_step(b, inst.operands[0], fast, type_)

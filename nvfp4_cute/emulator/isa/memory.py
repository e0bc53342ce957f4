"""Loads, stores, atomics, matrix loads, and address arithmetic between state spaces.

Uniform addresses use a scalar path. Lane-dependent addresses are one NumPy gather or scatter of full vectors, with
memory viewed as items as wide as the access.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.addresses import RANK_SHIFT
from nvfp4_cute.emulator.isa import SIGNED, UNSIGNED, Builder, Mods, Reader, Step, handler, type_bytes
from nvfp4_cute.emulator.isa.arith import as_array, put_step
from nvfp4_cute.emulator.isa.calls import move_argument
from nvfp4_cute.emulator.isa.spaces import (
    SPACES,
    gather,
    generic_space,
    is_uniform,
    locate,
    resolve_lanes,
    resolve_one,
    scatter,
)
from nvfp4_cute.emulator.memory import ITEM_DTYPES
from nvfp4_cute.emulator.ptx import Address, Inst, Operand, Sink, Symbol, Vector
from nvfp4_cute.emulator.reductions import combine_floats
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

HINTS = (
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "cta", "cluster", "gpu", "sys", "ca", "cg", "cs",
    "cv", "wb", "wt", "lu", "nc", "unified", "noftz",
)  # fmt: skip
"""Ordering, scope, and cache operators: the machine performs accesses in program order and has no caches."""

POLLING = ("relaxed", "acquire", "volatile", "mmio")


def memory_mods(inst: Inst) -> tuple[Mods, str, bool]:
    """Consumes the space and the hints. Returns (remaining modifiers, space, whether this load may be a poll)."""
    mods = Mods(inst)
    space = mods.one_of(*SPACES, default="generic") or "generic"
    polling = any(name in inst.mods for name in POLLING)
    mods.drop(*HINTS)
    mods.drop_prefix("L1::", "L2::")
    return mods, space, polling


def _vector(mods: Mods, operand: Operand) -> tuple[tuple[Operand, ...], int]:
    width = mods.one_of("v2", "v4", "v8")
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != int(width[1:] if width else 1):
        raise mods.inst.unsupported(f"{len(items)} registers for .{width}")
    return items, len(items)


@handler("ld", "ldu")
def load(inst: Inst, b: Builder) -> Step:
    """ld in every space, scalar or vector (PTX ISA 9.7.9.8). A trailing cache-policy operand is a hint."""
    if (moved := move_argument(inst, b)) is not None:
        return moved
    mods, space, polling = memory_mods(inst)
    type_ = mods.type()
    items, count = _vector(mods, inst.operands[0])
    mods.done()
    size = type_bytes(type_)
    element = SIGNED[size] if type_[0] == "s" else UNSIGNED.get(size)
    if element is None:
        return _load_wide(inst, b, space)
    result = type_ if type_[0] == "s" else f"u{8 * size}"
    writes = [b.write(item, result) for item in items]
    address = inst.operands[1]
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        return _load_param(b, address, writes, element)
    address_of = b.address(address)
    total = size * count
    full, half = 1 << 8 * size, 1 << (8 * size - (type_[0] == "s"))

    def step(warp: "Warp") -> None:
        where = address_of(warp)
        warp.polled = warp.polled or polling
        if is_uniform(space, where):
            memory, index = locate(warp, space, where, total, size, False)
            warp.cta.machine.stats.load_bytes += total * warp.warps
            if count == 1:
                value = memory.item(index)
                writes[0](warp, value - full if value >= half else value)
                return
            for write, value in zip(writes, memory[index : index + count].tolist(), strict=True):
                write(warp, value - full if value >= half else value)
            return
        rows = gather(warp, space, where, total, element, count)
        for i, write in enumerate(writes):
            write(warp, rows[i])

    return step


def _load_param(b: Builder, address: Address, writes: list[Any], element: np.dtype) -> Step:
    assert isinstance(address.base, Symbol)
    if address.base.name not in b.symbols:
        raise b.refuse(f"unknown kernel parameter `{address.base.name}`")
    start = b.symbols[address.base.name][1] + address.base.offset + address.offset
    end = start + element.itemsize * len(writes)

    def step(warp: "Warp") -> None:
        values = warp.cta.launch.params[start:end].view(element).tolist()
        for write, value in zip(writes, values, strict=True):
            write(warp, value)

    return step


def _load_wide(inst: Inst, b: Builder, space: str) -> Step:
    """ld.b128 into a 128-bit register."""
    address_of, write = b.address(inst.operands[1]), b.write(inst.operands[0], "b128")

    def step(warp: "Warp") -> None:
        where = address_of(warp)
        if where.__class__ is not np.ndarray:
            write(warp, int.from_bytes(resolve_one(warp, space, where, 16, False).tobytes(), "little"))
            return
        rows = gather(warp, space, where, 16, np.dtype("u8"), 2)
        words = np.empty(32, object)
        words[:] = [low | high << 64 for low, high in zip(rows[0].tolist(), rows[1].tolist(), strict=True)]
        write(warp, words)

    return step


@handler("st")
def store(inst: Inst, b: Builder) -> Step:
    """st in every space, scalar or vector (PTX ISA 9.7.9.11)."""
    if (moved := move_argument(inst, b)) is not None:
        return moved
    mods, space, _ = memory_mods(inst)
    type_ = mods.type()
    items, count = _vector(mods, inst.operands[1])
    mods.done()
    size = type_bytes(type_)
    if size == 16:
        return _store_wide(inst, b, space)
    reads = [b.read_as(item, type_, f"u{8 * size}") for item in items]
    address_of = b.address(inst.operands[0])
    total = size * count
    dtype = UNSIGNED[size]

    def step(warp: "Warp") -> None:
        where = address_of(warp)
        machine = warp.cta.machine
        machine.changes += 1
        values = [r(warp) for r in reads]
        if is_uniform(space, where):
            lane = warp.first_lane()
            memory, index = locate(warp, space, where, total, size, True)
            for i, value in enumerate(values):
                memory[index + i] = value[lane] if value.__class__ is np.ndarray else value
            machine.stats.store_bytes += total * warp.warps
            return
        scatter(warp, space, where, values, dtype)

    return step


def _store_wide(inst: Inst, b: Builder, space: str) -> Step:
    address_of, read = b.address(inst.operands[0]), b.read(inst.operands[1], "b128")

    def step(warp: "Warp") -> None:
        where, value = address_of(warp), read(warp)
        warp.cta.machine.changes += 1
        for lane in warp.active_lanes():
            address = int(where[lane]) if where.__class__ is np.ndarray else where
            word = int(value[lane]) if value.__class__ is np.ndarray else value
            resolve_one(warp, space, address, 16, True)[:] = np.frombuffer(
                word.to_bytes(16, "little"), np.uint8
            )

    return step


# ---- atomics --------------------------------------------------------------------------------------

ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


@handler("atom", "red")
def atomic(inst: Inst, b: Builder) -> Step:
    """atom/red: lanes act one after the other, in lane order (PTX ISA 9.7.13.5, 9.7.13.7)."""
    mods, space, _ = memory_mods(inst)
    operation = mods.one_of(*ATOMIC, "cas")
    type_ = mods.type()
    count = int((mods.one_of("v2", "v4", "v8") or "v1")[1:])
    mods.done()
    if operation is None:
        raise inst.unsupported("no atomic operation")
    has_result = inst.opcode == "atom"
    where = b.address(inst.operands[1 if has_result else 0])
    sources = inst.operands[2 if has_result else 1 :]
    need = 2 if operation == "cas" else 1
    reads = [_words(b, o, type_) for o in sources[:need]]
    targets = _targets(inst.operands[0]) if has_result else ()
    size = type_bytes(type_)
    writes = [b.write(t, f"u{8 * size}") for t in targets]
    updates = {flush: _updater(operation, type_, flush) for flush in (False, True)}
    dtype = UNSIGNED[size]

    def step(warp: "Warp") -> None:
        address = where(warp)
        operands = [[as_array(w(warp), dtype) for w in words] for words in reads]
        warp.cta.machine.changes += 1
        old = np.zeros((count, 32), dtype)
        for lane in warp.active_lanes():
            one = int(address[lane]) if address.__class__ is np.ndarray else address
            memory = resolve_one(warp, space, one, size * count, True).view(dtype)
            old[:, lane] = memory
            update = updates[(generic_space(one) if space == "generic" else space) == "global"]
            for i in range(count):
                memory[i : i + 1] = update(
                    memory[i : i + 1], *(words[i][lane : lane + 1] for words in operands)
                )
        for i, write in enumerate(writes):
            write(warp, int(old[i, warp.first_lane()]) if warp.num_active == 1 else old[i].copy())

    return step


def _targets(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _words(b: Builder, operand: Operand, type_: str) -> list[Reader]:
    return [b.read_as(o, type_, f"u{8 * type_bytes(type_)}") for o in _targets(operand)]


def _compare_and_swap(old: np.ndarray, compare: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == compare, new, old)


def _updater(operation: str, type_: str, flush: bool) -> Callable[..., np.ndarray]:
    """Returns a function of one-element word arrays (old, operand...) -> new word.

    `flush`: flush f32 subnormals in global memory.
    """
    if operation == "cas":
        return _compare_and_swap
    if type_[0] in "fb" and not type_[1:].isdecimal() or type_ in ("f16", "f32", "f64"):
        return partial(combine_floats, operation, type_.removesuffix("x2"), flush=flush and type_ == "f32")
    return integer_updater(ATOMIC[operation], type_)


def integer_updater(function: Callable[[Any, Any], Any], type_: str) -> Callable[..., np.ndarray]:
    """Wraps a function of Python ints of an integer type as one of word arrays (old, operand) -> new word, one element each."""
    size = type_bytes(type_)
    dtype = SIGNED[size] if type_[0] == "s" else UNSIGNED[size]
    mask = (1 << 8 * size) - 1

    def update(old: np.ndarray, operand: np.ndarray) -> np.ndarray:
        value = function(int(old.view(dtype)[0]), int(operand.view(dtype)[0])) & mask
        return np.array([value], UNSIGNED[size])

    return update


# ---- matrices -------------------------------------------------------------------------------------


def _matrix_mods(inst: Inst) -> tuple[int, bool]:
    mods, _, _ = memory_mods(inst)
    mods.drop("sync", "aligned", "b16")
    if not mods.flag("m8n8"):
        raise inst.unsupported("only the m8n8 shape of 16-bit elements is modelled")
    count = int((mods.one_of("x1", "x2", "x4") or "x1")[1:])
    transposed = mods.flag("trans")
    mods.done()
    return count, transposed


def _row_offsets(warp: "Warp", address: Any, count: int, write: bool) -> tuple[np.ndarray, np.ndarray]:
    if not warp.all_active:
        raise EmulatorError("a matrix load or store needs all 32 lanes active")
    rows = as_array(address, np.uint32)[: 8 * count]
    return resolve_lanes(warp, "shared", rows, 16, write)


@handler("ldmatrix")
def load_matrix(inst: Inst, b: Builder) -> Step:
    """ldmatrix m8n8: lane 8j+i supplies the address of row i of matrix j; lane 4g+t gets elements 2t, 2t+1 of row g."""
    count, transposed = _matrix_mods(inst)
    writes = [b.write(item, "b32") for item in _targets(inst.operands[0])]
    address_of = b.address(inst.operands[1])

    def step(warp: "Warp") -> None:
        memory, index = _row_offsets(warp, address_of(warp), count, False)
        warp.cta.machine.stats.load_bytes += 128 * count
        elements = memory[index].view(np.uint16).reshape(count, 8, 8)
        if transposed:
            elements = np.ascontiguousarray(elements.transpose(0, 2, 1))
        words = elements.view(np.uint32).reshape(count, 32)
        for i, write in enumerate(writes):
            write(warp, words[i])

    return step


@handler("stmatrix")
def store_matrix(inst: Inst, b: Builder) -> Step:
    """stmatrix m8n8, the inverse of ldmatrix."""
    count, transposed = _matrix_mods(inst)
    reads = [b.read(item, "b32") for item in _targets(inst.operands[1])]
    address_of = b.address(inst.operands[0])

    def step(warp: "Warp") -> None:
        memory, index = _row_offsets(warp, address_of(warp), count, True)
        machine = warp.cta.machine
        machine.stats.store_bytes += 128 * count
        machine.changes += 1
        words = np.empty((count, 32), np.uint32)
        for i, read in enumerate(reads):
            words[i] = read(warp)
        elements = words.view(np.uint16).reshape(count, 8, 8)
        if transposed:
            elements = np.ascontiguousarray(elements.transpose(0, 2, 1))
        memory[index] = elements.reshape(count * 8, 8).view(ITEM_DTYPES[16]).reshape(-1)

    return step


# ---- addresses ------------------------------------------------------------------------------------


@handler("cvta")
def convert_address(inst: Inst, b: Builder) -> Step:
    """cvta / cvta.to: converts between a state space and the generic address space."""
    mods = Mods(inst)
    back = mods.flag("to")
    space = mods.one_of(*SPACES)
    type_ = mods.type()
    mods.done()
    if space is None:
        raise inst.unsupported("cvta without a state space")
    base = SPACES[space].window
    read = b.read(inst.operands[1], type_)
    if not base:
        return put_step(b, inst.operands[0], read, type_)
    shift = -base if back else base

    def compute(warp: "Warp") -> Any:
        value = read(warp)
        if value.__class__ is np.ndarray:
            return value + np.uint64(shift & 0xFFFFFFFFFFFFFFFF)
        return value + shift

    return put_step(b, inst.operands[0], compute, type_)


@handler("isspacep")
def is_space(inst: Inst, b: Builder) -> Step:
    """Whether a generic address points into a state space."""
    mods = Mods(inst)
    space = mods.one_of(*SPACES)
    mods.done()
    read = b.read(inst.operands[1], "b64")

    own = space in ("shared", "shared::cta")

    def inside(warp: "Warp", address: int) -> bool:
        kind = generic_space(address)
        if own:  # the other CTAs of a cluster lie only in shared::cluster
            return kind == "shared::cluster" and address >> RANK_SHIFT & 0xFF == warp.cta.rank
        return kind == space

    def compute(warp: "Warp") -> Any:
        value = read(warp)
        if value.__class__ is np.ndarray:
            return np.array([inside(warp, v) for v in value.tolist()])
        return inside(warp, value)

    return put_step(b, inst.operands[0], compute, "pred")


@handler("mapa")
def map_address(inst: Inst, b: Builder) -> Step:
    """Returns the address of the same variable in the CTA with the given rank: replaces the rank byte."""
    mods = Mods(inst)
    mods.one_of("shared::cluster")
    type_ = mods.type()
    mods.done()
    address, rank = b.read(inst.operands[1], type_), b.read(inst.operands[2], "u32")
    clear = (1 << 8 * type_bytes(type_)) - 1 - 0xFF000000
    dtype = UNSIGNED[type_bytes(type_)].type

    def compute(warp: "Warp") -> Any:
        r = rank(warp)
        r = r.astype(dtype) if r.__class__ is np.ndarray else r
        return address(warp) & clear | r << 24

    return put_step(b, inst.operands[0], compute, type_)


@handler("getctarank")
def cta_rank(inst: Inst, b: Builder) -> Step:
    """Rank of the CTA that a shared::cluster address belongs to."""
    mods = Mods(inst)
    mods.one_of("shared::cluster")
    type_ = mods.type()
    mods.done()
    read = b.read(inst.operands[1], type_)
    return put_step(b, inst.operands[0], lambda warp: read(warp) >> 24 & 0xFF, "u32")


@handler("createpolicy")
def create_policy(inst: Inst, b: Builder) -> Step:
    """Returns an opaque cache policy. Any value works, because hints are not modelled."""
    if isinstance(inst.operands[0], Sink):
        return lambda warp: None
    return put_step(b, inst.operands[0], lambda warp: 0x12F0000000000000, "b64")

"""The instruction registry and the Builder that turns operands into readers and writers.

A handler is a builder function. It reads one `Inst` once, checks every modifier, and returns the closure (`Step`) that
a warp calls each time it executes the instruction. Each instruction family has a module, which registers its handlers
when imported; `isa.families` imports them all.

Register slots. Every operand (register, literal, special register, symbol address) lives in a slot of the warp's
register list, so that reading an operand is ``warp.regs[slot]``. A slot holds a bit pattern: a Python int (a
bool for predicates) when the active lanes agree, else an ndarray of 32 unsigned lanes. Typed readers reinterpret.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa.requirements import Architecture, missing_register
from nvfp4_cute.emulator.ptx import (
    TYPE_BYTES,
    Address,
    Imm,
    Inst,
    Label,
    Not,
    Operand,
    Reg,
    Sink,
    Special,
    Symbol,
)
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.lanes import Signal, Wait
    from nvfp4_cute.emulator.state import Warp

Step = Callable[["Warp"], "Wait | Signal | int | None"]
"""None: done. A Wait: blocked, call again when it is ready. An int: jump. A Signal: control did something else."""

Reader = Callable[["Warp"], Any]
Writer = Callable[["Warp", Any], None]
HandlerFunction = Callable[[Inst, "Builder"], Step]
Wrapper = Callable[[Inst, "Builder", Step], Step]

HANDLERS: dict[str, HandlerFunction] = {}

UNSIGNED: dict[int, np.dtype] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
SIGNED: dict[int, np.dtype] = {1: np.dtype("i1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}
WIDE = np.dtype(object)
"""Lanes of a 128-bit register: Python ints."""

DYNAMIC_SPECIALS = ("%clock", "%globaltimer")
FLOATS: dict[str, np.dtype] = {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}


def handler(*prefixes: str) -> Callable[[HandlerFunction], HandlerFunction]:
    """Registers a handler for opcodes that start with one of `prefixes` (whole dotted words)."""

    def register(function: HandlerFunction) -> HandlerFunction:
        for prefix in prefixes:
            if prefix in HANDLERS:
                raise ValueError(f"two handlers for opcode prefix {prefix!r}")
            HANDLERS[prefix] = function
        return function

    return register


def longest_prefix(inst: Inst, table: Container[str]) -> str | None:
    """Returns the longest dotted prefix of an instruction's opcode that is in a table, or None."""
    return next((prefix for prefix in _prefixes(inst.opcode, inst.mods) if prefix in table), None)


@lru_cache(4096)
def _prefixes(opcode: str, mods: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the dotted prefixes of an instruction's opcode, the longest first."""
    words = (*opcode.split("."), *mods[opcode.count(".") :])
    return tuple(".".join(words[:count]) for count in range(len(words), 0, -1))


class Wrappers:
    """Wrappers of the steps of some instructions.

    Attributes:
        by_prefix: opcode prefix (whole dotted words) -> the wrapper.
    """

    def __init__(self) -> None:
        """Starts without wrappers."""
        self.by_prefix: dict[str, Wrapper] = {}

    def register(self, *prefixes: str) -> Callable[[Wrapper], Wrapper]:
        """Registers a wrapper for opcodes that start with one of `prefixes`."""

        def add(function: Wrapper) -> Wrapper:
            self.by_prefix.update(dict.fromkeys(prefixes, function))
            return function

        return add

    def has(self, inst: Inst) -> bool:
        """Whether a wrapper is registered for the instruction."""
        return longest_prefix(inst, self.by_prefix) is not None

    def wrap(self, inst: Inst, b: "Builder", step: Step) -> Step:
        """Returns the step in the wrapper of the longest matching prefix, or the step itself without one."""
        prefix = longest_prefix(inst, self.by_prefix)
        return step if prefix is None else self.by_prefix[prefix](inst, b, step)


class Mods:
    """Consumes the modifiers of an instruction one by one, so that none is overlooked.

    The words that the handler's prefix already matched are consumed at the start.
    """

    def __init__(self, inst: Inst):
        """Starts with no modifier of `inst` consumed."""
        self.inst = inst
        self.left = list(inst.mods[inst.opcode.count(".") :])

    def flag(self, name: str) -> bool:
        """Consumes `name` if present. Returns whether it was."""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str | None:
        """Consumes the first of `names` that is present; returns `default` if none is."""
        for name in names:
            if self.flag(name):
                return name
        return default

    def drop(self, *names: str) -> None:
        """Consumes modifiers that change nothing here (hints, scopes of an in-order machine)."""
        for name in names:
            while self.flag(name):
                pass

    def drop_prefix(self, *prefixes: str) -> None:
        """Consumes hints that include a value, such as ``L2::128B``."""
        self.left = [m for m in self.left if not m.startswith(prefixes)]

    def types(self) -> list[str]:
        """Consumes and returns all data types, in order."""
        found = [m for m in self.left if m in TYPE_BYTES]
        self.left = [m for m in self.left if m not in TYPE_BYTES]
        return found

    def type(self) -> str:
        """Consumes and returns exactly one data type."""
        found = self.types()
        if len(found) != 1:
            raise self.inst.unsupported(f"expected one type, found {found}")
        return found[0]

    def done(self) -> None:
        """Raises if a modifier is left.

        Raises:
            EmulatorError: names the modifiers that were not consumed.
        """
        if self.left:
            raise self.inst.unsupported(f"unknown modifier {', '.join('.' + m for m in self.left)}")


def type_bytes(type_: str) -> int:
    """Returns the size of a PTX type in bytes."""
    return TYPE_BYTES[type_]


def lane_value(value: Any, lane: int) -> Any:
    """Returns one lane's value of a dual (uniform or 32-lane) value."""
    return value[lane].item() if value.__class__ is np.ndarray else value


def merge_lanes(active: np.ndarray, new: Any, old: Any, dtype: np.dtype) -> Any:
    """Returns `new` in the active lanes and `old` in the others; uniform if the two agree."""
    if old is None or (new.__class__ is not np.ndarray and old.__class__ is not np.ndarray and new == old):
        return new
    merged = np.empty(len(active), dtype)
    merged[:] = old
    np.copyto(merged, new if new.__class__ is np.ndarray else dtype.type(new), where=active)
    return merged


def slot_dtype(type_: str) -> np.dtype:
    """Returns the dtype of the 32-lane form of a register of this declared type."""
    if type_ == "pred":
        return np.dtype(bool)
    size = TYPE_BYTES[type_]
    return WIDE if size == 16 else UNSIGNED[size]


class Builder:
    """Creates operand readers and writers for the handlers of one entry, and records the slots that each handler touches.

    Attributes:
        arch: target of the module.
        template: initial register list of a warp: None for registers, the value for literals.
        specials: slot -> name of the special register that a warp fills in when it starts.
        shared_symbols / params: slot -> byte offset, turned into addresses when a warp starts.
        dtypes: slot -> dtype of its 32-lane form.
        reads / writes: slots that the instruction being built reads and writes (input of the liveness analysis).
        dynamic: slots of special registers that change while the kernel runs, read by this instruction.
        targets, falls_through: possible successors of this instruction (set by control handlers).
        guarded: the handler itself applies the instruction's predicate.
    """

    def __init__(
        self,
        labels: dict[str, int],
        symbols: dict[str, tuple[str, int]],
        tables: dict[str, tuple[str, ...]],
        arch: Architecture,
    ):
        """Makes a builder for one entry.

        Args:
            labels: name -> instruction index.
            symbols: name -> (space, offset in the space or host address).
            tables: name -> label names of a ``.branchtargets`` list.
            arch: target of the module.
        """
        self.arch = arch
        self.labels = labels
        self.symbols = symbols
        self.tables = tables
        self.template: list[Any] = []
        self.dtypes: list[np.dtype] = []
        self.names: list[str] = []
        self.specials: dict[int, str] = {}
        self.shared_symbols: dict[int, int] = {}
        self.params: dict[int, int] = {}
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.dynamic: dict[int, str] = {}
        self.targets: tuple[int, ...] = ()
        self.falls_through = True
        self.guarded = False
        self.inst = Inst("", (), (), "", 0)
        self.pc = 0
        self._slots: dict[Any, int] = {}

    def begin(self, inst: Inst, pc: int, prefix: str) -> None:
        """Starts the instruction at index `pc`, matched by the registered `prefix`."""
        self.inst = inst if prefix == inst.opcode else replace(inst, opcode=prefix)
        self.pc = pc
        self.reads, self.writes, self.dynamic = set(), set(), {}
        self.targets, self.falls_through, self.guarded = (), True, False

    # ---- slots ---------------------------------------------------------------------------------
    def slot(self, operand: Operand, type_: str) -> int:
        """Returns the slot of a source operand. Literals are encoded for `type_`. Registers keep their own width."""
        if isinstance(operand, Reg):
            slot = self._register(operand)
            self.reads.add(slot)
            return slot
        if isinstance(operand, Imm):
            value = encode_literal(operand, type_)
            return self._constant(("imm", value, type_ == "pred"), value, type_)
        if isinstance(operand, Special):
            missing = missing_register(operand.name, self.arch)
            if missing is not None:
                raise self.inst.error(missing)
            slot, new = self._new(operand, operand.name, special_type(operand.name))
            if operand.name.startswith(DYNAMIC_SPECIALS):
                self.dynamic[slot] = operand.name
            elif new:
                self.specials[slot] = operand.name
            return slot
        if isinstance(operand, Symbol):
            return self._symbol(operand, type_)
        raise self.refuse(f"operand {operand} where a register or a literal is expected")

    def target(self, operand: Operand) -> int:
        """Returns the slot of a destination register. The caller handles a Sink."""
        if not isinstance(operand, Reg):
            raise self.refuse(f"operand {operand} where a destination register is expected")
        slot = self._register(operand)
        self.writes.add(slot)
        return slot

    def _register(self, reg: Reg) -> int:
        return self._new(reg, reg.name, reg.type)[0]

    def _constant(self, key: Any, value: Any, type_: str) -> int:
        slot, new = self._new((key, type_bytes(type_)), f"literal {value}", type_)
        if new:
            self.template[slot] = value
        return slot

    def _symbol(self, symbol: Symbol, type_: str) -> int:
        if symbol.name not in self.symbols:
            raise self.refuse(f"unbound symbol `{symbol.name}`")
        space, base = self.symbols[symbol.name]
        slot, new = self._new((symbol, type_bytes(type_)), symbol.name, type_)
        if new:
            position = base + symbol.offset
            if space == "shared":
                self.shared_symbols[slot] = position
            elif space == "param":
                self.params[slot] = position
            else:
                self.template[slot] = position
        return slot

    def _new(self, key: Any, name: str, type_: str) -> tuple[int, bool]:
        if key in self._slots:
            return self._slots[key], False
        slot = self._slots[key] = len(self.template)
        self.template.append(None)
        self.dtypes.append(slot_dtype(type_))
        self.names.append(name)
        return slot, True

    def width(self, slot: int) -> int:
        """Returns the bytes of a slot's register (1 for predicates)."""
        return 16 if self.dtypes[slot] is WIDE else self.dtypes[slot].itemsize

    def poison(self, slot: int) -> Any:
        """Returns the content of an unwritten register: all ones, which is NaN in every float format; False for predicates."""
        if self.dtypes[slot] == np.dtype(bool):
            return False
        return (1 << 8 * self.width(slot)) - 1

    # ---- readers -------------------------------------------------------------------------------
    def read(self, operand: Operand, type_: str) -> Reader:
        """Returns a function ``warp -> value`` that reads the operand as `type_`.

        u/b types: Python int or unsigned ndarray (32 lanes). s types: signed int or signed ndarray. f16/f32/f64: NumPy
        scalar or ndarray of that dtype; bf16: exact float32. pred: bool or bool ndarray. A register wider than `type_`
        is truncated.
        """
        if isinstance(operand, Not):
            inner = self.read(operand.operand, "pred")
            return lambda warp: invert(inner(warp))
        slot = self.slot(operand, type_)
        have, want = self.width(slot), type_bytes(type_)
        if have < want and not isinstance(operand, Special):
            raise self.refuse(f"operand {operand} is narrower than .{type_}")
        bits = self._read_bits(slot, have, want)
        return self._reinterpret(bits, type_, want)

    def read_as(self, operand: Operand, type_: str, seen_as: str) -> Reader:
        """Returns a reader of the bits of a typed operand: literals are encoded for `type_`, the value is read as `seen_as`."""
        if isinstance(operand, Imm):
            return self.read(Imm(encode_literal(operand, type_)), seen_as)
        return self.read(operand, seen_as)

    def _read_bits(self, slot: int, have: int, want: int) -> Reader:
        if have <= want:
            return lambda warp: warp.regs[slot]
        mask, dtype = (1 << 8 * want) - 1, UNSIGNED[want]

        def truncated(warp: "Warp") -> Any:
            value = warp.regs[slot]
            return value.astype(dtype) if value.__class__ is np.ndarray else value & mask

        return truncated

    def _reinterpret(self, bits: Reader, type_: str, size: int) -> Reader:
        if type_[0] == "s":
            return _signed_reader(bits, size)
        if type_ in FLOATS:
            return _float_reader(bits, UNSIGNED[size].type, FLOATS[type_])
        if type_ == "bf16":
            return _bf16_reader(bits)
        return bits

    # ---- writers -------------------------------------------------------------------------------
    def write(self, operand: Operand, type_: str) -> Writer:
        """Returns a function ``(warp, value)`` that stores a value of `type_` in the active lanes.

        Accepts the results of `read`. Integers wrap to the register; values narrower than the register are extended
        (sign-extended for s types).
        """
        if isinstance(operand, Sink):
            return lambda warp, value: None
        slot = self.target(operand)
        dtype = self.dtypes[slot]
        if type_ != "pred" and type_ not in FLOATS and dtype is not WIDE:
            return _integer_writer(slot, dtype)
        encode = self._encoder(dtype, type_)

        def put(warp: "Warp", value: Any) -> None:
            value = encode(value)
            if slot in warp.protected:
                value = merge_lanes(warp.active, value, warp.regs[slot], dtype)
            warp.regs[slot] = value

        return put

    def _encoder(self, dtype: np.dtype, type_: str) -> Callable[[Any], Any]:
        if type_ == "pred":
            return lambda v: v if v.__class__ is np.ndarray else bool(v)
        if dtype is WIDE:
            return lambda v: v
        source = UNSIGNED[type_bytes(type_)]

        def from_float(value: Any) -> Any:
            bits = value.view(source)
            return (bits.astype(dtype) if source != dtype else bits) if bits.ndim else int(bits)

        return from_float

    # ---- others --------------------------------------------------------------------------------
    def address(self, operand: Operand) -> Reader:
        """Returns a function ``warp -> address`` of ``[base+offset]``: int or unsigned ndarray, in the operand's own space."""
        if not isinstance(operand, Address):
            raise self.refuse(f"operand {operand} where an address `[...]` is expected")
        base, offset = operand.base, operand.offset
        if isinstance(base, Symbol):
            slot = self.slot(Symbol(base.name, base.offset + offset), "b64")
            return lambda warp: warp.regs[slot]
        if isinstance(base, Imm):
            position = base.value + offset
            return lambda warp: position
        slot = self.slot(base, "b64")
        if not offset:
            return lambda warp: warp.regs[slot]
        mask = (1 << 8 * self.dtypes[slot].itemsize) - 1
        wrapped = offset & mask

        def moved(warp: "Warp") -> Any:
            value = warp.regs[slot]
            return value + wrapped if value.__class__ is np.ndarray else (value + wrapped) & mask

        return moved

    def imm(self, operand: Operand) -> int:
        """Returns the value of a literal operand; raises for any other operand."""
        if not isinstance(operand, Imm) or operand.kind != "int":
            raise self.refuse(f"operand {operand} where an integer literal is expected")
        return operand.value

    def label(self, operand: Operand) -> int:
        """Returns the instruction index of a branch target, and makes it a possible successor of this instruction."""
        if not isinstance(operand, Label):
            raise self.refuse(f"operand {operand} where a label is expected")
        target = self.labels[operand.name]
        self.targets = (*self.targets, target)
        return target

    def refuse(self, why: str) -> EmulatorError:
        """Returns the error for the instruction that is being built."""
        return self.inst.unsupported(why)


def _integer_writer(slot: int, dtype: np.dtype) -> Writer:
    """`Builder.write` for integers and bits, in one call, because most instructions end with it."""
    mask = (1 << 8 * dtype.itemsize) - 1

    def put(warp: "Warp", value: Any) -> None:
        if value.__class__ is not np.ndarray:
            value = int(value) & mask
        elif value.dtype != dtype or not value.flags.c_contiguous:
            value = value.astype(dtype)  # contiguous, so that readers may view the lanes as another type
        if slot in warp.protected:
            value = merge_lanes(warp.active, value, warp.regs[slot], dtype)
        warp.regs[slot] = value

    return put


def _signed_reader(bits: Reader, size: int) -> Reader:
    dtype, half, full = SIGNED[size], 1 << (8 * size - 1), 1 << 8 * size

    def read(warp: "Warp") -> Any:
        value = bits(warp)
        if value.__class__ is np.ndarray:
            return value.view(dtype)
        return value - full if value >= half else value

    return read


def _float_reader(bits: Reader, unsigned: Callable[[int], Any], dtype: np.dtype) -> Reader:
    def read(warp: "Warp") -> Any:
        value = bits(warp)
        return (value if value.__class__ is np.ndarray else unsigned(value)).view(dtype)

    return read


def _bf16_reader(bits: Reader) -> Reader:
    def read(warp: "Warp") -> Any:
        value = bits(warp)
        wide = value.astype(np.uint32) if value.__class__ is np.ndarray else np.uint32(value)
        return (wide << np.uint32(16)).view(np.float32)

    return read


def invert(value: Any) -> Any:
    """Returns the logical not of a dual predicate."""
    return ~value if value.__class__ is np.ndarray else not value


def encode_literal(operand: Imm, type_: str) -> Any:
    """Returns the bit pattern of a literal for an operand of `type_`."""
    if type_ == "pred":
        return bool(operand.value)
    if operand.kind == "int" and type_ in ("f32", "f64"):
        raise EmulatorError(f"integer literal {operand.value} where a .{type_} literal is expected")
    if operand.kind == "f64" and type_ == "f32":
        double = np.uint64(operand.value).view(np.float64)
        return int(double.astype(np.float32).view(np.uint32))
    return operand.value & ((1 << 8 * type_bytes(type_)) - 1)


def special_type(name: str) -> str:
    """Returns the declared type of a special register."""
    return "b64" if name in ("%clock64", "%globaltimer") or name.endswith("64") else "b32"

"""`call` of functions that the CUDA runtime provides (vprintf and __assertfail), and the parameters of calls.

Output of a kernel goes to `sys.stdout` when the instruction executes, lane by lane in ascending order.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler, lane_value, type_bytes
from nvfp4_cute.emulator.isa.spaces import resolve_lanes
from nvfp4_cute.emulator.ptx import Address, Argument, Group, Inst, Operand, Symbol
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

_SPEC = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp%n])|%")
_TEXT_LIMIT = 1 << 16
"""Length after which a string without a closing zero counts as a stray pointer."""

Function = Callable[["Warp", int, tuple[int, ...]], int | None]
"""(warp, lane, arguments) -> result."""


@handler("call")
def call(inst: Inst, b: Builder) -> Step:
    """call (result), function, (arguments): calls a function in FUNCTIONS once per active lane."""
    mods = Mods(inst)
    mods.drop("uni")
    mods.done()
    results, name, arguments = _signature(inst)
    function = FUNCTIONS[name.name]
    readers = [b.read(x, _bits(x)) for x in arguments]
    put = b.write(results[0], _bits(results[0])) if results else None

    def step(warp: "Warp") -> None:
        values = [read(warp) for read in readers]
        out = np.zeros(32, np.uint64)
        for lane in warp.active_lanes():
            result = function(warp, lane, tuple(int(lane_value(v, lane)) for v in values))
            out[lane] = (result or 0) & 0xFFFFFFFF
        if put is not None:
            put(warp, out)

    return step


def _signature(inst: Inst) -> tuple[list[Argument], Symbol, list[Argument]]:
    """Returns results, function, and arguments of a call."""
    operands = list(inst.operands)
    results = _arguments(inst, operands.pop(0)) if isinstance(operands[0], Group) else []
    name = operands[0]
    if not isinstance(name, Symbol) or name.name not in FUNCTIONS:
        raise inst.unsupported(f"a call of anything but {', '.join(sorted(FUNCTIONS))}")
    return results, name, _arguments(inst, operands[1]) if len(operands) == 2 else []


def _arguments(inst: Inst, group: Operand) -> list[Argument]:
    items = group.items if isinstance(group, Group) else ()
    found = [x for x in items if isinstance(x, Argument)]
    if len(found) != len(items):
        raise inst.unsupported("a call whose parameters are not scalar .param variables")
    return found


def _bits(argument: Argument) -> str:
    return f"b{8 * type_bytes(argument.type)}"


def move_argument(inst: Inst, b: Builder) -> Step | None:
    """Handles `st.param` of a call's argument, or `ld.param` of its result, as a move; None for other accesses."""
    place = inst.operands[0 if inst.opcode == "st" else 1]
    if not isinstance(place, Address) or not isinstance(place.base, Argument):
        return None
    mods = Mods(inst)
    mods.drop("param", "param::func")
    type_ = mods.type()
    mods.done()
    if place.offset or type_bytes(type_) != type_bytes(place.base.type):
        raise inst.unsupported("a part of a call's parameter")
    source, target = (inst.operands[1], place.base) if inst.opcode == "st" else (place.base, inst.operands[0])
    read, put = b.read_as(source, type_, _bits(place.base)), b.write(target, _bits(place.base))
    return lambda warp: put(warp, read(warp))


# ---- memory accesses of one lane ---------------------------------------------------------------------------------
def _load(warp: "Warp", lane: int, address: int, nbytes: int) -> int:
    lanes, where = np.array([lane], np.uint32), np.array([address], np.uint64)
    memory, index = resolve_lanes(warp, "generic", where, nbytes, False, lanes)
    return int(memory[index[0]])


def _text(warp: "Warp", lane: int, address: int) -> str:
    """Returns the zero-terminated string at a generic address."""
    data = bytearray()
    while len(data) < _TEXT_LIMIT:
        byte = _load(warp, lane, address + len(data), 1)
        if byte == 0:
            return data.decode("utf-8", "replace")
        data.append(byte)
    raise EmulatorError(f"the string at {address:#x} has no end in {_TEXT_LIMIT} bytes")


# ---- printf ------------------------------------------------------------------------------------------------------
class _Arguments:
    """The consecutive values in a printf buffer, each aligned to its size."""

    def __init__(self, warp: "Warp", lane: int, address: int):
        self.warp, self.lane, self.address, self.count = warp, lane, address, 0

    def word(self, nbytes: int) -> int:
        """Returns the next value of 4 or 8 bytes."""
        self.address = -(-self.address // nbytes) * nbytes
        value = _load(self.warp, self.lane, self.address, nbytes)
        self.address += nbytes
        self.count += 1
        return value


def _vprintf(warp: "Warp", lane: int, arguments: tuple[int, ...]) -> int:
    """Prints, and returns the number of arguments that the format names, like CUDA's printf; -1 for a null format."""
    where, buffer = arguments
    if where == 0:
        return -1
    values = _Arguments(warp, lane, buffer)
    sys.stdout.write("".join(_formatted(_text(warp, lane, where), values)))
    return values.count


def _formatted(text: str, values: _Arguments) -> Iterator[str]:
    """Yields the pieces of a printf text. Python's `%` supports most of C's conversions."""
    position = 0
    for match in _SPEC.finditer(text):
        yield text[position : match.start()]
        position = match.end()
        flags, width, precision, length, kind = match.groups()
        if kind is None or kind == "n":
            raise EmulatorError(f"printf format {text!r}: no conversion at character {match.start()}")
        if kind == "%":
            yield "%"
            continue
        sizes = [_signed(values.word(4), 4) if x == "*" else x for x in (width, precision)]
        point = f".{sizes[1] or 0}" if "." in match.group() else ""
        yield _converted(f"%{flags}{'' if sizes[0] is None else sizes[0]}{point}", length or "", kind, values)
    yield text[position:]


def _converted(prefix: str, length: str, kind: str, values: _Arguments) -> str:
    if kind in "eEfFgG":
        return (prefix + kind) % _double(values.word(8))
    if kind in "aA":
        text = (prefix + "s") % _double(values.word(8)).hex()
        return text.upper() if kind == "A" else text
    if kind == "s":
        pointer = values.word(8)
        return (prefix + "s") % (_text(values.warp, values.lane, pointer) if pointer else "(null)")
    if kind == "p":
        return (prefix + "s") % hex(values.word(8))
    nbytes = 8 if length in ("l", "ll", "z", "j", "t") else 4
    value = values.word(nbytes)
    if kind == "c":
        return (prefix + "c") % (value & 0xFF)
    size = {"hh": 1, "h": 2}.get(length, nbytes)
    value &= (1 << 8 * size) - 1
    if kind in "di":
        return (prefix + "d") % _signed(value, size)
    return (prefix + ("d" if kind == "u" else kind)) % value


def _signed(value: int, nbytes: int) -> int:
    return value - (1 << 8 * nbytes) if value >> (8 * nbytes - 1) else value


def _double(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


def _assertfail(warp: "Warp", lane: int, arguments: tuple[int, ...]) -> Any:
    """__assertfail(message, file, line, function, character size).

    Raises:
        EmulatorError: always, because the kernel's assertion failed.
    """
    message, file, line, function, _ = arguments
    text, where, name = (
        _text(warp, lane, pointer) if pointer else "?" for pointer in (message, file, function)
    )
    raise EmulatorError(f"{where}:{line}: {name}: lane {lane}: assertion `{text}` failed")


FUNCTIONS: dict[str, Function] = {"vprintf": _vprintf, "__assertfail": _assertfail}
"""Device functions that need no definition in the module."""

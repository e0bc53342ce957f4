"""PTX text -> Program: entries, parameters, symbols, and instructions with decoded operands.

The parser covers what NVVM prints for CuTe DSL kernels, inline assembly included: nested ``{ }`` scopes with
registers and labels of their own (the same label may appear in many scopes), predicates, vectors, sinks,
``%r|%p`` pairs, hexadecimal floats, and debug directives. Handlers never see text: they get `Inst` records.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

from nvfp4_cute.errors import EmulatorError

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "f16x2": 4,
    "bf16x2": 4, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f32x2": 8, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "b128": 16, "tf32": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A register; `name` is unique in the entry (scoped registers get a ``#n`` suffix), `type` as declared."""

    name: str
    type: str


@dataclass(frozen=True)
class Imm:
    """A literal. `kind` is "int", "f32" or "f64"; for floats `value` is the bit pattern."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Symbol:
    """A module variable or a kernel parameter whose address is meant."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A branch target; `name` is unique in the entry."""

    name: str


@dataclass(frozen=True)
class Special:
    """A read-only machine register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; `base` is a Reg, a Symbol, or an Imm."""

    base: "Operand"
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class TensorAddress:
    """``[map, {c0, c1, ...}]`` with the innermost coordinate first."""

    map: "Operand"
    coords: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations (elect.sync, shfl.sync, setp) in one operand place."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Not:
    """``!p``: a negated predicate used as a source."""

    operand: "Operand"


@dataclass(frozen=True)
class Group:
    """``(a, b, ...)``: the argument and result lists of `call`."""

    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Sink:
    """``_``: a result nobody wants."""


Operand = Union[Reg, Imm, Symbol, Label, Special, Address, Vector, TensorAddress, Pair, Not, Group, Sink]


@dataclass(frozen=True)
class Inst:
    """One instruction.

    Attributes:
        opcode: first dotted word; when a handler receives the Inst, the registered prefix that matched.
        mods: every dotted part after the first word (for ``mbarrier.arrive.shared.b64``: arrive, shared, b64).
        operands: destinations first, as written.
        pred: guarding predicate and whether it is negated.
        line: 1-based line in the PTX text.  source: (file, line) of the last ``.loc``, if any.
    """

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str
    line: int
    pred: tuple[Reg, bool] | None = None
    source: tuple[str, int] | None = None

    def unsupported(self, why: str) -> EmulatorError:
        """An error to raise for an instruction, modifier or operand form that is not modelled."""
        return EmulatorError(f"PTX line {self.line}: `{self.text}`: not modelled: {why}")

"""mma.sync: one warp multiplies m16n8kK tiles in registers, plain and block-scaled (PTX ISA 9.7.14.5).

Sums round as in `numerics` for sm_90 and later; earlier architectures split K and are not modelled. The 8-bit
floating-point forms without `.kind` are rounded as on sm_120, where they are instructions of their own. sm_90 has no
such instructions: an H200 converts to f16, sums two f16 products from zero (first the k with bit 1 clear, then the
others), and adds C with one more rounding. A handler does not know the architecture, so that is not modelled.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler
from nvfp4_cute.emulator.isa.arith import as_array
from nvfp4_cute.emulator.isa.fragments import (
    fragment_d,
    matrix_a,
    matrix_b,
    matrix_c,
    read_words,
    require_whole_warp,
    source_slots,
    target_slots,
    write_words,
)
from nvfp4_cute.emulator.isa.products import multiply, multiply_fp4, multiply_integers
from nvfp4_cute.emulator.isa.warp import synchronised, uniform
from nvfp4_cute.emulator.ptx import Imm, Inst, Operand, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

SHAPES = {f"m16n8k{k}": k for k in (4, 8, 16, 32, 64)}
INTEGERS = ("s8", "u8")
FP8 = ("e4m3", "e5m2")
NARROW = (*FP8, "e3m2", "e2m3", "e2m1")
CONTAINERS = {
    "f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "s8": np.int8, "u8": np.uint8,
    **dict.fromkeys(NARROW, np.uint8),
}  # fmt: skip
ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}

PLAIN = {
    "f16": ((8, 16), ("f16", "f32")),
    "bf16": ((8, 16), ("f32",)),
    "tf32": ((4, 8), ("f32",)),
    "fp8": ((16, 32), ("f16", "f32")),
    "integer": ((16, 32), ("s32",)),
}
"""Without `.kind`: class of the element types -> legal K, legal accumulator types (PTX ISA, mma, "Matrix Shape")."""

SCALED = {
    ("kind::mxf8f6f4", "scale_vec::1X"): ("ue8m0",),
    ("kind::mxf4", "scale_vec::2X"): ("ue8m0",),
    ("kind::mxf4nvf4", "scale_vec::2X"): ("ue8m0",),
    ("kind::mxf4nvf4", "scale_vec::4X"): ("ue8m0", "ue4m3"),
}
"""Block-scaled kinds: legal scale types (PTX ISA, table of `.scale_vec_size` and `.kind`)."""

DEFAULT_SCALE_VEC = {"kind::mxf8f6f4": "scale_vec::1X", "kind::mxf4": "scale_vec::2X"}
BYTE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}
"""Scales per row of one instruction -> legal byte selectors."""


@dataclass(frozen=True)
class Form:
    """Properties of an mma.sync that its modifiers determine.

    Attributes:
        k: K of the shape.
        a, b: element types.
        d: type of C and D.
        packed: two e2m1 elements per byte (mxf4, mxf4nvf4); otherwise narrow elements fill 8-bit containers.
        scales: scales per row for the full K, 0 without block scaling.
        scale_type: "ue8m0" or "ue4m3".
        saturate: clamp integer results.
    """

    k: int
    a: str
    b: str
    d: str
    packed: bool = False
    scales: int = 0
    scale_type: str = ""
    saturate: bool = False

    def words(self, rows: int) -> int:
        """Returns the number of 32-bit registers of an operand with this number of rows."""
        bits = 4 if self.packed else 8 * np.dtype(CONTAINERS[self.a]).itemsize
        return rows * self.k * bits // 1024

    @property
    def accumulators(self) -> int:
        """Number of 32-bit registers of C and of D."""
        return 2 if self.d == "f16" else 4


def parse_form(inst: Inst) -> Form:
    """Checks every modifier of an mma.sync.

    Raises:
        EmulatorError: an unknown modifier, or a combination that the ISA does not have or that is not modelled.
    """
    mods = Mods(inst)
    for word in ("aligned", "row", "col"):
        if not mods.flag(word):
            raise inst.unsupported(f"mma.sync without .{word}")
    shape = mods.one_of(*SHAPES)
    if shape is None:
        raise inst.unsupported(f"shape; modelled are {', '.join(SHAPES)}")
    kind = mods.one_of("kind::f8f6f4", *(k for k, _ in SCALED), default="") or ""
    scaled = mods.flag("block_scale")
    vec = mods.one_of("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", default=DEFAULT_SCALE_VEC.get(kind))
    saturate = mods.flag("satfinite")
    scale_type = mods.one_of("ue8m0", "ue4m3", default="") or ""
    types = tuple(mods.left)
    known = (*CONTAINERS, *ACCUMULATORS)
    if len(types) != 4 or any(t not in known for t in types):
        raise inst.unsupported(f"types or modifiers {', '.join('.' + t for t in types)}")
    d, a, b, c = types
    if c != d:
        raise inst.unsupported(f"C of type .{c} with D of type .{d}")
    if saturate and d != "s32":
        raise inst.unsupported(".satfinite with floating-point types")
    if scaled != ((kind, vec) in SCALED):
        raise inst.unsupported(".block_scale, .kind and .scale_vec do not go together")
    if scaled:
        return _scaled_form(inst, SHAPES[shape], types, kind, cast(str, vec), scale_type)
    if scale_type or vec:
        raise inst.unsupported("a scale type or vector size without .block_scale")
    form = Form(SHAPES[shape], a, b, d, saturate=saturate)
    if kind:
        legal = form.k == 32 and a in NARROW and b in NARROW and d in ("f16", "f32")
    else:
        ks, accumulators = PLAIN.get(_element_class(a, b), ((), ()))
        legal = form.k in ks and d in accumulators
    if not legal:
        raise inst.unsupported(f"{shape} with types {types}")
    return form


def _element_class(a: str, b: str) -> str:
    """Returns the key of PLAIN for the pair of element types ("" for an illegal pair)."""
    for name, members in (("fp8", FP8), ("integer", INTEGERS)):
        if a in members and b in members:
            return name
    return a if a == b else ""


def _scaled_form(inst: Inst, k: int, types: tuple[str, ...], kind: str, vec: str, scale_type: str) -> Form:
    if scale_type not in SCALED[kind, vec]:
        raise inst.unsupported(f"scale type .{scale_type} with .{kind}.{vec}; legal are {SCALED[kind, vec]}")
    packed = kind != "kind::mxf8f6f4"
    elements = ("e2m1",) if packed else NARROW
    d, a, b, _ = types
    if k != (64 if packed else 32) or d != "f32" or a not in elements or b not in elements:
        raise inst.unsupported(f"m16n8k{k} with types {types} and .{kind}")
    return Form(k, a, b, d, packed, int(vec[-2]), scale_type)


@handler("mma.sync")
def mma_sync(inst: Inst, b: Builder) -> Step:
    """D = A @ B + C; with block scaling, each row of A and column of B is scaled in 1, 2 or 4 pieces along k."""
    form = parse_form(inst)
    if len(inst.operands) != (8 if form.scales else 4):
        raise inst.unsupported(f"{len(inst.operands)} operands")
    targets = target_slots(b, inst.operands[0], form.accumulators, "D")
    slots_a = source_slots(b, inst.operands[1], form.words(16), "A")
    slots_b = source_slots(b, inst.operands[2], form.words(8), "B")
    slots_c = source_slots(b, inst.operands[3], form.accumulators, "C")
    scales = (_scale_reader(b, inst, form, "A"), _scale_reader(b, inst, form, "B")) if form.scales else None

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "mma.sync")
        a = matrix_a(read_words(warp, slots_a)).view(np.uint8)
        n = matrix_b(read_words(warp, slots_b)).view(np.uint8)
        c = matrix_c(read_words(warp, slots_c), ACCUMULATORS[form.d])
        factors = (scales[0](warp), scales[1](warp)) if scales else None
        write_words(warp, targets, fragment_d(compute(form, a, n, c, factors)))
        warp.cta.machine.stats.mmas += 1

    return synchronised(b, None, body)


def compute(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, scales: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
    """Computes one instruction.

    Args:
        form: types.
        a: uint8 (16, bytes of K), rows of A.
        b: uint8 (8, bytes of K), columns of B.
        c: (16, 8) of the accumulator type.
        scales: uint8 (16, form.scales) and (8, form.scales), or None.

    Returns:
        D, like `c`.
    """
    if form.packed:
        assert scales is not None, "packed forms are block-scaled"
        return multiply_fp4(a, b, c, scales[0], scales[1], form.scale_type)
    codes_a, codes_b = a.view(CONTAINERS[form.a]), b.view(CONTAINERS[form.b])
    if form.d == "s32":
        return multiply_integers(codes_a, codes_b, c, form.saturate)
    return multiply(
        _code(codes_a, form.a),
        _code(codes_b, form.b),
        c,
        (form.a, form.b),
        d_type=cast(Literal["f32", "f16"], form.d),
        scales=(scales[0][:, 0], scales[1][:, 0]) if scales else (None, None),
    )


def _code(containers: np.ndarray, fmt: str) -> np.ndarray:
    """Returns element codes: an e2m1 element is in bits 2-5 of its byte, others are in the low bits."""
    return containers >> 2 if fmt == "e2m1" else containers


# ---- scale factors -----------------------------------------------------------------------------------------------
def _scale_reader(b: Builder, inst: Inst, form: Form, name: str) -> Reader:
    """Returns a function ``warp -> uint8 (rows, form.scales)`` of a scale register and its {byte, thread} selectors.

    In each group of four lanes, lanes 2*thread and 2*thread + 1 hold the scales of rows g and g + 8 of A; lane `thread`
    holds those of column g of B (PTX ISA 9.7.14.3).
    """
    data, selectors = inst.operands[4:6] if name == "A" else inst.operands[6:8]
    if isinstance(data, Vector):
        if len(data.items) != 1:
            raise inst.unsupported(f"{len(data.items)} registers for the scales of {name}")
        data = data.items[0]
    read = b.read(data, "b32")
    byte_id, thread_id = _selectors(b, inst, selectors, form, name)
    count, quads = form.scales, 4 * np.arange(8)
    lanes = [
        np.concatenate([quads + 2 * thread, quads + 2 * thread + 1]) if name == "A" else quads + thread
        for thread in range(2 if name == "A" else 4)
    ]

    def scales(warp: "Warp") -> np.ndarray:
        first, thread = byte_id(warp), thread_id(warp)
        words = as_array(read(warp), np.uint32)[lanes[thread]]
        return words.view(np.uint8).reshape(-1, 4)[:, first : first + count]

    return scales


def _selectors(b: Builder, inst: Inst, pair: Operand, form: Form, name: str) -> list[Any]:
    """Returns readers of the byte and the thread selector. Literals are checked now, registers when they are read."""
    if not isinstance(pair, Vector) or len(pair.items) != 2:
        raise inst.unsupported(f"expected {{byte-id, thread-id}} for {name}")
    legal = (BYTE_IDS[form.scales], (0, 1) if name == "A" else (0, 1, 2, 3))
    readers: list[Any] = []
    for operand, values, what in zip(pair.items, legal, ("byte-id", "thread-id"), strict=True):
        if isinstance(operand, Imm) and operand.value not in values:
            raise inst.unsupported(f"{what} {operand.value} for {name}; legal are {values}")
        readers.append(_checked(uniform(b.read(operand, "u16"), what), values, f"{what} of {name}"))
    return readers


def _checked(read: Any, legal: tuple[int, ...], what: str) -> Any:
    def checked(warp: "Warp") -> int:
        value = read(warp)
        if value not in legal:
            raise EmulatorError(f"mma.sync: {what} is {value}; legal are {legal}")
        return value

    return checked

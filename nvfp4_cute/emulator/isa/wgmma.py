"""wgmma (sm_90a): a warpgroup multiplies 64 x K by K x N, B and perhaps A from shared memory (PTX ISA 9.7.15).

Division of work. Warp w of a warpgroup holds rows 16w to 16w+15 of D, which depend on rows 16w to 16w+15 of A and on
all of B. Each warp therefore computes its own 16 rows when it executes the instruction. The four warps need not
synchronise. Nothing checks that they pass the same descriptors.

Groups. A commit makes one wgmma-group of the warpgroup (ISA, wgmma.commit_group), so a wait of one warp covers the
operations of all four: it blocks until they have committed equally many groups, and their reads of shared memory are over.
CUTLASS relies on it: one thread of a warpgroup releases a stage after the wait. Each warp waits for its own
accumulators.

Asynchrony. Fragments of A in registers are read at issue, which is allowed because a kernel may not change them before
`wgmma.wait_group`. If operations happen later than at issue, the accumulator registers hold `Deferred` values until
then, which the next wgmma uses as its addend; shared memory is read when the operation happens. If operations happen at
issue under a checker, it notes which registers no `wgmma.wait_group` has covered.

Rounding. `products.STANDARD` for 16-bit and tf32 elements, `products.HOPPER_FP8` for 8-bit floats; integers are exact.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from nvfp4_cute.emulator.descriptors import Gather, k_major_chunks, mn_major_bytes
from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler
from nvfp4_cute.emulator.isa.fragments import (
    fragment_d,
    matrix_a,
    matrix_c,
    read_words,
    require_whole_warp,
    source_slots,
    target_slots,
    write_words,
)
from nvfp4_cute.emulator.isa.mma_sync import ACCUMULATORS, CONTAINERS, FP8, INTEGERS
from nvfp4_cute.emulator.isa.products import HOPPER_FP8, STANDARD, multiply, multiply_integers
from nvfp4_cute.emulator.isa.warp import synchronised, uniform
from nvfp4_cute.emulator.lanes import Condition
from nvfp4_cute.emulator.late_registers import defer, resolved
from nvfp4_cute.emulator.modes import Engine, operations_of
from nvfp4_cute.emulator.places import operand_place
from nvfp4_cute.emulator.ptx import Inst, Operand, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

WARPS = 4
ROWS = 64
ROWS_PER_WARP = ROWS // WARPS

ACCUMULATOR_TYPES = {
    ("f16", "f16"): ("f32", "f16"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    **{(a, b): ("f32", "f16") for a in FP8 for b in FP8},
    **{(a, b): ("s32",) for a in INTEGERS for b in INTEGERS},
}
"""Element types of A and B -> legal accumulator types (PTX ISA, wgmma, "Register Fragments and Shared Memory Matrix Layouts")."""


# ---- matrix descriptors ------------------------------------------------------------------------------------------
_SWIZZLE_CODES = (0, 2, 4, 6)
"""Codes of tcgen05 descriptors for the sm_90 codes 0 to 3: none, 128B, 64B, 32B."""

_RESERVED = 3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52


@lru_cache(4096)
def as_tcgen05(descriptor: int) -> int:
    """Returns the tcgen05 descriptor of the same shared-memory matrix: equal layouts, different encodings.

    sm_90: 0-13 start/16, 16-29 leading-dimension offset/16, 32-45 stride-dimension offset/16, 49-51 base offset,
    62-63 swizzle (0 none, 1 128B, 2 64B, 3 32B), all other bits 0.

    Raises:
        EmulatorError: a reserved bit is set, or a base offset (not modelled).
    """
    if descriptor & _RESERVED:
        raise EmulatorError(
            f"wgmma descriptor {descriptor:#018x}: a reserved bit is set ({descriptor & _RESERVED:#x})"
        )
    if descriptor >> 49 & 7:
        raise EmulatorError(
            f"wgmma descriptor {descriptor:#018x}: a base offset (bits 49-51) is not modelled"
        )
    fields = descriptor & ((1 << 46) - 1)
    return fields | 1 << 46 | _SWIZZLE_CODES[descriptor >> 62] << 61


def shared_rows(cta: "Cta", gather: Gather, rows: slice, element: str, mn_major: bool) -> np.ndarray:
    """Returns containers (rows, K) of an operand in shared memory; all of the gather's bytes must be in bounds."""
    cta.smem.check(gather.first_byte, gather.nbytes)
    if cta.machine.checker is not None:
        cta.machine.checker.read_operand(cta, operand_place(gather.indices, 1 if mn_major else 16, rows))
    container = CONTAINERS[element]
    if mn_major:
        return cta.smem.views[1].take(gather.indices[rows]).view(container)[..., 0]
    return cta.smem.views[16].take(gather.indices[rows]).view(container)


def operand_map(descriptor: int, rows: int, element: str, mn_major: bool) -> Gather:
    """Returns the place in shared memory of a matrix of `rows` rows (of M or N) and 32 bytes of K."""
    code = as_tcgen05(descriptor)
    if mn_major:
        return mn_major_bytes(code, rows, np.dtype(CONTAINERS[element]).itemsize)
    return k_major_chunks(code, rows)


# ---- the instruction ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """Properties of a wgmma.mma_async that modifiers and literals determine.

    Attributes:
        n: columns of D.
        a, b: element types.
        d: accumulator type.
        negate_a, negate_b: imm-scale of -1.
        transpose_a, transpose_b: MN-major in shared memory.
        saturate: clamp integer results.
    """

    n: int
    a: str
    b: str
    d: str
    saturate: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def accumulators(self) -> int:
        """Number of 32-bit registers of D."""
        return self.n // 4 if self.d == "f16" else self.n // 2


@dataclass(frozen=True)
class Operands:
    """Run-time values: descriptor or words (4, 32) of A, descriptor of B, whether to add to D."""

    a: "int | np.ndarray"
    b: int
    accumulate: bool


def parse_form(inst: Inst, b: Builder, a_in_registers: bool) -> Form:
    """Checks every modifier and literal.

    Raises:
        EmulatorError: an unknown modifier, a combination that the ISA does not have, or a wrong operand count.
    """
    mods = Mods(inst)
    if not (mods.flag("sync") and mods.flag("aligned")):
        raise inst.unsupported("wgmma without .sync.aligned")
    saturate = mods.flag("satfinite")
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", mods.left[0]) if mods.left else None
    types = tuple(mods.left[1:])
    if shape is None or len(types) != 3 or types[0] not in ACCUMULATOR_TYPES.get(types[1:], ()):
        raise inst.unsupported(f"shape, types, or modifiers {', '.join('.' + m for m in mods.left)}")
    (d, a, b_type), n, k = types, int(shape[1]), int(shape[2])
    integer = d == "s32"
    if k * np.dtype(CONTAINERS[a]).itemsize != 32 or not _legal_n(n, integer):
        raise inst.unsupported(f"shape {mods.left[0]} with types {types}")
    if saturate and not integer:
        raise inst.unsupported(".satfinite with floating-point types")
    literals = [b.imm(operand) for operand in inst.operands[4:]]
    sixteen = a in ("f16", "bf16")
    expected = 0 if integer else 2 + (2 - a_in_registers if sixteen else 0)
    if len(literals) != expected:
        raise inst.unsupported(f"{len(literals)} literals after scale-d, expected {expected}")
    signs, transposes = literals[:2], literals[2:]
    if any(s not in (1, -1) for s in signs) or any(t not in (0, 1) for t in transposes):
        raise inst.unsupported(f"literals {literals}: scales must be 1 or -1, transpositions 0 or 1")
    return Form(
        n, a, b_type, d, saturate,
        negate_a=signs[:1] == [-1],
        negate_b=signs[1:] == [-1],
        transpose_a=len(transposes) == 2 and transposes[0] == 1,
        transpose_b=transposes[-1:] == [1],
    )  # fmt: skip


def _legal_n(n: int, integer: bool) -> bool:
    """Whether N is legal: a multiple of 8; for integers above 32 a multiple of 16 (PTX ISA, wgmma, "Matrix Shape")."""
    return 8 <= n <= 256 and n % (16 if integer and n > 32 else 8) == 0


@handler("wgmma.mma_async")
def mma_async(inst: Inst, b: Builder) -> Step:
    """D = A @ B (+ D) for this warp's 16 rows, asynchronously; A in registers or by descriptor, B by descriptor."""
    if len(inst.operands) < 4:
        raise inst.unsupported(f"{len(inst.operands)} operands; expected d, a, b-desc, scale-d, ...")
    d, a, descriptor_b, scale_d = inst.operands[:4]
    in_registers = isinstance(a, Vector)
    form = parse_form(inst, b, in_registers)
    targets = target_slots(b, d, form.accumulators, "D")
    source_slots(b, d, form.accumulators, "D")  # D is also read
    read_b = uniform(b.read(descriptor_b, "b64"), "wgmma descriptor of B")
    read_scale = uniform(b.read(scale_d, "pred"), "wgmma scale-d")
    read_a = _reader_a(b, a, in_registers)

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "wgmma.mma_async")
        if warp.idx // WARPS * WARPS + WARPS > len(warp.cta.warps):
            raise EmulatorError(f"wgmma in warp {warp.idx}: its warpgroup of 4 warps is not complete")
        operands = Operands(read_a(warp), read_b(warp), bool(read_scale(warp)))
        warp.cta.machine.stats.mmas += warp.idx % WARPS == 0
        queue = warp.cta.machine.queue
        if queue is None:
            addend = read_words(warp, targets) if operands.accumulate else None
            write_words(warp, targets, _execute(warp, form, operands, addend))
            return
        promised = [warp.regs[slot] for slot in targets] if operands.accumulate else None
        effect = lambda: _execute(warp, form, operands, None if promised is None else resolved(promised))
        operation = queue.submit(warp, Engine.WGMMA, effect)
        operations_of(warp).group(Engine.WGMMA).open.append(operation)
        if queue.immediate:
            write_words(warp, targets, operation.result)
            queue.loaded(operation, targets)
        else:
            defer(operation, warp, targets)

    return synchronised(b, None, body)


def _reader_a(b: Builder, a: Operand, in_registers: bool) -> "Callable[[Warp], Any]":
    """Returns a function of the warp that returns the four words of A, or the descriptor."""
    if not in_registers:
        return uniform(b.read(a, "b64"), "wgmma descriptor of A")
    slots = source_slots(b, a, 4, "A")
    return lambda warp: read_words(warp, slots)


def _execute(warp: "Warp", form: Form, operands: Operands, addend: np.ndarray | None) -> np.ndarray:
    """Returns the new accumulator registers, uint32 (registers, 32), from the old ones (None: zero)."""
    cta, first = warp.cta, warp.idx % WARPS * ROWS_PER_WARP
    if isinstance(operands.a, np.ndarray):
        a = matrix_a(operands.a).view(CONTAINERS[form.a])
    else:
        where = operand_map(operands.a, ROWS, form.a, form.transpose_a)
        a = shared_rows(cta, where, slice(first, first + ROWS_PER_WARP), form.a, form.transpose_a)
    where = operand_map(operands.b, form.n, form.b, form.transpose_b)
    b = shared_rows(cta, where, slice(None), form.b, form.transpose_b)
    c = None if addend is None else matrix_c(addend, ACCUMULATORS[form.d])
    return fragment_d(compute(form, a, b, c))


def compute(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """Computes one warp's product: a (16, K), b (N, K) in their containers, c (16, N) or None -> D (16, N)."""
    if form.d == "s32":
        return multiply_integers(a, b, c, form.saturate)
    return multiply(
        a,
        b,
        c,
        (form.a, form.b),
        d_type=cast(Literal["f32", "f16"], form.d),
        rule=HOPPER_FP8 if form.a in FP8 else STANDARD,
        negate=(form.negate_a, form.negate_b),
    )


# ---- groups ------------------------------------------------------------------------------------------------------
@handler("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def order(inst: Inst, b: Builder) -> Step:
    """Orders register accesses (automatic, because registers hold `Deferred` values), and closes or awaits wgmma-groups."""
    mods = Mods(inst)
    if not (mods.flag("sync") and mods.flag("aligned")):
        raise inst.unsupported("without .sync.aligned")
    mods.done()
    expected = 1 if inst.opcode == "wgmma.wait_group" else 0
    if len(inst.operands) != expected:
        raise inst.unsupported(f"{len(inst.operands)} operands, expected {expected}")
    pending = b.imm(inst.operands[0]) if expected else 0
    if pending < 0:
        raise inst.unsupported(f"a number of pending groups of {pending}")

    def fence(warp: "Warp") -> None:
        require_whole_warp(warp, inst.opcode)

    def commit(warp: "Warp") -> None:
        require_whole_warp(warp, inst.opcode)
        own, machine = operations_of(warp), warp.cta.machine
        own.commits.append(machine.checker.issued_on(warp, Engine.WGMMA) if machine.checker else 0)
        if machine.queue is not None:
            own.group(Engine.WGMMA).close()

    def wait(warp: "Warp") -> Condition | None:
        require_whole_warp(warp, inst.opcode)
        needed = len(operations_of(warp).commits) - pending
        peers = [peer for peer in _warpgroup(warp) if peer is not warp]
        behind = lambda: [p.idx for p in peers if len(operations_of(p).commits) < needed and not p.done]
        if behind():
            text = lambda: (
                f"wgmma.wait_group {pending}: warps {behind()} of its warpgroup have committed fewer groups"
            )
            return Condition(lambda: not behind(), text)
        if warp.cta.machine.queue is not None:
            warp.cta.machine.queue.wait_group(warp, Engine.WGMMA, pending)
            for peer in peers:
                _cover(warp, peer, needed)
        return None

    if inst.opcode == "wgmma.wait_group":
        return synchronised(b, None, wait)
    return synchronised(b, None, commit if inst.opcode == "wgmma.commit_group" else fence)


def _warpgroup(warp: "Warp") -> "list[Warp]":
    first = warp.idx // WARPS * WARPS
    return warp.cta.warps[first : first + WARPS]


def _cover(warp: "Warp", peer: "Warp", groups: int) -> None:
    """Notes that the first `groups` wgmma-groups of another warp of the warpgroup are complete and that this warp knows it."""
    own = operations_of(peer)
    closed = own.group(Engine.WGMMA).closed
    own.group(Engine.WGMMA).finish_first(groups - (len(own.commits) - len(closed)))
    checker = warp.cta.machine.checker
    if checker is not None and groups > 0:
        checker.covered(
            warp, peer, Engine.WGMMA, own.commits[min(groups, len(own.commits)) - 1] if own.commits else 0
        )

"""tcgen05.mma: operands through `tcgen05_operands`, arithmetic through `numerics`."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nvfp4_cute.emulator import numerics, silicon
from nvfp4_cute.emulator.descriptors import (
    BLOCK_SCALED_KINDS,
    DENSE_KINDS,
    OPERAND_ROW_BYTES,
    AccumulatorBlock,
    InstructionDescriptor,
    accumulator_blocks,
    decode_instruction_descriptor,
    scale_places,
    zero_columns,
)
from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler
from nvfp4_cute.emulator.isa.accumulation import Accumulator, add_product
from nvfp4_cute.emulator.isa.issue import issuing_pair, per_thread, vector_items
from nvfp4_cute.emulator.isa.products import multiply_integers
from nvfp4_cute.emulator.isa.tcgen05_operands import (
    check_descriptor,
    lane_of,
    scale_factors,
    shared_operand,
    tensor_operand,
)
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.ptx import Address, Imm, Inst, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

_PACKED_KINDS = ("mxf4", "mxf4nvf4")
_SCALE_BLOCKS = {
    "scale_vec::1X": ("mxf8f6f4", 32),
    "scale_vec::2X": ("mxf4", 32),
    "scale_vec::4X": ("mxf4nvf4", 16),
    "block16": ("mxf4nvf4", 16),
    "block32": (None, 32),
}


@dataclass(frozen=True)
class _Form:
    """Properties that the modifiers, the operand list, and the architecture (its number) determine."""

    kind: str
    cta_group: int
    ws: bool
    a_in_tmem: bool
    arch: int
    scale_block: int | None = None
    scale_c: int = 0


@dataclass(frozen=True)
class _Operands:
    """Run-time values of one instruction.

    sfa, sfb: 0 for dense kinds.
    disabled: one int per 32 lanes, or empty.
    zeros: zero-column mask descriptor, or 0.
    """

    d: int
    a: int
    b: int
    idesc: int
    accumulate: bool
    sfa: int = 0
    sfb: int = 0
    disabled: tuple[int, ...] = ()
    zeros: int = 0


@handler("tcgen05.mma")
def mma(inst: Inst, b: Builder) -> Step:
    """D = A @ B^T (+ D), asynchronously. Collector usage is ignored as a hint."""
    mods = Mods(inst)
    ws = mods.flag("ws")
    group = mods.one_of("cta_group::1", "cta_group::2")
    kind = mods.one_of(*(f"kind::{k}" for k in (*DENSE_KINDS, *BLOCK_SCALED_KINDS)))
    if group is None or kind is None:
        raise inst.unsupported("cta_group or kind")
    kind = kind.removeprefix("kind::")
    mods.drop_prefix("collector::")
    if "ashift" in mods.left:
        raise inst.unsupported(
            ".ashift: whether the rows of A in tensor memory stay shifted is not published"
        )
    a_in_tmem = isinstance(inst.operands[1], Address)
    form = _Form(kind, int(group[-1]), ws, a_in_tmem, b.arch.number)
    if kind in BLOCK_SCALED_KINDS:
        form = replace(form, scale_block=_scale_block(inst, mods, kind))
        mods.done()
        return _block_scaled(inst, b, form)
    mods.done()
    return _dense(inst, b, form)


def _scale_block(inst: Inst, mods: Mods, kind: str) -> int:
    """Returns the number of elements that share a scale."""
    if not mods.flag("block_scale"):
        raise inst.unsupported(f"kind::{kind} without .block_scale")
    word = mods.one_of(*_SCALE_BLOCKS)
    if word is None:
        if kind == "mxf4nvf4":
            raise inst.unsupported("kind::mxf4nvf4 needs .block16, .block32, or .scale_vec")
        return 32
    only, block = _SCALE_BLOCKS[word]
    if only not in (None, kind) and (word, kind) != ("scale_vec::2X", "mxf4nvf4"):
        raise inst.unsupported(f".{word} with kind::{kind}")
    return block


def _common_readers(inst: Inst, b: Builder, form: _Form) -> list[Reader]:
    a = inst.operands[1]
    return [
        b.address(inst.operands[0]),
        b.address(a) if form.a_in_tmem else b.read(a, "b64"),
        b.read(inst.operands[2], "b64"),
        b.read(inst.operands[3], "b32"),
    ]


def _block_scaled(inst: Inst, b: Builder, form: _Form) -> Step:
    if len(inst.operands) != 7:
        raise inst.unsupported(f"{len(inst.operands)} operands; expected d, a, b, idesc, [sfa], [sfb], p")
    readers = _common_readers(inst, b, form)
    readers += [b.address(inst.operands[4]), b.address(inst.operands[5]), b.read(inst.operands[6], "pred")]

    def run(warp: "Warp", d: int, a: int, b_: int, idesc: int, sfa: int, sfb: int, accumulate: bool) -> None:
        _issue(warp, form, _Operands(d, a, b_, idesc, accumulate, sfa, sfb))

    return per_thread(run, readers)


def _dense(inst: Inst, b: Builder, form: _Form) -> Step:
    rest = list(inst.operands[4:])
    readers = _common_readers(inst, b, form)
    lanes: tuple[Any, ...] = ()
    if isinstance(rest[0], Vector):
        lanes = vector_items(inst, rest.pop(0), 4 * form.cta_group)
    readers.append(b.read(rest.pop(0), "pred"))
    readers += [b.read(x, "b32") for x in lanes]
    if rest and isinstance(rest[0], Imm) and form.kind in ("f16", "tf32") and not form.ws:
        scale_c = b.imm(rest.pop(0))
        if not 0 <= scale_c <= 15 or form.arch == 110:
            raise inst.unsupported(f"scale-input-d {scale_c} on {b.arch}; legal are 0..15, not on sm_110")
        form = replace(form, scale_c=scale_c)
    masked = form.ws and len(rest) == 1
    if masked:
        readers.append(b.read(rest.pop(0), "b64"))
    if rest:
        raise inst.unsupported(f"operand {rest[0]}")

    def run(warp: "Warp", d: int, a: int, b_: int, idesc: int, accumulate: bool, *more: int) -> None:
        zeros = more[-1] if masked else 0
        disabled = more[: len(lanes)]
        _issue(warp, form, _Operands(d, a, b_, idesc, accumulate, disabled=disabled, zeros=zeros))

    return per_thread(run, readers)


def _issue(warp: "Warp", form: _Form, operands: _Operands) -> None:
    cta = warp.cta
    ctas = issuing_pair(cta) if form.cta_group == 2 else (cta,)
    cta.machine.stats.mmas += 1
    cta.issue(warp, Engine.TCGEN05, partial(execute, ctas, form, operands))


# ---- execution ---------------------------------------------------------------------------------------------------
def execute(ctas: "tuple[Cta, ...]", form: _Form, operands: _Operands) -> None:
    """Computes each CTA's own rows of D: M / cta_group rows, all N columns.

    A pair splits A and B by rows over its shared memories; one descriptor serves both.
    """
    desc, blocks = _plan(form, operands.idesc, lane_of(operands.d))
    rows, share = desc.m // len(ctas), desc.n // len(ctas)
    b = _matrix_b(ctas, form, operands, desc, share)
    for index, cta in enumerate(ctas):
        a = _matrix_a(cta, form, operands, desc, rows)
        accumulator = Accumulator(
            cta, blocks[index], operands.d & 0xFFFF, rows * index, (rows, desc.n), desc.d_type
        )
        if operands.accumulate:
            accumulator.require()
        scales = _scale_factors(cta, form, operands, desc, len(a), len(b)) if form.scale_block else None
        accumulator.note_write()
        if scales is not None and form.kind in _PACKED_KINDS:
            signs = {"negate_a": desc.negate_a, "negate_b": desc.negate_b}
            settings = {"scale_type": desc.scale_type, **signs}
            add_product(accumulator, settings, operands.accumulate, (a, b, *scales))
            continue
        c = accumulator.read() if operands.accumulate else None
        out = _multiply(form, desc, a, b, c, scales)
        accumulator.write(out, operands.disabled[4 * index : 4 * index + 4])


@lru_cache(1024)
def _plan(
    form: _Form, idesc: int, lane: int
) -> tuple[InstructionDescriptor, tuple[tuple[AccumulatorBlock, ...], ...]]:
    """Returns the decoded instruction descriptor, and the blocks of D in each CTA if D begins at `lane`."""
    desc = decode_instruction_descriptor(
        idesc, form.kind, cta_group=form.cta_group, scale_block=form.scale_block, ws=form.ws
    )
    if desc.row_bytes != OPERAND_ROW_BYTES and form.arch != 103:
        raise EmulatorError(f"instruction descriptor {idesc:#010x}: K=96 needs sm_103a")
    blocks = accumulator_blocks(desc.m, desc.n, form.cta_group, form.ws, lane)
    return desc, tuple(tuple(b for b in blocks if b.cta == index) for index in range(form.cta_group))


def _matrix_a(
    cta: "Cta", form: _Form, operands: _Operands, desc: InstructionDescriptor, rows: int
) -> np.ndarray:
    """Returns the rows of A of one CTA: packed bytes (rows, row_bytes) for the 4-bit kinds, else codes (rows, K)."""
    packed = form.kind in _PACKED_KINDS
    if not form.a_in_tmem:
        check_descriptor(operands.a, form.arch, desc.row_bytes)
        return shared_operand(
            cta, operands.a, rows, desc.a_format, desc.a_mn_major, packed=packed, row_bytes=desc.row_bytes
        )
    if desc.a_mn_major or desc.row_bytes != OPERAND_ROW_BYTES:
        raise EmulatorError("A in tensor memory must be K-major, and has no K=96")
    if desc.m == 64 and not form.ws and form.cta_group == 1 and lane_of(operands.a) != lane_of(operands.d):
        raise EmulatorError(
            f"A at tensor-memory lane {lane_of(operands.a)} and D at lane {lane_of(operands.d)}: must be the same"
        )
    return tensor_operand(cta, operands.a, desc.a_format, desc.m, form.cta_group, form.ws, packed=packed)


def _matrix_b(
    ctas: "tuple[Cta, ...]", form: _Form, operands: _Operands, desc: InstructionDescriptor, share: int
) -> np.ndarray:
    """Returns all N columns of B, as rows; each CTA holds `share` of them."""
    check_descriptor(operands.b, form.arch, desc.row_bytes)
    packed = form.kind in _PACKED_KINDS
    parts = [
        shared_operand(
            cta, operands.b, share, desc.b_format, desc.b_mn_major, packed=packed, row_bytes=desc.row_bytes
        )
        for cta in ctas
    ]
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if operands.zeros:
        b = np.where(zero_columns(operands.zeros, desc.m, desc.n)[:, None], b.dtype.type(0), b)
    return b


def _scale_factors(
    cta: "Cta", form: _Form, operands: _Operands, desc: InstructionDescriptor, rows_a: int, rows_b: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale bytes of A and B, (rows, count) each."""
    assert form.scale_block is not None
    if desc.n not in silicon.TESTED_SCALE_WIDTHS and cta.machine.checker is not None:
        cta.machine.checker.silicon.scale_width(desc.n)
    count = 1 if form.kind == "mxf8f6f4" else 2 * desc.row_bytes // form.scale_block
    halves = form.cta_group == 2 and desc.m == 128
    return (
        scale_factors(cta, operands.sfa, scale_places(rows_a, count, desc.a_sf_id), "SFA"),
        scale_factors(cta, operands.sfb, scale_places(rows_b, count, desc.b_sf_id, halves), "SFB"),
    )


def _multiply(
    form: _Form,
    desc: InstructionDescriptor,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    scales: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    """Computes D for kinds whose elements fill a byte or more. A, B: element codes (rows, K)."""
    if form.kind == "i8":
        return multiply_integers(a, b, c, desc.saturate)
    sfa, sfb = scales or (None, None)
    return numerics.mma_fused(
        a,
        b,
        c,
        a_format=cast(numerics.ElementType, desc.a_format),
        b_format=cast(numerics.ElementType, desc.b_format),
        sfa=None if sfa is None else sfa[:, 0],
        sfb=None if sfb is None else sfb[:, 0],
        d_type="f16" if desc.d_type == "f16" else "f32",
        scale_c=form.scale_c,
        negate_a=desc.negate_a,
        negate_b=desc.negate_b,
    )

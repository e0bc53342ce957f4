"""tcgen05.mma: operands from shared and tensor memory through `descriptors`, arithmetic through `numerics`."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nvfp4_cute.emulator import numerics
from nvfp4_cute.emulator.descriptors import (
    BLOCK_SCALED_KINDS,
    DENSE_KINDS,
    OPERAND_ROW_BYTES,
    AccumulatorBlock,
    InstructionDescriptor,
    accumulator_blocks,
    decode_instruction_descriptor,
    k_major_chunks,
    mn_major_bytes,
    read_scales,
    scale_columns,
)
from nvfp4_cute.emulator.isa import Builder, Mods, Reader, Step, handler
from nvfp4_cute.emulator.isa.issue import cta_pair, per_thread, vector_items
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.ptx import Address, Imm, Inst, Vector
from nvfp4_cute.emulator.shadow import operand_place
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Cta, Warp

_CONTAINER = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}
_SCALE_BLOCKS = {
    "scale_vec::1X": ("mxf8f6f4", 32),
    "scale_vec::2X": ("mxf4", 32),
    "scale_vec::4X": ("mxf4nvf4", 16),
    "block16": ("mxf4nvf4", 16),
    "block32": (None, 32),
}


@dataclass(frozen=True)
class _Form:
    """What the modifiers and the operand list fix."""

    kind: str
    cta_group: int
    ws: bool
    a_in_tmem: bool
    scale_block: int | None = None
    scale_c: int = 0


@dataclass(frozen=True)
class _Operands:
    """Run-time values of one instruction. sfa, sfb: 0 for dense kinds; disabled: one int per 32 lanes, or empty."""

    d: int
    a: int
    b: int
    idesc: int
    accumulate: bool
    sfa: int = 0
    sfb: int = 0
    disabled: tuple[int, ...] = ()


@handler("tcgen05.mma")
def mma(inst: Inst, b: Builder) -> Step:
    """D = A @ B^T (+ D), asynchronously. Collector usage is a hint."""
    mods = Mods(inst)
    ws = mods.flag("ws")
    group = mods.one_of("cta_group::1", "cta_group::2")
    kind = mods.one_of(*(f"kind::{k}" for k in (*DENSE_KINDS, *BLOCK_SCALED_KINDS)))
    if group is None or kind is None:
        raise inst.unsupported("cta_group or kind")
    kind = kind.removeprefix("kind::")
    mods.drop_prefix("collector::")
    a_in_tmem = isinstance(inst.operands[1], Address)
    if kind in BLOCK_SCALED_KINDS:
        scale_block = _scale_block(inst, mods, kind)
        mods.done()
        return _block_scaled(inst, b, _Form(kind, int(group[-1]), ws, a_in_tmem, scale_block))
    mods.done()
    return _dense(inst, b, _Form(kind, int(group[-1]), ws, a_in_tmem))


def _scale_block(inst: Inst, mods: Mods, kind: str) -> int:
    """Elements that share a scale."""
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
        if not 0 <= scale_c <= 15:
            raise inst.unsupported(f"scale-input-d {scale_c}; legal are 0..15")
        form = _Form(form.kind, form.cta_group, form.ws, form.a_in_tmem, None, scale_c)
    if rest:
        raise inst.unsupported(f"operand {rest[0]}")

    def run(warp: "Warp", d: int, a: int, b_: int, idesc: int, accumulate: bool, *disabled: int) -> None:
        _issue(warp, form, _Operands(d, a, b_, idesc, accumulate, disabled=disabled))

    return per_thread(run, readers)


def _issue(warp: "Warp", form: _Form, operands: _Operands) -> None:
    cta = warp.cta
    ctas = cta_pair(cta) if form.cta_group == 2 else (cta,)
    cta.machine.stats.mmas += 1
    cta.issue(warp, Engine.TCGEN05, partial(_execute, ctas, form, operands))


# ---- execution ---------------------------------------------------------------------------------------------------
def _execute(ctas: "tuple[Cta, ...]", form: _Form, operands: _Operands) -> None:
    """Each CTA computes its own rows of D: M / cta_group rows, all N columns.

    A and B are split over the shared memories of a pair by rows; the same descriptor serves both.
    """
    desc = decode_instruction_descriptor(
        operands.idesc, form.kind, cta_group=form.cta_group, scale_block=form.scale_block, ws=form.ws
    )
    if form.scale_block and desc.m != 128 * form.cta_group:
        raise EmulatorError(
            f"kind::{form.kind} with M={desc.m} and cta_group::{form.cta_group}: the placement of A's scale "
            "factors is not modelled; use M=256"
        )
    rows, share = desc.m // len(ctas), desc.n // len(ctas)
    parts = [_shared_operand(cta, operands.b, share, desc.b_format, desc.b_mn_major, form) for cta in ctas]
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    blocks = accumulator_blocks(desc.m, desc.n, form.cta_group, form.ws, operands.d >> 16 & 0x7F)
    for index, cta in enumerate(ctas):
        if form.a_in_tmem:
            a = _tensor_operand(cta, operands.a, rows, desc, form)
        else:
            a = _shared_operand(cta, operands.a, rows, desc.a_format, desc.a_mn_major, form)
        own = [block for block in blocks if block.cta == index]
        accumulator = _Accumulator(cta, own, operands.d & 0xFFFF, rows * index, (rows, desc.n), desc.d_type)
        c = accumulator.read() if operands.accumulate else None
        out = _multiply(cta, form, operands, desc, a, b, c)
        accumulator.write(out, operands.disabled[4 * index : 4 * index + 4])


def _multiply(
    cta: "Cta",
    form: _Form,
    operands: _Operands,
    desc: InstructionDescriptor,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
) -> np.ndarray:
    """A, B: uint8 (rows, 32) for the 4-bit kinds, element codes (rows, K) for the others."""
    sfa = sfb = None
    if form.scale_block:
        count = 1 if form.kind == "mxf8f6f4" else 64 // form.scale_block
        sfa = _scales(cta, operands.sfa, len(a), count, desc.a_sf_id)
        sfb = _scales(cta, operands.sfb, len(b), count, desc.b_sf_id)
    signs = {"negate_a": desc.negate_a, "negate_b": desc.negate_b}
    if sfa is not None and sfb is not None and form.kind != "mxf8f6f4":
        scale_type = cast(numerics.ScaleType, desc.scale_type)
        return numerics.mma_block_scaled(a, b, sfa, sfb, c, scale_type=scale_type, **signs)
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
        **signs,
    )


def _scales(cta: "Cta", address: int, rows: int, count: int, sf_id: int) -> np.ndarray:
    """uint8 (rows, count). Bits 30-31 of the address repeat the byte selector and are no part of it."""
    column = address & 0xFFFF
    if address >> 16 & 0x7F:
        raise EmulatorError(
            f"scale factors at tensor-memory lane {address >> 16 & 0x7F}: must start at lane 0"
        )
    columns = scale_columns(rows)
    cta.tmem.check(0, 128, column, columns)
    checker = cta.machine.checker
    if checker is not None:
        span = slice(column, column + columns)
        unwritten = checker.read_tensor(cta, slice(0, 128), span)
        needed = unwritten.reshape(4, 32, columns).transpose(0, 2, 1).reshape(4, -1)[:, :rows]
        checker.require_tensor("scale factors", needed, span)
    return read_scales(cta.tmem.words, column, rows, count, sf_id)


# ---- operands ----------------------------------------------------------------------------------------------------
def _shared_operand(
    cta: "Cta", descriptor: int, rows: int, element: str, mn_major: bool, form: _Form
) -> np.ndarray:
    """Codes of an operand in shared memory: packed bytes (rows, 32) for the 4-bit kinds, else (rows, K)."""
    smem = cta.smem
    if mn_major:
        if element in ("e2m3", "e3m2", "e2m1"):
            raise EmulatorError(f"MN-major {element} operands are not modelled")
        container = np.dtype(_CONTAINER.get(element, np.uint8))
        gather = mn_major_bytes(descriptor, rows, container.itemsize)
        smem.check(gather.first_byte, gather.nbytes)
        if cta.machine.checker is not None:
            cta.machine.checker.read_operand(cta, operand_place(gather.indices, 1))
        return smem.views[1].take(gather.indices).view(container)[..., 0]
    gather = k_major_chunks(descriptor, rows)
    smem.check(gather.first_byte, gather.nbytes)
    if cta.machine.checker is not None:
        cta.machine.checker.read_operand(cta, operand_place(gather.indices, 16))
    data = smem.views[16].take(gather.indices).view(np.uint8)
    if form.kind in ("mxf4", "mxf4nvf4"):
        return data
    return _unpacked(data, element)


def _unpacked(data: np.ndarray, element: str) -> np.ndarray:
    """Element codes of rows of 32 bytes. Each 16-byte group holds 16 elements: 4-bit ones in its first 8 bytes,
    6-bit ones in its first 12.
    """
    if element in _CONTAINER:
        return data.view(_CONTAINER[element])
    groups = data.reshape(len(data), 2, 16)
    if element == "e2m1":
        packed = groups[..., :8]
        return np.stack([packed & 15, packed >> 4], -1).reshape(len(data), 32)
    if element in ("e2m3", "e3m2"):
        triples = groups[..., :12].reshape(len(data), 2, 4, 3).astype(np.uint32)
        word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        return (word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).reshape(len(data), 32)
    return data


def _tensor_operand(
    cta: "Cta", address: int, rows: int, desc: InstructionDescriptor, form: _Form
) -> np.ndarray:
    """Codes of A in tensor memory: row = lane, 32 bytes of K in 8 columns."""
    if rows != 128 or address >> 16 & 0x7F:
        raise EmulatorError(
            f"A in tensor memory with {rows} rows per CTA: only 128 rows from lane 0 are modelled"
        )
    if desc.a_mn_major:
        raise EmulatorError("A in tensor memory must be K-major")
    packed = form.kind in ("mxf4", "mxf4nvf4")
    if desc.a_format in ("e2m3", "e3m2", "e2m1") and not packed:
        raise EmulatorError(f"A in tensor memory with {desc.a_format} elements is not modelled")
    column = address & 0xFFFF
    columns = OPERAND_ROW_BYTES // 4
    cta.tmem.check(0, 128, column, columns)
    checker = cta.machine.checker
    if checker is not None:
        span = slice(column, column + columns)
        checker.require_tensor("A", checker.read_tensor(cta, slice(0, 128), span), span)
    data = np.ascontiguousarray(cta.tmem.words[:, column : column + columns]).view(np.uint8)
    return data if packed else _unpacked(data, desc.a_format)


class _Accumulator:
    """The rows of D that lie in one CTA's tensor memory."""

    def __init__(
        self,
        cta: "Cta",
        blocks: list[AccumulatorBlock],
        column: int,
        first_row: int,
        shape: tuple[int, int],
        d_type: str,
    ):
        self.words, self.blocks, self.column = cta.tmem.words, blocks, column
        self.first_row, self.shape, self.d_type, self.cta = first_row, shape, d_type, cta
        for block in blocks:
            lanes = block.lanes
            width = block.columns.stop - block.columns.start
            cta.tmem.check(lanes.start, lanes.stop - lanes.start, column + block.column_offset, width)

    def _span(self, block: AccumulatorBlock) -> tuple[slice, slice]:
        """Lanes and columns of a block in tensor memory."""
        start = self.column + block.column_offset
        return block.lanes, slice(start, start + block.columns.stop - block.columns.start)

    def _place(self, block: AccumulatorBlock) -> tuple[np.ndarray, tuple[slice, slice]]:
        """The block's words, and its place in this CTA's rows of D."""
        rows = slice(block.rows.start - self.first_row, block.rows.stop - self.first_row)
        return self.words[self._span(block)], (rows, block.columns)

    def read(self) -> np.ndarray:
        """float32 or float16 (rows, N); may be a view."""
        checker = self.cta.machine.checker
        if checker is not None:
            for block in self.blocks:
                lanes, columns = self._span(block)
                unwritten = ~checker.tensor[self.cta].valid[lanes, columns]
                checker.require_tensor("the accumulator", unwritten, columns)
        if len(self.blocks) == 1:
            bits = self._place(self.blocks[0])[0]
        else:
            bits = np.empty(self.shape, np.uint32)
            for block in self.blocks:
                words, place = self._place(block)
                bits[place] = words
        return bits.view(np.float32) if self.d_type == "f32" else bits.astype(np.uint16).view(np.float16)

    def write(self, out: np.ndarray, disabled: tuple[int, ...]) -> None:
        """Store D; float16 goes to the low half of each word, zero above. Lanes whose bit is set keep their words."""
        bits = out.view(np.uint32) if self.d_type == "f32" else out.view(np.uint16).astype(np.uint32)
        keep = None
        if any(disabled):
            keep = np.unpackbits(np.array(disabled, "<u4").view(np.uint8), bitorder="little").view(bool)
        checker = self.cta.machine.checker
        for block in self.blocks:
            if checker is not None:
                checker.write_tensor(self.cta, *self._span(block))
            words, place = self._place(block)
            if keep is None:
                words[...] = bits[place]
            else:
                np.copyto(words, bits[place], where=~keep[block.lanes, None])

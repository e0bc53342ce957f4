"""tcgen05.cp copies shared to tensor memory; tcgen05.shift moves rows of tensor memory down by one (PTX ISA 9.7.16.9)."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.descriptors import CONTAINER_SHIFT, COPY_SHAPES, k_major_chunks, unpack_elements
from nvfp4_cute.emulator.faults import TensorMemoryFault
from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler
from nvfp4_cute.emulator.isa.issue import cta_group, cta_pair, issuing_pair, per_thread
from nvfp4_cute.emulator.isa.tcgen05_operands import COLUMN_MASK, check_scale_column, lane_of
from nvfp4_cute.emulator.modes import Engine
from nvfp4_cute.emulator.places import operand_place
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.observers import Checker
    from nvfp4_cute.emulator.state import Cta, Warp

FORMATS = {"b4x16_p64": (4, CONTAINER_SHIFT["e2m1"]), "b6x16_p32": (6, CONTAINER_SHIFT["e3m2"])}
"""Packed source formats: bits of an element, and where it begins in the byte that it becomes."""

SHIFT_COLUMNS = 8
SCALE_SHAPE = "32x128b.warpx4"
"""Shape that copies scale factors."""


@handler("tcgen05.cp")
def copy(inst: Inst, b: Builder) -> Step:
    """Copies a matrix from shared memory to tensor memory, asynchronously; `.b8x16` spreads narrow elements over bytes.

    With cta_group::2 each CTA of the pair copies from its own shared memory, at the same offset, to its own
    tensor memory.
    """
    mods = Mods(inst)
    group = cta_group(inst, mods)
    shape = mods.one_of("128x256b", "128x128b", "4x256b", "64x128b", "32x128b")
    multicast = mods.one_of("warpx2::02_13", "warpx2::01_23", "warpx4")
    source = mods.one_of(*FORMATS) if mods.flag("b8x16") else None
    mods.done()
    name = f"{shape}.{multicast}" if multicast else f"{shape}"
    if name not in COPY_SHAPES:
        raise inst.unsupported(f"shape {name}; legal are {', '.join(COPY_SHAPES)}")
    readers = [b.address(inst.operands[0]), b.read(inst.operands[1], "b64")]

    def run(warp: "Warp", address: int, descriptor: int) -> None:
        ctas = issuing_pair(warp.cta) if group == 2 else (warp.cta,)
        warp.cta.issue(warp, Engine.TCGEN05, partial(copy_matrix, ctas, name, source, address, descriptor))

    return per_thread(run, readers)


def copy_matrix(
    ctas: "tuple[Cta, ...]", name: str, source: str | None, address: int, descriptor: int
) -> None:
    """Copies a matrix of named shape from each CTA's own shared memory to its tensor memory."""
    shape = COPY_SHAPES[name]
    lane, column = lane_of(address), address & COLUMN_MASK
    if lane and (name != "4x256b" or lane > 31):
        raise TensorMemoryFault(f"tcgen05.cp.{name} to tensor-memory lane {lane}: must start at lane 0")
    if name == SCALE_SHAPE:
        check_scale_column(column, f"tcgen05.cp.{name}")
    gather = k_major_chunks(descriptor, shape.rows, shape.row_bytes)
    columns = shape.row_bytes // 4
    for cta in ctas:
        cta.tmem.check(0, 128, column, columns)
        cta.smem.check(gather.first_byte, gather.nbytes)
        rows = cta.smem.views[16].take(gather.indices).view(np.uint8)
        if source is not None:
            bits, first = FORMATS[source]
            rows = unpack_elements(rows, bits) << np.uint8(first)
        if cta.machine.checker is not None:
            _check_copy(
                cta.machine.checker,
                cta,
                gather.indices,
                shape.lanes + lane,
                slice(column, column + columns),
                source,
            )
        if name == SCALE_SHAPE:
            cta.tmem.copy_scales(column, rows.view(np.uint32))
        else:
            words = cta.tmem.columns(column, columns)
            words[shape.lanes + lane, column : column + columns] = rows.view(np.uint32)


def _check_copy(
    checker: "Checker", cta: "Cta", indices: np.ndarray, lanes: np.ndarray, columns: slice, source: str | None
) -> None:
    """Marks unwritten source bytes as unwritten in the target, without a report."""
    place = operand_place(indices, 16)
    valid: np.ndarray | bool = True
    if not checker.copy_source(cta, place):
        memory = checker.shared[cta]
        written = ~memory.unwritten(indices).reshape(len(indices), -1, memory.parts).any(axis=2)
        # The first bytes of a group of 16 elements decide whether it is written; padding is ignored.
        valid = written if source is None else np.repeat(written[:, ::4], 4, axis=1)
    checker.write_tensor(cta, slice(int(lanes.item(0)), int(lanes.item(-1)) + 1), columns, None)
    words = checker.tensor[cta].valid
    if lanes.shape == (4, 32):
        words.reshape(4, 32, -1)[:, :, columns] = valid
    else:
        words[lanes, columns] = valid


@handler("tcgen05.shift")
def shift(inst: Inst, b: Builder) -> Step:
    """Moves rows of 32 bytes down by one lane, asynchronously: lane r gets the row of lane r + 1.

    Each group of 32 lanes shifts by itself, and its last lane keeps its row. A B200 does the same, by a published
    measurement with the address at lane 0. The effect of other lanes is unknown, so they raise.
    """
    mods = Mods(inst)
    group = cta_group(inst, mods)
    if not mods.flag("down"):
        raise inst.unsupported("a shift that is not .down")
    mods.done()

    def run(warp: "Warp", address: int) -> None:
        ctas = cta_pair(warp.cta) if group == 2 else (warp.cta,)
        warp.cta.issue(warp, Engine.TCGEN05, partial(_shift, ctas, address))

    return per_thread(run, [b.address(inst.operands[0])])


def _shift(ctas: "tuple[Cta, ...]", address: int) -> None:
    if lane_of(address):
        raise TensorMemoryFault(
            f"tcgen05.shift at tensor-memory lane {lane_of(address)}: only lane 0 is modelled"
        )
    column = address & COLUMN_MASK
    columns = slice(column, column + SHIFT_COLUMNS)
    for cta in ctas:
        cta.tmem.check(0, 128, column, SHIFT_COLUMNS)
        checker = cta.machine.checker
        if checker is not None:
            checker.read_tensor(cta, slice(0, 128), columns)
            checker.write_tensor(cta, slice(0, 128), columns, None)
            _move_down(checker.tensor[cta].valid[:, columns])
        _move_down(cta.tmem.words[:, columns])


def _move_down(rows: np.ndarray) -> None:
    groups = rows.reshape(4, 32, -1)
    groups[:, :-1] = groups[:, 1:].copy()

"""ldmatrix and stmatrix of 8-bit elements, 4- and 6-bit elements expanded to bytes on load, and movmatrix.

`memory` has the forms with 16-bit elements. Every participating lane supplies the address of one 16-byte row. With lane
= 4g + t (PTX ISA 9.7.14.5.15-17; byte positions as in CuTe's copy traits for sm_100):

* ``ldmatrix.m8n16``: matrix j has rows at the addresses of lanes 8j..8j+7; register j of a lane holds elements
  4t..4t+3 of row g, element 4t in the low byte.
* ``ldmatrix.m16n16.trans``: matrix j has rows at lanes 16j..16j+15; byte i of register 2j + h is the element of
  row 4t + i, column g + 8h.
* ``stmatrix.m16n8.trans``: matrix j is stored as 8 rows at lanes 8j..8j+7; byte i of register j goes to row
  2t + (i & 1), column g + 8*(i >> 1).
"""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.isa import Builder, Mods, Step, handler
from nvfp4_cute.emulator.isa.arith import as_array
from nvfp4_cute.emulator.isa.fragments import (
    read_words,
    require_whole_warp,
    source_slots,
    target_slots,
    write_words,
)
from nvfp4_cute.emulator.isa.spaces import resolve_lanes
from nvfp4_cute.emulator.isa.warp import synchronised
from nvfp4_cute.emulator.memory import ITEM_DTYPES
from nvfp4_cute.emulator.ptx import Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

ROW_BYTES = 16


def _space(mods: Mods) -> str:
    return mods.one_of("shared", "shared::cta", default="generic") or "generic"


def _count(mods: Mods, *legal: str) -> int:
    found = mods.one_of(*legal)
    if found is None:
        raise mods.inst.unsupported(f"number of matrices; legal are {', '.join('.' + x for x in legal)}")
    return int(found[1:])


def _elements(mods: Mods) -> str:
    """Returns the stored form of the elements: b8, or a compressed format that is loaded as b8x16."""
    if mods.flag("b8x16"):
        return mods.one_of("b4x16_p64", "b6x16_p32", default="") or ""
    return mods.one_of("b8", default="") or ""


def expand(rows: np.ndarray, stored: str) -> np.ndarray:
    """Expands 16-byte rows, uint8 (R, 16), to their 16 elements, one per byte, in the low bits.

    b8: unchanged. b4x16_p64: 8 bytes of data, low nibble first. b6x16_p32: 12 bytes, lowest bits first. The rest of the
    row is padding.
    """
    if stored == "b8":
        return rows
    bits, data = (4, 8) if stored == "b4x16_p64" else (6, 12)
    single = np.unpackbits(rows[:, :data], axis=1, bitorder="little").reshape(len(rows), 16, bits)
    return np.packbits(single, axis=2, bitorder="little")[..., 0]


def _load_rows(warp: "Warp", space: str, address: object, lanes: int) -> np.ndarray:
    """Returns uint8 (lanes, 16): the row that each of the first lanes addresses."""
    addresses = as_array(address, np.uint32 if space != "generic" else np.uint64)[:lanes]
    memory, index = resolve_lanes(warp, space, addresses, ROW_BYTES, False)
    warp.cta.machine.stats.load_bytes += ROW_BYTES * lanes
    return memory[index].view(np.uint8).reshape(lanes, ROW_BYTES)


@handler("ldmatrix.sync.aligned.m8n16")
def load_compressed(inst: Inst, b: Builder) -> Step:
    """ldmatrix m8n16 of 4- or 6-bit elements; see the module docstring."""
    mods = Mods(inst)
    count, space, stored = _count(mods, "x1", "x2", "x4"), _space(mods), _elements(mods)
    mods.done()
    if stored in ("", "b8"):
        raise inst.unsupported("m8n16 is for .b8x16.b4x16_p64 and .b8x16.b6x16_p32")
    targets = target_slots(b, inst.operands[0], count, "the matrices")
    locate = b.address(inst.operands[1])

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "ldmatrix")
        rows = expand(_load_rows(warp, space, locate(warp), 8 * count), stored)
        write_words(warp, targets, np.ascontiguousarray(rows).view(np.uint32).reshape(count, 32))

    return synchronised(b, None, body)


@handler("ldmatrix.sync.aligned.m16n16")
def load_transposed(inst: Inst, b: Builder) -> Step:
    """ldmatrix m16n16.trans of 8-bit, 4-bit or 6-bit elements; see the module docstring."""
    mods = Mods(inst)
    count, space, stored = _count(mods, "x1", "x2"), _space(mods), _elements(mods)
    transposed = mods.flag("trans")
    mods.done()
    if not transposed or not stored:
        raise inst.unsupported("m16n16 needs .trans and .b8, .b8x16.b4x16_p64, or .b8x16.b6x16_p32")
    targets = target_slots(b, inst.operands[0], 2 * count, "the matrices")
    locate = b.address(inst.operands[1])

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "ldmatrix")
        rows = expand(_load_rows(warp, space, locate(warp), 16 * count), stored)
        # (matrix, t, i, half, g) -> (matrix, half, g, t, i)
        quads = rows.reshape(count, 4, 4, 2, 8).transpose(0, 3, 4, 1, 2)
        write_words(warp, targets, np.ascontiguousarray(quads).view(np.uint32).reshape(2 * count, 32))

    return synchronised(b, None, body)


@handler("stmatrix.sync.aligned.m16n8")
def store_transposed(inst: Inst, b: Builder) -> Step:
    """stmatrix m16n8.trans of 8-bit elements; see the module docstring."""
    mods = Mods(inst)
    count, space, stored = _count(mods, "x1", "x2", "x4"), _space(mods), _elements(mods)
    transposed = mods.flag("trans")
    mods.done()
    if not transposed or stored != "b8":
        raise inst.unsupported("m16n8 needs .trans and .b8")
    sources = source_slots(b, inst.operands[1], count, "the matrices")
    locate = b.address(inst.operands[0])

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "stmatrix")
        machine, lanes = warp.cta.machine, 8 * count
        machine.stats.store_bytes += ROW_BYTES * lanes
        machine.changes += 1
        # bytes (matrix, g, t, half, odd) -> rows (matrix, t, odd) of columns (half, g)
        data = read_words(warp, sources).view(np.uint8).reshape(count, 8, 4, 2, 2).transpose(0, 2, 4, 3, 1)
        addresses = as_array(locate(warp), np.uint32 if space != "generic" else np.uint64)[:lanes]
        memory, index = resolve_lanes(warp, space, addresses, ROW_BYTES, True)
        memory[index] = np.ascontiguousarray(data).reshape(-1).view(ITEM_DTYPES[ROW_BYTES])

    return synchronised(b, None, body)


@handler("movmatrix.sync.aligned.m8n8")
def move_matrix(inst: Inst, b: Builder) -> Step:
    """movmatrix: transposes an 8 x 8 matrix of 16-bit elements in a register of the warp."""
    mods = Mods(inst)
    if not (mods.flag("trans") and mods.flag("b16")):
        raise inst.unsupported("movmatrix needs .trans.b16")
    mods.done()
    target = target_slots(b, inst.operands[0], 1, "the result")
    source = source_slots(b, inst.operands[1], 1, "the source")

    def body(warp: "Warp") -> None:
        require_whole_warp(warp, "movmatrix")
        elements = read_words(warp, source).view(np.uint16).reshape(8, 8)
        write_words(warp, target, np.ascontiguousarray(elements.T).view(np.uint32).reshape(1, 32))

    return synchronised(b, None, body)

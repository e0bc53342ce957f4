"""Register fragments of the warp matrix instructions: registers of 32 lanes <-> rows of a matrix.

All shapes of `mma.sync` and `wgmma` share three layouts (PTX ISA, "Matrix Fragments"). With lane = 4g + t:

* A (16 rows): register r holds the 32-bit word of row g + 8*(r & 1), word column t + 4*(r >> 1);
* B (8 columns n): register r holds the word of column n = g, word row t + 4r along k;
* C and D (16 rows, N columns), 32-bit elements: register 4j + 2h + c is row g + 8h, column 8j + 2t + c; 16-bit
  elements: register 2j + h is row g + 8h, columns 8j + 2t (low half) and 8j + 2t + 1.

A word holds 32 / bits consecutive elements along k, the first one in the low bits, so the layouts do not depend on
the element type, and a fragment becomes a matrix by one reshape and one transposition of whole words.
"""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.isa import Builder
from nvfp4_cute.emulator.ptx import Operand, Vector
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp


def source_slots(b: Builder, operand: Operand, count: int, name: str) -> list[int]:
    """Returns the slots of the `count` 32-bit source registers of a fragment.

    Raises:
        EmulatorError: another number of registers, or registers that are not 32 bits wide.
    """
    items = _registers(b, operand, count, name)
    return [_word(b, b.slot(item, "b32"), name) for item in items]


def target_slots(b: Builder, operand: Operand, count: int, name: str) -> list[int]:
    """Returns the slots of the `count` 32-bit destination registers of a fragment; raises like `source_slots`."""
    items = _registers(b, operand, count, name)
    return [_word(b, b.target(item), name) for item in items]


def _registers(b: Builder, operand: Operand, count: int, name: str) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise b.refuse(f"{len(items)} registers for {name}, this shape and type have {count}")
    return items


def _word(b: Builder, slot: int, name: str) -> int:
    if b.width(slot) != 4:
        raise b.refuse(f"{name} in registers of {8 * b.width(slot)} bits; fragments are in 32-bit registers")
    return slot


def require_whole_warp(warp: "Warp", what: str) -> None:
    """Raises EmulatorError unless all 32 lanes execute the instruction together."""
    if not warp.all_active:
        raise EmulatorError(f"{what} needs all 32 lanes of the warp; lanes {warp.active_lanes()} execute it")


def read_words(warp: "Warp", slots: list[int]) -> np.ndarray:
    """uint32 (registers, 32): the registers' bits."""
    words = np.empty((len(slots), 32), np.uint32)
    for row, slot in zip(words, slots, strict=True):
        row[:] = warp.regs[slot]
    return words


def write_words(warp: "Warp", slots: list[int], words: np.ndarray) -> None:
    """Stores uint32 (registers, 32) into all 32 lanes of the registers."""
    for slot, row in zip(slots, words, strict=True):
        warp.regs[slot] = row


def matrix_a(words: np.ndarray) -> np.ndarray:
    """Converts an A fragment (R, 32) to uint32 (16, 2R): rows of k, contiguous."""
    return np.ascontiguousarray(words.reshape(-1, 2, 8, 4).transpose(1, 2, 0, 3)).reshape(16, -1)


def matrix_b(words: np.ndarray) -> np.ndarray:
    """Converts a B fragment (R, 32) to uint32 (8, 4R): for each column n its words along k, contiguous."""
    return np.ascontiguousarray(words.reshape(-1, 8, 4).transpose(1, 0, 2)).reshape(8, -1)


def matrix_c(words: np.ndarray, dtype: type) -> np.ndarray:
    """Converts an accumulator fragment (R, 32) to (16, N) of `dtype` (float32, int32: N = 2R; float16: N = 4R)."""
    if np.dtype(dtype).itemsize == 4:
        rows = words.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2)
    else:
        rows = words.reshape(-1, 2, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(rows).reshape(16, -1).view(dtype)


def fragment_d(matrix: np.ndarray) -> np.ndarray:
    """Converts (16, N) float32, int32 or float16 to an accumulator fragment uint32 (R, 32)."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    if matrix.dtype.itemsize == 4:
        registers = words.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3)
    else:
        registers = words.reshape(2, 8, -1, 4).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(registers).reshape(-1, 32)

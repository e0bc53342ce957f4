"""Operands of tcgen05.mma: A and B from shared or tensor memory, and scale factors from tensor memory."""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.descriptors import (
    CONTAINER_SHIFT,
    ScalePlaces,
    decode_smem_descriptor,
    k_major_chunks,
    mn_major_bytes,
    read_scales,
    tensor_operand_lanes,
    unpack_elements,
)
from nvfp4_cute.emulator.places import operand_place
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta

COLUMN_MASK = 0xFFFF
CONTAINERS = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "s8": np.int8}
"""Types of the codes of an element format; uint8 where it is not listed."""

NARROW_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}


def lane_of(address: int) -> int:
    """Returns the lane of a tensor-memory address, without bits 30 and 31, which addresses of scale factors use otherwise."""
    return address >> 16 & 0x7F


def shared_operand(
    cta: "Cta", descriptor: int, rows: int, element: str, mn_major: bool, *, packed: bool, row_bytes: int
) -> np.ndarray:
    """Returns the codes of an operand in shared memory.

    packed: two e2m1 elements per byte, returned as bytes (rows, row_bytes); else codes (rows, K).
    """
    smem, container = cta.smem, np.dtype(CONTAINERS.get(element, np.uint8))
    gather = (
        mn_major_bytes(descriptor, rows, container.itemsize)
        if mn_major
        else k_major_chunks(descriptor, rows, row_bytes)
    )
    smem.check(gather.first_byte, gather.nbytes)
    if cta.machine.checker is not None:
        cta.machine.checker.read_operand(cta, operand_place(gather.indices, 1 if mn_major else 16))
    if mn_major:
        return smem.views[1].take(gather.indices).view(container)[..., 0]
    data = smem.views[16].take(gather.indices).view(np.uint8)
    if not packed and element in NARROW_BITS:
        return unpack_elements(data, NARROW_BITS[element])
    return data.view(container)


def check_descriptor(descriptor: int, arch_number: int, row_bytes: int) -> None:
    """Raises for an absolute leading dimension that the architecture or instruction does not have.

    Raises:
        EmulatorError: the architecture is not sm_103, or the instruction has no K=96.
    """
    if decode_smem_descriptor(descriptor).absolute and (arch_number != 103 or row_bytes != 48):
        raise EmulatorError(
            f"matrix descriptor {descriptor:#018x}: an absolute leading dimension (bit 52) needs sm_103a and K=96"
        )


def tensor_operand(
    cta: "Cta", address: int, element: str, m: int, cta_group: int, ws: bool, *, packed: bool
) -> np.ndarray:
    """Returns the codes of A in tensor memory: 32 bytes of a row along K in 8 columns of its lane, K-major.

    Elements of less than 8 bits fill a byte each, except for the kinds that pack two e2m1 into one.

    Raises:
        EmulatorError: a lane that the layout does not allow, or copies for several groups of lanes that differ.
    """
    lanes = tensor_operand_lanes(m, cta_group, ws, lane_of(address))
    column, columns = address & COLUMN_MASK, 8
    low, high = int(lanes.min()), int(lanes.max()) + 1
    cta.tmem.check(low, high - low, column, columns)
    checker = cta.machine.checker
    if checker is not None:
        span = slice(column, column + columns)
        unwritten = checker.read_tensor(cta, slice(low, high), span)
        checker.require_tensor("A", None if unwritten is None else unwritten[lanes - low], span)
    found = cta.tmem.columns(column, columns)[:, column : column + columns][lanes]
    if (found[1:] != found[0]).any():
        raise EmulatorError(
            f"A in tensor-memory columns {column}..{column + columns - 1} differs between the groups of {len(found[0])} "
            "lanes that need it whole"
        )
    data = np.ascontiguousarray(found[0]).view(np.uint8)
    if not packed and element in CONTAINER_SHIFT:
        return data >> CONTAINER_SHIFT[element] & (1 << NARROW_BITS[element]) - 1
    return data.view(CONTAINERS.get(element, np.uint8))


def check_scale_column(column: int, what: str) -> None:
    """Raises for scale factors at an odd column. `what`: the instruction that writes or uses them.

    Raises:
        EmulatorError: the column is odd.
    """
    if column & 1:
        raise silicon.fault(
            "even-scale-column", f"{what} with scale factors at tensor-memory column {column}"
        )


def scale_factors(cta: "Cta", address: int, places: ScalePlaces, name: str) -> np.ndarray:
    """Returns uint8 (rows, count). `name`: name of the operand."""
    column, lane = address & COLUMN_MASK, lane_of(address)
    check_scale_column(column, f"tcgen05.mma reads {name}")
    if lane:
        raise EmulatorError(f"scale factors at tensor-memory lane {lane}: must start at lane 0")
    cta.tmem.check(0, 128, column, places.columns)
    checker = cta.machine.checker
    if checker is not None:
        span = slice(column, column + places.columns)
        unwritten = checker.read_tensor(cta, slice(0, 128), span)
        if unwritten is not None:
            checker.require_tensor("scale factors", unwritten.reshape(-1)[places.words], span)
    copies = cta.tmem.copied_scales(column, places.columns) if places.words_of_rows else None
    if copies is not None:
        words = np.concatenate([rows.T for rows in copies]).reshape(-1, 1)
        return words[: len(places.first)].view(np.uint8)
    return read_scales(cta.tmem.columns(column, places.columns), column, places)

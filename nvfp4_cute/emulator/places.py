"""Places in shared memory: which of its granules an access touches, as an index and the span of rows that it lies in.

Instructions name what they touch so, and the hazard checker looks those granules up. A chunk is 16 bytes.
"""

from typing import Any

import numpy as np

GRANULES_PER_CHUNK = 4

Place = tuple[Any, tuple[int, int]]
"""Index and row span of granules."""


def granules(offsets: np.ndarray, nbytes: int) -> Place:
    """Index and span of accesses of `nbytes` at each of `offsets` in shared memory."""
    first = offsets.astype(np.int64) // 4
    if nbytes > 4:
        first = (first[:, None] + np.arange(nbytes // 4)).reshape(-1)
    rows = first >> 2
    return (rows, first & 3), (int(rows.min()), int(rows.max()) + 1)


def chunks(numbers: np.ndarray) -> Place:
    """Index and span of 16-byte chunks; contiguous ones become a slice."""
    low, high = int(numbers.min()), int(numbers.max()) + 1
    return (slice(low, high) if high - low == numbers.size else numbers.reshape(-1)), (low, high)


def byte_range(offset: int, nbytes: int) -> Place:
    """Index and span of the chunks that [offset, offset + nbytes) touches."""
    low, high = offset // 16, -(-(offset + nbytes) // 16)
    return slice(low, high), (low, high)


_operand_places: dict[tuple[int, int | None, int | None], tuple[np.ndarray, Any]] = {}
MOST_PLACES = 1 << 14


def operand_place(indices: np.ndarray, unit: int, rows: slice = slice(None)) -> Place:
    """Index and span of the rows of a matrix in shared memory.

    `indices`: (rows, ...) numbers of units of `unit` bytes (1 or 16), an array that lives as long as the program.
    """
    key = (id(indices), rows.start, rows.stop)
    found = _operand_places.get(key)
    if found is None:
        if len(_operand_places) >= MOST_PLACES:
            _operand_places.clear()
        numbers = np.unique(indices[rows].astype(np.int64) * unit // 16)
        found = _operand_places[key] = (indices, chunks(numbers))  # the reference keeps the id taken
    return found[1]

"""Places in shared memory: an index of the granules that an access touches, and the span of rows that contains them.

Instructions report their accesses in this form, and the hazard checker looks those granules up. A chunk is 16 bytes. A
granule is a word of 4 bytes, or a byte if an access touches parts of words.
"""

from typing import Any, NamedTuple

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT

CHUNK_BYTES = 16
GRANULES_PER_CHUNK = 4
WORD_BYTES = 4


class ByteIndex(NamedTuple):
    """Bytes of shared memory: chunk numbers, and positions within the chunks, 0 to 15 (int64)."""

    rows: np.ndarray
    columns: np.ndarray


Place = tuple[Any, tuple[int, int]]
"""Index and row span of granules."""


LanePlaces = tuple[tuple[int, Place], ...]
"""Places in the memories of several CTAs, by their ranks."""

MOST_PLACES = 1 << 14
_lane_places: dict[tuple[bytes, int], LanePlaces] = {}


def lane_places(addresses: np.ndarray, nbytes: int) -> LanePlaces:
    """Returns the ranks of the CTAs that accesses of `nbytes` touch, and the places in each CTA.

    `addresses`: int64 shared::cluster address per lane. Results are cached, because kernels access the same places
    again and again.
    """
    key = addresses.tobytes(), nbytes
    found = _lane_places.get(key)
    if found is None:
        ranks = addresses >> RANK_SHIFT
        if len(_lane_places) >= MOST_PLACES:
            _lane_places.clear()
        found = _lane_places[key] = tuple(
            (rank, _granules(addresses[ranks == rank] & OFFSET_MASK, nbytes))
            for rank in np.unique(ranks).tolist()
        )
    return found


def granules(offsets: np.ndarray, nbytes: int) -> Place:
    """Returns index and span of accesses of `nbytes` at each of `offsets` (int64) in shared memory."""
    ((_, place),) = lane_places(offsets, nbytes)
    return place


def _granules(offsets: np.ndarray, nbytes: int) -> Place:
    if nbytes < WORD_BYTES:
        bytes_ = np.unique(offsets[:, None] + np.arange(nbytes))
        words = np.unique(bytes_ // WORD_BYTES)
        if bytes_.size != WORD_BYTES * words.size:
            rows = bytes_ // CHUNK_BYTES
            return ByteIndex(rows, bytes_ % CHUNK_BYTES), (int(rows[0]), int(rows[-1]) + 1)
    numbers = np.unique(offsets[:, None] // 4 + np.arange(max(nbytes // 4, 1)))
    rows = np.unique(numbers >> 2)
    if numbers.size == GRANULES_PER_CHUNK * rows.size:
        return chunks(rows)
    return (numbers >> 2, numbers & 3), (int(rows[0]), int(rows[-1]) + 1)


def chunks(numbers: np.ndarray) -> Place:
    """Returns index and span of 16-byte chunks; contiguous ones become a slice."""
    low, high = int(numbers.min()), int(numbers.max()) + 1
    return (slice(low, high) if high - low == numbers.size else numbers.reshape(-1)), (low, high)


def byte_range(offset: int, nbytes: int) -> Place:
    """Returns index and span of the chunks that [offset, offset + nbytes) touches."""
    low, high = offset // 16, -(-(offset + nbytes) // 16)
    return slice(low, high), (low, high)


_operand_places: dict[tuple[int, int | None, int | None], tuple[np.ndarray, Any]] = {}


def operand_place(indices: np.ndarray, unit: int, rows: slice = slice(None)) -> Place:
    """Returns index and span of the rows of a matrix in shared memory.

    `indices`: (rows, ...) numbers of units of `unit` bytes (1 or 16), an array that lives as long as the program.
    """
    key = (id(indices), rows.start, rows.stop)
    found = _operand_places.get(key)
    if found is None:
        if len(_operand_places) >= MOST_PLACES:
            _operand_places.clear()
        numbers = np.unique(indices[rows].astype(np.int64) * unit // 16)
        found = _operand_places[key] = (indices, chunks(numbers))  # the reference keeps the id in use
    return found[1]

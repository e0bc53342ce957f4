"""State spaces: resolve one address, or 32 of them, to bytes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4_cute.emulator.addresses import LOCAL_WINDOW, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from nvfp4_cute.emulator.faults import AlignmentFault, BoundsFault
from nvfp4_cute.emulator.lanes import LANE_IDS, LANES
from nvfp4_cute.emulator.memory import ITEM_DTYPES, ITEM_SHIFTS, SHARED_BASE, lane_constant
from nvfp4_cute.emulator.state import Cta, Warp
from nvfp4_cute.errors import EmulatorError

WINDOW_BYTES = 1 << 32


@dataclass(frozen=True)
class Space:
    """A state space. `window`: offset that cvta adds to an address of the space to make it generic."""

    window: int


SPACES = {
    "shared::cluster": Space(SHARED_WINDOW),
    "shared::cta": Space(SHARED_WINDOW),
    "shared": Space(SHARED_WINDOW),
    "local": Space(LOCAL_WINDOW),
    "global": Space(0),
    "const": Space(0),
    "param": Space(0),
    "param::entry": Space(0),
}


def generic_space(address: int) -> str:
    """Returns the space of a generic address: shared::cluster, local, or global."""
    if SHARED_WINDOW <= address < SHARED_WINDOW + WINDOW_BYTES:
        return "shared::cluster"
    if LOCAL_WINDOW <= address < LOCAL_WINDOW + WINDOW_BYTES:
        return "local"
    return "global"


def is_uniform(space: str, where: Any) -> bool:
    """Whether one address means one place for all lanes. Equal local addresses mean a place per lane."""
    if where.__class__ is np.ndarray or space == "local":
        return False
    return space != "generic" or generic_space(where) != "local"


def _own_shared(warp: "Warp", address: int) -> "tuple[Cta, int]":
    cta = warp.cta
    if address >> RANK_SHIFT != cta.rank:
        raise EmulatorError(
            f"shared::cta address {address:#x} belongs to rank {address >> RANK_SHIFT}, this CTA is rank {cta.rank}"
        )
    return cta, address & OFFSET_MASK


def _misaligned(address: int, nbytes: int) -> AlignmentFault:
    return AlignmentFault(f"address {address:#x} is not aligned to the {nbytes} bytes of the access")


def _check_alignment(addresses: np.ndarray, nbytes: int) -> None:
    low_bits = addresses & lane_constant(addresses.dtype, nbytes - 1, len(addresses))
    if nbytes > 1 and np.count_nonzero(low_bits):
        raise _misaligned(int(addresses[low_bits != 0][0]), nbytes)


def locate(
    warp: "Warp", space: str, address: int, nbytes: int, size: int, write: bool
) -> tuple[np.ndarray, int]:
    """Returns a view of `size`-byte items and the index of the one at a uniform address, for an access of `nbytes`.

    Raises like `resolve_one`.
    """
    if address & (nbytes - 1):
        raise _misaligned(address, nbytes)
    if space == "generic":
        space = generic_space(address)
        address -= SPACES[space].window
    if space in ("shared", "shared::cta"):
        cta, offset = _own_shared(warp, address)
    elif space == "shared::cluster":
        cta, offset = warp.cta.cluster.resolve(address)
    else:
        return warp.cta.machine.memory.items(address, nbytes, size, write)
    cta.smem.check(offset, nbytes)
    return cta.smem.views[size], offset // size


def resolve_one(warp: "Warp", space: str, address: int, nbytes: int, write: bool) -> np.ndarray:
    """Returns a uint8 view of the bytes at one address (of the first active lane, for local memory).

    Raises:
        EmulatorError: the address is misaligned, out of bounds, or in another CTA if only the own one is allowed.
    """
    if address & (nbytes - 1):
        raise _misaligned(address, nbytes)
    if space == "generic":
        space = generic_space(address)
        address -= SPACES[space].window
    if space in ("shared", "shared::cta"):
        cta, offset = _own_shared(warp, address)
        return cta.smem.read(offset, nbytes)
    if space == "shared::cluster":
        cta, offset = warp.cta.cluster.resolve(address)
        return cta.smem.read(offset, nbytes)
    if space == "local":
        return _local_rows(warp)[warp.first_lane(), address : address + nbytes]
    return warp.cta.machine.memory.view(address, nbytes, write=write)


def _local_rows(warp: "Warp") -> np.ndarray:
    if warp.local is None:
        size = -(-max(warp.code.local_bytes, 16) // 16) * 16
        warp.local = np.full((len(warp.active), size), 0xFF, np.uint8)
    return warp.local


def resolve_lanes(
    warp: "Warp", space: str, addresses: np.ndarray, nbytes: int, write: bool, lanes: np.ndarray = LANE_IDS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a view of items of `nbytes` (at most 16) and the index of each lane's item.

    `addresses`: addresses of the active lanes only; `lanes`: numbers of these lanes (for local memory). Raises like
    `resolve_one`; lanes must not mix state spaces or CTAs.
    """
    if space in ("shared", "shared::cta"):
        return _own_lanes(warp.cta, addresses, nbytes)
    _check_alignment(addresses, nbytes)
    if space == "generic":
        space = generic_space(int(addresses[0]))
        addresses = addresses - np.uint64(SPACES[space].window)
    if space in ("global", "const", "param", "param::entry"):
        return warp.cta.machine.memory.lanes(addresses, nbytes, write)
    if space == "local":
        rows = _local_rows(warp)
        if int(addresses.max()) + nbytes > rows.shape[1]:
            raise BoundsFault(
                f"local access at offset {int(addresses.max()):#x} is outside {rows.shape[1]} bytes"
            )
        index = (addresses + lanes.astype(addresses.dtype) * rows.shape[1]) // nbytes
        return rows.reshape(-1).view(ITEM_DTYPES[nbytes]), index
    cta = warp.cta if space != "shared::cluster" else warp.cta.cluster.resolve(int(addresses[0]))[0]
    return _shared_lanes(cta, addresses, nbytes)


_own_indices: dict[tuple[bytes, int, int, int, int], np.ndarray] = {}
MOST_INDICES = 1 << 14


def _own_lanes(cta: Cta, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """`resolve_lanes` in the CTA's own shared memory. Legal accesses are cached, because kernels repeat their places."""
    smem = cta.smem
    key = addresses.tobytes(), addresses.itemsize, nbytes, cta.rank, smem.size
    index = _own_indices.get(key)
    if index is None:
        _check_alignment(addresses, nbytes)
        index = _shared_lanes(cta, addresses, nbytes)[1]
        index.setflags(write=False)
        if len(_own_indices) >= MOST_INDICES:
            _own_indices.clear()
        _own_indices[key] = index
    return smem.views_from_base[nbytes], index


def _shared_lanes(cta: Cta, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """`resolve_lanes` in the shared memory of a CTA, to which all addresses must point."""
    smem, dtype, count = cta.smem, addresses.dtype, len(addresses)
    relative = addresses - lane_constant(dtype, cta.rank << RANK_SHIFT | SHARED_BASE, count)
    # Unsigned: an address below the window, or of another rank, wraps to a huge offset.
    outside = relative > lane_constant(dtype, smem.size - SHARED_BASE - nbytes, count)
    if np.count_nonzero(outside):
        bad = int(addresses[outside][0])
        if bad >> RANK_SHIFT != cta.rank:
            raise BoundsFault(
                f"shared address {bad:#x} belongs to rank {bad >> RANK_SHIFT}, expected {cta.rank}"
            )
        smem.check(bad & OFFSET_MASK, nbytes)
    index = relative >> lane_constant(dtype, ITEM_SHIFTS[nbytes], count)
    return smem.views_from_base[nbytes], index.astype(np.int64)


def _addresses(warp: "Warp", where: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the addresses of the active lanes, and their lane numbers."""
    width = len(warp.active)
    if where.__class__ is not np.ndarray:
        where = np.full(width, where, np.uint64)
    lanes = LANE_IDS if width == LANES else np.arange(width, dtype=LANE_IDS.dtype)
    if warp.all_active:
        return where, lanes
    return where[warp.active], lanes[warp.active]


def _per_rank(warp: "Warp", space: str, addresses: np.ndarray) -> list[np.ndarray] | None:
    """Returns lane selections by CTA if lanes address several CTAs of the cluster, else None."""
    if space not in ("shared::cluster", "generic") or len(warp.cta.cluster.ctas) == 1:
        return None
    if space == "generic" and generic_space(int(addresses[0])) != "shared::cluster":
        return None
    ranks = (addresses >> addresses.dtype.type(RANK_SHIFT)) & addresses.dtype.type(0xFF)
    if (ranks == ranks[0]).all():
        return None
    return [np.flatnonzero(ranks == rank) for rank in np.unique(ranks)]


def _parts(
    warp: "Warp", space: str, addresses: np.ndarray, total: int, write: bool, lanes: np.ndarray
) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Yields (lanes, items, index of each lane's item): one part, or one for each CTA or tensor that lanes address."""
    groups = _per_rank(warp, space, addresses)
    if groups is None:
        try:
            return [(slice(None), *resolve_lanes(warp, space, addresses, total, write, lanes))]
        except BoundsFault:
            groups = warp.cta.machine.memory.by_range(addresses) if space in ("global", "generic") else []
            if len(groups) < 2:
                raise
    return [
        (part, *resolve_lanes(warp, space, addresses[part], total, write, lanes[part])) for part in groups
    ]


def gather(warp: "Warp", space: str, where: Any, total: int, element: np.dtype, count: int) -> np.ndarray:
    """Loads `count` elements per active lane; array (count, lanes), zero in inactive lanes."""
    addresses, lanes = _addresses(warp, where)
    warp.cta.machine.stats.load_bytes += total * len(addresses)
    if total > 16:
        _check_alignment(addresses, total)
        halves = [
            gather(
                warp,
                space,
                as_u64(where, len(warp.active)) + np.uint64(16 * i),
                16,
                element,
                16 // element.itemsize,
            )
            for i in range(total // 16)
        ]
        warp.cta.machine.stats.load_bytes -= total * len(addresses)
        return np.concatenate(halves)
    parts = _parts(warp, space, addresses, total, False, lanes)
    if len(parts) == 1:
        _, memory, index = parts[0]
        items = memory.take(index)
    else:
        items = np.empty(len(addresses), ITEM_DTYPES[total])
        for part, memory, index in parts:
            items[part] = memory[index]
    rows = items.view(element)
    rows = rows.reshape(1, -1) if count == 1 else np.ascontiguousarray(rows.reshape(-1, count).T)
    if warp.all_active:
        return rows
    full = np.zeros((count, len(warp.active)), element)
    full[:, warp.active] = rows
    return full


def as_u64(where: Any, width: int = LANES) -> np.ndarray:
    """Returns a dual address as 64-bit lanes."""
    return where.astype(np.uint64) if where.__class__ is np.ndarray else np.full(width, where, np.uint64)


def scatter(warp: "Warp", space: str, where: Any, values: list[Any], dtype: np.dtype) -> None:
    """Stores one element of each of `values` per active lane, contiguously from the lane's address."""
    count, total = len(values), dtype.itemsize * len(values)
    if total > 16:
        _check_alignment(_addresses(warp, where)[0], total)
        step = 16 // dtype.itemsize
        for i in range(0, count, step):
            scatter(
                warp,
                space,
                as_u64(where, len(warp.active)) + np.uint64(i * dtype.itemsize),
                values[i : i + step],
                dtype,
            )
        return
    addresses, lanes = _addresses(warp, where)
    warp.cta.machine.stats.store_bytes += total * len(addresses)
    table = np.empty(len(warp.active) * count, dtype)
    for i, value in enumerate(values):
        table[i::count] = value
    items = table.view(ITEM_DTYPES[total])
    if not warp.all_active:
        items = items[warp.active]
    for part, memory, index in _parts(warp, space, addresses, total, True, lanes):
        memory[index] = items[part]

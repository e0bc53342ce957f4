"""Storage of the emulated machine: global, shared, and tensor memory, and mbarrier objects.

All storage starts as poison (NaN bit patterns) and is bounds checked. A kernel that reads unwritten storage computes
NaN; a kernel that leaves its storage gets an EmulatorError that names the place.
"""

import bisect
import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.addresses import USER_END
from nvfp4_cute.emulator.faults import BoundsFault, MbarrierFault, TensorMemoryFault

SHARED_BASE = 1024
"""First usable offset of the shared window; the bytes below are reserved for the machine."""

TMEM_LANES, TMEM_COLS = 128, 512
TMEM_POISON = 0xFFFFFFFF
MAX_COUNT = (1 << 20) - 1
"""Largest mbarrier arrival count and largest magnitude of its tx-count."""


OFFSET_BITS, MOST_OVERFLOWS = 32, 256
"""Bits of an offset that may have overflowed, and the largest number of overflows that the hint considers."""


@dataclass(frozen=True)
class Range:
    """A live allocation of global memory: host address, size in bytes, and whether stores are allowed."""

    start: int
    nbytes: int
    name: str
    writable: bool

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.nbytes


def host_view(address: int, nbytes: int) -> np.ndarray:
    """uint8 view of host memory. The caller guarantees that the range is mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


ITEM_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
"""dtype that copies blocks of this number of bytes (complex128 only carries 16 bytes)."""


ITEM_SHIFTS = {size: size.bit_length() - 1 for size in ITEM_DTYPES}
_U64 = np.dtype(np.uint64)
_CONSTANTS: dict[tuple[np.dtype, int], np.ndarray] = {}


def lane_constant(dtype: np.dtype, value: int, count: int = 32) -> np.ndarray:
    """`value` in `count` lanes, cached: NumPy combines two arrays in a third of the time that a scalar takes.

    For more than 32 lanes the result has one element, which broadcasts to any number.
    """
    found = _CONSTANTS.get((dtype, value))
    if found is None:
        if len(_CONSTANTS) > 4096:
            _CONSTANTS.clear()
        found = _CONSTANTS[dtype, value] = np.full(32, value, dtype)
        found.setflags(write=False)
    return found if count == 32 else found[: count if count < 32 else 1]


class _Window:
    """Host memory [start, end) as arrays of items of each size, made on first use."""

    __slots__ = ("_items", "end", "start", "view", "writable")

    def __init__(self, start: int, end: int, writable: bool):
        self.start, self.end, self.writable = start, end, writable
        self.view = host_view(start, end - start)
        self._items: dict[int, tuple[np.ndarray, int]] = {}

    def items(self, nbytes: int) -> tuple[np.ndarray, int]:
        """Returns aligned items of `nbytes`, and the address of the first item."""
        found = self._items.get(nbytes)
        if found is None:
            skipped = -self.start % nbytes
            usable = (self.view.size - skipped) // nbytes * nbytes
            items = self.view[skipped : skipped + usable].view(ITEM_DTYPES[nbytes])
            found = self._items[nbytes] = (items, self.start + skipped)
        return found


class GlobalMemory:
    """Host memory seen as global memory: device addresses are host addresses.

    Without registered ranges every address is trusted, and the process may crash as on a GPU. Once ranges are
    registered, an access outside all of them raises.
    """

    def __init__(self) -> None:
        """Start without ranges."""
        self._registered: dict[int, Range] = {}  # by start, in registration order
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._checked = False
        self._last: _Window | None = None

    def add_range(
        self, name: str, addr: int, nbytes: int, writable: bool = True, *, own: bool = False
    ) -> None:
        """Registers a live allocation under a name for error messages. Replaces a range at the same address.

        `own`: a buffer of the machine itself, which does not turn checking on.
        """
        if nbytes <= 0:
            return
        self._checked = self._checked or not own
        self.remove_range(addr)
        index = bisect.bisect_left(self._starts, addr)
        self._registered[addr] = Range(addr, nbytes, name, writable)
        self._ranges.insert(index, self._registered[addr])
        self._starts.insert(index, addr)
        self._forget()

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Registered ranges in address order."""
        return tuple(self._ranges)

    @property
    def registered(self) -> tuple[Range, ...]:
        """Registered ranges in registration order."""
        return tuple(self._registered.values())

    def remove_range(self, addr: int) -> None:
        """Forgets the range that starts at `addr`."""
        index = bisect.bisect_left(self._starts, addr)
        if index < len(self._starts) and self._starts[index] == addr:
            del self._ranges[index], self._starts[index], self._registered[addr]
            self._forget()

    def clear_ranges(self) -> None:
        """Forgets all ranges, so every address is trusted again."""
        self._registered.clear()
        self._ranges.clear()
        self._starts.clear()
        self._checked = False
        self._forget()

    @property
    def is_checked(self) -> bool:
        """Whether accesses are checked against the registered ranges."""
        return self._checked

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that restores the contents of the writable ranges at the end of the block."""
        views = [
            host_view(start, end - start) for start, end in _united(r for r in self._ranges if r.writable)
        ]
        copies = [view.copy() for view in views]
        try:
            yield
        finally:
            for view, copy in zip(views, copies, strict=True):
                view[:] = copy

    @contextmanager
    def shared(self) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Context manager that moves the writable ranges into memory shared with forks, and copies them back at its end.

        The value lists the pending copies as (to, from). Empty it to leave memory as it was.
        """
        self._forget()
        moved: list[tuple[np.ndarray, np.ndarray]] = []
        starts: list[int] = []
        for start, end in _united(r for r in self._ranges if r.writable):
            host = host_view(start, end - start)
            copy = np.frombuffer(mmap.mmap(-1, end - start), np.uint8)
            copy[:] = host
            moved.append((host, copy))
            starts.append(start)
        for index, found in enumerate(self._ranges):
            if found.writable:
                window = self._windows[index] = _Window(found.start, found.end, True)
                part = bisect.bisect_right(starts, found.start) - 1
                window.view = moved[part][1][found.start - starts[part] :][: found.nbytes]
        try:
            yield moved
        finally:
            self._forget()
            for host, copy in moved:
                host[:] = copy

    def _forget(self) -> None:
        self._windows.clear()
        self._last = None

    def lanes(self, addresses: np.ndarray, nbytes: int, write: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns a view of `nbytes`-byte items (1, 2, 4, 8, or 16) and the index of each address in it.

        `addresses`: uint64, aligned to `nbytes`. Raises like `view`.
        """
        last, count = self._last, len(addresses)
        if last is not None and (last.writable or not write):
            view, origin = last.items(nbytes)
            index = (addresses - lane_constant(_U64, origin, count)) >> lane_constant(
                _U64, ITEM_SHIFTS[nbytes], count
            )
            # Unsigned: an address below the origin wraps to a huge index.
            if not np.count_nonzero(index >= lane_constant(_U64, len(view), count)):
                return view, index.view(np.int64)
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        view, origin = self._window(low, high, write).items(nbytes)
        return view, ((addresses - np.uint64(origin)) >> np.uint64(ITEM_SHIFTS[nbytes])).view(np.int64)

    def by_range(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Groups the positions of addresses by the last registered range that starts at or below each."""
        owners = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right")
        return [np.flatnonzero(owners == owner) for owner in np.unique(owners)]

    def items(self, address: int, nbytes: int, size: int, write: bool) -> tuple[np.ndarray, int]:
        """Returns a view of `size`-byte items and the index of the one at `address`, for an access of `nbytes`."""
        last = self._last
        if (
            last is None
            or address < last.start
            or address + nbytes > last.end
            or (write and not last.writable)
        ):
            last = self._window(address, address + nbytes, write)
        view, origin = last.items(size)
        return view, (address - origin) // size

    def view(self, addr: int, nbytes: int, *, write: bool) -> np.ndarray:
        """uint8 view of [addr, addr + nbytes).

        Raises:
            EmulatorError: null pointer, outside every registered range, or a store to a read-only range; the
                message gives address, size, and the nearest range.
        """
        window = self._window(addr, addr + nbytes, write)
        return window.view[addr - window.start : addr - window.start + nbytes]

    def _window(self, low: int, high: int, write: bool) -> "_Window":
        """Returns a window that contains [low, high); checks like `view`."""
        last = self._last
        if last is not None and last.start <= low and high <= last.end and (last.writable or not write):
            return last
        if not self._checked:
            if low < 4096 or high > USER_END:
                raise BoundsFault(f"global access to {low:#x}: not an address of this process")
            return _Window(low, high, True)
        index = bisect.bisect_right(self._starts, low) - 1
        found = self._ranges[index] if index >= 0 else None
        if found is None or high > found.end:
            raise BoundsFault(self._outside(low, high - low, write))
        if write and not found.writable:
            raise BoundsFault(f"global store to {low:#x} ({high - low} bytes): `{found.name}` is read-only")
        if index not in self._windows:
            self._windows[index] = _Window(found.start, found.end, found.writable)
        self._last = self._windows[index]
        return self._last

    def _outside(self, addr: int, nbytes: int, write: bool) -> str:
        def distance(r: Range) -> int:
            return max(r.start - addr, addr + nbytes - r.end)

        near = min(self._ranges, key=distance)
        where = f"{addr - near.start:+d} bytes from the start of `{near.name}` ({near.nbytes} bytes)"
        access = f"global {'store' if write else 'load'} of {nbytes} bytes at {addr:#x}"
        return f"{access} is outside every live range; nearest: {where}{self._overflowed(addr)}"

    def _overflowed(self, addr: int) -> str:
        """Returns a hint if an address lies a multiple of 2^32 bytes from a range, as after a 32-bit offset overflow."""
        addr -= addr >> 63 << 64  # one before 0 wrapped
        for found in self._ranges:
            times = (addr - found.start) >> OFFSET_BITS
            if (
                times
                and abs(times) <= MOST_OVERFLOWS
                and (addr - found.start) % (1 << OFFSET_BITS) < found.nbytes
            ):
                return (
                    f"; {times:+d} x 2^{OFFSET_BITS} bytes from a place in `{found.name}`: an offset that overflowed "
                    f"{OFFSET_BITS} bits?"
                )
        return ""


def _united(ranges: Iterable[Range]) -> list[tuple[int, int]]:
    """Returns [start, end) intervals that cover ranges sorted by start; overlapping ones become one."""
    found: list[tuple[int, int]] = []
    for item in ranges:
        if found and item.start < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], item.end))
        else:
            found.append((item.start, item.end))
    return found


class SharedMemory:
    """Shared memory of one CTA. `bytes[offset]` counts from the start, including the reserved first 1024 bytes."""

    def __init__(self, nbytes: int):
        """`nbytes`: usable bytes (static + dynamic), without the reserved area."""
        self.size = SHARED_BASE + nbytes
        # Rounds up so that the widest (16-byte) view covers all bytes.
        self._storage = np.full((self.size + 15) // 16 * 16, 0xFF, np.uint8)
        self.bytes = self._storage[: self.size]
        self.views = {
            n: self._storage.view(d) for n, d in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))
        }
        self.views_from_base = {n: view[SHARED_BASE // n :] for n, view in self.views.items()}
        self.barriers: dict[int, Mbarrier] = {}

    def check(self, offset: int, nbytes: int) -> None:
        """Raise EmulatorError unless [offset, offset + nbytes) is usable shared memory."""
        if offset < SHARED_BASE or offset + nbytes > self.size:
            raise BoundsFault(
                f"shared access of {nbytes} bytes at offset {offset:#x} is outside [{SHARED_BASE:#x}, {self.size:#x})"
            )

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 view (no copy) of `nbytes` bytes."""
        self.check(offset, nbytes)
        return self.bytes[offset : offset + nbytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        """Store a uint8 array."""
        self.check(offset, data.size)
        self.bytes[offset : offset + data.size] = data.reshape(-1)


class Later(Protocol):
    """Pending work on columns of tensor memory, done when somebody reads or writes them."""

    first: int
    last: int
    """Its columns are first..last - 1."""

    def settle(self) -> None:
        """Does the work."""
        ...


class ScaleCopy:
    """Pending copy of scale factors to four columns, equal in all four groups of 32 lanes (`tcgen05.cp.32x128b.warpx4`).

    Kernels copy the factors of a product and then multiply. The product reads the pending copy directly, so the factors
    are never spread over the lanes.
    """

    __slots__ = ("first", "last", "rows", "tmem")

    COLUMNS = 4

    def __init__(self, tmem: "TensorMemory", column: int, rows: np.ndarray):
        """`rows`: uint32 (32, 4), from `column` on."""
        self.tmem, self.first, self.last, self.rows = tmem, column, column + self.COLUMNS, rows

    def settle(self) -> None:
        """Writes the words."""
        words = self.tmem.columns(self.first, self.COLUMNS)
        words.reshape(4, 32, -1)[:, :, self.first : self.last] = self.rows


class TensorMemory:
    """Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit words, and its column allocations.

    Attributes:
        allocations: number of columns by the first column.
        promised: (first, columns) of allocations that the leader of a pair made for this CTA and that it has not
            claimed.
        later: pending products (see `isa.accumulation`) and scale factors by first column. They are not in `words` yet,
            and no two have columns in common.
    """

    def __init__(self) -> None:
        """Starts without allocations."""
        self.later: dict[int, Later] = {}
        self._words: np.ndarray | None = None
        self.allocations: dict[int, int] = {}
        self.owned = np.zeros(TMEM_COLS, bool)
        self._live: set[tuple[int, int, int, int]] = (
            set()
        )  # rectangles that were checked since `owned` changed
        self.may_allocate = True
        self.freed: list[
            tuple[int, int, str]
        ] = []  # base, columns, and the warp that freed them, newest last
        self.promised: list[tuple[int, int]] = []

    @property
    def words(self) -> np.ndarray:
        """uint32 [lane, column]; poisoned with 0xFFFFFFFF until written."""
        return self.columns(0, TMEM_COLS)

    def columns(self, column: int, count: int) -> np.ndarray:
        """Returns `words` for use of only these columns."""
        if self.later:
            self.settle(column, column + count)
        if self._words is None:
            self._words = np.full((TMEM_LANES, TMEM_COLS), TMEM_POISON, np.uint32)
        return self._words

    def settle(self, first: int, last: int) -> None:
        """Does the pending work on columns first..last - 1."""
        for later in [one for one in self.later.values() if first < one.last and one.first < last]:
            del self.later[later.first]
            later.settle()

    def put_off(self, later: Later) -> None:
        """Adds pending work, to be done when its columns are used."""
        self.settle(later.first, later.last)
        self.later[later.first] = later

    def copy_scales(self, column: int, rows: np.ndarray) -> None:
        """Writes uint32 (32, 4) to four columns of all groups of 32 lanes."""
        found = self.later.get(column)
        if isinstance(found, ScaleCopy):
            found.rows = rows
        else:
            self.put_off(ScaleCopy(self, column, rows))

    def copied_scales(self, column: int, count: int) -> list[np.ndarray] | None:
        """Returns the pending `copy_scales` of these columns, four columns each, or None if there is none."""
        rows = []
        for first in range(column, column + count, ScaleCopy.COLUMNS):
            copy = self.later.get(first)
            if not isinstance(copy, ScaleCopy):
                return None
            rows.append(copy.rows)
        return rows

    def alloc(self, ncols: int, peer: "TensorMemory | None" = None) -> int | None:
        """First-fit allocation of a power of two (32..512) of columns; None when no room is left.

        `peer`: the tensor memory of the pair's other CTA, for an allocation of both: `peer` gets the same columns.

        Raises:
            EmulatorError: illegal column count, or allocation after relinquish_alloc_permit.
        """
        self._check_alloc(ncols)
        taken = self.owned if peer is None else self.owned | peer.owned
        for base in range(0, TMEM_COLS - ncols + 1, 32):
            if not taken[base : base + ncols].any():
                self._own(base, ncols)
                if peer is not None:
                    peer._own(base, ncols)
                    peer.promised.append((base, ncols))
                return base
        return None

    def claim(self, ncols: int) -> int | None:
        """Returns the columns that the leader of the pair has allocated for this CTA, or None if it has not.

        Raises:
            EmulatorError: see `alloc`; also if the leader allocated another number of columns.
        """
        self._check_alloc(ncols)
        if not self.promised:
            return None
        base, count = self.promised.pop(0)
        if count != ncols:
            raise TensorMemoryFault(
                f"tcgen05.alloc.cta_group::2 of {ncols} columns, where the other CTA of the pair allocated {count}"
            )
        return base

    def _check_alloc(self, ncols: int) -> None:
        if ncols < 32 or ncols > TMEM_COLS or ncols & (ncols - 1):
            raise TensorMemoryFault(f"tcgen05.alloc of {ncols} columns: must be a power of two in 32..512")
        if not self.may_allocate:
            raise TensorMemoryFault("tcgen05.alloc after tcgen05.relinquish_alloc_permit in the same CTA")

    def _own(self, base: int, ncols: int) -> None:
        self._live.clear()
        self.owned[base : base + ncols] = True
        self.allocations[base] = ncols

    def dealloc(self, base: int, ncols: int, who: str = "somebody") -> None:
        """Frees columns. `who`: the warp, for the message if the columns are used afterwards.

        Columns may be freed twice: every warp of one of cuDNN's epilogues (`gemm_amax`) frees them, and that kernel
        runs.

        Raises:
            EmulatorError: there is no such allocation, and there was none.
        """
        if self.freed_by(base, ncols):
            return
        if self.allocations.get(base) != ncols:
            raise TensorMemoryFault(
                f"tcgen05.dealloc of {ncols} columns at {base}: live allocations are {self.allocations or 'none'}"
            )
        del self.allocations[base]
        self.owned[base : base + ncols] = False
        self._live.clear()
        self.freed.append((base, ncols, who))

    def freed_by(self, base: int, ncols: int) -> str:
        """Returns who freed exactly these columns, or "" if any of them has been allocated since."""
        if self.owned[base : base + ncols].any():
            return ""
        return next((who for *freed, who in reversed(self.freed) if freed == [base, ncols]), "")

    def check(self, lane: int, nlanes: int, column: int, ncols: int) -> None:
        """Raises EmulatorError unless the rectangle lies inside allocated columns."""
        rectangle = lane, nlanes, column, ncols
        if rectangle in self._live:
            return
        if lane < 0 or lane + nlanes > TMEM_LANES or column < 0 or column + ncols > TMEM_COLS:
            raise TensorMemoryFault(
                f"tensor memory access to lanes {lane}..{lane + nlanes - 1}, columns {column}..{column + ncols - 1} "
                f"is outside {TMEM_LANES} x {TMEM_COLS}"
            )
        if not self.owned[column : column + ncols].all():
            raise TensorMemoryFault(
                f"tensor memory access to columns {column}..{column + ncols - 1}: not allocated "
                f"(live allocations {self.allocations or 'none'}){self._who_freed(column, ncols)}"
            )
        self._live.add(rectangle)

    def _who_freed(self, column: int, ncols: int) -> str:
        for base, count, who in reversed(self.freed):
            if base < column + ncols and column < base + count:
                return f"; columns {base}..{base + count - 1} were freed before, by {who}"
        return ""


class Mbarrier:
    """One mbarrier object: phase, pending arrivals, and transaction bytes in flight (PTX ISA, mbarrier).

    `record`: notes of the hazard checker. `found`: maps each warp that waited for a phase to the number of complete
    phases when it last found one complete.
    """

    __slots__ = ("count", "found", "offset", "pending", "phase", "record", "tx")

    def __init__(self, offset: int, count: int):
        """`offset`: shared-memory offset, for messages; `count`: arrivals that complete a phase."""
        self.offset = offset
        self.record: Any = None
        self.init(count)

    def init(self, count: int) -> None:
        """Starts at phase 0 with `count` expected arrivals."""
        if not 1 <= count <= MAX_COUNT:
            raise MbarrierFault(
                f"mbarrier smem+{self.offset:#x}: init count {count} is not in 1..{MAX_COUNT}"
            )
        self.count = self.pending = count
        self.phase = 0
        self.tx = 0
        self.found: dict[Any, int] = {}

    def arrive(self, n: int = 1) -> None:
        """Counts `n` arrivals; completes the phase when none is pending and no bytes are in flight."""
        if n < 1 or n > self.pending:
            raise MbarrierFault(
                f"mbarrier smem+{self.offset:#x}: {n} arrivals with {self.pending} of {self.count} pending "
                f"in phase {self.phase}: more arrivals than the barrier expects"
            )
        self.pending -= n
        self._complete()

    def expect_tx(self, nbytes: int) -> None:
        """Announces `nbytes` of asynchronous data for this phase."""
        self.tx += nbytes
        self._check_tx()
        self._complete()  # data may have landed before it was announced

    def complete_tx(self, nbytes: int) -> None:
        """Subtracts `nbytes` of data that arrived."""
        self.tx -= nbytes
        self._check_tx()
        self._complete()

    def arrive_drop(self, n: int = 1) -> None:
        """Arrives, and expects `n` fewer arrivals in later phases."""
        self.count -= n
        self.arrive(n)

    def test_parity(self, parity: int) -> bool:
        """True when the phase of this parity has completed, that is, the current phase has the other parity."""
        return (self.phase & 1) != (parity & 1)

    def found_by(self, warp: Any) -> bool:
        """Notes that a warp found the newest phase complete. Returns True if it is the first of several warps that may wait.

        The others are warps that have waited here before; if there are none, any warp may be one.
        """
        found = self.found
        others = len(found) > 1 or warp not in found
        first = others and self.phase not in found.values()
        found[warp] = self.phase
        return first

    def state(self) -> int:
        """Opaque state token, as mbarrier.arrive returns it: the current phase above 20 bits of pending arrivals."""
        return self.phase << 20 | self.pending

    def test_state(self, token: int) -> bool:
        """True when the phase that `token` was taken in has completed."""
        return self.phase != self.phase_of(token)

    @staticmethod
    def phase_of(token: int) -> int:
        """Returns the phase in which a state token was taken."""
        return token >> 20

    def describe(self) -> str:
        """Returns the state for a hang report."""
        return f"phase {self.phase}, pending {self.pending} of {self.count} arrivals, {self.tx} tx bytes outstanding"

    def _complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            if self.record is not None:
                self.record.phase_done()

    def _check_tx(self) -> None:
        if abs(self.tx) > MAX_COUNT:
            raise MbarrierFault(
                f"mbarrier smem+{self.offset:#x}: tx-count {self.tx} leaves the range of +-{MAX_COUNT}"
            )

"""Memory of the timing model: queues for device memory, L2's look-ups and data, and the pieces that L2 holds."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from nvfp4_cute.emulator.record.events import LINE, Piece
from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.state import Counters

PAGE_BYTES = 1 << 21
"""Size of a page of device memory."""
LAYOUTS = 5
"""Number of places in a page, at equal distances, where a launch's memory may begin."""

SPREAD_BYTES = 8192
"""Pieces of at least this size use many memory channels and wait for the slowest one."""


@dataclass
class Reply:
    """Time at which the data of a request arrive, and whether L2 had them."""

    time: float
    hit: bool


@dataclass(slots=True)
class Held:
    """A piece in L2: when device memory delivers it, whether a kernel wrote it, and when L2 answers its current requests."""

    nbytes: int
    there: float
    dirty: bool
    served: float = 0.0


class Memory:
    """L2 and device memory, shared by all SMs. Requests come in the order of their times.

    A piece is a region that is copied as a unit. L2 holds the most recently used pieces. Requests wait for a piece
    under way instead of reading it twice, and requests for a piece that L2 is just answering cost it no bandwidth.
    Boxes overlap where groups of rows are smaller than a box; of a box, only rows that no other box holds are read.
    Written pieces stay in L2 until they are evicted.
    """

    def __init__(self, constants: Constants, *, layout: int = 0, keep_log: bool = False):
        """Starts cold and idle. `layout`: one of `LAYOUTS`. `keep_log`: note every read of device memory in `log`."""
        self._shift = layout * PAGE_BYTES // LAYOUTS
        self.log: list[tuple[float, int]] = []
        self._keep_log = keep_log
        self.constants = constants
        self._hbm_cycles = 1 / constants.hbm_bandwidth
        self._l2_cycles = 1 / constants.l2_bandwidth
        self._look_up_cycles = 1 / constants.l2_look_ups
        self._write_cycles = 1 / constants.l2_write_bandwidth
        self._pages: set[tuple[int, int]] = set()
        self._hbm_free = self._prefetch_free = self._l2_free = self._look_up_free = self._write_free = 0.0
        self._held: OrderedDict[int, Held] = OrderedDict()  # by address
        # First rows of boxes, by pitch, bytes per row and position in a row.
        self._columns: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._used = 0
        self._lost = 0  # bytes of results that were evicted during this launch
        self._results: list[
            tuple[int, int]
        ] = []  # [start, end) of earlier launches' results, as far as L2 held them at its end
        self.hbm_bytes = self.l2_bytes = self._stored = self._left = 0
        self.hbm_busy = 0.0

    @property
    def counters(self) -> Counters:
        """Traffic up to now."""
        return Counters(self.hbm_bytes, self.l2_bytes, self.hbm_busy, self._stored, self._left)

    def know(self, pieces: Iterable[Piece]) -> int:
        """Adds pieces that were loaded before the launch, as far as there is room. Returns the bytes that were read."""
        nbytes = 0
        for piece in pieces:
            if self._find(piece) is None:
                nbytes += self._missing(piece)[0]
                self._keep(piece[0], piece[1], 0.0, dirty=False, now=0.0)
        return nbytes

    def settle(self, tensors: Iterable[Piece], now: float) -> None:
        """Ends a launch: its results in each tensor become one piece, whatever pieces later readers use.

        If L2 does not hold a complete tensor, it holds the end, which was written last.
        """
        dirty = sorted(key for key, held in self._held.items() if held.dirty)
        lost = self._lost / max(1, self._lost + sum(self._held[key].nbytes for key in dirty))
        self._lost = 0
        for start, nbytes in tensors:
            inside = dirty[bisect_left(dirty, start) : bisect_left(dirty, start + nbytes)]
            kept = sum(self._held[key].nbytes for key in inside if key in self._held)
            if not kept:
                continue
            for key in inside:
                self._used -= self._held.pop(key).nbytes
            first = start + int(nbytes * lost) // LINE * LINE
            self._keep(first, kept, now, dirty=True, now=now)
            self._results = [
                known for known in self._results if known[1] <= start or known[0] >= start + nbytes
            ]
            self._results.append((first, start + nbytes))

    def read(self, piece: Piece, now: float, gpc: int) -> Reply:
        """Requests a piece for an SM of a group."""
        nbytes, latency = piece[1], self.constants.l2_latency
        self.l2_bytes += nbytes
        held = self._find(piece) or self._fetch(piece, now, gpc)
        self._look_up(nbytes, now)
        if now >= held.served:  # otherwise L2 answers this request together with an earlier one for the piece
            self._l2_free = max(self._l2_free, now) + nbytes * self._l2_cycles
            held.served = max(self._l2_free, held.there) + latency
        return Reply(max(held.served, now + latency), held.there <= now)

    def prefetch(self, piece: Piece, now: float, gpc: int) -> float:
        """Prefetches a piece into L2. Returns when L2 has looked it up.

        A backlogged device memory accepts only one prefetch in the time that one takes, and drops the others.
        """
        self._look_up(piece[1], now)
        if self._find(piece) is None and (
            now >= self._prefetch_free or self._hbm_free - now <= self.constants.prefetch_backlog
        ):
            self._prefetch_free = max(self._prefetch_free, now) + piece[1] * self._hbm_cycles
            self._fetch(piece, now, gpc)
        return self._look_up_free

    def _look_up(self, nbytes: int, now: float) -> None:
        """Makes L2 look up this number of bytes. Loads do not wait for it, because sending the data takes longer."""
        self._look_up_free = max(self._look_up_free, now) + nbytes * self._look_up_cycles

    def _find(self, piece: Piece) -> Held | None:
        """Returns a piece that L2 holds, and marks it as the most recently used one."""
        key, nbytes = piece[:2]
        held = self._held.get(key)
        if held is None or held.nbytes < nbytes:
            # Results that were written line by line are later read as larger pieces.
            key = key // LINE * LINE
            held = self._held.get(key)
            if held is None or not held.dirty:
                key = next((start for start, end in self._results if start <= piece[0] < end), -1)
                held = self._held.get(key)
                if held is None:
                    return None
        self._held.move_to_end(key)
        return held

    def _fetch(self, piece: Piece, now: float, gpc: int) -> Held:
        """Reads a piece from device memory."""
        address, c = piece[0], self.constants
        nbytes, there = self._missing(piece)
        if not nbytes:
            return self._keep(address, piece[1], there, dirty=False, now=now)
        done = self._from_hbm(nbytes, now)
        spread = c.hbm_spread * min(1.0, nbytes / SPREAD_BYTES)
        there = max(there, done + c.hbm_latency - c.l2_latency + spread)
        if nbytes <= LINE:
            there += c.line_spread * (_share(address + self._shift) - 1)
        page = gpc, (address + self._shift) // PAGE_BYTES
        if page not in self._pages:
            self._pages.add(page)
            there += c.page_latency
        return self._keep(address, piece[1], there, dirty=False, now=now)

    def _missing(self, piece: Piece) -> tuple[int, float]:
        """Returns the bytes of a piece that no box in L2 holds, and when the others are there. Notes the piece if it is a box."""
        address, nbytes, *rows = piece
        if not rows:
            return nbytes, 0.0
        pitch, row_bytes = rows
        first, place = divmod(address, pitch)
        begin, end, there = first, first + nbytes // row_bytes, 0.0
        column = self._columns[pitch, row_bytes, place]
        index = bisect_right(column, first)
        while index and column[index - 1] * pitch + place not in self._held:
            index -= 1
            del column[index]  # evicted
        for row in column[max(index - 1, 0) : index + 1]:
            held = self._held.get(row * pitch + place)
            if held is None:
                continue
            held_end = row + held.nbytes // row_bytes
            if row <= first < held_end:
                begin, there = held_end, held.there
            elif first < row < end:
                end, there = row, max(there, held.there)
        if index == 0 or column[index - 1] != first:
            column.insert(index, first)
        return max(0, end - begin) * row_bytes, there

    def write(self, piece: Piece, now: float) -> float:
        """Stores a piece. Returns when L2 has it."""
        address, nbytes = piece[:2]
        self._write_free = max(self._write_free, now) + nbytes * self._write_cycles
        key = address // LINE * LINE if nbytes <= LINE else address
        self._stored += nbytes
        self._keep(key, nbytes, self._write_free, dirty=True, now=now)
        return self._write_free

    def _from_hbm(self, nbytes: int, now: float) -> float:
        self.hbm_bytes += nbytes
        cycles = nbytes * self._hbm_cycles
        self.hbm_busy += cycles
        self._hbm_free = max(self._hbm_free, now) + cycles
        if self._keep_log:
            self.log.append((self._hbm_free, nbytes))
        return self._hbm_free

    def _keep(self, address: int, nbytes: int, there: float, *, dirty: bool, now: float) -> Held:
        old = self._held.pop(address, None)
        if old is not None:
            self._used -= old.nbytes
            dirty = dirty or old.dirty
        held = self._held[address] = Held(nbytes, there, dirty)
        self._used += nbytes
        while self._used > self.constants.l2_bytes and len(self._held) > 1:
            _, least = self._held.popitem(last=False)
            self._used -= least.nbytes
            if least.dirty:
                self._lost += least.nbytes
                self._left += least.nbytes
                cycles = least.nbytes * self._hbm_cycles
                self.hbm_busy += cycles
                self._hbm_free = max(self._hbm_free, now) + cycles
        return held


def _share(address: int) -> float:
    """Returns the delay of a line, from its address: exponentially distributed with mean 1."""
    mixed = address // LINE * 0x9E3779B97F4A7C15 % (1 << 64)
    mixed ^= mixed >> 29
    return -log(((mixed * 0xBF58476D1CE4E5B9 >> 40) % (1 << 24) + 0.5) / (1 << 24))

"""Memory as the timing model sees it: one queue for device memory, one for L2, and which pieces L2 holds."""

from collections import OrderedDict
from dataclasses import dataclass

from nvfp4_cute.emulator.timing_constants import Constants
from nvfp4_cute.emulator.timing_events import LINE, Piece

PAGE_SHIFT = 21
"""Log2 of the bytes of a page of device memory."""

SPREAD_BYTES = 8192
"""Pieces of this size or more meet the slowest of many memory channels."""


@dataclass
class Reply:
    """When the data of a request is there, and whether L2 had it."""

    time: float
    hit: bool


class Memory:
    """L2 and device memory, shared by all SMs. Requests come in the order of their times.

    A piece is what somebody copies as a whole. L2 holds the pieces used last; a piece under way is waited for, not
    read twice, and requests for a piece that L2 is just answering cost it no bandwidth. Written pieces stay in L2 until they
    make room.
    """

    def __init__(self, constants: Constants, *, keep_log: bool = False):
        """Cold and idle. `keep_log`: note every read of device memory in `log`."""
        self.log: list[tuple[float, int]] = []
        self._keep_log = keep_log
        self.constants = constants
        self._hbm_cycles = 1 / constants.hbm_bandwidth
        self._l2_cycles = 1 / constants.l2_bandwidth
        self._write_cycles = 1 / constants.l2_write_bandwidth
        self._pages: set[tuple[int, int]] = set()
        self._hbm_free = self._l2_free = self._write_free = 0.0
        self._held: OrderedDict[int, list[float]] = (
            OrderedDict()
        )  # address -> [bytes, time it is there, dirty, reply]
        self._used = 0.0
        self.hbm_bytes = self.l2_bytes = 0
        self.hbm_busy = 0.0

    def read(self, piece: Piece, now: float, gpc: int) -> Reply:
        """Request a piece for an SM of a group."""
        address, nbytes = piece
        c = self.constants
        self.l2_bytes += nbytes
        key, held = address, self._held.get(address)
        if (
            held is None or held[0] < nbytes
        ):  # results that were written line by line are read as larger pieces
            key = address // LINE * LINE
            line = self._held.get(key)
            held = line if line is not None and line[2] else None
        if held is not None:
            self._held.move_to_end(key)
            there, served = held[1], held[3]
            if now >= served:  # else L2 answers this request with an earlier one for the same piece
                self._l2_free = max(self._l2_free, now) + nbytes * self._l2_cycles
                served = held[3] = max(self._l2_free, there) + c.l2_latency
            return Reply(max(served, now + c.l2_latency), there <= now)
        self._l2_free = max(self._l2_free, now) + nbytes * self._l2_cycles
        done = self._from_hbm(nbytes, now)
        there = done + c.hbm_latency - c.l2_latency + c.hbm_spread * min(1.0, nbytes / SPREAD_BYTES)
        page = gpc, address >> PAGE_SHIFT
        if page not in self._pages:
            self._pages.add(page)
            there += c.page_latency
        time = max(self._l2_free, there) + c.l2_latency
        self._keep(address, nbytes, there, dirty=False, now=now)
        self._held[address][3] = time
        return Reply(time, False)

    def write(self, piece: Piece, now: float) -> float:
        """Store a piece; when L2 has it."""
        address, nbytes = piece
        self._write_free = max(self._write_free, now) + nbytes * self._write_cycles
        key = address // LINE * LINE if nbytes <= LINE else address
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

    def _keep(self, address: int, nbytes: int, there: float, *, dirty: bool, now: float) -> None:
        old = self._held.pop(address, None)
        if old is not None:
            self._used -= old[0]
            dirty = dirty or bool(old[2])
        self._held[address] = [nbytes, there, dirty, 0.0]
        self._used += nbytes
        while self._used > self.constants.l2_bytes and len(self._held) > 1:
            _, (size, _, was_dirty, _) = self._held.popitem(last=False)
            self._used -= size
            if was_dirty:
                cycles = size * self._hbm_cycles
                self.hbm_busy += cycles
                self._hbm_free = max(self._hbm_free, now) + cycles

"""Where a GPU would have the memory of a launch: modelled times must not depend on where the host's allocator put it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nvfp4_cute.emulator.memory import Range

ALIGNMENT = 512
"""Of allocations, in bytes: a caching allocator's on a device."""
FIRST = 1 << 21  # of a page
"""Address of the first allocation."""


@dataclass
class _Block:
    """Host memory [start, end) that moves by `shift`. `number`: of its range that was registered first."""

    start: int
    end: int
    number: int
    shift: int = 0


class Placement:
    """Host addresses as those of a device that has allocated one range behind the other.

    Ranges that overlap move together. What no range holds keeps its address.
    """

    def __init__(self, ranges: Iterable[Range] = ()):
        """`ranges`: in the order that the device allocates them."""
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        self._next = FIRST
        self.add(ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Allocate further ranges; what of them is allocated already stays where it is."""
        new: list[_Block] = []
        parts = (
            (start, end, number)
            for number, found in enumerate(ranges)
            for start, end in self._missing(found.start, found.end)
        )
        for start, end, number in sorted(parts):
            last = new[-1] if new else None
            if last is not None and start < last.end:
                last.end, last.number = max(last.end, end), min(last.number, number)
            else:
                new.append(_Block(start, end, number))
        for block in sorted(new, key=lambda block: block.number):
            block.shift = self._next - block.start
            self._next += -(-(block.end - block.start) // ALIGNMENT) * ALIGNMENT
        self._blocks = sorted(self._blocks + new, key=lambda block: block.start)
        self._starts = [block.start for block in self._blocks]

    def _missing(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of [start, end) no block holds."""
        for block in self._blocks:
            if block.end <= start or block.start >= end:
                continue
            if start < block.start:
                yield start, block.start
            start = block.end
        if start < end:
            yield start, end

    def of(self, address: int) -> int:
        """The device's address of a byte."""
        block = self._block(address)
        return address if block is None else address + block.shift

    def of_lanes(self, addresses: np.ndarray) -> np.ndarray:
        """The device's addresses of bytes; int64."""
        block = self._block(int(addresses[0]))
        if block is not None and block.start <= addresses.min() and addresses.max() < block.end:
            return addresses + block.shift
        return np.array([self.of(address) for address in addresses.tolist()], np.int64)

    def _block(self, address: int) -> _Block | None:
        index = bisect_right(self._starts, address) - 1
        return self._blocks[index] if index >= 0 and address < self._blocks[index].end else None

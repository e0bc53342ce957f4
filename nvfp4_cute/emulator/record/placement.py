"""Device addresses for the memory of a launch, so that modelled times do not depend on the host's allocator."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nvfp4_cute.emulator.memory import Range

ALIGNMENT = 512
"""Alignment of allocations in bytes, like that of a caching allocator on a device."""
FIRST = 1 << 21  # a multiple of the page size
"""Address of the first allocation."""


@dataclass
class _Block:
    """Host memory [start, end) that moves by `shift`. `number`: number of its first registered range."""

    start: int
    end: int
    number: int
    shift: int = 0


class Placement:
    """Maps host addresses to those of a device that has allocated the ranges one after the other.

    Ranges that overlap move together. Addresses outside all ranges stay unchanged.
    """

    def __init__(self, ranges: Iterable[Range] = ()):
        """`ranges`: in the order of the device's allocation."""
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        self._next = FIRST
        self.add(ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Allocates further ranges; parts that are already allocated stay in place."""
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
        """Yields the parts of [start, end) that no block holds."""
        for block in self._blocks:
            if block.end <= start or block.start >= end:
                continue
            if start < block.start:
                yield start, block.start
            start = block.end
        if start < end:
            yield start, end

    def of(self, address: int) -> int:
        """Returns the device address of a byte."""
        block = self._block(address)
        return address if block is None else address + block.shift

    def of_lanes(self, addresses: np.ndarray) -> np.ndarray:
        """Returns the device addresses of bytes; int64."""
        block = self._block(int(addresses[0]))
        if block is not None and block.start <= addresses.min() and addresses.max() < block.end:
            return addresses + block.shift
        return np.array([self.of(address) for address in addresses.tolist()], np.int64)

    def _block(self, address: int) -> _Block | None:
        index = bisect_right(self._starts, address) - 1
        return self._blocks[index] if index >= 0 and address < self._blocks[index].end else None

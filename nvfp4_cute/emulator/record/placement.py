"""Where a GPU would have the memory of a launch: modelled times must not depend on where the host's allocator put it."""

from bisect import bisect_right
from collections.abc import Iterable
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
        for number, found in sorted(enumerate(ranges), key=lambda item: item[1].start):
            last = self._blocks[-1] if self._blocks else None
            if last is not None and found.start < last.end:
                last.end, last.number = max(last.end, found.end), min(last.number, number)
            else:
                self._blocks.append(_Block(found.start, found.end, number))
        self._starts = [block.start for block in self._blocks]
        place = FIRST
        for block in sorted(self._blocks, key=lambda block: block.number):
            block.shift = place - block.start
            place += -(-(block.end - block.start) // ALIGNMENT) * ALIGNMENT

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

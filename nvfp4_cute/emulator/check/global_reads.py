"""Last readers of global memory in one launch: a write over bytes that another warp may still read is also a race.

For each 4-byte word the newest read is kept. Words that a read or a write covers only partly are left out, because
neighbours in one word may belong to different threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import COMPONENT_SHIFT, SEEN, VALUE_MASK
from nvfp4_cute.emulator.check.shadow import Actor

WORD = 4


@dataclass(frozen=True, slots=True)
class Read:
    """A read: its epoch, its cluster, that cluster's number of releases before it, and its place."""

    epoch: int
    cluster: int
    order: int
    site: int

    def unordered(self, actor: Actor, cluster: int, known: Mapping[int, int]) -> bool:
        """Whether an actor of `cluster` does not know that the read is complete. `known`: known releases of other clusters."""
        if self.cluster != cluster:
            return self.order > known.get(self.cluster, 0)
        return bool(actor.knowledge[SEEN, self.epoch >> COMPONENT_SHIFT] < self.epoch & VALUE_MASK)


class GlobalReads:
    """Newest reads of the writable ranges of global memory, by the number of the range."""

    def __init__(self) -> None:
        """Starts without reads."""
        self._reads: list[Read] = []
        self._newest: dict[int, np.ndarray] = {}

    def note(self, which: int, nbytes: int, offsets: np.ndarray, width: int, read: Read) -> None:
        """Notes a read of `width` bytes at each offset (int64) of a range of `nbytes`."""
        index = _words(offsets, width)
        if index is None:
            return
        newest = self._newest.get(which)
        if newest is None:
            newest = self._newest[which] = np.zeros(-(-nbytes // WORD), np.int32)
        if not self._reads or self._reads[-1] != read:
            self._reads.append(read)
        newest[index] = len(self._reads)

    def over(
        self,
        which: int,
        offsets: np.ndarray,
        width: int,
        actor: Actor,
        cluster: int,
        known: Mapping[int, int],
    ) -> tuple[Read, np.ndarray] | None:
        """Returns an unordered read under a write of `width` bytes at each offset, and the offsets of its words."""
        newest = self._newest.get(which)
        index = None if newest is None else _words(offsets, width)
        if newest is None or index is None:
            return None
        numbers = newest[index]
        if not np.count_nonzero(numbers):
            return None
        found = None
        for number in np.unique(numbers).tolist():
            if number and self._reads[number - 1].unordered(actor, cluster, known):
                positions = np.flatnonzero(numbers == number)
                words = index.start + positions if isinstance(index, slice) else index[positions]
                found = self._reads[number - 1], WORD * words
                break
        newest[index] = 0
        return found


def _words(offsets: np.ndarray, width: int) -> Any:
    """Returns the numbers of the full words in `width` bytes at each offset, or None; a slice if they are contiguous."""
    first = int(offsets[0])
    if not np.count_nonzero(offsets[1:] - offsets[:-1] != width):
        low, high = -(-first // WORD), (first + width * len(offsets)) // WORD
        return slice(low, high) if low < high else None
    if width % WORD or np.count_nonzero(offsets % WORD):
        return None
    words = offsets // WORD
    return words if width == WORD else (words[:, None] + np.arange(width // WORD)).reshape(-1)

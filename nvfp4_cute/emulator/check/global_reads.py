"""Who read global memory last, in one launch: a write over what another one may still read is a race, too.

Kept for each 4-byte word is the newest read of it. Words of which a read or a write covers a part are left out: neighbours in
one word belong to whoever they belong to.
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
    """A read: its epoch, its cluster and how often that one had released, its place."""

    epoch: int
    cluster: int
    order: int
    site: int

    def unordered(self, actor: Actor, cluster: int, known: Mapping[int, int]) -> bool:
        """Whether nothing says to an actor of a cluster, which knows so many releases of others, that it is over."""
        if self.cluster != cluster:
            return self.order > known.get(self.cluster, 0)
        return bool(actor.knowledge[SEEN, self.epoch >> COMPONENT_SHIFT] < self.epoch & VALUE_MASK)


class GlobalReads:
    """The newest reads of the writable ranges of global memory, by the number of the range."""

    def __init__(self) -> None:
        """Nobody has read anything."""
        self._reads: list[Read] = []
        self._newest: dict[int, np.ndarray] = {}

    def note(self, which: int, nbytes: int, offsets: np.ndarray, width: int, read: Read) -> None:
        """A read of `width` bytes at each offset (int64) of a range of `nbytes`."""
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
        """A write of `width` bytes at each offset: an unordered read of what it writes, and the offsets of the words of that."""
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
    """Numbers of the whole words in `width` bytes at each offset, or None; a slice where one follows on the other."""
    first = int(offsets[0])
    if not np.count_nonzero(offsets[1:] - offsets[:-1] != width):
        low, high = -(-first // WORD), (first + width * len(offsets)) // WORD
        return slice(low, high) if low < high else None
    if width % WORD or np.count_nonzero(offsets % WORD):
        return None
    words = offsets // WORD
    return words if width == WORD else (words[:, None] + np.arange(width // WORD)).reshape(-1)

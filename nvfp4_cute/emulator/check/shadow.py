"""Shadow memory: for each granule of shared, tensor, or global memory, who wrote and who read it last.

A granule is 4 bytes of shared memory, 16 lanes x 1 column of tensor memory, or 1 byte of global memory.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import FENCED, NOBODY, SEEN, first_unordered, unordered
from nvfp4_cute.emulator.memory import TMEM_COLS, TMEM_LANES
from nvfp4_cute.emulator.places import GRANULES_PER_CHUNK

HALF_QUADRANT = 16
"""Lanes of a tensor-memory granule."""

GLOBAL_GRANULE = 1


@dataclass
class Actor:
    """Who accesses memory.

    Attributes:
        knowledge: what happened before the access.  epoch: its stamp.
        site: number of the place that issued it.  proxy: it goes through the async proxy.
    """

    knowledge: np.ndarray
    epoch: int
    site: int
    proxy: bool


@dataclass(frozen=True)
class Conflict:
    """An earlier access that nothing orders before this one.

    Attributes:
        site: who made it.  wrote: it was a write.
        unfenced: it is ordered, but its bytes were never handed to the async proxy.
        granules: flat numbers of the first and the last granule concerned.
        late: flat numbers of all granules that unordered writes wrote; empty for reads.
    """

    site: int
    wrote: bool
    unfenced: bool
    granules: tuple[int, int]
    late: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class _Readers:
    """Newest reads of one component: value and site of each granule, and the rows that it ever touched."""

    def __init__(self, shape: tuple[int, int]):
        self.values = np.zeros(shape, np.int64)
        self.sites = np.zeros(shape, np.int32)
        self.low, self.high = shape[0], 0

    def note(self, index: Any, span: tuple[int, int], value: int, site: int) -> None:
        self.low, self.high = min(self.low, span[0]), max(self.high, span[1])
        self.values[index] = value
        self.sites[index] = site


class Shadow:
    """Last writer and readers of a memory of (rows, columns) granules.

    Shared memory: rows are 16-byte chunks of 4 granules. Tensor memory: rows are half quadrants, columns are columns.
    """

    def __init__(self, rows: int, columns: int):
        """Nobody has accessed anything."""
        self.shape = (rows, columns)
        self.writers = np.zeros(self.shape, np.int64)
        self.sites = np.zeros(self.shape, np.int32)
        self.generic = np.zeros(self.shape, bool)
        self.readers: dict[int, _Readers] = {}

    def read(
        self, index: Any, span: tuple[int, int], actor: Actor, epochs: np.ndarray | None = None
    ) -> Conflict | None:
        """Note a read of the granules at `index`, whose rows lie in [span); report an unordered write.

        epochs: of the last writes there, if they are at hand.
        """
        conflict = self._against_writers(index, actor, epochs)
        component, value = actor.epoch >> 32, actor.epoch & 0xFFFFFFFF
        readers = self.readers.get(component)
        if readers is None:
            readers = self.readers[component] = _Readers(self.shape)
        readers.note(index, span, value, actor.site)
        return conflict

    def write(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """Note a write; report an unordered write or read."""
        conflict = self._against_writers(index, actor) or self.unordered_reader(index, span, actor)
        self.writers[index] = actor.epoch
        self.sites[index] = actor.site
        self.generic[index] = not actor.proxy
        return conflict

    def unwritten(self, index: Any) -> np.ndarray:
        """Which granules at `index` nobody has written."""
        return self.writers[index] == NOBODY

    def forget(self, index: Any) -> None:
        """The granules are as new (freshly allocated)."""
        self.writers[index] = NOBODY
        for readers in self.readers.values():
            readers.values[index] = 0

    def unordered(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """The first access that did not happen before the actor's, without noting one."""
        return self._against_writers(index, actor) or self.unordered_reader(index, span, actor)

    def _against_writers(self, index: Any, actor: Actor, epochs: np.ndarray | None = None) -> Conflict | None:
        if epochs is None:
            epochs = self.writers[index]
        position = first_unordered(actor.knowledge[SEEN], epochs)
        unfenced = False
        if position is None and actor.proxy:
            generic = self.generic[index]
            if np.count_nonzero(generic):
                position = first_unordered(actor.knowledge[FENCED], np.where(generic, epochs, NOBODY))
                unfenced = True
        if position is None:
            return None
        site = int(self.sites[index].reshape(-1)[position])
        late = unordered(actor.knowledge[SEEN], epochs)
        return Conflict(
            site, True, unfenced, self.extent(index, self.sites[index] == site), self.numbers(index)[late]
        )

    def unordered_reader(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """The first read that did not happen before the actor's access."""
        seen = actor.knowledge[SEEN]
        for component, readers in self.readers.items():
            if readers.high <= span[0] or readers.low >= span[1]:
                continue
            values = readers.values[index]
            if np.maximum.reduce(values, None) > seen[component]:
                late = values > seen[component]
                site = int(readers.sites[index].reshape(-1)[int(late.argmax())])
                return Conflict(site, False, False, self.extent(index, late))
        return None

    def extent(self, index: Any, where: np.ndarray) -> tuple[int, int]:
        """Flat numbers of the first and the last granule at `index` where `where` holds."""
        numbers = self.numbers(index)[where]
        return int(numbers.min()), int(numbers.max())

    def numbers(self, index: Any) -> np.ndarray:
        """Flat numbers of the granules at `index`."""
        return np.arange(self.shape[0] * self.shape[1]).reshape(self.shape)[index]


def shared_shadow(nbytes: int) -> Shadow:
    """Shadow of a CTA's shared memory of `nbytes` (reserved area included)."""
    return Shadow(-(-nbytes // 16), GRANULES_PER_CHUNK)


class TensorShadow(Shadow):
    """Shadow of a CTA's tensor memory, and for every word whether anybody wrote it."""

    def __init__(self) -> None:
        """Nobody has accessed anything."""
        super().__init__(TMEM_LANES // HALF_QUADRANT, TMEM_COLS)
        self.valid = np.zeros((TMEM_LANES, TMEM_COLS), bool)

    @staticmethod
    def rectangle(lanes: slice, columns: slice) -> tuple[Any, tuple[int, int]]:
        """Index and span of a rectangle of words."""
        rows = slice(lanes.start // HALF_QUADRANT, -(-lanes.stop // HALF_QUADRANT))
        return (rows, columns), (rows.start, rows.stop)


class GlobalShadow:
    """Last writers of one range of global memory during one launch.

    An entry of `writers` is an epoch of the cluster in `clusters`; `order` counts that cluster's releases to global
    memory before the write. `read` says what anybody read, where that is kept.
    """

    def __init__(self, start: int, nbytes: int):
        """Nobody has written anything."""
        self.start, self.end = start, start + nbytes
        count = -(-nbytes // GLOBAL_GRANULE)
        self.writers = np.zeros(count, np.int64)
        self.clusters = np.zeros(count, np.int32)
        self.order = np.zeros(count, np.int32)
        self.sites = np.zeros(count, np.int32)
        self.read = np.zeros(count, bool)

    def index(self, addresses: np.ndarray, nbytes: int) -> Any:
        """Granules of accesses of `nbytes` at each address; a slice where one access follows on the other."""
        first = (addresses.astype(np.int64, copy=False) - self.start) // GLOBAL_GRANULE
        width = -(-nbytes // GLOBAL_GRANULE)
        if not np.count_nonzero(first[1:] - first[:-1] != width):
            return slice(int(first[0]), int(first[-1]) + width)
        return first if width == 1 else (first[:, None] + np.arange(width)).reshape(-1)

"""Shadow memory: the last writer and readers of each granule of shared, tensor, or global memory.

A granule is 4 bytes of shared memory, 16 lanes x 1 column of tensor memory, or 1 to 16 bytes of global memory (the
largest power of two that divides all accesses there so far). Granules of shared memory become bytes at the first access
to part of a word, in kernels that store parts of words.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import (
    COMPONENT_SHIFT,
    FENCED,
    NOBODY,
    SEEN,
    VALUE_MASK,
    first_unordered,
    unordered,
)
from nvfp4_cute.emulator.memory import TMEM_COLS, TMEM_LANES
from nvfp4_cute.emulator.modes import EVERY_LANE
from nvfp4_cute.emulator.places import CHUNK_BYTES, GRANULES_PER_CHUNK, WORD_BYTES, ByteIndex
from nvfp4_cute.emulator.ptx import Inst

HALF_QUADRANT = 16
"""Lanes of a tensor-memory granule."""


@dataclass(slots=True)
class Actor:
    """A warp or an operation that accesses memory.

    Attributes:
        knowledge: events that happened before the access.
        epoch: stamp of the access.
        site: number of the place that issued it.
        proxy: it goes through the async proxy.
        lanes: lanes of the warp that make it, one bit each.
    """

    knowledge: np.ndarray
    epoch: int
    site: int
    proxy: bool
    lanes: int = EVERY_LANE


@dataclass(frozen=True)
class Conflict:
    """An earlier access that nothing orders before the current one.

    Attributes:
        site: place of the earlier access.
        wrote: it was a write.
        unfenced: it is ordered, but its bytes were never made visible to the async proxy.
        granules: flat numbers of the first and the last granule concerned.
        writer: epoch of the write; for a read, of the current access.
        epoch: epoch of the earlier access.
        late: flat numbers of all granules with unordered writes; empty for reads.
    """

    site: int
    wrote: bool
    unfenced: bool
    granules: tuple[int, int]
    writer: int
    epoch: int
    late: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class Accesses:
    """All accesses to the memories of the running clusters, by number. Number 0 means no access.

    Attributes:
        epochs: stamps of the accesses.
        sites: twice the numbers of their places, plus one if they went through the generic proxy.
        lanes: lanes that made them, one bit each.
    """

    def __init__(self) -> None:
        """Starts without accesses."""
        self.epochs, self.sites, self.lanes = array("q", [NOBODY]), array("q", [0]), array("I", [0])

    def add(self, actor: Actor) -> int:
        """Returns the number of a new access."""
        number = len(self.epochs)
        self.epochs.append(actor.epoch)
        self.sites.append(2 * actor.site if actor.proxy else 2 * actor.site + 1)
        self.lanes.append(actor.lanes)
        return number

    def epochs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the epochs, int64, of the same shape."""
        return np.frombuffer(self.epochs, np.int64)[numbers]

    def sites_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the places' numbers, int64, of the same shape."""
        return np.frombuffer(self.sites, np.int64)[numbers] >> 1

    def generic_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns which accesses used the generic proxy, bool, of the same shape."""
        return np.frombuffer(self.sites, np.int64)[numbers] & 1 != 0


class Granules:
    """The number of one access per granule, int32 (rows, columns)."""

    def __init__(self, shape: tuple[int, int]):
        """Starts with number 0 everywhere."""
        self.numbers = np.zeros(shape, np.int32)
        whole = shape[1] == GRANULES_PER_CHUNK  # rows move as one element each
        self._rows = self.numbers.view(np.complex128).reshape(-1) if whole else None
        self._row = np.zeros(GRANULES_PER_CHUNK, np.int32)

    def at(self, index: Any) -> np.ndarray:
        """Returns the numbers of the granules at `index`; full rows that an array names are concatenated."""
        if self._rows is not None and index.__class__ is np.ndarray:
            return self._rows.take(index).view(np.int32)
        return self.numbers[index]

    def divide(self, parts: int) -> None:
        """Divides each granule into `parts` granules of the same access."""
        self.numbers, self._rows = np.repeat(self.numbers, parts, axis=1), None

    def put(self, index: Any, number: int) -> None:
        """Sets all granules at `index` to the number."""
        if self._rows is not None and index.__class__ is np.ndarray:
            self._row.fill(number)
            self._rows[index] = self._row.view(np.complex128)
        else:
            self.numbers[index] = number


def distinct(numbers: np.ndarray) -> list[int]:
    """Returns the distinct numbers. Neighbours are mostly equal."""
    flat = numbers.reshape(-1)
    if not flat.size:
        return []
    changes = (flat[1:] != flat[:-1]).nonzero()[0]
    return list({int(flat[0]), *flat[changes + 1].tolist()}) if changes.size else [int(flat[0])]


class Readers(Granules):
    """Newest reads of one component: numbers of accesses, the rows that it ever touched, and its greatest value."""

    def __init__(self, shape: tuple[int, int]):
        """Starts without reads."""
        super().__init__(shape)
        self.low, self.high, self.newest = shape[0], 0, 0

    def note(self, index: Any, span: tuple[int, int], value: int, number: int) -> None:
        """Notes a read of the granules at `index`, in rows [span)."""
        self.low, self.high = min(self.low, span[0]), max(self.high, span[1])
        self.newest = max(self.newest, value)
        self.put(index, number)

    def beside(self, span: tuple[int, int]) -> bool:
        """Whether rows [span) were never read."""
        return self.high <= span[0] or self.low >= span[1]


class Shadow:
    """Last writer and readers of a memory of (rows, columns) granules.

    Shared memory: rows are chunks of 4 words, or of 16 bytes. Tensor memory: rows are half quadrants, and columns are
    its columns.

    Attributes:
        bytewise: granules become bytes at the first access to part of a word.
        parts: granules per word of shared memory, 1 or 4.
    """

    def __init__(self, rows: int, columns: int, accesses: Accesses, *, bytewise: bool = False):
        """`accesses`: accesses to all memories of the running clusters."""
        self.shape = (rows, columns)
        self.accesses = accesses
        self.bytewise, self.parts = bytewise, 1
        self.writers = Granules(self.shape)
        self.readers: dict[int, Readers] = {}

    def at(self, index: Any) -> Any:
        """Returns the index of a place in the current granules."""
        if index.__class__ is ByteIndex:
            if self.parts == 1 and not self.bytewise:
                return index.rows, index.columns // WORD_BYTES
            self.divide()
        elif self.parts > 1 and index.__class__ is tuple:
            rows, words = (np.asarray(part).reshape(-1, 1) for part in index)
            columns = words * self.parts + np.arange(self.parts)
            return ByteIndex(np.broadcast_to(rows, columns.shape).reshape(-1), columns.reshape(-1))
        return index

    def divide(self) -> None:
        """Makes every byte a granule."""
        if self.parts == 1:
            self.parts = WORD_BYTES
            self.shape = self.shape[0], CHUNK_BYTES
            for granules in (self.writers, *self.readers.values()):
                granules.divide(WORD_BYTES)

    def read(
        self, index: Any, span: tuple[int, int], actor: Actor, writers: list[int] | None = None
    ) -> Conflict | None:
        """Notes a read of the granules at `index`, whose rows lie in [span). Reports an unordered write.

        writers: result of `writers_of` for them, if known.
        """
        index = self.at(index)
        conflict = self._against_writers(index, actor, writers)
        component, value = actor.epoch >> COMPONENT_SHIFT, actor.epoch & VALUE_MASK
        readers = self.readers.get(component)
        if readers is None:
            readers = self.readers[component] = Readers(self.shape)
        readers.note(index, span, value, self.accesses.add(actor))
        return conflict

    def write(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """Notes a write. Reports an unordered write or read."""
        index = self.at(index)
        conflict = self._against_writers(index, actor) or self.unordered_reader(index, span, actor)
        self.writers.put(index, self.accesses.add(actor))
        return conflict

    def writers_of(self, index: Any) -> list[int]:
        """Returns the numbers of the last writes to the granules at `index`; 0 if one was never written."""
        return distinct(self.writers.at(self.at(index)))

    def unwritten(self, index: Any) -> np.ndarray:
        """Returns which granules at `index` were never written."""
        return self.writers.at(self.at(index)) == NOBODY

    def forget(self, index: Any) -> None:
        """Makes the granules as new (freshly allocated)."""
        self.writers.put(index, NOBODY)
        for readers in self.readers.values():
            readers.put(index, NOBODY)

    def unordered(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """Returns the first access that did not happen before the actor's, without noting the actor's access."""
        index = self.at(index)
        return self._against_writers(index, actor) or self.unordered_reader(index, span, actor)

    def _against_writers(self, index: Any, actor: Actor, writers: list[int] | None = None) -> Conflict | None:
        seen, fenced = actor.knowledge[SEEN], actor.knowledge[FENCED]
        epochs, sites, proxy = self.accesses.epochs, self.accesses.sites, actor.proxy
        for number in self.writers_of(index) if writers is None else writers:
            stamp = epochs[number]
            component, value = stamp >> COMPONENT_SHIFT, stamp & VALUE_MASK
            if seen[component] < value or (proxy and sites[number] & 1 and fenced[component] < value):
                return self._late_write(index, actor)
        return None

    def _late_write(self, index: Any, actor: Actor) -> Conflict:
        """Returns the first write that did not happen before the actor's access, or that no fence made visible."""
        numbers = self.writers.numbers[index]
        epochs, sites = self.accesses.epochs_of(numbers), self.accesses.sites_of(numbers)
        position = first_unordered(actor.knowledge[SEEN], epochs)
        unfenced = position is None
        if unfenced:
            generic = self.accesses.generic_of(numbers)
            position = first_unordered(actor.knowledge[FENCED], np.where(generic, epochs, NOBODY))
        site = int(sites.reshape(-1)[position])
        late = unordered(actor.knowledge[SEEN], epochs)
        extent, writer = self.extent(index, sites == site), int(epochs.reshape(-1)[position])
        return Conflict(site, True, unfenced, extent, writer, writer, self.numbers(index)[late])

    def unordered_reader(self, index: Any, span: tuple[int, int], actor: Actor) -> Conflict | None:
        """Returns the first read that did not happen before the actor's access."""
        index = self.at(index)
        seen, epochs = actor.knowledge[SEEN], self.accesses.epochs
        for component, readers in self.readers.items():
            known = seen[component]
            if readers.newest <= known or readers.beside(span):
                continue
            if any(epochs[number] & VALUE_MASK > known for number in distinct(readers.at(index))):
                numbers = readers.numbers[index]
                stamps = self.accesses.epochs_of(numbers)
                late = stamps & VALUE_MASK > known
                first = int(late.argmax())
                site, stamp = (
                    int(self.accesses.sites_of(numbers).reshape(-1)[first]),
                    int(stamps.reshape(-1)[first]),
                )
                return Conflict(site, False, False, self.extent(index, late), actor.epoch, stamp)
        return None

    def extent(self, index: Any, where: np.ndarray) -> tuple[int, int]:
        """Returns the flat numbers of the first and the last granule at `index` where `where` holds."""
        numbers = self.numbers(index)[where]
        return int(numbers.min()), int(numbers.max())

    def numbers(self, index: Any) -> np.ndarray:
        """Returns the flat numbers of the granules at `index`."""
        return np.arange(self.shape[0] * self.shape[1]).reshape(self.shape)[self.at(index)]


def shared_shadow(nbytes: int, accesses: Accesses, *, bytewise: bool = False) -> Shadow:
    """Returns the shadow of a CTA's shared memory of `nbytes` (reserved area included). `bytewise`: result of `stores_parts`."""
    return Shadow(-(-nbytes // CHUNK_BYTES), GRANULES_PER_CHUNK, accesses, bytewise=bytewise)


NARROW = {"b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"}
_ELSEWHERE = {"global", "param", "local"}


def stores_parts(insts: Sequence[Inst]) -> bool:
    """Whether an instruction may store less than a word of shared memory, so that bytes of a word need separate shadows."""
    return any(
        inst.opcode in ("st", "atom", "red") and NARROW & set(inst.mods) and _ELSEWHERE.isdisjoint(inst.mods)
        for inst in insts
    )


class TensorShadow(Shadow):
    """Shadow of a CTA's tensor memory, with a flag per word that it was written."""

    def __init__(self, accesses: Accesses) -> None:
        """Starts without accesses."""
        super().__init__(TMEM_LANES // HALF_QUADRANT, TMEM_COLS, accesses)
        self.valid = np.zeros((TMEM_LANES, TMEM_COLS), bool)

    def unwritten_words(self, lanes: slice, columns: slice) -> np.ndarray | None:
        """Returns which words of a rectangle were never written; None if all were."""
        valid = self.valid[lanes, columns]
        return None if valid.all() else ~valid

    @staticmethod
    def rectangle(lanes: slice, columns: slice) -> tuple[Any, tuple[int, int]]:
        """Returns index and span of a rectangle of words."""
        rows = slice(lanes.start // HALF_QUADRANT, -(-lanes.stop // HALF_QUADRANT))
        return (rows, columns), (rows.start, rows.stop)


WIDEST_GRANULE = 16


class GlobalRange:
    """Values kept for the granules of one range of global memory during one launch. `granule`: bytes of one."""

    fields: dict[str, type] = {}
    """Names of the arrays, one entry per granule, and types of their entries."""

    def __init__(self, start: int, nbytes: int):
        """All values are zero."""
        self.start, self.end, self.granule = start, start + nbytes, WIDEST_GRANULE
        for name, kind in self.fields.items():
            setattr(self, name, np.zeros(-(-nbytes // WIDEST_GRANULE), kind))

    def index(self, addresses: np.ndarray, nbytes: int) -> Any:
        """Granules of accesses of `nbytes` at each address; a slice if each access follows the one before it.

        An access that ends or begins inside a granule makes all of them smaller.
        """
        first = addresses.astype(np.int64, copy=False) - self.start
        bits = int(np.bitwise_or.reduce(first)) | nbytes
        if bits & self.granule - 1:
            self._divide(bits & -bits)
        first, width = first // self.granule, nbytes // self.granule
        if not np.count_nonzero(first[1:] - first[:-1] != width):
            return slice(int(first[0]), int(first[-1]) + width)
        return first if width == 1 else (first[:, None] + np.arange(width)).reshape(-1)

    def _divide(self, granule: int) -> None:
        parts, self.granule = self.granule // granule, granule
        for name in self.fields:
            setattr(self, name, np.repeat(getattr(self, name), parts))


class GlobalShadow(GlobalRange):
    """Last writers of one range of global memory during one launch.

    An entry of `writers` is an epoch of the cluster in `clusters`; `order` counts that cluster's releases to global
    memory before the write. `read` says what anybody read, where that is kept. `writes` counts the accesses that wrote.
    """

    fields = {"writers": np.int64, "clusters": np.int32, "order": np.int32, "sites": np.int32, "read": bool}
    writers: np.ndarray
    clusters: np.ndarray
    order: np.ndarray
    sites: np.ndarray
    read: np.ndarray
    writes = 0

    def bytes_at(self, index: np.ndarray) -> np.ndarray:
        """Returns the offsets of all bytes of the granules at `index`, from the start of the range."""
        return (index[:, None] * self.granule + np.arange(self.granule)).reshape(-1)

    def by_byte(self, flags: np.ndarray) -> np.ndarray:
        """Converts flags of granules to packed bits of the bytes of the range."""
        return np.packbits(np.repeat(flags, self.granule)[: self.end - self.start])

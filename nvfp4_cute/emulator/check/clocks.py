"""Vector clocks: what happened before what, for threads, asynchronous engines, and barriers of one cluster.

A *component* counts the events of one source: a warp (its releases), an engine of a warp (operations complete up to a
number), or an mbarrier (phases complete). An *epoch* is a component and a value, packed into one int64; an access is
stamped with the epoch whose completion makes it done. *Knowledge* is what somebody can rely on: an int64 array (4,
components), in row SEEN the greatest value of each component that happened before, in row FENCED the same for generic
writes to shared memory that a proxy fence has handed to the async proxy (`global_races` keeps fences of global memory), in row
CLUSTER the same for what warps did as far as no arrival of narrower scope than the cluster told of it (only warps' own components
mean anything there), in row CAUSED the same for what copies and relaxed arrivals tell, too: what their issuer knew has happened,
though it orders no memory. An access with epoch (c, v) happened before whoever has ``knowledge[SEEN, c] >= v``.
"""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.modes import Engine

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

SEEN, FENCED, CLUSTER, CAUSED = 0, 1, 2, 3
COMPONENT_SHIFT = 32
VALUE_MASK = (1 << COMPONENT_SHIFT) - 1
NOBODY = 0
"""Epoch of what was never accessed: it happened before everything."""


def epoch(component: int, value: int) -> int:
    """Pack."""
    return component << COMPONENT_SHIFT | value


class Components:
    """Numbers the components of one cluster. Number 0 is nobody."""

    def __init__(self, expected: int):
        """`expected`: how many there will probably be; more are allowed."""
        self.count = 1
        self.capacity = expected + 1

    def new(self) -> int:
        """A component that nobody knows anything about."""
        self.count += 1
        if self.count > self.capacity:
            self.capacity *= 2
        return self.count - 1

    def nothing(self) -> np.ndarray:
        """Knowledge of nothing."""
        return np.zeros((4, self.capacity), np.int64)

    def fit(self, knowledge: np.ndarray) -> np.ndarray:
        """The same knowledge, wide enough for all components."""
        if knowledge.shape[1] >= self.capacity:
            return knowledge
        wide = self.nothing()
        wide[:, : knowledge.shape[1]] = knowledge
        return wide


def joined(into: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What the two know together; may reuse `into`."""
    if into.shape[1] < other.shape[1]:
        into, other = other.copy(), into
    part = into[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return into


def happened(knowledge: np.ndarray) -> np.ndarray:
    """That all of it has happened, and nothing that orders memory."""
    told = np.zeros_like(knowledge)
    np.maximum(knowledge[SEEN], knowledge[CAUSED], out=told[CAUSED])
    return told


def first_unordered(seen: np.ndarray, epochs: np.ndarray) -> int | None:
    """Position (in C order) of the first epoch that did not happen before a holder of the row `seen`, or None."""
    flat = epochs.reshape(-1)
    if not flat.size:
        return None
    first = int(flat[0])
    if not np.count_nonzero(flat != first):
        return None if seen[first >> COMPONENT_SHIFT] >= first & VALUE_MASK else 0
    late = unordered(seen, flat)
    position = int(late.argmax())
    return position if late[position] else None


def unordered(seen: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Which epochs (bool, of the same shape) did not happen before a holder of the row `seen`."""
    return seen[epochs >> COMPONENT_SHIFT] < epochs & VALUE_MASK


class WarpClock:
    """What one warp knows, and the components of its own.

    Attributes:
        value: the warp's own count.  epoch: stamp of an access that the warp makes now.
        sites: numbers of the places of its instructions, by program counter; of atomics, by its complement.
        releases: where it published, by its own count then.
        fenced: what it knew at its last fence, in row CLUSTER at its last one of the cluster or wider.
        unfenced: what relaxed waits found, which counts from the next fence on.
        fenced_inits: how many of its initialisations of mbarriers a fence of its own has covered.
        gave_up: program counters of the waits for mbarriers that gave up once (`Mbarriers.gives_up`).
    """

    def __init__(self, components: Components, warp: "Warp"):
        """A warp that has done nothing."""
        self.components, self.warp = components, warp
        self.own = components.new()
        self.knowledge = components.nothing()
        self.knowledge[SEEN, self.own] = self.knowledge[CLUSTER, self.own] = 1
        self.value, self.epoch = 1, epoch(self.own, 1)
        self.sites: dict[int, int] = {}
        self.fenced: np.ndarray | None = None
        self.unfenced: np.ndarray | None = None
        self.engines: dict[Engine | str, int] = {}
        self.issued: dict[Engine | str, int] = {}
        self.releases: dict[int, int] = {}
        self.fenced_inits = 0
        self.gave_up: set[int] = set()

    def publish(self, site: int | None = None) -> np.ndarray:
        """What the warp knows now, for whoever learns from it; what it does later is not part of it.

        `site`: number of the place of the instruction, for reports.
        """
        published = self.knowledge = self.components.fit(self.knowledge)
        if site is not None:
            self.releases[self.value] = site
        self.knowledge = published.copy()
        self._next()
        return published

    def _next(self) -> None:
        """What the warp does from here on is news."""
        self.value += 1
        self.epoch += 1
        self.knowledge[SEEN, self.own] += 1
        self.knowledge[CLUSTER, self.own] += 1

    def fence_memory(self, *, wide: bool) -> None:
        """A fence, of the cluster or wider or not: what the warp knows now, its later arrivals tell with that scope."""
        self.acquire_relaxed()
        self.fenced = self.knowledge.copy() if wide else self.narrowed(self.knowledge)
        self._next()

    def acquire_relaxed(self) -> None:
        """A fence behind relaxed waits: together they acquire."""
        if self.unfenced is not None:
            self.learn(self.unfenced)
            self.unfenced = None

    def found_relaxed(self, other: np.ndarray) -> None:
        """A relaxed wait found `other`: it has happened, and orders memory only behind a fence."""
        self.unfenced = other.copy() if self.unfenced is None else joined(self.unfenced, other)
        self.learn(happened(other))

    def relaxed(self, published: np.ndarray) -> np.ndarray:
        """What a relaxed arrival tells of `published`: what the last fence covered, and that the rest has happened."""
        told = happened(published)
        return told if self.fenced is None else joined(told, self.fenced)

    def narrowed(self, published: np.ndarray) -> np.ndarray:
        """What an arrival with the scope of the CTA tells another CTA: a copy."""
        told = published.copy()
        told[CLUSTER] = 0
        if self.fenced is not None:
            told[CLUSTER, : self.fenced.shape[1]] = self.fenced[CLUSTER]
        return told

    def learn(self, other: np.ndarray) -> None:
        """Everything in `other` happened before what the warp does next."""
        self.knowledge = joined(self.knowledge, other)

    def fence(self) -> None:
        """A proxy fence: all generic writes to shared memory that the warp knows of are visible to the async proxy."""
        self.knowledge[FENCED] = self.knowledge[SEEN]
        self._next()

    def engine(self, name: Engine | str) -> int:
        """Component of one of the warp's engines."""
        found = self.engines.get(name)
        if found is None:
            found = self.engines[name] = self.components.new()
            self.knowledge = self.components.fit(self.knowledge)
        return found

    def next_number(self, name: Engine | str) -> int:
        """Number of the operation that the warp issues now on an engine, from 1."""
        number = self.issued[name] = self.issued.get(name, 0) + 1
        return number

    def count(self, name: Engine | str) -> tuple[int, int]:
        """Component and number of something that the warp does at once, from 1."""
        component, number = self.engine(name), self.next_number(name)
        self.completed(component, number)
        return component, number

    def completed(self, component: int, value: int) -> None:
        """The warp knows that operations of a component are complete up to `value`."""
        self.knowledge = self.components.fit(self.knowledge)
        if self.knowledge[SEEN, component] < value:
            self.knowledge[SEEN, component] = value

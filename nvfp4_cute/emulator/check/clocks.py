"""Vector clocks: the happens-before order of threads, asynchronous engines, and barriers of one cluster.

A *component* counts the events of one source: a warp (its releases), an engine of a warp (operations complete up to a
number), or an mbarrier (phases complete). An *epoch* is a component and a value, packed into one int64. Each access is
stamped with the epoch whose completion makes it done. An access with epoch (c, v) happened before every holder of
knowledge with ``knowledge[SEEN, c] >= v``.

*Knowledge* is the set of events that a warp or an operation can rely on: an int64 array (5, components) of greatest
values.

* SEEN: events that happened before.
* FENCED: generic writes to shared memory that a proxy fence has made visible to the async proxy (`global_races` keeps
  fences of global memory).
* CLUSTER: actions of warps, and of their cp.async, that arrivals of at least cluster scope have announced. Values of other
  components in this row have no meaning.
* CAUSED: events that copies and relaxed arrivals also announce: events known to their issuer have happened, but this
  orders no memory.
* LANES: actions of warps, up to the first store of a lane that did not take part in the announcement (`lane_order`). Only
  the components of warps have a meaning in this row.
"""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.modes import Engine

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

SEEN, FENCED, CLUSTER, CAUSED, LANES = 0, 1, 2, 3, 4
ROWS = 5
OWN_ROWS = slice(SEEN, None, CLUSTER - SEEN)
"""Rows SEEN, CLUSTER and LANES, which count the actions of a warp itself."""
COMPONENT_SHIFT = 32
VALUE_MASK = (1 << COMPONENT_SHIFT) - 1
NOBODY = 0
"""Epoch of memory that was never accessed; it happened before everything."""


def epoch(component: int, value: int) -> int:
    """Packs a component and a value into an epoch."""
    return component << COMPONENT_SHIFT | value


class Components:
    """Numbers the components of one cluster. Component 0 is unused."""

    def __init__(self, expected: int):
        """`expected`: the probable number of components; more are allowed."""
        self.count = 1
        self.capacity = expected + 1

    def new(self) -> int:
        """Returns a new component that no knowledge contains."""
        self.count += 1
        if self.count > self.capacity:
            self.capacity *= 2
        return self.count - 1

    def nothing(self) -> np.ndarray:
        """Returns empty knowledge."""
        return np.zeros((ROWS, self.capacity), np.int64)

    def fit(self, knowledge: np.ndarray) -> np.ndarray:
        """Extends knowledge to all components."""
        if knowledge.shape[1] >= self.capacity:
            return knowledge
        wide = self.nothing()
        wide[:, : knowledge.shape[1]] = knowledge
        return wide


def joined(into: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the union of two knowledges; may reuse `into`."""
    if into.shape[1] < other.shape[1]:
        into, other = other.copy(), into
    part = into[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return into


def happened(knowledge: np.ndarray) -> np.ndarray:
    """Returns knowledge that its events have happened, without any order of memory."""
    told = np.zeros_like(knowledge)
    np.maximum(knowledge[SEEN], knowledge[CAUSED], out=told[CAUSED])
    return told


def first_unordered(seen: np.ndarray, epochs: np.ndarray) -> int | None:
    """Returns the position (in C order) of the first epoch that did not happen before a holder of the row `seen`, or None."""
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
    """Returns a bool array: epochs that did not happen before a holder of the row `seen`."""
    return seen[epochs >> COMPONENT_SHIFT] < epochs & VALUE_MASK


class WarpClock:
    """Knowledge of one warp, and its own components.

    Attributes:
        value: the warp's own count.
        epoch: stamp of an access that the warp makes now.
        sites: numbers of its instructions' places, by program counter; of atomics, by its complement.
        releases: places where it published, by its count at that time.
        fenced: knowledge at its last fence; in row CLUSTER at its last fence of cluster scope or wider.
        unfenced: knowledge from relaxed waits, which counts after the next fence.
        fenced_inits: number of its mbarrier initialisations that a fence of its own has covered.
        gave_up: program counters of the mbarrier waits that gave up once (`Mbarriers.gives_up`).
    """

    def __init__(self, components: Components, warp: "Warp"):
        """Starts without knowledge."""
        self.components, self.warp = components, warp
        self.own = components.new()
        self.knowledge = components.nothing()
        self.knowledge[OWN_ROWS, self.own] = 1
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
        """Returns the warp's current knowledge for others to learn. Later actions of the warp are not part of it.

        `site`: number of the instruction's place, for reports.
        """
        published = self.knowledge = self.components.fit(self.knowledge)
        if site is not None:
            self.releases[self.value] = site
        self.knowledge = published.copy()
        self._next()
        return published

    def _next(self) -> None:
        """Increments the warp's count, so that its later actions are new events."""
        self.value += 1
        self.epoch += 1
        self.knowledge[OWN_ROWS, self.own] += 1

    def fence_memory(self, *, wide: bool) -> None:
        """Executes a memory fence. Later arrivals of the warp announce its current knowledge with the scope of the fence.

        `wide`: the fence has cluster scope or wider.
        """
        self.acquire_relaxed()
        self.fenced = self.knowledge.copy() if wide else self.narrowed(self.knowledge)
        self._next()

    def acquire_relaxed(self) -> None:
        """Executes a fence after relaxed waits. Together they acquire."""
        if self.unfenced is not None:
            self.learn(self.unfenced)
            self.unfenced = None

    def found_relaxed(self, other: np.ndarray) -> None:
        """Notes what a relaxed wait found: `other` has happened, and orders memory only after a fence."""
        self.unfenced = other.copy() if self.unfenced is None else joined(self.unfenced, other)
        self.learn(happened(other))

    def relaxed(self, published: np.ndarray) -> np.ndarray:
        """Returns the part of `published` that a relaxed arrival announces.

        Events that the last fence covered are ordered; the rest has only happened.
        """
        told = happened(published)
        return told if self.fenced is None else joined(told, self.fenced)

    def narrowed(self, published: np.ndarray) -> np.ndarray:
        """Returns what an arrival of CTA scope announces to another CTA, as a copy."""
        told = published.copy()
        told[CLUSTER] = 0
        if self.fenced is not None:
            told[CLUSTER, : self.fenced.shape[1]] = self.fenced[CLUSTER]
        return told

    def learn(self, other: np.ndarray) -> None:
        """Adds `other` to the knowledge: all of it happened before the warp's next action."""
        self.knowledge = joined(self.knowledge, other)

    def fence(self) -> None:
        """Executes a proxy fence: makes all generic writes to shared memory known to the warp visible to the async proxy."""
        self.knowledge[FENCED] = self.knowledge[SEEN]
        self._next()

    def engine(self, name: Engine | str) -> int:
        """Returns the component of one of the warp's engines."""
        found = self.engines.get(name)
        if found is None:
            found = self.engines[name] = self.components.new()
            self.knowledge = self.components.fit(self.knowledge)
        return found

    def next_number(self, name: Engine | str) -> int:
        """Returns the number, from 1, of the operation that the warp now issues on an engine."""
        number = self.issued[name] = self.issued.get(name, 0) + 1
        return number

    def count(self, name: Engine | str) -> tuple[int, int]:
        """Returns component and number, from 1, of an action that the warp does at once."""
        component, number = self.engine(name), self.next_number(name)
        self.completed(component, number)
        return component, number

    def completed(self, component: int, value: int) -> None:
        """Notes that operations of a component are complete up to `value`."""
        self.knowledge = self.components.fit(self.knowledge)
        if self.knowledge[SEEN, component] < value:
            self.knowledge[SEEN, component] = self.knowledge[CLUSTER, component] = value

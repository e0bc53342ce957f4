"""Tensor maps that a kernel edits: uses of a new map without a proxy fence, and edits of a map that a copy still uses.

TMA reads maps through a separate proxy. Ordinary writes reach it after ``fence.proxy.tensormap::generic.release``,
which ``tensormap.cp_fenceproxy`` contains. A user of the map first executes ``.acquire``, or knows of a warp that did
(PTX ISA, membar and fence, proxies). Edits are ``tensormap.replace`` and ordinary stores. TMA may read a map until the
copies that use it are complete (DeepGEMM #343), or until ``wait_group.read`` of a later group, which also waits for the
map reads of loads (CUTLASS #2912).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvfp4_cute.emulator.check.clocks import COMPONENT_SHIFT, SEEN, VALUE_MASK
from nvfp4_cute.emulator.check.global_races import GlobalRaces
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.shadow import Actor
from nvfp4_cute.emulator.tensormap import DESCRIPTOR_BYTES

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

MANY = 16
"""Number of uses of a map after which completed uses are dropped."""


@dataclass
class Use:
    """A copy that uses a map: its place, and epochs after which the map was read (of the read, of received data)."""

    site: int
    epochs: list[int] = field(default_factory=list)

    def known(self, knowledge: np.ndarray) -> bool:
        """Whether one of them happened before a holder of the knowledge, so that TMA has read the map."""
        return any(knowledge[SEEN, epoch >> COMPONENT_SHIFT] >= epoch & VALUE_MASK for epoch in self.epochs)


class Fence(NamedTuple):
    """A fence of the proxy: component and count of its warp, and the warp's knowledge."""

    component: int
    value: int
    knowledge: np.ndarray


@dataclass
class Edits:
    """A map that the running clusters use or edit.

    Attributes:
        writer: component, count and place of the newest edit.
        released: the edit included a fence.
        acquires: fences after it.
        uses: copies that may still use the map.
    """

    writer: tuple[int, int, int] | None = None
    released: bool = False
    acquires: list[Fence] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


class TensorMaps:
    """Tracks the maps in global memory that the running clusters edit or use."""

    def __init__(self, checker: Ledger, races: GlobalRaces):
        """`checker`: receives the findings. `races`: knows the order of accesses to global memory."""
        self.checker, self.races = checker, races
        self.begin()

    def begin(self) -> None:
        """Starts new clusters."""
        self._maps: dict[int, Edits] = {}
        self._releases: list[Fence] = []

    def edited(self, warp: "Warp", pc: int, address: int, *, released: bool) -> None:
        """Notes a write to a map in global memory. `released`: the instruction is also a release of its proxy."""
        clock, actor = self.checker.clock(warp), self.checker.warp_actor(warp, pc)
        self.races.access(np.array([address], np.int64), DESCRIPTOR_BYTES, actor, write=True)
        uses = self._maps[address].uses if address in self._maps else []
        flying = next((use for use in uses if not use.known(actor.knowledge)), None)
        if flying is not None:
            site, other = self.checker.sites[actor.site], self.checker.sites[flying.site]
            text = f"{site} edits the tensor map at {address:#x} while {other} may still use it: nothing orders them"
            self.checker.report("race", site, other, text)
        self._maps[address] = Edits((clock.own, clock.value, actor.site), released)

    def fenced(self, warp: "Warp", address: int | None = None) -> None:
        """Notes a fence of the proxy: an acquire of the map at `address`, or without one a release of all that the warp knows."""
        clock = self.checker.clock(warp)
        fence = Fence(clock.own, clock.value, clock.publish())
        fences = self._releases if address is None else self._maps.setdefault(address, Edits()).acquires
        fences.append(fence)

    def used(self, warp: "Warp", pc: int, address: int) -> Use:
        """Notes a copy that uses the map in global memory. Returns the argument of `reading`."""
        actor = self.checker.warp_actor(warp, pc)
        self.races.access(np.array([address], np.int64), DESCRIPTOR_BYTES, actor, write=False)
        edits = self._maps.setdefault(address, Edits())
        self._check(edits, actor, address)
        if len(edits.uses) >= MANY:
            edits.uses = [use for use in edits.uses if not use.known(actor.knowledge)]
        edits.uses.append(Use(actor.site))
        return edits.uses[-1]

    def _check(self, edits: Edits, actor: Actor, address: int) -> None:
        writers = [
            (epoch >> COMPONENT_SHIFT, epoch & VALUE_MASK, site)
            for epoch, site in self.races.generic_writers(address, DESCRIPTOR_BYTES)
        ]
        if edits.writer is not None:
            writers.append(edits.writer)
        for writer in writers:
            if not _knows(actor.knowledge, writer):
                continue  # a race
            missing = self._missing(edits, writer, actor, released=edits.released and writer is edits.writer)
            if missing:
                site, other = self.checker.sites[actor.site], self.checker.sites[writer[2]]
                self.checker.report(
                    "proxy-fence",
                    site,
                    other,
                    f"{site} uses the tensor map at {address:#x}, which {other} wrote through the generic proxy: no "
                    f"fence.proxy.tensormap::generic.{missing} between them",
                )
                return

    def _missing(
        self, edits: Edits, writer: tuple[int, int, int], actor: Actor, *, released: bool
    ) -> str | None:
        """Returns which half of the fence is missing between a write of a map and a use.

        `released`: the write was also a release.
        """
        acquires = [
            fence
            for fence in edits.acquires
            if _knows(actor.knowledge, fence) and _knows(fence.knowledge, writer)
        ]
        if released:
            return None if acquires else "acquire"
        missing = "release"
        for release in reversed(self._releases):  # the newest releases are those of the newest writes
            if _knows(release.knowledge, writer):
                if any(_knows(fence.knowledge, release) for fence in acquires):
                    return None
                missing = "acquire"
        return missing

    def reading(self, use: Use, stamp: int | None = None) -> None:
        """Notes that the current operation uses a map. `stamp`: epoch of its completion, if not that of its own component."""
        use.epochs.append(self.checker.operation().actor(stamp).epoch)


def _knows(knowledge: np.ndarray, event: "tuple[int, int, int] | Fence") -> bool:
    """Whether an event (component, count, ...) happened before a holder of the knowledge."""
    component, value, _ = event
    return component < knowledge.shape[1] and bool(knowledge[SEEN, component] >= value)

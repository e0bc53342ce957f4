"""Stores by lanes of a warp that another lane announces to other warps.

An arrival at an mbarrier, or the start of a copy, orders the earlier accesses of the lanes that execute it. It orders
those of other lanes only after a barrier of the warp or of the CTA (PTX ISA, memory consistency model). `elect.sync`,
shuffles and votes order no memory. Hardware executes the stores of a converged warp in program order, so a violation is
a warning.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.check.clocks import COMPONENT_SHIFT, LANES, SEEN, VALUE_MASK
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.shadow import Accesses, Actor

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp


class LaneOrder:
    """Finds accesses to data that a lane of another warp stored, but only another lane of that warp announced.

    Attributes:
        active: whether an announcement so far has left out stores of other lanes.
    """

    def __init__(self, checker: Ledger):
        """`checker`: receives the findings."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Starts new clusters."""
        self.active = False
        # By the own component of a warp: lanes of its stores since its last barrier, with the count of the first one;
        # and count, lanes and place of each announcement that leaves stores out.
        self._stores: dict[int, dict[int, int]] = {}
        self._partial: dict[int, list[tuple[int, int, int]]] = {}

    def stored(self, warp: "Warp", lanes: int) -> None:
        """Notes a store to shared memory by `lanes` of a warp (one bit each)."""
        clock = self.checker.clock(warp)
        stores = self._stores.setdefault(clock.own, {})
        if lanes not in stores:
            stores[lanes] = clock.value

    def met(self, warp: "Warp") -> None:
        """Notes a barrier of a warp: later announcements of any lane cover its earlier stores."""
        self._stores.pop(self.checker.clock(warp).own, None)

    def announced(self, warp: "Warp", published: np.ndarray, site: int) -> None:
        """Removes stores of inactive lanes from what a warp has just `published` (changed in place). `site`: the place."""
        clock, lanes = self.checker.clock(warp), warp.lanes
        missed = [count for mask, count in self._stores.get(clock.own, {}).items() if mask & ~lanes]
        if missed:
            published[LANES, clock.own] = min(missed) - 1
            self._partial.setdefault(clock.own, []).append((clock.value - 1, lanes, site))
            self.active = True

    def check(
        self, numbers: Iterable[int], accesses: Accesses, actor: Actor, what: str, *, write: bool
    ) -> None:
        """Compares an access to a place (`what`) with the stores `numbers` there."""
        for number in numbers:
            stamp = accesses.epochs[number]
            component, value = stamp >> COMPONENT_SHIFT, stamp & VALUE_MASK
            if component not in self._partial or actor.knowledge[LANES, component] >= value:
                continue
            if actor.knowledge[SEEN, component] < value:
                continue  # a race of the warps
            _, lanes, place = next(one for one in self._partial[component] if one[0] >= value)
            if accesses.lanes[number] & ~lanes:
                sites = self.checker.sites
                site, other = sites[actor.site], sites[accesses.sites[number] >> 1]
                does = "writes" if write else "reads"
                text = (
                    f"{site} {does} {what} that {other} writes, and only another lane announced that in {sites[place]}: "
                    "put bar.warp.sync before it, or let every lane arrive"
                )
                self.checker.report("race", site, other, text, severity="warning")
                return

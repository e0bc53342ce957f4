"""Atomics and strong stores on shared memory: compared with plain accesses to the same bytes, not with each other.

A plain store before an atomic stays the last writer of its bytes, so a missing barrier between the two shows in either
order.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nvfp4_cute.emulator.check.clocks import NOBODY
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.shadow import Accesses, Actor, Shadow
from nvfp4_cute.emulator.places import Place

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta


class SharedAtomics:
    """Newest atomics of every warp, by place in shared memory."""

    def __init__(self, checker: Ledger, conflict: Callable[..., None]):
        """`checker`: knows the plain accesses. `conflict`: reports one (CTA, conflict, actor, whether it writes)."""
        self.checker, self._conflict = checker, conflict
        self.begin(Accesses())

    def begin(self, accesses: Accesses) -> None:
        """Starts with new memories. `accesses`: accesses to all memories of the running clusters."""
        self._accesses = accesses
        self._shadows: dict[Cta, Shadow] = {}

    def access(self, cta: "Cta", place: Place, actor: Actor) -> None:
        """Notes an atomic or a strong store of a warp. The bytes count as written from then on."""
        memory = self.checker.shared[cta]
        index, span = memory.at(place[0]), place[1]
        conflict = memory.unordered(index, span, actor)
        if conflict is not None and not self.checker.sites[conflict.site].atomic:
            self._conflict(cta, conflict, actor, write=True)
        unwritten = memory.unwritten(index)
        if unwritten.any():
            numbers = memory.writers.at(index).copy()
            numbers[unwritten] = self._accesses.add(actor)
            memory.writers.numbers[index] = numbers.reshape(memory.writers.numbers[index].shape)
        shadow = self._shadows.get(cta)
        if shadow is None:
            shadow = self._shadows[cta] = Shadow(*memory.shape, self._accesses, bytewise=memory.bytewise)
            shadow.parts = memory.parts
        self._divide_alike(shadow, memory)
        shadow.read(index, span, actor, [NOBODY])

    @staticmethod
    def _divide_alike(shadow: Shadow, memory: Shadow) -> None:
        if memory.parts > shadow.parts:
            shadow.divide()

    def plain(self, cta: "Cta", place: Place, actor: Actor, *, write: bool) -> None:
        """Compares a plain access with earlier atomics."""
        shadow = self._shadows.get(cta)
        if shadow is None:
            return
        memory = self.checker.shared[cta]
        index = memory.at(place[0])
        self._divide_alike(shadow, memory)
        found = shadow.unordered_reader(index, place[1], actor)
        if found is not None:
            self._conflict(cta, replace(found, wrote=True), actor, write=write, compared=False)

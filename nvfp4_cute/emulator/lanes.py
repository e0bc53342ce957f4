"""The 32 lanes of a warp: masks, groups of lanes, and the conditions that make a group wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

LANES = 32
ALL_LANES = np.ones(LANES, bool)
ALL_LANES.setflags(write=False)
LANE_IDS = np.arange(LANES, dtype=np.uint32)
LANE_IDS.setflags(write=False)
NOTHING: frozenset[int] = frozenset()


class Wait(Protocol):
    """Reason why a warp cannot continue. Its step is called again once `ready()` is true."""

    def ready(self) -> bool:
        """Whether another attempt may succeed."""
        ...

    def describe(self) -> str:
        """Returns what is missing, for the hang report."""
        ...


@dataclass
class Condition:
    """A Wait made of a predicate and a function that returns its text when a hang is reported."""

    test: Callable[[], bool]
    text: Callable[[], str]

    def ready(self) -> bool:
        """Evaluates the predicate."""
        return self.test()

    def describe(self) -> str:
        """Calls the text function."""
        return self.text()


class RuleWait(Condition):
    """A Condition whose hang means that a rule of the chip is broken; the text names the rule."""


class Signal:
    """A step's result when control does something other than fall through, jump, or wait."""


REGROUP = Signal()
"""The step changed the warp's groups (a divergent branch, or lanes that exited), so a group must be chosen again."""


@dataclass
class Group:
    """Lanes of a warp that share a program counter but are not running. `wait`: what blocks them there, if anything."""

    pc: int
    mask: np.ndarray
    wait: Wait | None = None


class Diverging:
    """Lanes that execute steps together, divided into groups where they took different branches.

    Attributes:
        code: knows which registers are live where (`state.Executable`).
        active / num_active / all_active: lanes that execute the current step.  live: lanes that have not exited.
        groups: the other groups.  protected: slots that a write must merge because a waiting group still reads them.
    """

    __slots__ = ("active", "all_active", "code", "groups", "live", "num_active", "protected")

    code: Any
    active: np.ndarray
    num_active: int
    all_active: bool
    live: np.ndarray
    groups: list[Group]
    protected: frozenset[int]

    def resume(self, mask: np.ndarray) -> None:
        """Makes `mask` the active lanes and computes which registers the waiting groups still need."""
        self.active = mask
        self.num_active = int(np.count_nonzero(mask))
        self.all_active = self.num_active == mask.size
        protected = NOTHING
        for group in self.groups:
            live = self.code.live_at(group.pc)
            protected = protected | live if protected else live
        self.protected = protected

    def active_lanes(self) -> list[int]:
        """Indices of the active lanes, ascending."""
        return np.flatnonzero(self.active).tolist()

    def split(self, taken: np.ndarray, target: int, fallthrough: int) -> Signal:
        """Sends the lanes of `taken` to `target` and the other active lanes to `fallthrough`."""
        return self.scatter([(target, taken), (fallthrough, self.active & ~taken)])

    def split_once(self, taken: np.ndarray, count: int, target: int, fallthrough: int) -> int:
        """`split` where nothing is diverged, typically for an elected lane. Returns the next program counter."""
        rest = self.active & ~taken
        first, second = (target, taken, count), (fallthrough, rest, self.num_active - count)
        if fallthrough < target:
            first, second = second, first
        self.groups.append(Group(second[0], second[1]))
        pc, self.active, self.num_active = first
        self.all_active = False
        self.protected = self.code.live_at(second[0])
        return pc

    def scatter(self, parts: list[tuple[int, np.ndarray]]) -> Signal:
        """Replaces the running group by groups of (program counter, lanes)."""
        self.groups.extend(Group(pc, mask) for pc, mask in parts)
        self.num_active = 0
        return REGROUP

    def exit_lanes(self, mask: np.ndarray, next_pc: int) -> Signal:
        """Ends the lanes of `mask`; the rest of the group continues at `next_pc`."""
        self.live = self.live & ~mask
        rest = self.active & ~mask
        if rest.any():
            self.groups.append(Group(next_pc, rest))
        self.num_active = 0
        return REGROUP


def mask_bits(mask: np.ndarray) -> int:
    """Returns a 32-lane bool mask as an integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bits_mask(bits: int) -> np.ndarray:
    """Returns an integer as a 32-lane bool mask."""
    if bits == 0xFFFFFFFF:
        return ALL_LANES
    return np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little").view(bool)

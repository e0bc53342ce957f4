"""The 32 lanes of a warp: masks, groups of lanes, and the conditions that make a group wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


def mask_bits(mask: np.ndarray) -> int:
    """Returns a 32-lane bool mask as an integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bits_mask(bits: int) -> np.ndarray:
    """Returns an integer as a 32-lane bool mask."""
    if bits == 0xFFFFFFFF:
        return ALL_LANES
    return np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little").view(bool)

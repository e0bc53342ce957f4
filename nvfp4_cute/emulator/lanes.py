"""The 32 lanes of a warp: masks of them, the groups that they fall into, and what makes a group wait."""

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
    """Why a warp cannot go on. The step that returned it is called again once `ready()` is true."""

    def ready(self) -> bool:
        """True when trying again may succeed."""
        ...

    def describe(self) -> str:
        """What is missing, for the hang report."""
        ...


@dataclass
class Condition:
    """A Wait made of a predicate and a text (called when a hang is reported)."""

    test: Callable[[], bool]
    text: Callable[[], str]

    def ready(self) -> bool:
        """The predicate's value now."""
        return self.test()

    def describe(self) -> str:
        """The text now."""
        return self.text()


class RuleWait(Condition):
    """A Condition whose hang is a broken rule of the chip, which the text names."""


class Signal:
    """A step's way to say that control did something other than fall through, jump, or wait."""


REGROUP = Signal()
"""The step changed the warp's groups (a divergent branch, or lanes that exited): pick a group anew."""


@dataclass
class Group:
    """Lanes of a warp that share a program counter but are not running; `wait` if they are blocked there."""

    pc: int
    mask: np.ndarray
    wait: Wait | None = None


def mask_bits(mask: np.ndarray) -> int:
    """A 32-lane bool mask as an integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bits_mask(bits: int) -> np.ndarray:
    """An integer as a 32-lane bool mask."""
    if bits == 0xFFFFFFFF:
        return ALL_LANES
    return np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little").view(bool)

"""The machine: grid -> clusters -> CTAs -> warps, their scheduling, divergence, and hang detection.

One cluster runs at a time, all its CTAs together. Warps take turns; a warp runs until it blocks (a step returned a
`Wait`), exits, or used up its turn. Within a warp, lanes with the same program counter form a group; the group with
the lowest program counter runs first, and groups that meet merge. A group that blocks lets the others run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nvfp4_cute.emulator.memory import SHARED_BASE, GlobalMemory, Mbarrier, SharedMemory, TensorMemory
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code

LANES = 32
WARP_MASK = 0xFFFFFFFF
RANK_SHIFT = 24
"""A shared::cluster address is ``rank << 24 | offset``."""

OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW = 0x7E00_0000_0000_0000
"""Base of shared memory in the generic address space: no host address lies there."""

LOCAL_WINDOW = 0x7D00_0000_0000_0000
"""Base of per-lane local memory in the generic address space."""

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

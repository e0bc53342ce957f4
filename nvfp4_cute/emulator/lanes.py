"""A warp: 32 lanes, the groups that they fall into when they diverge, and what makes a group wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Cta
    from nvfp4_cute.emulator.modes import WarpOperations
    from nvfp4_cute.emulator.record.recorder import Track

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


class Warp:
    """32 lanes. Handlers use `regs` (through Builder), the active mask, and `cta`.

    Attributes:
        idx: warp index in the CTA.  active / num_active / all_active: lanes that execute the current step.
        live: lanes that have not exited.  groups: the other groups of a diverged warp.
        protected: slots that a write must merge because a waiting group still reads them.
        pending: state of a step that has begun and is blocked (a barrier already arrived at).
        polled: a step looked at memory that another warp may change (hint for spin detection).
        looks: by program counter after such a step, the registers there and what the machine's ``changes`` were.
        operations: asynchronous operations of the warp, where the mode keeps track of them.
        track: what a recorder notes about it.
        budgets: registers of a thread that the warp has set, one after the other.
    """

    __slots__ = (
        "active", "all_active", "budgets", "code", "cta", "done", "executed", "groups", "idx", "live", "local", "looks",
        "num_active", "operations", "pc", "pending", "polled", "protected", "regs", "track", "wait",
    )  # fmt: skip

    def __init__(self, cta: "Cta", idx: int, lanes: int):
        """A warp at the entry point with its first `lanes` lanes alive."""
        self.cta, self.idx, self.code = cta, idx, cta.launch.code
        self.live = ALL_LANES if lanes == LANES else np.arange(LANES) < lanes
        self.groups: list[Group] = []
        self.regs: list[Any] = self.code.builder.template.copy()
        self.local: np.ndarray | None = None
        self.pending: Wait | None = None
        self.operations: WarpOperations | None = None
        self.track: Track
        self.budgets: tuple[int, ...] = ()
        self.wait: Wait | None = None
        self.looks: dict[int, tuple[list[Any], int]] = {}
        self.polled = self.done = False
        self.pc = self.executed = 0
        self.resume(self.live)

    def resume(self, mask: np.ndarray) -> None:
        """Make `mask` the active lanes and work out which registers the waiting groups still need."""
        self.active = mask
        self.num_active = int(np.count_nonzero(mask))
        self.all_active = self.num_active == LANES
        protected = NOTHING
        for group in self.groups:
            live = self.code.live_at(group.pc)
            protected = protected | live if protected else live
        self.protected = protected

    def active_lanes(self) -> list[int]:
        """Indices of the active lanes, ascending."""
        return np.flatnonzero(self.active).tolist()

    def first_lane(self) -> int:
        """Lowest active lane."""
        return 0 if self.all_active else int(self.active.argmax())

    @contextmanager
    def as_if(self, lanes: np.ndarray) -> Iterator[None]:
        """Within the block the given lanes are the active ones."""
        saved = self.active, self.num_active, self.all_active
        self.active, self.num_active = lanes, int(np.count_nonzero(lanes))
        self.all_active = self.num_active == LANES
        try:
            yield
        finally:
            self.active, self.num_active, self.all_active = saved

    def active_bits(self) -> int:
        """Active mask as an integer, bit i = lane i."""
        return mask_bits(self.active)

    def split(self, taken: np.ndarray, target: int, fallthrough: int) -> Signal:
        """Send the lanes of `taken` to `target` and the other active lanes to `fallthrough`."""
        return self.scatter([(target, taken), (fallthrough, self.active & ~taken)])

    def split_once(self, taken: np.ndarray, count: int, target: int, fallthrough: int) -> int:
        """`split` of a warp that is not diverged (an elected lane, mostly): returns where to go on."""
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
        """Replace the running group by groups of (program counter, lanes)."""
        self.groups.extend(Group(pc, mask) for pc, mask in parts)
        self.num_active = 0
        return REGROUP

    def exit_lanes(self, mask: np.ndarray, next_pc: int) -> Signal:
        """End the lanes of `mask`; the rest of the group goes on at `next_pc`."""
        self.live = self.live & ~mask
        rest = self.active & ~mask
        if rest.any():
            self.groups.append(Group(next_pc, rest))
        self.num_active = 0
        return REGROUP

    def missing(self, members: int = 0xFFFFFFFF) -> np.ndarray | None:
        """Live lanes of `members` that are not active, or None: who must still arrive at a ``.sync`` instruction."""
        if not self.groups and self.num_active == LANES:
            return None
        lacking = self.live & ~self.active & bits_mask(members)
        return lacking if lacking.any() else None

    def clock(self, name: str) -> int:
        """Value of a clock-like special register: executed instructions, or nanoseconds for the global timer."""
        if name.startswith("%globaltimer"):
            value = time.perf_counter_ns()
        else:
            value = self.executed
            self.executed += 1
        if name.endswith("_hi"):
            return value >> 32
        return value if name in ("%clock64", "%globaltimer") else value & 0xFFFFFFFF


def mask_bits(mask: np.ndarray) -> int:
    """A 32-lane bool mask as an integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bits_mask(bits: int) -> np.ndarray:
    """An integer as a 32-lane bool mask."""
    if bits == 0xFFFFFFFF:
        return ALL_LANES
    return np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little").view(bool)

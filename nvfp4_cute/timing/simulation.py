"""The part of a replay that its events use: the time, a queue of actions, the GPU's memory, and notes of waits."""

from heapq import heappush
from typing import Any

from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.memory import Memory
from nvfp4_cute.timing.state import Cta, Span, Warp


class Simulation:
    """A discrete-event simulation of launches, from the point of view of its events (`replay.Replay` places and runs the warps).

    Attributes:
        constants: constants of the GPU.
        memory: memory of the GPU.
        now: time of the current action.
        heap: future actions: time, a number that keeps their order, function, arguments.
        timeline: whether spans of engines and pipes are kept.
        explained: whether spans of warps are kept.
        sm_cycles: cycles of an SM per byte of L2.
        issue_left: share of a scheduler that wgmma leaves.
        intervals: intervals of matrix instructions by shape, cached.
    """

    def __init__(self, constants: Constants, memory: Memory, *, timeline: bool, explained: bool):
        """Starts at time 0 without actions."""
        self.constants, self.memory = constants, memory
        self.timeline, self.explained = timeline, explained
        self.now = 0.0
        self.heap: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._sequence = 0
        self.sm_cycles = 1 / constants.sm_bandwidth
        self.issue_left = 1 - constants.wgmma_issue
        self.intervals: dict[Any, float] = {}

    def at(self, time: float, action: Any, *args: Any) -> None:
        """Schedules a call of `action` with its arguments at `time`."""
        self._sequence += 1
        heappush(self.heap, (time, self._sequence, action, args))

    def advance(self, warp: Warp, time: float) -> None:
        """Runs a warp from `time` until it blocks, ends, or another one is due."""
        raise NotImplementedError

    def trigger(self, cta: Cta) -> None:
        """Notes that a CTA allows the next launch to start."""
        raise NotImplementedError

    def wait(self, warp: Warp, time: float, done: float, cause: str) -> float:
        """Makes a warp wait from `time` until `done`, if that is later. Returns when the warp continues."""
        end = max(time, done)
        self.stall(warp, time, end, cause)
        return end

    def stall(
        self, warp: Warp, start: float, end: float, cause: str, by: Warp | None = None, since: float = 0.0
    ) -> None:
        """Notes a warp's time from `start` to `end` as a Span, unless it is empty."""
        if end > start and self.explained:
            warp.spans.append(Span(start, end, cause, by, since))

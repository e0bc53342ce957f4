"""What the events of a replay ask of it: the time, a queue of actions, the GPU's memory, and where waits are noted."""

from heapq import heappush
from typing import Any

from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.memory import Memory
from nvfp4_cute.timing.state import Cta, Span, Warp


class Simulation:
    """A discrete-event simulation of launches, as its events see it (`replay.Replay` places and runs the warps).

    Attributes:
        constants: of the GPU.  memory: of the GPU.
        now: the time of what is being done.
        heap: actions to come: time, a number that keeps their order, function, arguments.
        timeline: whether spans of engines and pipes are kept.  explained: whether spans of warps are.
        sm_cycles: that an SM takes for a byte of L2.  issue_left: share of a scheduler that wgmma leaves.
        intervals: of matrix instructions, by shape, as far as they were asked for.
    """

    def __init__(self, constants: Constants, memory: Memory, *, timeline: bool, explained: bool):
        """At time 0, with nothing to do."""
        self.constants, self.memory = constants, memory
        self.timeline, self.explained = timeline, explained
        self.now = 0.0
        self.heap: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._sequence = 0
        self.sm_cycles = 1 / constants.sm_bandwidth
        self.issue_left = 1 - constants.wgmma_issue
        self.intervals: dict[Any, float] = {}

    def at(self, time: float, action: Any, *args: Any) -> None:
        """Have an action called with its arguments when it is that time."""
        self._sequence += 1
        heappush(self.heap, (time, self._sequence, action, args))

    def advance(self, warp: Warp, time: float) -> None:
        """Run a warp from `time` until it blocks, ends, or another one is due."""
        raise NotImplementedError

    def trigger(self, cta: Cta) -> None:
        """A CTA lets the next launch start, as far as it is concerned."""
        raise NotImplementedError

    def wait(self, warp: Warp, time: float, done: float, cause: str) -> float:
        """A warp waits from `time` until something is done, if it is not; returns when the warp goes on."""
        end = max(time, done)
        self.stall(warp, time, end, cause)
        return end

    def stall(
        self, warp: Warp, start: float, end: float, cause: str, by: Warp | None = None, since: float = 0.0
    ) -> None:
        """A warp's time from `start` to `end`, as a Span has it; nothing where it has no length."""
        if end > start and self.explained:
            warp.spans.append(Span(start, end, cause, by, since))

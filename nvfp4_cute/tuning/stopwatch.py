"""Times calls on a GPU: CUDA events around one call on a cold L2, alternating competitors, rotating inputs.

Every call is captured in one CUDA graph per input set, to exclude host time. An empty interval is timed along with the
competitors, to show the cost of two events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

Call = Callable[[int], object]
"""Enqueues one computation on the input set with this index."""
EMPTY = "an empty interval"
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """Times of one competitor in us.

    Attributes:
        median: the reported time.
        low, high: first and ninth decile, the spread.
        count: number of timed calls.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, times_us: list[float]) -> "Sample":
        """Summarizes at least two times."""
        deciles = quantiles(times_us, n=10, method="inclusive")
        return cls(deciles[4], deciles[0], deciles[8], len(times_us))


def measure(
    calls: Mapping[str, Call], num_sets: int, *, rounds: int = 40, clean: bool = False
) -> dict[str, Sample]:
    """Times competitors on the current device, round after round, alternating which one begins.

    Args:
        calls: by name.
        num_sets: number of input sets; round i uses set i % num_sets.
        rounds: number of timed calls of each.
        clean: see :func:`cold_l2`.

    Returns:
        A sample per name, and one for ``EMPTY``.
    """
    replays = {name: [captured(call, index) for index in range(num_sets)] for name, call in calls.items()}
    nothing = [lambda: None] * num_sets
    order = [*replays.items(), (EMPTY, nothing)]
    flush = cold_l2(clean)
    intervals: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name, _ in order}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, of_set in order if number % 2 else reversed(order):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            begin.record()
            of_set[number % num_sets]()
            end.record()
            if number >= 0:
                intervals[name].append((begin, end))
        torch.cuda.synchronize()
    return {
        name: Sample.of([1e3 * begin.elapsed_time(end) for begin, end in pairs])
        for name, pairs in intervals.items()
    }


def captured(call: Call, index: int) -> Callable[[], None]:
    """Captures the call in a CUDA graph and returns its replay. A first, uncaptured run compiles and sets up."""
    call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(index)
    return graph.replay


def cold_l2(clean: bool = False) -> Callable[[], None]:
    """Returns a function that fills L2 with other data, and runs long enough for the host to enqueue the following calls.

    Args:
        clean: whether the data is only read. Otherwise it was just written, as is usual, and moves to memory while the timed
            call reads: on an H200, up to 7 us for 130 MB.
    """
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    other = torch.empty(4 * l2_bytes, dtype=torch.uint8, device="cuda")
    read = torch.zeros(l2_bytes if clean else 0, dtype=torch.float32, device="cuda")

    def fill() -> None:
        other.zero_()
        if clean:
            read.sum()

    return fill


# ---- timing like the competition -------------------------------------------------------------------------------
HARNESS_INPUTS = {"gemv": 1, "gemm": 50, "dual_gemm": 50, "grouped_gemm": 15}
"""Number of calls between two events, each on its own inputs, by operation."""


def measure_like_harness(call: Call, num_inputs: int, *, repeats: int = 100, seconds: float = 10.0) -> Sample:
    """Times a call like the competition's harness: eager, L2 cleared once, then ``num_inputs`` calls back to back.

    Stops after ``repeats``, after ``seconds`` of measured time, or when the standard error is below 0.1 % of the mean. The
    harness reports means; this function returns the median and the deciles of the same repeats.
    """
    for index in range(num_inputs):
        call(index)
    flush = cold_l2()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(20):  # the harness clears with 62 GiB, so its queue is full before the clock starts
            flush()
        begin.record()
        for index in range(num_inputs):
            call(index)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / num_inputs)
        if len(times) > 2 and (_settled(times) or sum(times) * num_inputs > 1e6 * seconds):
            break
    return Sample.of(times)


def _settled(times: list[float]) -> bool:
    values = torch.tensor(times, dtype=torch.float64)
    return bool(values.std() / len(times) ** 0.5 < 1e-3 * values.mean())

"""Modelled launches as a timeline for Perfetto or chrome://tracing: the trace-event format, JSON."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.timing.result import ChainTiming, Lane, Timing

BUCKET_US = 0.25
"""Width of a step in the curve of device memory's throughput."""

_COLORS = {
    "compute": "thread_state_running",
    "memory data": "terrible",
    "L2 data": "bad",
    "free stage": "grey",
    "MMA": "good",
    "epilogue": "yellow",
    "launch": "white",
}


Modelled = Timing | ChainTiming


def events(*timings: Modelled) -> Iterator[dict[str, Any]]:
    """Yields trace events: one process per SM with a row for each warp, its copy engine and its matrix pipe.

    Process 0 is the GPU: throughput of device memory, and the launches. Each timing begins at the end of the previous
    one.

    Raises:
        ValueError: a timing was made without its timeline, or there is none.
    """
    if not timings or not all(timing.lanes for timing in timings):
        raise ValueError("this timing has no timeline: replay the launch with timeline=True")
    total = sum(timing.us for timing in timings)
    yield _name("process_name", 0, 0, f"{timings[0].constants.name}: {total:.2f} us (modelled)")
    yield _name("thread_name", 0, 1, "launches")
    rows: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    start = 0.0
    for timing in timings:
        yield from _launches(timing, start)
        yield from _throughput(timing, start)
        yield from _lanes(timing, start, rows)
        start += timing.us


def _launches(timing: Modelled, start: float) -> Iterator[dict[str, Any]]:
    """Yields one span per launch, from `start` in microseconds."""
    for launch in timing.launches if isinstance(timing, ChainTiming) else (timing,):
        yield {
            "ph": "X", "pid": 0, "tid": 1, "name": short_name(launch.kernel), "cat": "launch",
            "ts": round(start, 4), "dur": round(launch.us, 4), "args": {"kernel": launch.kernel},
        }  # fmt: skip
        start += launch.us


def _lanes(
    timing: Modelled, start: float, rows: dict[int, dict[tuple[str, int], int]]
) -> Iterator[dict[str, Any]]:
    """Yields the spans of every row, and names of rows that no earlier timing had. `rows`: row numbers by SM and lane."""
    us = timing.constants.us
    for lane in sorted(timing.lanes, key=lambda lane: (lane.sm, lane.order, lane.name)):
        pid, own, key = lane.sm + 1, rows[lane.sm], (lane.name, lane.order)
        if key not in own:
            if not own:
                yield _name("process_name", pid, 0, f"SM {lane.sm}")
                yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
            own[key] = len(own) + 1
            yield _name("thread_name", pid, own[key], lane.name)
        for begin, end, cause in _merged(lane):
            event: dict[str, Any] = {
                "ph": "X", "pid": pid, "tid": own[key], "name": cause, "cat": "stall" if cause != "compute" else "run",
                "ts": round(start + us(begin), 4), "dur": round(us(end - begin), 4),
            }  # fmt: skip
            if cause in _COLORS:
                event["cname"] = _COLORS[cause]
            yield event


def write(path: Path, *timings: Modelled) -> None:
    """Writes the timeline of consecutive launches; compressed if the name ends in .gz.

    Raises:
        ValueError: see `events`.
    """
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events(*timings))}, separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), 6))
    else:
        path.write_text(text)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _throughput(timing: Modelled, start: float) -> Iterator[dict[str, Any]]:
    buckets: dict[int, int] = defaultdict(int)
    for time, nbytes in timing.memory_log:
        buckets[int(timing.constants.us(time) / BUCKET_US)] += nbytes
    for step in range(max(buckets, default=0) + 2):
        rate = buckets.get(step, 0) / (BUCKET_US * 1e6)
        yield {
            "ph": "C", "pid": 0, "name": "device memory", "ts": start + step * BUCKET_US, "args": {"TB/s": round(rate, 3)},
        }  # fmt: skip


def _merged(lane: Lane) -> Iterator[tuple[float, float, str]]:
    """Yields spans, with neighbours of one cause joined."""
    current: list[Any] = []
    for span in lane.spans:
        if current and current[2] == span.cause and span.start <= current[1] + 1:
            current[1] = max(current[1], span.end)
            continue
        if current:
            yield current[0], current[1], current[2]
        current = [span.start, span.end, span.cause]
    if current:
        yield current[0], current[1], current[2]

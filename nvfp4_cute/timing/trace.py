"""Modelled launches as a timeline for Perfetto or chrome://tracing: the trace-event format, JSON."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvfp4_cute.timing.result import ChainTiming, Lane, Timing

BUCKET_US = 0.25
"""Width of a step of the curve of device memory's throughput."""

_COLORS = {
    "compute": "thread_state_running",
    "memory data": "terrible",
    "L2 data": "bad",
    "free stage": "grey",
    "MMA": "good",
    "epilogue": "yellow",
    "launch": "white",
}


def events(timing: Timing | ChainTiming) -> Iterator[dict[str, Any]]:
    """Trace events: a process for each SM with a row for each warp, its copy engine and its matrix pipe.

    Process 0 is the GPU: throughput of device memory.

    Raises:
        ValueError: the timing was made without its timeline.
    """
    if not timing.lanes:
        raise ValueError("this timing has no timeline: replay the launch with timeline=True")
    us = timing.constants.us
    yield _name("process_name", 0, 0, f"{timing.constants.name}: {timing.us:.2f} us (modelled)")
    yield from _throughput(timing)
    rows: dict[int, int] = defaultdict(int)
    for lane in sorted(timing.lanes, key=lambda lane: (lane.sm, lane.order, lane.name)):
        pid = lane.sm + 1
        if not rows[pid]:
            yield _name("process_name", pid, 0, f"SM {lane.sm}")
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        rows[pid] += 1
        yield _name("thread_name", pid, rows[pid], lane.name)
        for start, end, cause in _merged(lane):
            event: dict[str, Any] = {
                "ph": "X", "pid": pid, "tid": rows[pid], "name": cause, "cat": "stall" if cause != "compute" else "run",
                "ts": round(us(start), 4), "dur": round(us(end - start), 4),
            }  # fmt: skip
            if cause in _COLORS:
                event["cname"] = _COLORS[cause]
            yield event


def write(timing: Timing | ChainTiming, path: Path) -> None:
    """Write the timeline; compressed if the name ends in .gz.

    Raises:
        ValueError: the timing was made without its timeline.
    """
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events(timing))}, separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), 6))
    else:
        path.write_text(text)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _throughput(timing: Timing | ChainTiming) -> Iterator[dict[str, Any]]:
    buckets: dict[int, int] = defaultdict(int)
    for time, nbytes in timing.memory_log:
        buckets[int(timing.constants.us(time) / BUCKET_US)] += nbytes
    for step in range(max(buckets, default=0) + 2):
        rate = buckets.get(step, 0) / (BUCKET_US * 1e6)
        yield {
            "ph": "C", "pid": 0, "name": "device memory", "ts": step * BUCKET_US, "args": {"TB/s": round(rate, 3)},
        }  # fmt: skip


def _merged(lane: Lane) -> Iterator[tuple[float, float, str]]:
    """Spans with neighbours of the same cause joined."""
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

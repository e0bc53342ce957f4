"""How far predictions are from what was measured: what files of ``blind`` say, without what measures or models."""

import json
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

RANKED_GAP = 1.10
"""Two measured times that differ by more must be predicted in the same order."""
PREDICTIONS = tuple(
    Path(__file__).parent / "results" / name
    for name in (
        "blind_h100.json",
        "blind_h100_second.json",
        "blind_h100_third.json",
        "blind_h100_fourth.json",
        "blind_h100_fifth.json",
        "blind_h100_sixth.json",
    )
)
"""Committed files, oldest first."""


def newest() -> dict[str, Any]:
    """The newest of them that were measured; without times where none was."""
    found = [json.loads(path.read_text()) for path in PREDICTIONS if path.exists()]
    return next((record for record in reversed(found) if record.get("measured")), {"us": {}, "measured": {}})


def errors_of(record: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured time less one, by call, of those that were measured."""
    return {name: record["us"][name] / us - 1 for name, us in record["measured"].items()}


def summary_of(record: dict[str, Any]) -> tuple[float, float, float]:
    """Sizes of errors: median, within which nine in ten are, worst.

    Raises:
        ValueError: nothing was measured.
    """
    sizes = sorted(map(abs, errors_of(record).values()))
    if not sizes:
        raise ValueError("nothing of these predictions was measured")
    return median(sizes), sizes[-(-9 * len(sizes) // 10) - 1], sizes[-1]


def wrong_pairs(record: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """Pairs of calls predicted in the wrong order, and how many pairs there are whose measured times differ by `RANKED_GAP`."""
    times, us = record["measured"], record["us"]
    gaps = [
        (one, other)
        for one, other in combinations(times, 2)
        if max(times[one], times[other]) > RANKED_GAP * min(times[one], times[other])
    ]
    return [(a, b) for a, b in gaps if (times[a] < times[b]) != (us[a] < us[b])], len(gaps)

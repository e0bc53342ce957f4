"""Errors of predictions, computed from the committed files without modelling or measuring."""

import json
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

RANKED_GAP = 1.10
"""Two measured times that differ by more must be predicted in the same order."""
PREDICTIONS = {
    name: Path(__file__).parents[1] / "results" / f"blind_h100{suffix}.json"
    for name, suffix in (
        ("first", ""), ("second", "_second"), ("third", "_third"), ("fourth", "_fourth"), ("fifth", "_fifth"),
        ("sixth", "_sixth"),
    )
}  # fmt: skip
"""Committed sets of calls that were predicted together, oldest first. No constant of the model was set from the times of a set
before they were predicted."""


def committed(calls: str) -> dict[str, Any]:
    """Returns the predictions of a set and the times measured later, by call."""
    return json.loads(PREDICTIONS[calls].read_text())


def newest() -> dict[str, Any]:
    """Returns the newest set."""
    return committed(next(reversed(PREDICTIONS)))


def errors_of(record: dict[str, Any]) -> dict[str, float]:
    """Returns predicted over measured time minus one, for every measured call."""
    return {name: record["us"][name] / us - 1 for name, us in record["measured"].items()}


def summary_of(record: dict[str, Any]) -> tuple[float, float, float]:
    """Returns magnitudes of errors: median, bound of nine in ten, worst.

    Raises:
        ValueError: nothing was measured.
    """
    sizes = sorted(map(abs, errors_of(record).values()))
    if not sizes:
        raise ValueError("nothing of these predictions was measured")
    return median(sizes), sizes[-(-9 * len(sizes) // 10) - 1], sizes[-1]


def wrong_pairs(record: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """Returns pairs of calls predicted in the wrong order, and the number of pairs with times `RANKED_GAP` apart."""
    times, us = record["measured"], record["us"]
    gaps = [
        (one, other)
        for one, other in combinations(times, 2)
        if max(times[one], times[other]) > RANKED_GAP * min(times[one], times[other])
    ]
    return [(a, b) for a, b in gaps if (times[a] < times[b]) != (us[a] < us[b])], len(gaps)

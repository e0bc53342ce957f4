"""Times of today against those of an earlier `eval --json`: which case became slower."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nvfp4_cute.competition.report import Row


def compare(found: Sequence[Row], baseline: Path, tolerance_percent: float) -> list[Row]:
    """Rows with the baseline's times beside them.

    Args:
        baseline: what `eval --json` printed.
        tolerance_percent: how much slower counts as slower.

    Raises:
        ValueError: the file holds no such result, none of these cases, or times of another kind.
    """
    try:
        content = json.loads(baseline.read_text(encoding="utf-8"))
        times = {case["name"]: (case["mean"], case["source"]) for case in content["cases"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--baseline {baseline}: not what `eval --json` prints ({error!r})") from None
    if not any(row.name in times for row in found):
        raise ValueError(
            f"--baseline {baseline}: has none of the cases {', '.join(row.name for row in found)}"
        )
    compared = []
    for row in found:
        before_us, source = times.get(row.name, (None, row.result.source))
        if before_us is not None and row.mean_us is not None and source != row.result.source:
            raise ValueError(
                f"--baseline {baseline}: {row.name} was {source} there and is {row.result.source} here; times of two kinds "
                "say nothing of each other"
            )
        compared.append(replace(row, baseline_us=before_us, tolerance_percent=tolerance_percent))
    return compared

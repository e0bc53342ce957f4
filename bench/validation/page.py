"""Tables of ``bench/results/timing_model.md``, from files that ``bench --predict``, ``bench --against`` and ``prove`` wrote.

python -m nvfp4_cute.bench.validation.page
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from nvfp4_cute.bench.foreign import page as foreign
from nvfp4_cute.bench.validation import published
from nvfp4_cute.bench.validation.errors import (
    PREDICTIONS,
    committed,
    errors_of,
    newest,
    summary_of,
    wrong_pairs,
)

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "timing_model.md"
PROVED = {"H100 SXM": "h100_sxm", "H200": "h200"}
"""In the names of files of `prove`."""
FAR = 0.15
"""Errors beyond this are listed."""


def blind_line(title: str, record: dict[str, Any]) -> str:
    """Returns Markdown: the errors of a set of predictions."""
    who = f"{record['made']}, sources {record['sources']}"
    if not record["measured"]:
        return f"| {title}: {len(record['us'])} | {who} | not measured yet | | | |"
    middle, nine, worst = summary_of(record)
    wrong, gaps = wrong_pairs(record)
    cells = f"{100 * middle:.1f} % | {100 * nine:.0f} % | {100 * worst:.0f} %"
    return f"| {title}: {len(record['measured'])} | {who} | {cells} | {len(wrong)} of {gaps} |"


def kinds(record: dict[str, Any]) -> str:
    """Returns Markdown: errors by kind of call."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, error in errors_of(record).items():
        found[re.sub(r" (\d+( x \d+)*$|--.*)", "", name)].append(100 * error)
    lines = ["| kind | calls | median error | from | to |", "|---|---:|---:|---:|---:|"]
    for kind, errors in found.items():
        lines.append(
            f"| {kind} | {len(errors)} | {median(errors):+.0f} % | {min(errors):+.0f} % | {max(errors):+.0f} % |"
        )
    return "\n".join(lines)


def far_ones(record: dict[str, Any]) -> str:
    """Returns Markdown: calls with an error over `FAR`, and pairs in the wrong order."""
    errors = errors_of(record)
    listed = [
        f"| {name} | {record['measured'][name]:.2f} | {record['us'][name]:.2f} | {100 * error:+.0f} % |"
        for name, error in sorted(errors.items(), key=lambda item: -abs(item[1]))
        if abs(error) > FAR
    ]
    if not listed:
        return f"None is off by over {100 * FAR:.0f} %."
    return "\n".join(
        [f"| over {100 * FAR:.0f} % | measured us | predicted us | error |", "|---|---:|---:|---:|", *listed]
    )


def proved_calls(gpu: str) -> dict[str, tuple[float, float]]:
    """Returns (measured, modelled) us of calls that `prove` measured on a GPU before they were modelled, by name.

    Includes only calls whose named kernels are those that ran.
    """
    predicted, proved = (
        json.loads((RESULTS / f"{kind}-{PROVED[gpu]}.json").read_text()) for kind in ("predictions", "prove")
    )
    found: dict[str, tuple[float, float]] = {}
    for timed in proved["timed"] if predicted["made"] > proved["made"] else ():
        known = predicted["cases"].get(timed["case"])
        if known and known["us"] and timed["us"] and set(known["kernels"]) == set(timed["kernel_names"]):
            found[timed["case"]] = (timed["clean_us"] or timed["us"], known["us"])
    return found


def proved() -> str:
    """Returns Markdown: `proved_calls` of both GPUs next to each other, and their errors."""
    calls = {gpu: found for gpu in PROVED if (found := proved_calls(gpu))}
    if not calls:
        return "No call is left today."
    cell = lambda measured, modelled: (
        f"{measured:.2f} | {modelled:.2f} | {100 * (modelled / measured - 1):+.0f} %"
    )
    lines = ["| call | " + " | ".join(f"{gpu}, us | modelled us | error" for gpu in calls) + " |"]
    lines.append("|---|" + "---:|" * 3 * len(calls))
    for name in dict.fromkeys(name for found in calls.values() for name in found):
        cells = (cell(*found[name]) if name in found else "| |" for found in calls.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for gpu, found in calls.items():
        record = {
            "measured": {n: m for n, (m, _) in found.items()},
            "us": {n: p for n, (_, p) in found.items()},
        }
        middle, nine, worst = (100 * error for error in summary_of(record))
        lines += [
            "",
            f"{gpu}: {len(found)} calls, median error {middle:.1f} %, nine in ten within {nine:.0f} %, worst {worst:.0f} %.",
        ]
    return "\n".join(lines)


def tables() -> list[str]:
    """Returns the page's tables, in its order; those by kind are of the newest set."""
    lines = [blind_line(name, committed(name)) for name in PREDICTIONS]
    by_others = [published.table(), foreign.published_table(RESULTS / "b200_foreign.json")]
    return [proved(), "\n".join(lines), kinds(newest()), far_ones(newest()), *by_others]


if __name__ == "__main__":
    print("\n\n".join(tables()))

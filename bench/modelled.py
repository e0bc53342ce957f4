"""Times of cases on a GPU that need not be present: the launch is recorded on the emulator and replayed."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from nvfp4_cute.bench import ours, processes, provenance
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.bench.report import MODELLED, Time, Timer
from nvfp4_cute.bench.validation.errors import newest, summary_of
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.gpus.power import sustained_us
from nvfp4_cute.gpus.targets import Target, lookup
from nvfp4_cute.roofline.modelled import modelled_times

VALIDATION = Path(__file__).parent / "results" / "timing_model.md"
MOST_FLOPS = 2e13
"""16384^3 is 8.8e12: some tiles of each CTA are replayed (``roofline.modelled``), all of one CTA executed, in minutes."""
FEW_FLOPS, FEW_FLOPS_BY_WARPS = 1e11, 1e9
"""Operations of a launch below which every CTA is executed, in seconds.

Their time is the mean over layouts of memory, which changes it by less than a percent. For larger launches, and for
gemv, one CTA stands for all equal ones. The second number is for GPUs whose warps multiply themselves, with
``mma.sync``, which have twenty times the events.
"""
MULTIPLIED_BY_WARPS, EVENTS_OF_WARPS = ("sm_80", "sm_86", "sm_89", "sm_120a", "sm_121a"), 20


def time_case(case: Case, target: Target) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """Returns the modelled time of our kernel, or why there is none."""
    if case.work.flops > MOST_FLOPS:
        return None, {}, {ours.NAME: f"not modelled: more than {MOST_FLOPS / 1e9:.0f} GFLOP"}
    few = FEW_FLOPS_BY_WARPS if target.arch in MULTIPLIED_BY_WARPS else FEW_FLOPS
    by_representatives = case.operation == "gemv" or case.work.flops > few
    try:
        timings = modelled_times(
            lambda backend: ours.prepare(case, empty_operands(case), backend).run(),
            target,
            all_layouts=not by_representatives,
            by_representatives=by_representatives,
        )
    except (UnsupportedProblem, UnsupportedTarget) as error:
        return None, {}, {ours.NAME: str(error)}
    us = sum(mean(timing.us_by_layout) for timing in timings)
    repeated = [sustained_us(timing, target) for timing in timings]
    known = [of_one for of_one in repeated if of_one is not None]
    sustained = max(us, sum(known)) if known else None
    return Time(us, MODELLED, sustained_us=sustained), {}, {}


def record(piece: tuple[Case, str]) -> dict[str, Any]:
    """Returns plain data of a case on a GPU.

    The data are its time in the form of ``Time``, or None and the reason; the seconds that modelling took; and the
    digest of the sources.
    """
    case, target_name = piece
    began = time.monotonic()
    found, _, remarks = time_case(case, lookup(target_name))
    return {
        "time": None if found is None else vars(found),
        "remarks": remarks,
        "seconds": round(time.monotonic() - began, 1),
        "sources": provenance.digest(),
    }


def records(
    pieces: Iterable[tuple[Case, Target]],
    *,
    jobs: int = 1,
    results: Path | None = None,
    label: str,
    longest_first: bool = True,
) -> dict[str, dict[str, Any]]:
    """Returns the results of ``record`` for cases on GPUs, by their keys; several at a time.

    Args:
        jobs, results, label: see ``processes.records``.
        longest_first: ends soonest; otherwise most cases end early, for a run that may be stopped.
    """
    ordered = sorted(pieces, key=lambda piece: expected_work(*piece), reverse=longest_first)
    wanted = {key_of(case, target): (case, target.name) for case, target in ordered}
    return processes.records(record, wanted, jobs=jobs, results=results, label=label)


def key_of(case: Case, target: Target) -> str:
    """Returns the key of a case on a GPU in a file of results."""
    return f"{target.name}/{case}"


def expected_work(case: Case, target: Target) -> float:
    """Returns the expected modelling time of a case, in arbitrary units, for ordering."""
    return case.work.flops * (EVENTS_OF_WARPS if target.arch in MULTIPLIED_BY_WARPS else 1)


def timer(known: Mapping[str, dict[str, Any]], target: Target) -> Timer:
    """Returns a timer with the recorded times of cases on a GPU."""

    def time_of(case: Case) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
        found = known[key_of(case, target)]
        return None if found["time"] is None else Time(**found["time"]), {}, found["remarks"]

    return time_of


def made_by(known: Mapping[str, dict[str, Any]], cases: Sequence[Case], target: Target) -> list[str]:
    """Returns notes: the sources that modelled the times, and the rows with sources other than the most frequent ones."""
    by_sources: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        by_sources[known[key_of(case, target)].get("sources", "unknown")].append(str(case))
    most = max(by_sources, key=lambda sources: len(by_sources[sources]))
    commit = f", commit {provenance.commit() or 'unknown'}" if most == provenance.digest() else ""
    return [f"modelled by sources {most}{commit}."] + [
        f"by older sources {sources}: {', '.join(names)}."
        for sources, names in by_sources.items()
        if sources != most
    ]


def stated_error() -> str:
    """Returns a statement of the model's error, from its committed comparisons with an H200 and an H100."""
    text = VALIDATION.read_text() if VALIDATION.exists() else ""
    found = re.search(r"^(\d+) cases\. Median error (.*?%), worst (.*?%)", text, re.M)
    known = [f"{found[2]} over {found[1]} launches on an H200 (worst {found[3]})"] if found else []
    predicted = newest()
    if predicted["measured"]:
        middle = 100 * summary_of(predicted)[0]
        known.append(
            f"{middle:.1f} % over the last {len(predicted['measured'])} calls that were predicted before an H100 ran them"
        )
    comparison = f"the model's median error is {' and '.join(known)}; " if known else ""
    return f"{comparison}it was never measured on Blackwell: bench/results/timing_model.md"

"""`nvfp4-cute bench`: selects cases, target, and source of times; prints, draws, and saves, or explains configs."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent

from nvfp4_cute.bench import cases, report
from nvfp4_cute.bench.report import Report
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch.tuned import Request
from nvfp4_cute.planning import choose
from nvfp4_cute.planning.arch import mmas_of
from nvfp4_cute.planning.arch.base import check_pair
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline.plot import bars

RESULTS = Path(__file__).parent / "results"
PEER_NOTE = (
    "best peer: torch on the same values, in the same run: a loop over the groups in a CUDA graph (bf16, fp8, NVFP4), "
    "bf16 grouped_mm; for a B200 the best published competition entry, for other GPUs the figure that is named."
)
EXPLANATION_NOTE = (
    "The config of each case is that of its first line. Cycles are estimates of an SM's, not measured."
)
SOL_NOTE = "SOL us: the physical speed of light, computed: the longest of bytes / bandwidth, FLOP / rate, an empty launch."


def run(
    chosen: list[cases.Case],
    *,
    command: Sequence[str] = (),
    target_name: str | None = None,
    like_harness: bool = False,
    as_json: bool = False,
    plot: Path | None = None,
    save: bool = False,
    jobs: int | None = None,
    results: Path | None = None,
) -> int:
    """Prints the benchmark of a target. Returns 0.

    Args:
        chosen: cases to time.
        command: words of the command line, for the page that ``save`` writes.
        target_name: GPU; by default that of this machine if known, else B200.
        like_harness: time eager calls like the competition's harness (only on a GPU).
        as_json: print JSON instead of a table.
        plot: also write a bar chart to this file.
        save: also write the page of the target to ``bench/results``.
        jobs: processes that model cases; default 1.
        results: file that stores modelled times, and supplies them if it has them.

    Raises:
        ValueError: ``like_harness`` without the GPU, or ``jobs`` or ``results`` with it.
        UnsupportedTarget: an unknown target.
        UnsupportedProblem: the GPU does not multiply this pair of formats.
    """
    here = targets.detect()
    target = targets.lookup(target_name) if target_name else here or targets.B200
    for formats in dict.fromkeys(case.formats for case in chosen if case.operation != "w4a16"):
        check_pair(target.arch, formats, mmas_of(target.arch))
    measured = target is here
    if like_harness and not measured:
        raise ValueError(f"the harness's way of timing needs a GPU, and this machine has no {target.name}")
    if measured and (jobs or results):
        raise ValueError(f"{target.name} is in this machine and is measured: leave out --jobs and --results")
    notes: tuple[str, ...] = (SOL_NOTE,)
    if measured:
        timer = _measured(like_harness)
    else:
        timer, made_by = _modelled(chosen, target, jobs or 1, results)
        notes = (*made_by, *notes)
    rows = report.make_rows(chosen, target, timer)
    if any(row.peers for row in rows):
        notes = (*notes, PEER_NOTE)
    result = Report(
        target,
        rows,
        _heading(target, measured, like_harness),
        notes,
        _command(target, command, like_harness),
    )
    print(result.json() if as_json else result.text())
    if plot:
        draw(plot, result)
    if save:
        page = report.save(result, RESULTS)
        print(f"saved to {page}")
        drawn = [row for row in rows if row.case.suite == "competition"]
        if drawn and page.with_suffix(".png").exists():  # a page with a picture keeps it up to date
            draw(page.with_suffix(".png"), replace(result, rows=drawn))
    return 0


def explain(chosen: list[cases.Case], *, target_name: str | None = None) -> int:
    """Prints why the config of every grouped case was chosen, without timing. Returns 0.

    Args:
        chosen, target_name: see :func:`run`.

    Raises:
        ValueError: no grouped case.
        UnsupportedTarget: an unknown target, or one without a kernel.
        UnsupportedProblem: the target does not multiply this pair of formats.
    """
    target = targets.lookup(target_name) if target_name else targets.detect() or targets.B200
    chosen = [case for case in chosen if case.operation == "grouped_gemm"]
    if not chosen:
        raise ValueError("no chosen case is a grouped GEMM; name others, or leave out --containing")
    print(f"{EXPLANATION_NOTE}\n")
    for case in chosen:
        print(
            f"{case} on {target.name} ({target.arch})\n{indent(_explanation(case, target), '  ')}\n",
            flush=True,
        )
    return 0


def _explanation(case: cases.Case, target: Target) -> str:
    """Returns why the config was chosen: by tuning, or by estimate."""
    n, k = case.sizes[0][1:]
    mean = -(-sum(m for m, _, _ in case.sizes) // len(case.sizes))
    is_list = case.form == "list"
    sizes = case.sizes if is_list else ((mean, n, k),) * len(case.sizes)
    a_format, b_format = case.formats
    dtype = cases.RESULT_DTYPES[case.out]
    problem = GroupedProblem(sizes, case.form, dtype, a_format=a_format, b_format=b_format)
    found = tuned.load(Request.of(problem, target.gpu))
    first = ""
    if found is not None:
        us = found.times_us[found.config]
        first = f"{found.config.to_name()}: tuned, {us:.2f} us {found.kind}; chosen without that:\n"
    if not is_list:
        return first + _choice_for_mean(problem, target)
    return first + choose.explain(problem, target.arch, target.num_sms)


def _choice_for_mean(problem: GroupedProblem, target: Target) -> str:
    mean = problem.sizes[0]
    config = choose.choose_config(problem, target.arch, target.num_sms)
    return f"{config.to_name()}: only the device knows the sizes; chosen for groups of their mean size, {mean[0]} rows"


def _command(target: Target, command: Sequence[str], like_harness: bool) -> str:
    """Returns the command line that makes the page."""
    words = ["nvfp4-cute", "bench", *command]
    words += ["--target", target.name, *["--like-harness"] * like_harness, "--save"]
    return shlex.join(words)


def _measured(like_harness: bool) -> report.Timer:
    from nvfp4_cute.bench.measured import time_case, time_like_harness

    return time_like_harness if like_harness else time_case


def _modelled(
    chosen: list[cases.Case], target: Target, jobs: int, results: Path | None
) -> tuple[report.Timer, list[str]]:
    """Returns a timer of modelled times, and notes on their sources."""
    from nvfp4_cute.bench import modelled

    pieces = [(case, target) for case in chosen]
    known = modelled.records(pieces, jobs=jobs, results=results, label=target.name)
    return modelled.timer(known, target), modelled.made_by(known, chosen, target)


def _heading(target: Target, measured: bool, like_harness: bool) -> str:
    if measured:
        import torch

        way = (
            "the harness's way: eager calls back to back"
            if like_harness
            else "CUDA events, graph replay, cold L2"
        )
        how = f"measured ({way}; median) with torch {torch.__version__}, CUDA {torch.version.cuda}"
    else:
        from nvfp4_cute.bench.modelled import stated_error

        how = f"modelled, not measured ({stated_error()})"
    return f"{target.name} ({target.arch}): times are {how}."


def draw(path: Path, result: Report) -> None:
    """Draws the share of the speed of light that our kernels and the best peers reach, on a linear axis.

    Raises:
        ValueError: nothing was timed, or matplotlib is not installed.
    """
    timed = [row for row in result.rows if row.time is not None]
    if not timed:
        raise ValueError("there is no time to draw")
    share = lambda row, time: None if time is None else 100 * row.floor.us / time.us
    kind = timed[0].time.kind
    values = {
        f"ours ({kind})": [share(row, row.time) for row in timed],
        "best peer": [share(row, row.best_peer and row.best_peer[1]) for row in timed],
    }
    labels = [f"{row.case}: {row.time.us:.3g} us" for row in timed]
    bars(path, f"{result.target.name}, {kind}: longer is faster", labels, values, unit="% of speed of light")

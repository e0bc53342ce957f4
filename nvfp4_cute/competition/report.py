"""Results of a submission as a table and as JSON: times and the speed of light, marked measured or modelled."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvfp4_cute.competition.protocol import (
    EMULATED_ARCH,
    STATISTICS,
    TIMED_MODES,
    CaseResult,
    Results,
    geometric_mean,
    parse_case,
)
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS, MODEL_ERROR
from nvfp4_cute.problems.registry import Problem
from nvfp4_cute.roofline.speed_of_light import Work, competition_us
from nvfp4_cute.terminal import text_table

NS_PER_US = 1e3
# By source of a time.
NOTES = {
    "modelled": f"modelled: the submission's own kernels on a {DEFAULT_TARGETS[EMULATED_ARCH].name}, one after the other, "
    f"without the gaps between launches that a harness times, too, and without torch's kernels. {MODEL_ERROR}",
    "not timed": "not timed: no kernel was launched that the timing model sees, or the genuine harness ran on the emulator",
}


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        name: name of the case.
        result: the harness's result.
        sol_us: speed of light in microseconds, published or by the same formula; None if unknown.
        work: traffic and operations of the case; None if unknown.
    """

    name: str
    result: CaseResult
    sol_us: float | None
    work: Work | None

    @property
    def mean_us(self) -> float | None:
        """Mean duration in microseconds."""
        return self.result.stats.mean / NS_PER_US if self.result.stats else None

    @property
    def percent_of_sol(self) -> float | None:
        """Speed of light over mean, in percent."""
        return 100 * self.sol_us / self.mean_us if self.sol_us and self.mean_us else None

    @property
    def gb_per_s(self) -> float | None:
        """Least traffic over mean duration."""
        return self.work.bytes / self.mean_us / 1e3 if self.work and self.mean_us else None

    @property
    def tflop_per_s(self) -> float | None:
        """Operations over mean duration."""
        return self.work.flops / self.mean_us / 1e6 if self.work and self.mean_us else None


def rows(problem: Problem | None, results: Results) -> list[Row]:
    """Returns one row per case that the harness reached. For problems of others only the lines of the cases are known."""
    return [_row(problem, result) for result in results.cases]


def _row(problem: Problem | None, result: CaseResult) -> Row:
    if problem is None:
        return Row(result.spec, result, None, None)
    case = problem.case_type.from_arguments(**parse_case(result.spec))
    published = {known.name: known.sol_us for known in problem.benchmarks}
    return Row(case.name, result, published.get(case.name) or competition_us(case.work), case.work)


def geomean_us(found: Sequence[Row]) -> float | None:
    """Returns the score, or None unless every case was timed."""
    means = [row.mean_us for row in found]
    return geometric_mean(mean for mean in means if mean) if means and all(means) else None


def text(mode: str, results: Results, found: Sequence[Row], remarks: Sequence[str] = ()) -> str:
    """Returns a table, a line for each failure, and ``remarks`` about the timing below the table."""
    header, cells = ["case", "status"], [[row.name, "pass" if row.result.passed else "FAIL"] for row in found]
    if mode in TIMED_MODES:
        header += [
            "source",
            "mean us",
            "std",
            "err",
            "best",
            "worst",
            "SOL us",
            "% of SOL",
            "GB/s",
            "TFLOP/s",
        ]
        for row, line in zip(found, cells, strict=True):
            line += [row.result.source, *_times(row), _number(row.sol_us, 3), _number(row.percent_of_sol, 1)]
            line += [_number(row.gb_per_s, 0), _number(row.tflop_per_s, 1)]
    lines = [text_table(header, cells, left=3)] if cells else []
    score = geomean_us(found)
    if score is not None:
        floor = (
            geometric_mean(row.sol_us for row in found if row.sol_us)
            if all(r.sol_us for r in found)
            else None
        )
        sources = ", ".join(sorted({row.result.source for row in found}))
        beside = f", speed of light {floor:.3f} us ({100 * floor / score:.1f} %)" if floor else ""
        lines.append(f"geomean {score:.3f} us ({sources}){beside}")
    lines += [*notes(found), *remarks] if mode in TIMED_MODES else []
    lines += [f"{row.name}:\n{row.result.report}" for row in found if row.result.report]
    lines += [f"{row.name}: {row.result.message}" for row in found if row.result.message]
    if "error" in results.log:
        lines.append(results.log["error"])
    passed = sum(row.result.passed for row in found)
    lines.append(
        f"{mode}: {passed} of {len(found)} cases passed; check: {'pass' if results.passed else 'fail'}"
    )
    return "\n".join(lines)


def notes(found: Sequence[Row]) -> list[str]:
    """Returns notes on what the times of the table do not include."""
    sources = {row.result.source for row in found if row.result.passed}
    return [NOTES[source] for source in NOTES if source in sources]


def as_dict(
    problem: str, mode: str, results: Results, found: Sequence[Row], remarks: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns everything for machines, with times in microseconds."""
    return {
        "problem": problem,
        "mode": mode,
        "passed": results.passed,
        "exit_code": results.exit_code,
        "error": results.log.get("error", ""),
        "geomean_us": geomean_us(found),
        "notes": [*notes(found), *remarks] if mode in TIMED_MODES else [],
        "cases": [
            {
                "name": row.name,
                "spec": row.result.spec,
                "passed": row.result.passed,
                "message": row.result.message,
                "report": row.result.report,
                "source": row.result.source,
                **_microseconds(row.result),
                "sol_us": row.sol_us,
                "percent_of_sol": row.percent_of_sol,
                "gb_per_s": row.gb_per_s,
                "tflop_per_s": row.tflop_per_s,
            }
            for row in found
        ],
    }


def _microseconds(result: CaseResult) -> dict[str, float | None]:
    if result.stats is None:
        return dict.fromkeys(STATISTICS)
    times = {
        name: value if name == "runs" else value / NS_PER_US for name, value in asdict(result.stats).items()
    }
    # A single value, as from a model, has no deviation.
    return times if result.stats.runs > 1 else {**times, "std": None, "err": None}


def _times(row: Row) -> list[str]:
    times = _microseconds(row.result)
    return [_number(times[name], 3) for name in ("mean", "std", "err", "best", "worst")]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

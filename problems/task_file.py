"""task.yml: the description of a problem, its cases and its harness in gpu-mode/reference-kernels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBMISSION = "@SUBMISSION@"


@dataclass(frozen=True)
class Task:
    """Contents of a task.yml.

    Attributes:
        files: name in the working directory -> path of the file; without the submission.
        main: name of the harness among them.
        tests, benchmarks: arguments of every case; lists are tuples.
        ranking_by: how benchmarks become a score: "last", "mean" or "geom".
        timeouts_s: of test, benchmark and leaderboard mode.
    """

    files: dict[str, Path]
    main: str
    tests: list[dict[str, Any]]
    benchmarks: list[dict[str, Any]]
    ranking_by: str
    timeouts_s: dict[str, int]

    def cases(self, mode: str) -> list[dict[str, Any]]:
        """Returns the arguments of a mode's cases: the tests, or in any other mode the benchmarks."""
        return self.tests if mode == "test" else self.benchmarks


def read_task(path: Path) -> Task:
    """Reads a task.yml.

    Raises:
        ValueError: the file is missing, or lacks an entry that a task needs.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"there is no file `{path}`")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    missing = [key for key in ("files", "tests", "benchmarks") if key not in content]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it is not a task.yml")
    files = {
        entry["name"]: (path.parent / entry["source"]).resolve()
        for entry in content["files"]
        if entry["source"] != SUBMISSION
    }
    return Task(
        files,
        content.get("config", {}).get("main", "eval.py"),
        [_arguments(case) for case in content["tests"]],
        [_arguments(case) for case in content["benchmarks"]],
        content.get("ranking_by", "last"),
        {
            mode: content.get(key, 180)
            for mode, key in (
                ("test", "test_timeout"),
                ("benchmark", "benchmark_timeout"),
                ("leaderboard", "ranked_timeout"),
            )
        },
    )


def _arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in case.items()}


def find_task(checkout: Path, problem: str) -> Path:
    """Returns the path of a problem's task.yml in a checkout.

    Raises:
        ValueError: there is none.
    """
    found = sorted(checkout.glob(f"**/{problem}/task.yml"))
    if not found:
        raise ValueError(
            f"no {problem}/task.yml below {checkout}: clone https://github.com/gpu-mode/reference-kernels and pass its folder"
        )
    return found[0]

"""The genuine harness: a user's checkout of gpu-mode/reference-kernels, run as its server would, on a GPU or the emulator.

Its files are copied into a temporary folder as task.yml says and run unmodified. Every Python process of that run, the
spawned worker included, first passes through ``genuine_process``, which provides what newer versions of CuTe DSL removed
and, on request, a virtual GPU.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.problems.registry import Problem

SUBMISSION = "@SUBMISSION@"
# Named so, in a folder of PYTHONPATH, it is imported by every Python process before anything else.
HOOK_FILE = "sitecustomize.py"
HOOK = """\
from nvfp4_cute.competition.genuine_process import activate

activate({arch!r})
"""


@dataclass(frozen=True)
class Task:
    """What a task.yml says.

    Attributes:
        files: name in the working directory -> path of the file; without the submission.
        main: the harness among them.
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


def read_task(path: Path) -> Task:
    """Read a task.yml.

    Raises:
        ValueError: there is none, or it lacks what a task needs.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"there is no file `{path}`")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    missing = [key for key in ("files", "tests", "benchmarks") if key not in content]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it is no task.yml")
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
    """The task.yml of a problem in a checkout.

    Raises:
        ValueError: there is none.
    """
    found = sorted(checkout.glob(f"**/{problem}/task.yml"))
    if not found:
        raise ValueError(
            f"no {problem}/task.yml below {checkout}: clone https://github.com/gpu-mode/reference-kernels and pass its folder"
        )
    return found[0]


def prepare(
    checkout: Path, problem: Problem, folder: Path, arch: str | None
) -> tuple[Callable[[str], list[str]], dict[str, str]]:
    """Fill ``folder`` with the harness's files.

    Returns:
        (mode -> command that runs the harness there, environment variables of that command).

    Raises:
        ValueError: the checkout lacks the problem or one of its files.
    """
    task = read_task(find_task(checkout, problem.name))
    for name, source in task.files.items():
        if not source.is_file():
            raise ValueError(f"{source}, which task.yml of {problem.name} names, does not exist")
        shutil.copyfile(source, folder / name)
    hook = folder / "hook"
    hook.mkdir()
    (hook / HOOK_FILE).write_text(HOOK.format(arch=arch), encoding="utf-8")
    path = env.python_path([str(hook), str(folder)])
    return lambda mode: [sys.executable, task.main, mode, "cases.txt"], {"PYTHONPATH": path}

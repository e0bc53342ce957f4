"""The part of a competition's runner around a harness: the import step, the process with a pipe for its results, the limit."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.competition import contain, protocol, wire
from nvfp4_cute.terminal import Progress

IMPORT_TIMEOUT_S = 120
# The runner's seed in its import step.
IMPORT_SEED = 1
# Characters of a failed import step's output that are shown.
MOST_SHOWN = 4000
# Submissions import the names of the argument and the result from task.py; nothing reads them. Starts a judge without
# the working directory on the path, whatever put it there (`-c` does, and PYTHONPATH may).
START = """\
import os, sys
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != os.getcwd()]
import importlib
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""
TASK_PY = "from typing import TypeVar\n\ninput_t = TypeVar('input_t')\noutput_t = TypeVar('output_t')\n"


def judge_command(module: str) -> list[str]:
    """Returns the command that runs ``main`` of a module of ours without importing modules from its working directory."""
    return [sys.executable, "-c", START, module]


def import_step(folder: Path, arch: str | None, variables: dict[str, str]) -> protocol.Results | None:
    """Runs the submission in ``folder`` as a program, as the runner does before any mode. Returns the failure, or None.

    ``folder`` is only for this step. Files and processes that the submission leaves are gone when a harness starts.
    """
    script = [sys.executable, "submission.py"]
    if arch is not None and not variables:
        script = [sys.executable, "-m", "nvfp4_cute.cli", "emulate", "--arch", arch, "submission.py"]
    if not (folder / "task.py").exists():
        (folder / "task.py").write_text(TASK_PY)
    own = env.folders_below(folder)
    environment = env.with_variables({**variables, **own, "POPCORN_SEED": str(IMPORT_SEED)})
    with contain.descendants_end():
        process = subprocess.Popen(
            script,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_bounds([folder]),
        )
        try:
            _, errors = process.communicate(timeout=IMPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            message = f"python3 submission.py took more than {IMPORT_TIMEOUT_S} s"
            return protocol.Results((), False, protocol.TIMED_OUT, {"error": message})
    if process.returncode:
        shown = wire.printable(errors.decode(errors="replace")[-MOST_SHOWN:])
        message = f"python3 submission.py ended with exit code {process.returncode}:\n{shown}"
        return protocol.Results((), False, process.returncode, {"error": message})
    return None


def _bounds(writable: list[Path] | None) -> Callable[[], None]:
    """Returns a function for a child before exec: it ends with this process and writes only to `writable`."""
    parent = os.getpid()

    def bound() -> None:
        contain.die_with(parent)
        if writable is not None:
            contain.limit_resources()
            contain.confine(writable)

    return bound


def run_harness(
    command: list[str],
    folder: Path,
    variables: dict[str, str],
    timeout_s: int | None,
    writable: list[Path] | None = None,
) -> protocol.Results:
    """Starts a harness in ``folder``, and reads its results while it runs.

    Args:
        writable: folders besides ``folder`` that the harness and the submission may write to; None sets no limits.
    """
    lines, code = run_judge(command, folder, variables, timeout_s, writable, passed=_with_progress)
    results = protocol.parse_results("".join(lines), code)
    if code in (protocol.OK, protocol.REJECTED):
        return results
    meaning = protocol.EXIT_MEANINGS.get(code, "the harness itself failed, see above")
    return replace(results, passed=False, log={**results.log, "error": f"exit code {code}: {meaning}"})


def run_judge(
    command: list[str],
    folder: Path,
    variables: dict[str, str],
    timeout_s: int | None,
    writable: list[Path] | None = None,
    *,
    passed: Callable[[Iterable[str]], Iterable[str]] = iter,
    output: int | None = None,
) -> tuple[list[str], int]:
    """Starts a program that judges in ``folder``, with a pipe for its results.

    When it ends, by itself or by the limit, every process that it or the submission started also ends.

    Args:
        writable: see :func:`run_harness`.
        passed: receives the lines as they arrive and passes them on.
        output: descriptor of the program's standard output; None means this process's.

    Returns:
        (lines from the pipe, exit code: ``protocol.TIMED_OUT`` after the limit).
    """
    reader, writer = os.pipe()
    own = {} if writable is None else env.folders_below(folder)
    environment = env.with_variables({**variables, **own, "POPCORN_FD": str(writer)})
    lines: list[str] = []
    with contain.descendants_end(), open(reader, encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,  # what a user types is not for a submission
            stdout=output,
            start_new_session=True,
            preexec_fn=_bounds(None if writable is None else [folder, *writable]),
        )
        os.close(writer)
        thread = threading.Thread(target=lambda: lines.extend(passed(file)), daemon=True)
        thread.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = protocol.TIMED_OUT
        finally:
            contain.end_session(process.pid)
            process.wait()
        # Processes that the submission left may keep the pipe open.
        contain.end_descendants(set())
        thread.join(10)
    return lines, code


def _with_progress(lines: Iterable[str]) -> Iterable[str]:
    """Passes lines on, and shows the number of finished cases on a terminal."""
    with Progress(desc="eval", unit="case") as bar:
        for line in lines:
            if count := re.match(r"(?:test|benchmark)-count: (\d+)", line):
                bar.total = int(count[1])
            elif begun := re.match(r"(?:test|benchmark)\.(\d+)\.spec: ", line):
                bar.update(int(begun[1]) - bar.n)
            yield line

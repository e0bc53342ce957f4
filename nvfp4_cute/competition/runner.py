"""What a competition's runner does around a harness: the import step, the process with a pipe for its results, the limit."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.competition import protocol
from nvfp4_cute.terminal import Progress

IMPORT_TIMEOUT_S = 120
# The runner's seed in its import step.
IMPORT_SEED = 1
# Submissions take the names of the argument and the result from task.py; nothing reads them.
TASK_PY = "from typing import TypeVar\n\ninput_t = TypeVar('input_t')\noutput_t = TypeVar('output_t')\n"


def import_step(folder: Path, arch: str | None, variables: dict[str, str]) -> protocol.Results | None:
    """Run the submission in ``folder`` as a program, as the runner does before any mode; what failed, or None."""
    script = [sys.executable, "submission.py"]
    if arch is not None and not variables:
        script = [sys.executable, "-m", "nvfp4_cute.cli", "emulate", "--arch", arch, "submission.py"]
    if not (folder / "task.py").exists():
        (folder / "task.py").write_text(TASK_PY)
    environment = env.with_variables({**variables, "POPCORN_SEED": str(IMPORT_SEED)})
    try:
        done = subprocess.run(
            script, cwd=folder, env=environment, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        message = f"python3 submission.py took more than {IMPORT_TIMEOUT_S} s"
        return protocol.Results((), False, protocol.TIMED_OUT, {"error": message})
    if done.returncode:
        message = f"python3 submission.py ended with exit code {done.returncode}:\n{done.stderr[-4000:]}"
        return protocol.Results((), False, done.returncode, {"error": message})
    return None


def run_harness(
    command: list[str], folder: Path, variables: dict[str, str], timeout_s: int | None
) -> protocol.Results:
    """Start a harness in ``folder`` with a pipe for its results, and read them while it runs."""
    reader, writer = os.pipe()
    environment = env.with_variables({**variables, "POPCORN_FD": str(writer)})
    process = subprocess.Popen(command, cwd=folder, env=environment, pass_fds=(writer,))
    os.close(writer)
    lines: list[str] = []
    with open(reader, encoding="utf-8") as file:
        thread = threading.Thread(target=lambda: lines.extend(_with_progress(file)), daemon=True)
        thread.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = protocol.TIMED_OUT
        thread.join(10)
    results = protocol.parse_results("".join(lines), code)
    if code in (protocol.OK, protocol.REJECTED):
        return results
    meaning = protocol.EXIT_MEANINGS.get(code, "the harness itself failed, see above")
    return replace(results, passed=False, log={**results.log, "error": f"exit code {code}: {meaning}"})


def _with_progress(lines: Iterable[str]) -> Iterable[str]:
    """Pass lines on, and show on a terminal how many cases are done."""
    with Progress(desc="eval", unit="case") as bar:
        for line in lines:
            if count := re.match(r"(?:test|benchmark)-count: (\d+)", line):
                bar.total = int(count[1])
            elif begun := re.match(r"(?:test|benchmark)\.(\d+)\.spec: ", line):
                bar.update(int(begun[1]) - bar.n)
            yield line

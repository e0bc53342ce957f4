"""`nvfp4-cute eval`: what a competition's runner does with a submission, here.

Preflight rules, the import step, then a harness in a process of its own with a pipe for its results and a time limit: our
harness (``evaluator``), or the genuine files of a checkout (``genuine``).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nvfp4_cute import env
from nvfp4_cute.competition import genuine, protocol, report
from nvfp4_cute.competition.rules import check_file, read_header
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.registry import Problem

IMPORT_TIMEOUT_S = 120
# The runner's seed in its import step.
IMPORT_SEED = 1


@dataclass(frozen=True)
class Request:
    """What to try, and how.

    Attributes:
        submission: the file.
        problem: its problem; None takes the one that the file's header names.
        mode: test, benchmark, leaderboard, or profile.
        device: "cuda", "emulator", or "auto": the GPU of this machine where torch sees one.
        seed: the runner's secret seed, mixed into every case's; None for none.
        strict: whether to look for answers that are not computed.
        harness: checkout of gpu-mode/reference-kernels whose files are run instead of ours.
        task: task.yml with the cases; None takes the problem's.
        case: only this one, counted from 0.
        inputs: inputs of a timing; None takes the harness's number, 1 on the emulator.
        l2_gib: memory that is written before a timing, in GiB; None takes the harness's.
        timeout_s: limit of the mode; None takes the harness's on a GPU and none on the emulator.
        ignore_rules: only warn of what a server would refuse.
    """

    submission: Path
    problem: str | None = None
    mode: str = "test"
    device: str = "auto"
    seed: int | None = None
    strict: bool = False
    harness: Path | None = None
    task: Path | None = None
    case: int | None = None
    inputs: int | None = None
    l2_gib: float | None = None
    timeout_s: int | None = None
    ignore_rules: bool = False


def run(request: Request, *, as_json: bool = False) -> int:
    """Try a submission and print what came of it; 0 if everything was accepted, else 1.

    Raises:
        ValueError: no such file, problem, or case, or options that do not go together.
    """
    findings = check_file(request.submission)
    for finding in findings:
        print(f"{request.submission}: {finding}", file=sys.stderr)
    if findings and not request.ignore_rules:
        print("a server refuses this file; --ignore-rules tries it all the same", file=sys.stderr)
        return 1
    results = evaluate(request)
    problem = find_problem(request)
    rows = report.rows(problem, results)
    if as_json:
        print(json.dumps(report.as_dict(problem.name, request.mode, results, rows), indent=2))
    else:
        print(report.text(request.mode, results, rows))
    return 0 if results.passed else 1


def find_problem(request: Request) -> Problem:
    """The problem that a request names, or its submission's header."""
    name = request.problem or read_header(request.submission.read_text(encoding="utf-8")).leaderboard
    if name is None:
        raise ValueError(
            f"{request.submission} names no problem; pass --problem, one of {', '.join(registry.names())}"
        )
    return registry.load(name)


def evaluate(request: Request) -> protocol.Results:
    """Run a submission through a harness.

    Raises:
        ValueError: as :func:`run`.
    """
    problem = find_problem(request)
    arch = emulated_arch(request.device)
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_eval_") as name:
        folder = Path(name)
        if request.harness:
            command, extra = genuine.prepare(request.harness, problem, folder, arch)
        else:
            command, extra = _own_harness(request, problem, arch), {}
        shutil.copyfile(request.submission, folder / "submission.py")
        failure = _import_step(folder, arch, extra)
        if failure is not None:
            return failure
        (folder / "cases.txt").write_text("\n".join(_case_lines(request, problem)), encoding="utf-8")
        seed = {} if request.seed is None else {"POPCORN_SEED": str(request.seed)}
        limit = _time_limit(request, problem, arch)
        results = _run_harness(command(request.mode), folder, {**extra, **seed}, limit)
        return _without_times(results) if request.harness and arch else results


def _without_times(results: protocol.Results) -> protocol.Results:
    """The genuine harness reads clocks, and those of a virtual GPU tell how long this machine emulated."""
    cases = tuple(replace(case, stats=None, source="not timed") for case in results.cases)
    return replace(results, cases=cases)


def emulated_arch(device: str) -> str | None:
    """Architecture of the virtual GPU to run on; None for the GPU of this machine.

    Raises:
        ValueError: "cuda" without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch sees no GPU here; use --device emulator")
    return None if has_gpu and device != "emulator" else protocol.EMULATED_ARCH


def _own_harness(request: Request, problem: Problem, arch: str | None):
    options: list[str] = ["--arch", arch] if arch else []
    options += ["--strict"] if request.strict else []
    options += ["--inputs", str(request.inputs)] if request.inputs else []
    options += [] if request.l2_gib is None else ["--l2-clear-bytes", str(int(request.l2_gib * (1 << 30)))]
    module = "nvfp4_cute.competition.evaluator"
    return lambda mode: [sys.executable, "-m", module, problem.name, mode, "cases.txt", *options]


def _case_lines(request: Request, problem: Problem) -> Sequence[str]:
    """The case file: tests in test mode, else benchmarks."""
    if request.task:
        task = genuine.read_task(request.task)
        cases = task.tests if request.mode == "test" else task.benchmarks
    else:
        cases = [case.arguments for case in (problem.tests if request.mode == "test" else problem.benchmarks)]
    if request.case is not None:
        if not 0 <= request.case < len(cases):
            raise ValueError(f"--case {request.case}: there are cases 0 to {len(cases) - 1}")
        cases = [cases[request.case]]
    return [protocol.format_case(arguments) for arguments in cases]


def _time_limit(request: Request, problem: Problem, arch: str | None) -> int | None:
    if request.timeout_s is not None or arch is not None:
        return request.timeout_s
    rules = problem.harness
    limits = {"test": rules.test_timeout_s, "leaderboard": rules.ranked_timeout_s}
    return limits.get(request.mode, rules.benchmark_timeout_s)


def _import_step(folder: Path, arch: str | None, extra: dict[str, str]) -> protocol.Results | None:
    """Run the submission as a program, as the runner does before any mode; what failed, or None."""
    script = [sys.executable, "submission.py"]
    if arch is not None and not extra:
        script = [sys.executable, "-m", "nvfp4_cute.cli", "emulate", "--arch", arch, "submission.py"]
    if not (folder / "task.py").exists():
        # Submissions take the names of the argument and the result from it; nothing reads them.
        (folder / "task.py").write_text(
            "from typing import TypeVar\n\ninput_t = TypeVar('input_t')\noutput_t = TypeVar('output_t')\n"
        )
    variables = env.with_variables({**extra, "POPCORN_SEED": str(IMPORT_SEED)})
    try:
        done = subprocess.run(
            script, cwd=folder, env=variables, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        message = f"python3 submission.py took more than {IMPORT_TIMEOUT_S} s"
        return protocol.Results((), False, protocol.TIMED_OUT, {"error": message})
    if done.returncode:
        message = f"python3 submission.py ended with exit code {done.returncode}:\n{done.stderr[-4000:]}"
        return protocol.Results((), False, done.returncode, {"error": message})
    return None


def _run_harness(
    command: list[str], folder: Path, extra: dict[str, str], timeout_s: int | None
) -> protocol.Results:
    """Start a harness with a pipe for its results and read them while it runs."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        command, cwd=folder, env=env.with_variables({**extra, "POPCORN_FD": str(writer)}), pass_fds=(writer,)
    )
    os.close(writer)
    pieces: list[str] = []
    with open(reader, encoding="utf-8") as file:
        thread = threading.Thread(target=lambda: pieces.extend(file), daemon=True)
        thread.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = protocol.TIMED_OUT
        thread.join(10)
    results = protocol.parse_results("".join(pieces), code)
    if code in (protocol.OK, protocol.REJECTED):
        return results
    meaning = protocol.EXIT_MEANINGS.get(code, "the harness itself failed, see above")
    return replace(results, passed=False, log={**results.log, "error": f"exit code {code}: {meaning}"})

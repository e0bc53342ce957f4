"""`nvfp4-cute eval`: evaluates a submission locally, with the steps of a competition's runner.

It checks the preflight rules, runs the import step, and then a harness in a separate process with a pipe for its
results and a time limit: our harness (``evaluator``), or the genuine files of a checkout (``genuine``).
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.competition import genuine, kernelguard, protocol, report, runner
from nvfp4_cute.competition.rules import check_file, read_header
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.harness_rules import GIB
from nvfp4_cute.problems.registry import Problem
from nvfp4_cute.problems.task_file import Task, find_task, read_task

# Values of --low-memory: four times the largest L2, and enough inputs to show that they differ.
LOW_MEMORY_L2_BYTES = GIB // 2
LOW_MEMORY_INPUTS = 2


@dataclass(frozen=True)
class Request:
    """A submission to evaluate, with options.

    Attributes:
        submission: the file.
        problem: its problem; None means the one in the file's header.
        mode: test, benchmark, leaderboard, or profile.
        device: "cuda", "emulator", or "auto": this machine's GPU if torch sees one.
        seed: the runner's secret seed, mixed into every case's seed; None for no seed.
        strict: whether to look for answers that are not computed.
        harness: checkout of gpu-mode/reference-kernels whose files run instead of ours.
        task: task.yml with the cases; None means the problem's own.
        case: number of the only case to run, from 0; None runs all, or the first if ``mode`` is profile.
        inputs: inputs of a timing; None means the harness's number, 1 on the emulator.
        l2_gib: memory that is written before a timing, in GiB; None means the harness's amount.
        low_memory: defaults for ``inputs`` and ``l2_gib`` that fit a small GPU.
        timeout_s: time limit of the mode; None means the harness's on a GPU and none on the emulator.
        ignore_rules: only warn about broken server rules.
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
    low_memory: bool = False
    timeout_s: int | None = None
    ignore_rules: bool = False

    @property
    def num_inputs(self) -> int | None:
        """Inputs of a timing, unless it is the harness's number."""
        return self.inputs or (LOW_MEMORY_INPUTS if self.low_memory else None)

    @property
    def l2_clear_bytes(self) -> int | None:
        """Bytes to write before a timing, unless it is the harness's amount."""
        if self.l2_gib is not None:
            return int(self.l2_gib * GIB)
        return LOW_MEMORY_L2_BYTES if self.low_memory else None


def run(request: Request, *, as_json: bool = False) -> int:
    """Evaluates a submission and prints the results. Returns 0 if everything was accepted, else 1.

    Raises:
        ValueError: no such file, problem, or case, or contradicting options.
    """
    if refused(request) and not request.ignore_rules:
        print("a server refuses this file; pass --ignore-rules to evaluate it anyway", file=sys.stderr)
        return 1
    results = evaluate(request)
    name = problem_name(request)
    rows = report.rows(registry.load(name) if name in registry.names() else None, results)
    remarks = timing_remarks(request) if request.mode in protocol.TIMED_MODES else []
    if as_json:
        print(json.dumps(report.as_dict(name, request.mode, results, rows, remarks), indent=2))
    else:
        print(report.text(request.mode, results, rows, remarks))
    return 0 if results.passed else 1


def refused(request: Request) -> bool:
    """Whether a server would refuse the file. Prints the reasons.

    Servers run KernelGuard in every mode except test. Here it runs in every mode, but a test only warns.
    """
    findings = check_file(request.submission)
    for finding in findings:
        print(f"{request.submission}: {finding}", file=sys.stderr)
    if findings:
        return True
    opinion = kernelguard.ask(request.submission.read_text(encoding="utf-8"))
    if opinion:
        print(opinion, file=sys.stderr)
    return bool(opinion and opinion.filtered and request.mode != "test")


def problem_name(request: Request) -> str:
    """Returns the problem that a request names, or its submission's header.

    Raises:
        ValueError: neither names one, or there is no such problem here and no ``--harness`` that may have it.
    """
    name = request.problem or read_header(request.submission.read_text(encoding="utf-8")).leaderboard
    if name is None:
        raise ValueError(
            f"{request.submission} names no problem; pass --problem, one of {', '.join(registry.names())}"
        )
    if not request.harness:
        registry.load(name)
    return name


def evaluate(request: Request) -> protocol.Results:
    """Runs a submission through a harness.

    Raises:
        ValueError: see :func:`run`.
    """
    name = problem_name(request)
    arch = emulated_arch(request.device)
    task = _task(request, name)
    problem = None if request.harness else registry.load(name)
    failure = _import_step(request, task if problem is None else None, arch)
    if failure is not None:
        return failure
    # New folders, because the import step may have written anything into its own.
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_eval_") as base:
        place, folder = Path(base, "submission"), Path(base, "harness")
        folder.mkdir()
        if problem is None:
            assert task is not None
            command, variables = genuine.prepare(task, folder, arch, request.l2_clear_bytes)
            place = folder
        else:
            place.mkdir()
            (place / "task.py").write_text(runner.TASK_PY)
            command, variables = _own_harness(request, problem, arch, place), {}
        shutil.copyfile(request.submission, place / "submission.py")
        (folder / "cases.txt").write_text("\n".join(_case_lines(request, problem, task)), encoding="utf-8")
        seed = {} if request.seed is None else {"POPCORN_SEED": str(request.seed)}
        limit = _time_limit(request, problem, task, arch)
        writable = [place, request.submission.resolve().parent]
        results = runner.run_harness(
            command(request.mode), folder, {**variables, **seed}, limit, writable if problem is None else None
        )
        results = named(results, request.submission)
        return _without_times(results) if problem is None and arch else results


def _import_step(request: Request, genuine_task: Task | None, arch: str | None) -> protocol.Results | None:
    """Runs the import step, with the files of a genuine harness if one is used. Returns the failure, or None."""
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_import_") as base:
        folder, variables = Path(base), dict[str, str]()
        if genuine_task is not None:
            _, variables = genuine.prepare(genuine_task, folder, arch, request.l2_clear_bytes)
        shutil.copyfile(request.submission, folder / "submission.py")
        failure = runner.import_step(folder, arch, variables)
    if failure is None:
        return None
    # The user knows the file by its original name.
    error = (
        failure.log["error"].replace(f"{base}/submission.py", str(request.submission)).replace(f"{base}/", "")
    )
    return replace(failure, log={**failure.log, "error": error})


def named(results: protocol.Results, submission: Path) -> protocol.Results:
    """Replaces the copy's name by the original file's in messages that name a line."""
    own = lambda text: text.replace("submission.py, line ", f"{submission.name}, line ")
    return replace(results, cases=tuple(replace(case, message=own(case.message)) for case in results.cases))


def _without_times(results: protocol.Results) -> protocol.Results:
    """Removes the genuine harness's times, which on a virtual GPU measure the emulation on this machine."""
    cases = tuple(replace(case, stats=None, source="not timed") for case in results.cases)
    return replace(results, cases=cases)


def emulated_arch(device: str) -> str | None:
    """Returns the architecture of the virtual GPU to use; None for this machine's GPU.

    Raises:
        ValueError: "cuda" without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch sees no GPU here; use --device emulator")
    return None if has_gpu and device != "emulator" else protocol.EMULATED_ARCH


def timing_remarks(request: Request) -> list[str]:
    """Returns the differences of a timing on a GPU from the official one."""
    if emulated_arch(request.device) is not None:
        return []
    changes = []
    if request.num_inputs is not None and not request.harness:
        changes.append(f"{request.num_inputs} inputs a timing")
    if request.l2_clear_bytes is not None:
        changes.append(f"{request.l2_clear_bytes / GIB:.3g} GiB written before it")
    return [f"not the official timing: {', '.join(changes)}"] if changes else []


def _task(request: Request, name: str) -> Task | None:
    """Returns the task.yml with the cases; None means ours."""
    if request.task:
        return read_task(request.task)
    return read_task(find_task(request.harness, name)) if request.harness else None


def _own_harness(
    request: Request, problem: Problem, arch: str | None, place: Path | None = None
) -> Callable[[str], list[str]]:
    """Returns the command that runs our harness on the submission in `place`, by mode.

    It imports no module from the working directory, which might hold files of a submission.
    """
    options: list[str] = ["--arch", arch] if arch else []
    options += ["--strict"] if request.strict else []
    options += ["--inputs", str(request.num_inputs)] if request.num_inputs else []
    options += [] if request.l2_clear_bytes is None else ["--l2-clear-bytes", str(request.l2_clear_bytes)]
    options += [] if place is None else ["--folder", str(place)]
    options += [] if place is None else ["--writable", str(request.submission.resolve().parent)]
    return lambda mode: [
        *runner.judge_command("nvfp4_cute.competition.evaluator"),
        problem.name,
        mode,
        "cases.txt",
        *options,
    ]


def _case_lines(request: Request, problem: Problem | None, task: Task | None) -> Sequence[str]:
    """Returns the lines of the case file: tests in test mode, else benchmarks."""
    cases: Sequence[dict[str, Any]] = []
    if task:
        cases = task.cases(request.mode)
    elif problem:
        ours = problem.tests if request.mode == "test" else problem.benchmarks
        cases = [case.arguments for case in ours]
    chosen = 0 if request.case is None and request.mode == "profile" else request.case
    if chosen is not None:
        if not 0 <= chosen < len(cases):
            raise ValueError(f"--case {chosen}: there are cases 0 to {len(cases) - 1}")
        cases = [cases[chosen]]
    return [protocol.format_case(arguments) for arguments in cases]


def _time_limit(request: Request, problem: Problem | None, task: Task | None, arch: str | None) -> int | None:
    if request.timeout_s is not None or arch is not None:
        return request.timeout_s
    if problem is None:
        assert task is not None
        return task.timeouts_s.get(request.mode, task.timeouts_s["benchmark"])
    rules = problem.harness
    limits = {"test": rules.test_timeout_s, "leaderboard": rules.ranked_timeout_s}
    return limits.get(request.mode, rules.benchmark_timeout_s)

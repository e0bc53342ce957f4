"""`nvfp4-cute eval DIR`: evaluates a problem of FlashInfer-Bench or SOL-ExecBench by their rules.

The input is a folder of JSON of any origin (definition.json, workload.jsonl, solution.json), or a folder of sources
(spec.py, reference.py, kernel.py), which is first converted to JSON.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from nvfp4_cute.competition import protocol, runner
from nvfp4_cute.competition.protocol import EMULATED_ARCH
from nvfp4_cute.competition.trace import folder as sources
from nvfp4_cute.competition.trace.matching import FLASHINFER_BENCH, RULES, SOL_EXECBENCH, Rules
from nvfp4_cute.competition.trace.session import PASSED, TIMEOUT, Result, Settings
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS, MODEL_ERROR
from nvfp4_cute.problems.trace_schema import WORKLOAD_FILE, Solution, Workload, read_folder, write_folder
from nvfp4_cute.terminal import Progress, text_table

STDERR = 2  # file descriptor
DEVICES = ("auto", "cuda", "emulator", "cpu")
PYTHON_LANGUAGES = ("python", "pytorch", "triton", "cute_dsl", "cutile", "cudnn_frontend", "tilelang")
NOTES = {
    "modelled": f"modelled: the solution's own kernels on a {DEFAULT_TARGETS[EMULATED_ARCH].name}, one after the other. "
    f"{MODEL_ERROR}",
    "measured": "measured: median of 50 calls between CUDA events, L2 cleared before each; the baseline is the reference",
    "not timed": "not timed",
}


@dataclass(frozen=True)
class Request:
    """A folder to evaluate, with options.

    Attributes:
        folder: folder of JSON or of sources.
        solution: a solution to use instead of the folder's.
        device: one of ``DEVICES``; "auto" is this machine's GPU if torch sees one, else the emulator.
        rules: "sol-execbench" or "flashinfer-bench"; None means those of the workloads' origin.
        rounds: inputs per workload; None means the rules' number on a GPU, and 1 elsewhere.
        timed: whether to time right answers.
        workload: number of the only workload to run, from 0.
        timeout_s: total time limit; None means the rules' on a GPU and none elsewhere.
    """

    folder: Path
    solution: Path | None = None
    device: str = "auto"
    rules: str | None = None
    rounds: int | None = None
    timed: bool = False
    workload: int | None = None
    timeout_s: int | None = None


def run(request: Request, *, as_json: bool = False) -> int:
    """Evaluates a folder and prints the results. Returns 0 if every workload passed, else 1.

    Raises:
        ValueError: the folder breaks a rule of the schema, or options contradict each other.
    """
    results = evaluate(request)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(report(results))
    return 0 if results and all(result.status == PASSED for result in results) else 1


def evaluate(request: Request) -> list[Result]:
    """Returns one result per workload.

    Raises:
        ValueError: see :func:`run`.
    """
    if not sources.is_source(request.folder):
        return _evaluate(request)
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_trace_") as made:
        write_folder(Path(made), *sources.load(str(request.folder)))
        return _evaluate(replace(request, folder=Path(made)))


def _evaluate(request: Request) -> list[Result]:
    _, workloads, solution = read_folder(request.folder, request.solution)
    _check(request, workloads, solution)
    device = _device(request.device)
    rules = RULES[request.rules] if request.rules else _rules_of(request.folder)
    rounds = request.rounds or (rules.rounds if device == "cuda" else 1)
    chosen = workloads if request.workload is None else [workloads[request.workload]]
    limit = request.timeout_s or (rules.run_timeout_s if device == "cuda" else None)
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_eval_") as base:
        place, folder = Path(base, "solution"), Path(base, "judge")
        folder.mkdir()
        write_sources(solution, place)
        settings = Settings(
            str(request.folder.resolve()),
            str(request.solution.resolve()) if request.solution else None,
            str(place),
            device,
            rules.name,
            rounds,
            request.timed,
            request.workload,
        )
        results, error = _in_process(settings, folder, len(chosen), limit)
    missing = [Result(workload.name, *error) for workload in chosen[len(results) :]]
    return results + missing


def write_sources(solution: Solution, place: Path) -> None:
    """Writes a solution's files below a folder, which is created."""
    place.mkdir(exist_ok=True)
    for path, text in solution.sources.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, encoding="utf-8")


def _check(request: Request, workloads: list[Workload], solution: Solution) -> None:
    if request.workload is not None and not 0 <= request.workload < len(workloads):
        raise ValueError(f"--case {request.workload}: there are workloads 0 to {len(workloads) - 1}")
    foreign = [name for name in solution.languages if name not in PYTHON_LANGUAGES]
    if foreign:
        raise ValueError(
            f"{solution.name} is written in {', '.join(foreign)}; eval runs {', '.join(PYTHON_LANGUAGES)}: use the project's "
            "own evaluator"
        )


def _device(name: str) -> str:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch sees no GPU here; use --device emulator or --device cpu")
    return name if name != "auto" else "cuda" if has_gpu else "emulator"


def _rules_of(folder: Path) -> Rules:
    """Recognizes the rules: FlashInfer-Bench's lines hold a workload in a trace, SOL-ExecBench's lines are workloads."""
    first = (folder / WORKLOAD_FILE).read_text(encoding="utf-8").partition("\n")[0]
    return FLASHINFER_BENCH if "workload" in json.loads(first or "{}") else SOL_EXECBENCH


def _in_process(
    settings: Settings, folder: Path, count: int, limit: int | None
) -> tuple[list[Result], tuple[str, str]]:
    """Returns the results received so far, with status and message for the missing ones.

    Args:
        folder: folder for the judge alone.
        count: number of workloads.
    """

    def passed(lines: Iterable[str]) -> Iterator[str]:
        with Progress(total=count, desc="eval", unit="workload") as bar:
            for line in lines:
                yield line
                bar.update()

    command = [*runner.judge_command("nvfp4_cute.competition.trace.session"), json.dumps(asdict(settings))]
    writable = [Path(settings.place)]
    # Output of a solution or a reference goes to standard error, because standard output holds the report.
    lines, code = runner.run_judge(command, folder, {}, limit, writable, passed=passed, output=STDERR)
    results = [Result(**json.loads(line)) for line in lines]
    if code == protocol.TIMED_OUT:
        return results, (TIMEOUT, f"all workloads took more than {limit} s")
    return results, ("RUNTIME_ERROR", f"the process that judges ended with exit code {code}, see above")


def report(results: list[Result]) -> str:
    """Returns a table, a note on the times, and the errors."""
    header = [
        "workload",
        "status",
        "max abs",
        "max rel",
        "matched",
        "us",
        "SOL us",
        "% of SOL",
        "baseline us",
        "score",
    ]
    rows = [
        [
            result.name,
            result.status,
            _text(result.max_absolute, ".3g"),
            _text(result.max_relative, ".3g"),
            _text(result.matched, ".2%"),
            _text(result.us, ".2f"),
            _text(result.sol_us, ".2f"),
            _text(100 * result.sol_us / result.us if result.sol_us and result.us else None, ".1f"),
            _text(result.base_us, ".2f"),
            _text(result.score, ".3f"),
        ]
        for result in results
    ]
    # Without a GPU there are no baselines and scores, without timings no speed of light; their columns are left out.
    used = [index for index in range(len(header)) if index < 2 or any(row[index] for row in rows)]
    lines = [text_table([header[i] for i in used], [[row[i] for i in used] for row in rows], left=2)]
    kinds = {result.source for result in results if result.status == PASSED}
    lines += [NOTES[kind] for kind in sorted(kinds)]
    scores = [result.score for result in results if result.score is not None]
    if scores and len(scores) == len(results):
        lines.append(f"score, mean over workloads: {sum(scores) / len(scores):.3f}")
    lines += [f"{result.name}: {result.status}: {result.message}" for result in results if result.message]
    return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

"""Other people's kernels on the virtual GPU: scripts and test suites from a user's checkouts, unmodified.

Each of CUTLASS's CuTe DSL examples runs through `nvfp4-cute emulate` and compares its result with its own reference.
Test suites of other projects run through `pytest --cute-emulate`. Kernels of wheels are called by the files of
`bench/witnesses`. A run passes if it ends with exit code 0 and the checker, if it is on, reports no error.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Queue
from types import MappingProxyType

from tqdm import tqdm

from nvfp4_cute import env
from nvfp4_cute.bench.public_cases import CASES, EXAMPLES, MORE_CASES, OLD_CASES, SUITES, Case
from nvfp4_cute.bench.public_judgements import judgement
from nvfp4_cute.bench.witnesses import wheels
from nvfp4_cute.bench.witnesses.table import NOT_CALLED, WITNESSES
from nvfp4_cute.terminal import text_table

SETTINGS = ("eager", "lazy", "random:7", "eager+check")
"""Settings of each script: when asynchronous operations happen, and whether the hazard checker is on."""

SECONDS = 600
SM_COUNT = 16
"""A small number, so that persistent kernels loop over several tiles."""

MESSAGE_CHARACTERS = 1000
LINE_CHARACTERS = 300
NOT_RUN = "not run"
OTHER_DSL = "other DSL"
MISSING_IN_DSL = re.compile(r"(?:Attribute|Import|ModuleNotFound)Error: .*\bcutlass\b")
"""Python's message for a script that is written for a different version of CuTe DSL."""

CHECKED = re.compile(
    r"^nvfp4-cute emulate: (\d+ launch(es)? checked: |nothing was checked|pass --check ).*\n?", re.M
)
"""Last line of a script, however it ends: what was checked, or the advice to check."""

REPORTED = re.compile(r"\b(?:error|warning|note)s? in kernel `")
"""First words of a report of the hazard checker."""

DISTRIBUTIONS = ("nvfp4-cute", "nvidia-cutlass-dsl", "torch", "numpy")

EPILOG = """settings: eager, lazy, or random:SEED, with +check for the hazard checker. The exit code is 0 if every run passes,
1 if one fails, 2 for wrong arguments.

examples:
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --list                       the scripts and their arguments
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --only tutorial              those of the tutorial
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --only 'grouped.* 2,2' --settings lazy+check
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --project quack=~/quack --project flash-attention=~/flash-attention
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --wheels ~/wheels --only lightmoe
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --record runs.jsonl --save bench/results/public_kernels.md

fetch wheels, without their dependencies (Triton, einops and transformers must be importable for some):
  python -m pip download --no-deps --dest ~/wheels --python-version 3.12 --only-binary :all: lightmoe b12x dist-moe \\
      liger-kernel sonic-moe quack-kernels nvidia-cutlass-operators
  python -m pip download --no-deps --dest ~/wheels nvidia-cudnn-frontend sglang
"""


@dataclass(frozen=True)
class Result:
    """End of a run.

    Attributes:
        verdict: "pass", "hazard" (the checker reported one), "FAIL", "killed", "other DSL" (the installed CuTe DSL
            lacks the script's imports), or "not run" (past the deadline).
        seconds: processor time of the script's process and its children.
        instructions: executed warp instructions, None if nothing was launched.
        message: last message.
        configurations: number of tests that a suite's case ran; 1 for a script.
    """

    verdict: str
    seconds: float
    instructions: int | None = None
    message: str = ""
    configurations: int = 1

    @property
    def passed(self) -> bool:
        """Whether the run has no fault."""
        return self.verdict == "pass"


PROJECTS = tuple(sorted({case.project for case in (*OLD_CASES, *SUITES)}))
"""Projects besides CUTLASS."""

Results = Mapping[tuple[Case, str], Result]
MADE_BY = (
    "Made by `python -m nvfp4_cute.bench.public_kernels CHECKOUT --save bench/results/public_kernels.md`."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen scripts and prints the table. Returns 0 if all runs pass, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    folder = args.checkout / EXAMPLES
    if not folder.is_dir():
        parser.error(f"{args.checkout} is no CUTLASS checkout: there is no {EXAMPLES} in it")
    folders = {"cutlass": folder, **dict(args.project)}
    packages = _packages(args.wheels)
    folders.update(dict.fromkeys(packages, Path(wheels.__file__).parent))
    known = [*CASES, *MORE_CASES, *OLD_CASES, *SUITES, *WITNESSES]
    cases = [case for case in known if case.project in folders and re.search(args.only, str(case))]
    if not cases:
        parser.error(f"no script matches {args.only!r}; --list shows them")
    if args.list:
        print("\n".join(map(str, cases)))
        return 0
    limits = partial(run_one, sm_count=args.sm_count, timeout=args.timeout, cores=_free_cores(args.jobs))
    run = lambda case, setting: limits(
        case, setting, folder=folders[case.project], packages=packages.get(case.project, ())
    )
    record = Record(args.record)
    results = run_all(cases, args.settings, run, args.jobs, record, args.deadline)
    marks = record.marks(results)
    heading = _heading(args.checkout, args.sm_count, results, record)
    if packages:
        found = sorted({path.name for paths in packages.values() for path in paths})
        heading = f"{heading} Wheels: {', '.join(found)}."
    table = results_table(cases, args.settings, results, marks)
    passed = sum(result.passed for result in results.values())
    ran = sum(result.verdict != NOT_RUN for result in results.values())
    count = sum(max(results[case, setting].configurations for setting in args.settings) for case in cases)
    total = f"{passed} of {ran} runs pass; {count} configurations."
    print(f"{heading}\n\n{table}\n\n{total}")
    if args.save:
        args.save.write_text(
            f"# Public kernels on the emulator\n\n{heading} {MADE_BY}\n\n{total}\n\n```\n{table}\n```\n\n"
            f"## What did not pass, with our judgement\n\n{what_did_not_pass(results)}\n\n"
            f"## Kernels without a row\n\n{not_called()}\n"
        )
    return 0 if passed == len(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.public_kernels",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="folder of a CUTLASS checkout (its examples suffice)")
    parser.add_argument(
        "--project",
        action="append",
        type=_project,
        default=[],
        metavar="PROJECT=FOLDER",
        help=f"also a project ({', '.join(PROJECTS)}) of which FOLDER is a checkout; what its tests need can be imported; may be "
        "repeated",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="also kernels of the wheels in FOLDER, which are unpacked and not installed",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="on architecture, script and arguments")
    parser.add_argument(
        "--settings",
        nargs="+",
        type=_setting,
        default=SETTINGS,
        metavar="S",
        help=f"default: {' '.join(SETTINGS)}",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="scripts at a time (default: cores)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=SECONDS,
        metavar="S",
        help="seconds for each run (default %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=math.inf,
        metavar="S",
        help="seconds after which no run starts; what --record has of the others counts (0: a table of it)",
    )
    parser.add_argument(
        "--sm-count", type=int, default=SM_COUNT, metavar="N", help="SMs of the GPU (default %(default)s)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append each run's result to FILE as it ends, and do not repeat what passed there: an interrupted table goes on",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--list", action="store_true", help="print what would run, and stop")
    return parser


def _packages(folder: Path | None) -> dict[str, Sequence[Path]]:
    """Unpacks the wheels in `folder`. Returns the folders of each project whose wheels are all there."""
    if folder is None:
        return {}
    scratch = env.user_data_dir() / "public_kernels" / "wheels"
    found = {project: wheels.unpack(project, folder, scratch) for project in wheels.PACKAGES}
    return {project: paths for project, paths in found.items() if paths}


def _free_cores(jobs: int) -> "Queue[int] | None":
    """Returns one core per job if there are enough; None if jobs share cores."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not 1 < jobs <= len(available):
        return None
    cores: Queue[int] = Queue()
    for core in available[:jobs]:
        cores.put(core)
    return cores


def _setting(text: str) -> str:
    if not re.fullmatch(r"(eager|lazy|random:\d+)(\+check)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not eager, lazy, or random:SEED, perhaps with +check")
    return text


def _project(text: str) -> tuple[str, Path]:
    project, _, folder = text.partition("=")
    if project not in PROJECTS or not Path(folder).expanduser().is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PROJECT=FOLDER of a known project and its checkout"
        )
    return project, Path(folder).expanduser().resolve()


class Record:
    """Results of earlier runs, one JSON object per line; the last one of a run counts. Runs that passed are not repeated."""

    def __init__(self, path: Path | None):
        """`path` None: stores nothing."""
        self.path = path
        self.earlier: dict[tuple[str, str], Result] = {}
        self.made: dict[tuple[str, str], str] = {}
        for line in path.read_text().splitlines() if path and path.is_file() else ():
            entry = json.loads(line)
            key = entry.pop("case"), entry.pop("setting")
            made = entry.pop("made")
            self.earlier[key], self.made[key] = Result(**entry), made

    def passed(self, case: Case, setting: str) -> Result | None:
        """Returns the recorded result of a run if it passed."""
        result = self.earlier.get((str(case), setting))
        return result if result is not None and result.passed else None

    def last(self, case: Case, setting: str) -> Result:
        """Returns the recorded result of a run, or that it was not run."""
        return self.earlier.get((str(case), setting), Result(NOT_RUN, 0.0))

    def marks(self, results: Results) -> dict[tuple[Case, str], str]:
        """Returns a letter per run that tells when it was made; none if all were made on one day with one set of versions."""
        made = self.made_of(results)
        letter = {text: chr(ord("a") + index) for index, text in enumerate(made)}
        found = {key: self.made.get((str(key[0]), key[1])) for key in results}
        return {key: letter[text] for key, text in found.items() if text and len(made) > 1}

    def made_of(self, results: Results) -> list[str]:
        """Returns the dates and versions of runs, sorted."""
        keys = [(str(case), setting) for case, setting in results]
        return sorted({self.made[key] for key in keys if key in self.made})

    def add(self, case: Case, setting: str, result: Result) -> None:
        """Appends a result with its date and versions."""
        made = self.made[str(case), setting] = _made_now()
        if self.path is not None:
            with self.path.open("a") as file:
                entry = {"case": str(case), "setting": setting, **asdict(result), "made": made}
                file.write(json.dumps(entry) + "\n")


def run_all(
    cases: Sequence[Case],
    settings: Sequence[str],
    run: Callable[[Case, str], Result],
    jobs: int,
    record: Record,
    deadline: float = math.inf,
) -> dict[tuple[Case, str], Result]:
    """Runs every case in every setting, `jobs` at a time, with a progress bar; shows failures when they happen.

    Settings run one after the other, so that an interrupted run has results for every case. `deadline`: seconds after
    which no run starts, and recorded results count.
    """
    end = time.monotonic() + deadline
    size = shutil.get_terminal_size()
    keys = [(case, setting) for setting in settings for case in cases]
    results = {key: found for key in keys if (found := record.passed(*key)) is not None}
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(
            total=len(keys),
            initial=len(results),
            unit="run",
            disable=None,
            ncols=size.columns,
            nrows=size.lines,
        ) as bar,
    ):

        def start(case: Case, setting: str) -> Result | None:
            return run(case, setting) if time.monotonic() < end else None

        runs = {pool.submit(start, *key): key for key in keys if key not in results}
        for future in as_completed(runs):
            case, setting = key = runs[future]
            result = future.result()
            if result is None:
                results[key] = record.last(case, setting)
                continue
            results[key] = result
            record.add(case, setting, result)
            if bar.disable or not result.passed:
                said = "" if result.passed else f": {result.message}"
                tqdm.write(f"{result.verdict} in {result.seconds:.1f} s, {setting}: {case}{said}")
            bar.update()
    return results


def run_one(
    case: Case,
    setting: str,
    *,
    folder: Path,
    sm_count: int,
    timeout: float,
    cores: "Queue[int] | None" = None,
    packages: Sequence[Path] = (),
) -> Result:
    """Runs one script in a separate process.

    `timeout`: seconds of wall time. `cores`: free cores; the script gets one. `packages`: folders in front of the module path.
    """
    command = _command(case, setting, folder, sm_count)
    core = None if cores is None else cores.get()
    with tempfile.TemporaryFile("w+") as output:
        stdout = output if case.suite else subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=output,
            cwd=folder if case.suite else None,
            env=_environment(case, packages),
        )
        if core is not None:
            os.sched_setaffinity(process.pid, {core})  # before it has threads
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        if cores is not None and core is not None:
            cores.put(core)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
    seconds = usage.ru_utime + usage.ru_stime
    if process.returncode == -signal.SIGKILL:
        return Result("killed", seconds, message=f"killed, perhaps after the time limit of {timeout:g} s")
    counted = re.search(r"launches, ([\d,]+) warp instructions", said)
    instructions = int(counted.group(1).replace(",", "")) if counted else None
    message = "" if process.returncode == 0 else _last_words(said)
    verdict = _verdict(process.returncode, message)
    ran = sum(map(int, re.findall(r"(\d+) (?:passed|failed)", said.strip().rsplit("\n", 1)[-1])))
    if case.suite and not ran:
        verdict = "FAIL"
    return Result(verdict, seconds, instructions, message, ran if case.suite else 1)


def _command(case: Case, setting: str, folder: Path, sm_count: int) -> list[str]:
    """Returns the command line of a run."""
    mode, _, check = setting.partition("+")
    if case.suite:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "nvfp4_cute.cli.pytest_plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-q", "--cute-emulate", case.arch, "--cute-mode", mode, "--cute-sm-count", str(sm_count)]
        command += ["--cute-check", "errors"] if check else []
        return [*command, case.script, *(["-k", case.arguments] if case.arguments else [])]
    command = [sys.executable, "-m", "nvfp4_cute.cli", "emulate", "--arch", case.arch, "--mode", mode]
    command += ["--sm-count", str(sm_count), "--stats", *(["--check"] if check else [])]
    return [*command, str(folder / case.script), *case.arguments.split()]


def _environment(case: Case, packages: Sequence[Path] = ()) -> dict[str, str]:
    """Returns this process's environment, with one kernel cache per architecture, because QuACK's keys do not contain it."""
    values = env.with_variables({"QUACK_CACHE_DIR": str(env.user_data_dir() / "public_kernels" / case.arch)})
    if packages:
        earlier = filter(None, [values.get("PYTHONPATH")])
        values["PYTHONPATH"] = os.pathsep.join([*map(str, packages), *earlier])
    return values


def _verdict(returncode: int, message: str) -> str:
    if returncode == 0:
        return "pass"
    if MISSING_IN_DSL.search(message):
        return OTHER_DSL
    return "hazard" if REPORTED.search(message) else "FAIL"


def _last_words(text: str) -> str:
    """Returns the emulator's report, else the first error, hazard or failed launch of a suite, else the last line."""
    text = CHECKED.sub("", text)
    hazards = re.search(
        rf"^nvfp4-cute emulate: .*{REPORTED.pattern}", text, re.M
    )  # warnings and notes may follow
    report = hazards.start() if hazards else text.rfind("nvfp4-cute emulate:")
    lines = text[report:].splitlines() if report >= 0 else text.strip().splitlines()
    if report < 0:
        found = [n for n, line in enumerate(lines) if re.match(rf"E  |\d+ .*{REPORTED.pattern}", line)]
        found += [n + 1 for n, line in enumerate(lines[:-1]) if re.fullmatch(r"_{3,} .* _{3,}", line)]
        lines = lines[found[0] :][:2] if found else lines[-1:]
    return "\n".join(lines)[:MESSAGE_CHARACTERS]


def results_table(
    cases: Sequence[Case],
    settings: Sequence[str],
    results: Results,
    marks: Mapping[tuple[Case, str], str] = MappingProxyType({}),
) -> str:
    """Returns one line per case: its name, the end in each setting, seconds and mark of each, and warp instructions."""
    header = ("arch", "script", "arguments", *settings, "warp instr.")
    rows = []
    for case in cases:
        ends = [results[case, setting] for setting in settings]
        counts = [end.instructions for end in ends if end.instructions is not None]
        cells = [
            f"{end.verdict} {end.seconds:5.1f} s {marks.get((case, setting), '')}".rstrip()
            for setting, end in zip(settings, ends, strict=True)
        ]
        count = f"{counts[0]:,}" if counts else "-"
        name = (
            Path(case.script).name
            if case.project == "cutlass"
            else f"{case.project} {Path(case.script).name}"
        )
        arguments = f"-k '{case.arguments}': {ends[0].configurations} tests" if case.suite else case.arguments
        rows.append((case.arch, name, arguments, *cells, count))
    return text_table(header, rows, left=3)


def what_did_not_pass(results: Results) -> str:
    """Returns one line per case that did not pass and its end: the settings, and the first message."""
    ends: dict[tuple[Case, str], list[tuple[str, str]]] = {}
    for (case, setting), result in results.items():
        if not result.passed and result.verdict != NOT_RUN:
            ends.setdefault((case, result.verdict), []).append((setting, result.message))
    lines = []
    for (case, verdict), runs in ends.items():
        said = runs[0][1].splitlines() or [""]
        heading = len(said) > 1 and re.search(rf"{REPORTED.pattern}|^nvfp4-cute emulate:", said[0])
        first = said[1].strip() if heading else said[0]
        first = re.sub(r" \(/[^)]*\)", "", first)  # path of a module on this machine
        settings = ", ".join(setting for setting, _ in runs)
        judged = judgement(case, verdict, first)
        lines.append(f"- {case}, {settings}: {verdict}: {first[:LINE_CHARACTERS]}\n  {judged}")
    return "\n".join(lines) or "Nothing."


def not_called() -> str:
    """Returns one line per project with kernels that no row calls, and the reason."""
    return "\n".join(f"- {project}: {reason}" for project, reason in NOT_CALLED)


def _made_now() -> str:
    """Returns the date and the versions that a result depends on."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in DISTRIBUTIONS)
    return f"{datetime.now(UTC):%Y-%m-%d}: Python {platform.python_version()}, {versions}"


def _heading(checkout: Path, sm_count: int, results: Results, record: Record) -> str:
    """Returns the facts that the table depends on: date, subject, and versions."""
    made = record.made_of(results)
    dated = "; ".join(
        f"{chr(ord('a') + index)}: {text}" if len(made) > 1 else text for index, text in enumerate(made)
    )
    seconds = sum(result.seconds for result in results.values())
    return (
        f"{dated}.\nCUTLASS {checkout_version(checkout)}; virtual GPUs of {sm_count} SMs. "
        "Seconds are processor time of a whole run: imports, compilation, emulation, the script's own reference. "
        f"All together: {seconds / 60:.0f} min."
    )


def checkout_version(checkout: Path) -> str:
    """Returns the first version in a checkout's change log, or "of unknown version"."""
    log = checkout / "CHANGELOG.md"
    found = re.search(r"^## \[([\d.]+)\]", log.read_text(), re.MULTILINE) if log.is_file() else None
    return found.group(1) if found else "of unknown version"


if __name__ == "__main__":
    raise SystemExit(main())

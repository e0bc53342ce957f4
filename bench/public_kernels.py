"""Other people's kernels on the virtual GPU: CUTLASS's CuTe DSL examples, from a user's checkout, unmodified.

Each script runs through `nvfp4-cute emulate` and compares its own result with its own reference. A run passes if the
script ends with exit code 0 and the checker, where it watches, reports no hazard.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from nvfp4_cute.bench.public_cases import CASES, EXAMPLES, Case
from nvfp4_cute.text_table import text_table

SETTINGS = ("eager", "lazy", "random:7", "eager+check")
"""How each script runs: when asynchronous operations happen, and whether the hazard checker watches."""

SECONDS = 600
MESSAGE_CHARACTERS = 1000

DISTRIBUTIONS = ("nvfp4-cute", "nvidia-cutlass-dsl", "torch", "numpy")

EPILOG = """settings: eager, lazy, or random:SEED, with +check for the hazard checker. The exit code is 0 if every run passes, 1 if one
fails, 2 for wrong arguments.

examples:
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --list                       the scripts and their arguments
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --only tutorial              those of the tutorial
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --only 'grouped.* 2,2' --settings lazy+check
  python -m nvfp4_cute.bench.public_kernels ~/cutlass --save bench/results/public_kernels.md
"""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        verdict: "pass", "hazard" (the checker reported one), "FAIL", or "time" (stopped).
        seconds: of the whole process.
        instructions: warp instructions executed, None if nothing was launched.
        message: what was said last on stderr.
    """

    verdict: str
    seconds: float
    instructions: int | None = None
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict == "pass"


Results = Mapping[tuple[Case, str], Result]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen scripts and print the table; return 0 if all runs pass, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    folder = args.checkout / EXAMPLES
    if not folder.is_dir():
        parser.error(f"{args.checkout} is no CUTLASS checkout: there is no {EXAMPLES} in it")
    cases = [case for case in CASES if re.search(args.only, str(case))]
    if not cases:
        parser.error(f"no script matches {args.only!r}; --list shows them")
    if args.list:
        print("\n".join(map(str, cases)))
        return 0
    started = time.perf_counter()
    results = run_all(cases, args.settings, folder, args.jobs, args.timeout)
    heading = _heading(args.checkout, args.jobs, time.perf_counter() - started)
    table = results_table(cases, args.settings, results)
    passed = sum(result.passed for result in results.values())
    total = f"{passed} of {len(results)} runs pass."
    print(f"{heading}\n\n{table}\n\n{total}")
    if args.save:
        args.save.write_text(
            f"# Public kernels on the emulator\n\n{heading}\n\n```\n{table}\n```\n\n{total}\n"
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
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--list", action="store_true", help="print what would run, and stop")
    return parser


def _setting(text: str) -> str:
    if not re.fullmatch(r"(eager|lazy|random:\d+)(\+check)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not eager, lazy, or random:SEED, perhaps with +check")
    return text


def run_all(
    cases: Sequence[Case], settings: Sequence[str], folder: Path, jobs: int, timeout: float
) -> dict[tuple[Case, str], Result]:
    """Run every case in every setting, `jobs` at a time, with a bar; what does not pass is shown when it happens."""
    size = shutil.get_terminal_size()
    results: dict[tuple[Case, str], Result] = {}
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(
            total=len(cases) * len(settings), unit="run", disable=None, ncols=size.columns, nrows=size.lines
        ) as bar,
    ):
        runs = {pool.submit(run_one, c, s, folder, timeout): (c, s) for c in cases for s in settings}
        for future in as_completed(runs):
            case, setting = key = runs[future]
            result = results[key] = future.result()
            if bar.disable or not result.passed:
                said = "" if result.passed else f": {result.message}"
                tqdm.write(f"{result.verdict} in {result.seconds:.1f} s, {setting}: {case}{said}")
            bar.update()
    return results


def run_one(case: Case, setting: str, folder: Path, timeout: float) -> Result:
    """Run one script in a process of its own."""
    mode, _, check = setting.partition("+")
    command = [
        sys.executable,
        "-m",
        "nvfp4_cute.cli",
        "emulate",
        "--arch",
        case.arch,
        "--stats",
        "--mode",
        mode,
    ]
    command += ["--check"] if check else []
    command += [str(folder / case.script), *case.arguments.split()]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Result("time", timeout, message=f"stopped after {timeout:g} s")
    seconds = time.perf_counter() - started
    counted = re.search(r"launches, ([\d,]+) warp instructions", done.stderr)
    instructions = int(counted.group(1).replace(",", "")) if counted else None
    message = _last_words(done.stderr)
    verdict = "pass" if done.returncode == 0 else "hazard" if " hazard" in message else "FAIL"
    return Result(verdict, seconds, instructions, message)


def _last_words(text: str) -> str:
    """What the emulator reported, else the last line."""
    report = text.rfind("nvfp4-cute emulate:")
    lines = text[report:].splitlines() if report >= 0 else text.strip().splitlines()[-1:]
    return "\n".join(lines)[:MESSAGE_CHARACTERS]


def results_table(cases: Sequence[Case], settings: Sequence[str], results: Results) -> str:
    """One line a case: what it is, how each setting ended, seconds of each, and warp instructions."""
    header = ("arch", "script", "arguments", *settings, "warp instr.")
    rows = []
    for case in cases:
        ends = [results[case, setting] for setting in settings]
        counts = [end.instructions for end in ends if end.instructions is not None]
        cells = [f"{end.verdict} {end.seconds:5.1f} s" for end in ends]
        count = f"{counts[0]:,}" if counts else "-"
        rows.append((case.arch, Path(case.script).name, case.arguments, *cells, count))
    return text_table(header, rows, left=3)


def _heading(checkout: Path, jobs: int, seconds: float) -> str:
    """When, what, and where: the facts that the table depends on."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in DISTRIBUTIONS)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, CUTLASS {checkout_version(checkout)}, Python {platform.python_version()}, {versions}.\n"
        f"All runs took {seconds / 60:.0f} min, {jobs} at a time on {os.cpu_count()} cores; seconds are of a whole process,\n"
        "imports, compilation, emulation and the script's own reference, and depend on what else the machine does."
    )


def checkout_version(checkout: Path) -> str:
    """The version that a checkout's change log begins with, or "of unknown version"."""
    log = checkout / "CHANGELOG.md"
    found = re.search(r"^## \[([\d.]+)\]", log.read_text(), re.MULTILINE) if log.is_file() else None
    return found.group(1) if found else "of unknown version"


if __name__ == "__main__":
    raise SystemExit(main())

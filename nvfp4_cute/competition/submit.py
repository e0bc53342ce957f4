"""`nvfp4-cute submit`: passes a submission to popcorn-cli, and stores the result.

popcorn-cli knows the user (~/.popcorn.yaml, written by `popcorn register`); nothing here reads, prints, or stores that.
"""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.competition import kernelguard, server
from nvfp4_cute.competition.protocol import Stats, geometric_mean
from nvfp4_cute.competition.rules import check_file, read_header
from nvfp4_cute.terminal import text_table

TOOL = "popcorn"
INSTALL = (
    "popcorn-cli is not installed: curl -fsSL "
    "https://raw.githubusercontent.com/gpu-mode/popcorn-cli/main/install.sh | bash, then `popcorn register discord`"
)
# Modes that precede a ranked run: each must pass before the next is submitted.
GATES = {"leaderboard": ("test", "benchmark", "leaderboard")}
RATE_LIMIT = r"\b429\b|rate limit|too many"
# Successive waiting times, in seconds, if the server limits the rate of submissions.
WAITS_S = (30, 60, 120, 300)
# Text in a server's refusal -> advice.
REFUSALS = (
    (
        r"deadline|closed|has ended",
        f"this leaderboard is closed (those of 2025-26 are): {server.TRY_LOCALLY}",
    ),
    (RATE_LIMIT, "the server limits how often one submits: wait, then try again"),
    (r"another stream", "the server found its refused word: `nvfp4-cute eval` lists the lines"),
    (r"invite|join", "the leaderboard needs an invitation: `popcorn join CODE`"),
    (
        r"no cli id|register|unauthori[sz]ed|\b401\b",
        "popcorn-cli is not registered: `popcorn register discord`",
    ),
    (r"dns|resolve|connect|network|timed out", "the server cannot be reached: check the network"),
)


@dataclass(frozen=True)
class Order:
    """A requested submission.

    Attributes:
        path: the file.
        leaderboard, gpu: None means the values in the file's header.
        mode: mode of popcorn-cli; a leaderboard run comes after a test and a benchmark.
        repeat: number of submissions. Runners differ by up to half, so one time means little.
        ungated: skip the runs before a leaderboard run.
        dry_run: only print the commands.
        yes: do not ask before a ranked run.
        force: submit even if the server's own list, or its deadline, implies a refusal.
        history: file of JSON lines; None means the default.
    """

    path: Path
    leaderboard: str | None = None
    gpu: str | None = None
    mode: str = "test"
    repeat: int = 1
    ungated: bool = False
    dry_run: bool = False
    yes: bool = False
    force: bool = False
    history: Path | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes to submit, in order."""
        gates = (self.mode,) if self.ungated else GATES.get(self.mode, (self.mode,))
        return gates[:-1] + (self.mode,) * self.repeat


@dataclass(frozen=True)
class Submission:
    """One submission in the history.

    Attributes:
        when: UTC, ISO 8601.
        sha256: hash of the file.
        exit_code: exit code of popcorn-cli.
        times_us: mean of each benchmark, if the result names it.
    """

    when: str
    file: str
    sha256: str
    leaderboard: str
    gpu: str
    mode: str
    exit_code: int
    times_us: list[float] = field(default_factory=list)


def run(order: Order) -> int:
    """Submits a file. Returns popcorn-cli's exit code, or 1.

    Raises:
        ValueError: no such file, broken server rules, an unknown destination, or a closed leaderboard.
    """
    leaderboard, gpu = _destination(order)
    if order.repeat < 1:
        raise ValueError(f"--repeat {order.repeat}: submit at least once")
    if order.dry_run:
        for remark in server.known_objections(leaderboard):
            print(f"nvfp4-cute submit: {remark}", file=sys.stderr)
        for mode in order.modes:
            print(shlex.join(command(order.path, leaderboard, gpu, mode, Path("results.txt"))))
        return 0
    _preflight(order, leaderboard, gpu)
    if order.mode == "leaderboard" and not order.yes and not _confirmed(order.path, leaderboard, gpu):
        print("not submitted", file=sys.stderr)
        return 1
    repeated: list[Submission] = []
    for index, mode in enumerate(order.modes):
        entry = _hand_over(order.path, leaderboard, gpu, mode)
        _keep(entry, order.history)
        if entry.exit_code:
            if index + 1 < len(order.modes):
                print(f"nvfp4-cute submit: stopped after this {mode} run", file=sys.stderr)
            return entry.exit_code
        if mode == order.mode:
            repeated.append(entry)
    if len(repeated) > 1:
        print(summary([entry.times_us for entry in repeated]))
    return 0


def _destination(order: Order) -> tuple[str, str]:
    """Returns leaderboard and GPU of a file that a server accepts."""
    findings = check_file(order.path)
    if findings:
        raise ValueError("a server refuses this file:\n" + "\n".join(f"  {finding}" for finding in findings))
    header = read_header(order.path.read_text(encoding="utf-8"))
    leaderboard = order.leaderboard or header.leaderboard
    gpu = order.gpu or (header.gpus[0] if header.gpus else None)
    if not leaderboard or not gpu:
        raise ValueError(f"{order.path} names no leaderboard or no gpu; pass --leaderboard and --gpu")
    return leaderboard, gpu


def _preflight(order: Order, leaderboard: str, gpu: str) -> None:
    """Checks everything that a submission would find out later and more slowly."""
    if shutil.which(TOOL) is None:
        raise ValueError(INSTALL)
    opinion = kernelguard.ask(order.path.read_text(encoding="utf-8"))
    if opinion:
        print(opinion, file=sys.stderr)
    against, asked = server.objections(leaderboard, gpu)
    if opinion and opinion.filtered and order.mode != "test":
        against.append("KernelGuard, which the server runs before it times a file, filters it")
    if not asked:
        print("nvfp4-cute submit: the server's list of leaderboards could not be read", file=sys.stderr)
    if against and not order.force:
        raise ValueError("; ".join(against) + "; --force submits all the same")


def _hand_over(path: Path, leaderboard: str, gpu: str, mode: str) -> Submission:
    """Makes popcorn-cli submit once. If the server limits the rate, waits and tries again."""
    for wait_s in (*WAITS_S, None):
        with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as folder:
            output = Path(folder) / "results.txt"
            done = subprocess.run(
                command(path, leaderboard, gpu, mode, output), capture_output=True, text=True, check=False
            )
            result = output.read_text(encoding="utf-8") if output.is_file() else ""
        print(done.stdout + result, end="")
        print(done.stderr, end="", file=sys.stderr)
        said = done.stdout + done.stderr + result
        limited = done.returncode and re.search(RATE_LIMIT, said, re.IGNORECASE)
        if not limited or wait_s is None:
            break
        print(f"nvfp4-cute submit: the server limits how often; waiting {wait_s} s", file=sys.stderr)
        time.sleep(wait_s)
    if done.returncode:
        print(f"nvfp4-cute submit: {explain(said)}", file=sys.stderr)
    return Submission(
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        leaderboard,
        gpu,
        mode,
        done.returncode,
        read_times_us(result or done.stdout),
    )


def _keep(entry: Submission, history: Path | None) -> None:
    file = history or env.user_data_dir() / "submissions.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(entry)) + "\n")


def command(path: Path, leaderboard: str, gpu: str, mode: str, output: Path) -> list[str]:
    """Returns popcorn-cli's command line."""
    options = [
        "--no-tui",
        "--leaderboard",
        leaderboard,
        "--gpu",
        gpu,
        "--mode",
        mode,
        "--output",
        str(output),
    ]
    return [TOOL, "submit", *options, str(path)]


def explain(message: str) -> str:
    """Returns advice on a refusal."""
    for pattern, advice in REFUSALS:
        if re.search(pattern, message, re.IGNORECASE):
            return advice
    return "popcorn-cli failed; what it said is above"


def read_times_us(text: str) -> list[float]:
    """Returns the means of a result's benchmarks in microseconds: numbers before a unit of time and a plus-minus sign."""
    units = {"ns": 1e-3, "µs": 1.0, "us": 1.0, "ms": 1e3, "s": 1e6}
    found = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*±\s*[0-9.]+\s*(ns|µs|us|ms|s)\b", text)
    return [float(number) * units[unit] for number, unit in found]


def summary(runs: Sequence[Sequence[float]]) -> str:
    """Summarizes repeated runs, measured by the server's runners: each benchmark, and their geometric mean."""
    timed = [run for run in runs if run]
    count = max((len(run) for run in timed), default=0)
    whole = [run for run in timed if len(run) == count]
    if not whole:
        return f"{len(runs)} runs; none of the results names a time"
    columns = {f"benchmark {index}": [run[index] for run in whole] for index in range(count)}
    columns["geomean"] = [geometric_mean(run) for run in whole]
    rows = []
    for name, values in columns.items():
        stats = Stats.of(values)
        numbers = (stats.mean, stats.std, stats.best, stats.worst)
        rows.append(
            [name, *(f"{value:.3f}" for value in numbers), f"{100 * (stats.worst / stats.best - 1):.1f}"]
        )
    header = ["measured", "mean us", "std", "best", "worst", "spread %"]
    return f"{len(whole)} of {len(runs)} runs timed\n{text_table(header, rows)}"


def _confirmed(path: Path, leaderboard: str, gpu: str) -> bool:
    """Asks the user; anything but "yes" means no, and so does a closed input."""
    try:
        answer = input(f"Submit {path} to leaderboard {leaderboard} on {gpu}, ranked and public? Type yes: ")
    except EOFError:
        return False
    return answer.strip().lower() == "yes"

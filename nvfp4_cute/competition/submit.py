"""`nvfp4-cute submit`: hands a submission to popcorn-cli, and keeps what came back.

popcorn-cli knows who submits (~/.popcorn.yaml, written by `popcorn register`); nothing here reads, prints, or stores that.
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
# What a ranked run is preceded by: each must pass before the next is submitted.
GATES = {"leaderboard": ("test", "benchmark", "leaderboard")}
RATE_LIMIT = r"\b429\b|rate limit|too many"
# How long to wait, one time after the other, where the server limits how often one submits.
WAITS_S = (30, 60, 120, 300)
# What a server's refusal says -> what to do about it.
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
    """What is asked for.

    Attributes:
        path: the file.
        leaderboard, gpu: None takes what the file's header says.
        mode: of popcorn-cli; a leaderboard run comes after a test and a benchmark.
        repeat: how often to submit: runners differ by up to half, so one time says little.
        ungated: leave out what comes before a leaderboard run.
        dry_run: only print the commands.
        yes: do not ask before a ranked run.
        force: submit although the server's own list, or its deadline, says that it will refuse.
        history: file of JSON lines; None takes the default.
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
        """What is submitted, in this order."""
        gates = (self.mode,) if self.ungated else GATES.get(self.mode, (self.mode,))
        return gates[:-1] + (self.mode,) * self.repeat


@dataclass(frozen=True)
class Submission:
    """One hand-over, as the history keeps it.

    Attributes:
        when: UTC, ISO 8601.
        sha256: of the file.
        exit_code: of popcorn-cli.
        times_us: mean of each benchmark, as far as the result names them.
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
    """Submit a file; popcorn-cli's exit code, or 1.

    Raises:
        ValueError: no such file, rules of the server that it breaks, nobody says where to, or the leaderboard is closed.
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
    """Leaderboard and GPU of a file that a server accepts."""
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
    """Everything that would be found out later, and slower, by submitting."""
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
    """Have popcorn-cli submit once; where the server limits how often one may, wait and try again."""
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
    """popcorn-cli's command line."""
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
    """What to do about a refusal."""
    for pattern, advice in REFUSALS:
        if re.search(pattern, message, re.IGNORECASE):
            return advice
    return "popcorn-cli failed; what it said is above"


def read_times_us(text: str) -> list[float]:
    """Means of a result's benchmarks in microseconds: numbers before a unit of time and a plus-minus sign."""
    units = {"ns": 1e-3, "µs": 1.0, "us": 1.0, "ms": 1e3, "s": 1e6}
    found = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*±\s*[0-9.]+\s*(ns|µs|us|ms|s)\b", text)
    return [float(number) * units[unit] for number, unit in found]


def summary(runs: Sequence[Sequence[float]]) -> str:
    """What repeated runs say of each benchmark, measured by the server's runners, and of their geometric mean."""
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
    """Ask; anything but "yes" is no, and so is a closed input."""
    try:
        answer = input(f"Submit {path} to leaderboard {leaderboard} on {gpu}, ranked and public? Type yes: ")
    except EOFError:
        return False
    return answer.strip().lower() == "yes"

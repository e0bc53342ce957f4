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
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from nvfp4_cute import env
from nvfp4_cute.competition.rules import check_file, read_header

TOOL = "popcorn"
INSTALL = (
    "popcorn-cli is not installed: curl -fsSL "
    "https://raw.githubusercontent.com/gpu-mode/popcorn-cli/main/install.sh | bash, then `popcorn register discord`"
)
# What a server's refusal says -> what to do about it.
REFUSALS = (
    (
        r"deadline|closed|has ended",
        "this leaderboard is closed (those of 2025-26 are): try the file with `nvfp4-cute eval`",
    ),
    (r"\b429\b|rate limit|too many", "the server limits how often one submits: wait, then try again"),
    (r"another stream", "the server found its refused word: `nvfp4-cute eval` lists the lines"),
    (r"invite|join", "the leaderboard needs an invitation: `popcorn join CODE`"),
    (
        r"no cli id|register|unauthori[sz]ed|\b401\b",
        "popcorn-cli is not registered: `popcorn register discord`",
    ),
    (r"dns|resolve|connect|network|timed out", "the server cannot be reached: check the network"),
)


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


def run(
    path: Path,
    *,
    leaderboard: str | None,
    gpu: str | None,
    mode: str,
    dry_run: bool,
    yes: bool,
    history: Path | None,
) -> int:
    """Submit a file; popcorn-cli's exit code, or 1.

    Args:
        leaderboard, gpu: None takes what the file's header says.
        dry_run: only print the command.  yes: do not ask before a ranked run.
        history: file of JSON lines; None takes the default.

    Raises:
        ValueError: no such file, rules of the server that it breaks, or nobody says where to.
    """
    findings = check_file(path)
    if findings:
        raise ValueError("a server refuses this file:\n" + "\n".join(f"  {finding}" for finding in findings))
    header = read_header(path.read_text(encoding="utf-8"))
    leaderboard = leaderboard or header.leaderboard
    gpu = gpu or (header.gpus[0] if header.gpus else None)
    if not leaderboard or not gpu:
        raise ValueError(f"{path} names no leaderboard or no gpu; pass --leaderboard and --gpu")
    if dry_run:
        print(shlex.join(command(path, leaderboard, gpu, mode, Path("results.txt"))))
        return 0
    if shutil.which(TOOL) is None:
        raise ValueError(INSTALL)
    if mode == "leaderboard" and not yes and not _confirmed(path, leaderboard, gpu):
        print("not submitted", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as folder:
        output = Path(folder) / "results.txt"
        done = subprocess.run(
            command(path, leaderboard, gpu, mode, output), capture_output=True, text=True, check=False
        )
        result = output.read_text(encoding="utf-8") if output.is_file() else ""
    print(done.stdout + result, end="")
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        advice = explain(done.stdout + done.stderr + result)
        print(f"nvfp4-cute submit: {advice}", file=sys.stderr)
    entry = Submission(
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        leaderboard,
        gpu,
        mode,
        done.returncode,
        read_times_us(result or done.stdout),
    )
    file = history or env.user_data_dir() / "submissions.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(entry)) + "\n")
    return done.returncode


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


def _confirmed(path: Path, leaderboard: str, gpu: str) -> bool:
    """Ask; anything but "yes" is no, and so is a closed input."""
    try:
        answer = input(f"Submit {path} to leaderboard {leaderboard} on {gpu}, ranked and public? Type yes: ")
    except EOFError:
        return False
    return answer.strip().lower() == "yes"

"""The protocol between a competition's runner and its harness: case files, ``key: value`` result lines, exit codes.

A case file has one case per line, ``m: 128; k: 256; l: 1; seed: 1111``; extents of groups are lists, ``m: [96, 128]``.
The harness writes its results to the inherited file descriptor that POPCORN_FD names, with times in nanoseconds.
"""

import base64
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Architecture of the emulator: that of all of the servers' GPUs for these problems.
EMULATED_ARCH = "sm_100a"
# Exit codes of a harness; TIMEOUT is the runner's.
OK, BAD_ARGUMENTS = 0, 2
CUDA_FAILED, NO_DESCRIPTOR, REJECTED, BAD_CASES, TIMED_OUT = 110, 111, 112, 113, 114
EXIT_MEANINGS = {
    OK: "ran to its end",
    BAD_ARGUMENTS: "wrong arguments",
    CUDA_FAILED: "the device or the process that ran the submission failed",
    NO_DESCRIPTOR: "POPCORN_FD is not set",
    REJECTED: "an answer was rejected",
    BAD_CASES: "the case file cannot be read",
    TIMED_OUT: "the time limit was exceeded",
}
MODES = ("test", "benchmark", "leaderboard", "profile")
TIMED_MODES = ("benchmark", "leaderboard")
STATISTICS = ("runs", "mean", "std", "err", "best", "worst")

_PART = re.compile(r"\s*([a-zA-Z_]+)\s*:\s*(\[[^\]]*\]|\([^)]*\)|[a-zA-Z_]+|[+-]?[0-9]+)\s*")


def combine_seeds(public: int, secret: int) -> int:
    """Combines seeds by Cantor's pairing, shifted by ``public``: large if ``secret`` is, however small the published seed."""
    return public + (public + secret) * (public + secret + 1) // 2


def format_case(arguments: dict[str, Any]) -> str:
    """Returns a line of a case file."""
    return "; ".join(
        f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in arguments.items()
    )


def parse_case(line: str) -> dict[str, Any]:
    """Parses the arguments of a line of a case file; lists become tuples.

    Raises:
        ValueError: a part that is not ``key: value``.
    """
    arguments: dict[str, Any] = {}
    for part in line.split(";"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"invalid test case: {line!r}: {part!r} is not of the form `key: value`")
        arguments[match[1]] = _value(match[2])
    return arguments


def _value(text: str) -> Any:
    if text[0] in "[(":
        return tuple(int(item) for item in text[1:-1].split(",") if item.strip())
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else text


@dataclass(frozen=True)
class Stats:
    """Statistics of durations in nanoseconds: number, mean, standard deviation, standard error of the mean, extremes."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float

    @classmethod
    def of(cls, durations: Sequence[float]) -> "Stats":
        """Computes the statistics of at least one duration; a single one has no deviation."""
        runs = len(durations)
        mean = sum(durations) / runs
        variance = sum((duration - mean) ** 2 for duration in durations) / max(runs - 1, 1)
        std = math.sqrt(variance)
        return cls(runs, mean, std, std / math.sqrt(runs), min(durations), max(durations))


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the score of a list of benchmarks: (product) ** (1 / count)."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


@dataclass(frozen=True)
class CaseResult:
    """A harness's result for one case.

    Attributes:
        spec: the line of the case file.
        passed: whether it was accepted.
        message: the reason if not, or a remark.
        stats: statistics of its timings, or None.
        source: "measured", "modelled", or "not timed".
        report: text of a profile.
    """

    spec: str
    passed: bool
    message: str = ""
    stats: Stats | None = None
    source: str = "not timed"
    report: str = ""


@dataclass(frozen=True)
class Results:
    """All results of a harness.

    Attributes:
        cases: one result per case that it reached.
        passed: its value of ``check``; False if it never wrote one.
        exit_code: exit code of its process.
    """

    cases: tuple[CaseResult, ...]
    passed: bool
    exit_code: int = OK
    log: dict[str, str] = field(default_factory=dict, repr=False)


def parse_results(text: str, exit_code: int) -> Results:
    """Parses the text that a harness wrote to its descriptor.

    A ranked run of the official harness ends with exit code 0 even if it failed, so ``check`` decides instead of the
    code.
    """
    log: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        match = re.match(r"((?:test|benchmark)[-.][\w.]+|test-count|benchmark-count|check): (.*)", line)
        if match:
            key = match[1]
            log[key] = match[2]
        elif key:
            log[key] += "\n" + line  # messages may have several lines
    cases = []
    for kind in ("test", "benchmark"):
        index = 0
        while f"{kind}.{index}.spec" in log:
            cases.append(_case(log, f"{kind}.{index}."))
            index += 1
    return Results(tuple(cases), log.get("check") == "pass" and exit_code == OK, exit_code, log)


def _case(log: dict[str, str], prefix: str) -> CaseResult:
    stats = None
    if prefix + "mean" in log:
        numbers = [float(log[prefix + name]) for name in STATISTICS]
        stats = Stats(int(numbers[0]), *numbers[1:])
    report = base64.b64decode(log.get(prefix + "report", ""), b"+*").decode()
    passed = log.get(prefix + "status", "pass" if stats or prefix + "report" in log else "fail") == "pass"
    message = log.get(prefix + "error", log.get(prefix + "message", ""))
    source = log.get(prefix + "source", "measured" if stats else "not timed")
    return CaseResult(log[prefix + "spec"], passed, message, stats, source, report)

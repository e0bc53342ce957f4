"""Resolves which engines and libraries can be installed next to this package, by uv from package metadata. Installs nothing.

A pair is this package, with the extra that users of the peer need, and one peer at one version. Each pair is resolved
for every Python and processor. If a pair has no solution, the page names the requirement at fault: one of the peer's
own, which fails without this package, or the requirement of this package without which the pair resolves.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nvfp4_cute.terminal import Progress

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "bench/results/pins.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The glibc that wheels of vLLM and SGLang ask for.
PLATFORMS = {"x86-64": "x86_64-manylinux_2_35", "aarch64": "aarch64-manylinux_2_35"}
SECONDS = 300  # for one resolution
JOBS = 4  # resolutions at a time: each waits for the index most of the time
SHOWN = ("nvidia-cutlass-dsl", "torch")
OFFLINE = re.compile(r"error sending request|dns error|failed to fetch|connection refused|timed out", re.I)
NOT_CACHED = re.compile(r"network was disabled|not found in the cache|--offline", re.I)


@dataclass(frozen=True)
class Peer:
    """A package that is installed next to this one.

    Attributes:
        requirement: requirement such as ``vllm==0.33.0``.
        extra: extra of this package that users of the peer need; "" for none.
    """

    requirement: str
    extra: str = ""

    def __str__(self) -> str:
        return self.requirement.replace("==", " ")


PEERS = (
    Peer("vllm==0.32.0", "vllm"),
    Peer("vllm==0.33.0", "vllm"),
    Peer("sglang==0.5.23"),
    Peer("flashinfer-python"),
    Peer("nvidia-cudnn-frontend"),
    Peer("quack-kernels"),
    Peer("torchao", "models"),
    Peer("llmcompressor", "models"),
    *(Peer(f"transformers=={version}", "models") for version in (
        "5.17.0", "5.18.*", "5.19.*", "5.20.*", "5.21.*", "5.22.*", "5.23.*", "5.24.0"
    )),
)  # fmt: skip
FAST = (("vllm==0.33.0", "3.12", "x86-64"), ("sglang==0.5.23", "3.12", "x86-64"))
"""Pairs that a test resolves in a few seconds: engines whose exact pins have excluded this package before."""


class Unreachable(RuntimeError):
    """The package index does not answer, or uv is not installed."""


@dataclass(frozen=True)
class Outcome:
    """Result for one pair on one Python and processor.

    Attributes:
        versions: versions of SHOWN, if there is a solution.
        fault: the requirement without a solution; "" if there is one.
        is_ours: whether the requirement at fault belongs to this package.
    """

    versions: tuple[str, ...] = ()
    fault: str = ""
    is_ours: bool = False


def resolve(
    requirements: Sequence[str], python: str, platform: str, cache: Path | None = None
) -> tuple[dict[str, str], str]:
    """Returns versions by package, and uv's message, empty if there is a solution.

    Args:
        requirements: lines in pip's format.
        python: version such as "3.12".
        platform: a key of PLATFORMS.
        cache: folder of uv whose index answers are used before the index is queried; None means uv's own folder, whose
            answers uv verifies with the index.

    Raises:
        Unreachable: the index does not answer, or uv is not installed.
    """
    command = [
        _uv(), "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:",
        "--python-version", python, "--python-platform", PLATFORMS[platform],
    ]  # fmt: skip
    run = None
    if cache is not None:
        command += ["--cache-dir", str(cache)]
        run = _run([*command, "--offline"], requirements)
    if run is None or NOT_CACHED.search(run.stderr):
        run = _run(command, requirements)
    if run.returncode == 0:
        return dict(re.findall(r"^([\w.-]+)(?:\[[\w,.-]+\])?==(\S+)", run.stdout, re.M)), ""
    if OFFLINE.search(run.stderr):
        raise Unreachable(run.stderr.strip().splitlines()[-1])
    return {}, run.stderr


def _run(command: Sequence[str], requirements: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input="\n".join(requirements), capture_output=True, text=True, timeout=SECONDS, cwd="/"
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"uv found no answer in {SECONDS} s") from None


def requirements_of(extra: str) -> list[str]:
    """Returns the requirements of this package with one of its extras."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r'^(\w+) = \[(.*?)\](?!")', text, re.M | re.S)  # "name[extra]" does not end a list
    found = {name: re.findall(r'"([^"]+)"', values) for name, values in lists}
    return [*found["dependencies"], *(found[extra] if extra else ())]


def outcome_of(peer: Peer, python: str, platform: str, cache: Path | None = None) -> Outcome:
    """Resolves one pair. If that fails, finds the requirement at fault."""
    ours = requirements_of(peer.extra)
    versions, message = resolve([*ours, peer.requirement], python, platform, cache)
    if not message:
        return Outcome(tuple(versions.get(name, "") for name in SHOWN))
    _, alone = resolve([peer.requirement], python, platform, cache)
    if alone:
        return Outcome(fault=_cause(alone))
    for requirement in ours:
        rest = [one for one in ours if one != requirement]
        if not resolve([*rest, peer.requirement], python, platform, cache)[1]:
            return Outcome(fault=f"{requirement} of this package", is_ours=True)
    return Outcome(fault="several requirements of this package", is_ours=True)


def _uv() -> str:
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if found is None:
        raise Unreachable('uv is not installed; run `pip install "nvfp4-cute[dev]"`')
    return found


def _cause(message: str) -> str:
    """Returns the package in uv's message that has no version, or no wheel, for this Python and processor."""
    flat = " ".join(message.split())
    rules = (
        (r"does not satisfy Python(\S+?)(?:,<[\d.]+)? and (\S+?)(?:[=<>]\S*)? depends", "{1} needs Python {0}"),
        (r"(\S+?)(?:[=<>,]\S*)? has no (?:usable wheels|wheels with a matching)", "{0} has no wheel"),
        (r"only the following versions of (\S+?) are available", "{0} has no such version"),
        (r"there (?:is|are) no versions? of (\S+?)(?:[=<>]\S*)? ", "{0} has no such version"),
    )  # fmt: skip
    for pattern, text in rules:
        found = re.search(pattern, flat)
        if found:
            return text.format(*found.groups())
    return "its own requirements: " + flat[flat.find("Because") :][:160]


def page(found: dict[tuple[Peer, str, str], Outcome]) -> str:
    """Returns the page with the table."""
    lines = [
        "# What can be installed next to nvfp4-cute",
        "",
        "Made by `python -m nvfp4_cute.bench.pins --write`; `make test-pins` compares it with the package index. uv resolves "
        "each pair from package metadata. Nothing is installed or run. The fourth column has the CuTe DSL and the torch of "
        "pairs that leave no choice. A letter stands for the package at fault.",
        "",
        f"| next to | with our extra | processor | CuTe DSL, torch | {' | '.join(PYTHONS)} |",
        "|---" * (4 + len(PYTHONS)) + "|",
    ]
    notes: dict[str, str] = {}
    for peer in dict.fromkeys(peer for peer, _, _ in found):
        for platform in PLATFORMS:
            outcomes = [found[peer, python, platform] for python in PYTHONS]
            cells = [
                notes.setdefault(outcome.fault, f"({chr(ord('a') + len(notes))})") if outcome.fault else "yes"
                for outcome in outcomes
            ]
            pins = {outcome.versions for outcome in outcomes if not outcome.fault}
            pinned = ", ".join(pins.pop()) if len(pins) == 1 else "-"
            lines.append(f"| {peer} | {peer.extra or '-'} | {platform} | {pinned} | {' | '.join(cells)} |")
    lines += ["", *(f"- {letter} {fault}" for fault, letter in notes.items())]
    return "\n".join(lines).rstrip() + "\n"


def run(peers: Sequence[Peer], pythons: Sequence[str]) -> dict[tuple[Peer, str, str], Outcome]:
    """Resolves every pair on every Python and processor, several peers at a time, with current answers of the index."""
    cases = [(peer, python, platform) for peer in peers for python in pythons for platform in PLATFORMS]
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as folder, ThreadPoolExecutor(JOBS) as pool:
        jobs = {pool.submit(partial(outcome_of, *case, Path(folder))): case for case in cases}
        done = Progress(as_completed(jobs), desc="resolutions", unit="pair", total=len(jobs))
        found = {jobs[job]: job.result() for job in done}
    return {case: found[case] for case in cases}


def rows_of(text: str) -> set[str]:
    """Returns the rows of a page, with the causes that its letters stand for."""
    causes = dict(re.findall(r"^- (\([a-z]\)) (.*)$", text, re.M))
    return {
        re.sub(r"\([a-z]\)", lambda found: causes[found[0]], row)
        for row in re.findall(r"^\| [a-z].*$", text, re.M)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Resolves all pairs and compares them with the page, or writes it.

    Returns:
        0; 1 if a pair has a different outcome than on the page, or a requirement of this package excludes a peer; 2 if
        the package index does not answer.
    """
    parser = argparse.ArgumentParser(prog="python -m nvfp4_cute.bench.pins", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    try:
        found = run(PEERS, PYTHONS)
    except Unreachable as error:
        print(f"not resolved: {error}", file=sys.stderr)
        return 2
    text = page(found)
    if args.write:
        PAGE.write_text(text)
    changed = rows_of(text) - rows_of(PAGE.read_text())
    for row in sorted(changed):
        print(f"not what {PAGE.relative_to(ROOT)} says: {row}", file=sys.stderr)
    ours = [(case, outcome.fault) for case, outcome in found.items() if outcome.is_ours]
    for (peer, python, platform), fault in ours:
        print(f"{peer} on Python {python}, {platform}, is excluded by {fault}", file=sys.stderr)
    print(
        f"{len(found)} pairs resolved, {sum(not outcome.fault for outcome in found.values())} can be installed"
    )
    return 1 if ours or changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Requirements of a competition server for a submission file, checked before it runs the file.

The rules are those of GPU MODE's service of 2026-07: one UTF-8 file of at most 1,000,000 bytes named ``*.py``; options
in its first comment block (``#!POPCORN leaderboard NAME``, ``#!POPCORN gpu NAME``); and nowhere, in upper or lower
case, the word for side queues. Imports are a rule of our own exports, because a runner is not guaranteed to have other
packages.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute.competition.bundle import FORBIDDEN_WORD
from nvfp4_cute.competition.sources import is_stdlib

MAX_BYTES = 1_000_000
IMPORTABLE = ("cuda", "cutlass", "task", "torch")
OPTIONS = {"leaderboard": "leaderboard", "gpu": "gpu", "gpus": "gpu"}
# Executing text hides what a submission does; services filter it as obfuscation.
EXECUTING = ("exec", "eval", "__import__", "compile")


@dataclass(frozen=True)
class Finding:
    """A broken rule: the line (0 for the whole file) and what is wrong with it."""

    line: int
    message: str

    def __str__(self) -> str:
        """Returns ``line 12: ...``."""
        return f"line {self.line}: {self.message}" if self.line else self.message


@dataclass(frozen=True)
class Header:
    """Options of a submission's first comment block."""

    leaderboard: str | None = None
    gpus: tuple[str, ...] = ()


def header_text(leaderboard: str, gpu: str) -> str:
    """Returns the option lines that a server reads."""
    return f"#!POPCORN leaderboard {leaderboard}\n#!POPCORN gpu {gpu}\n"


def read_header(text: str) -> Header:
    """Reads the options of the first comment block.

    Raises:
        ValueError: an unknown or repeated option, for which a server refuses the file.
    """
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("#"):
            break
        match = re.match(r"#!POPCORN\s+(\S+)\s*(.*)", line)
        if not match:
            continue
        option = OPTIONS.get(match[1].lower())
        if option is None:
            raise ValueError(f"line {number}: option {match[1]!r} is unknown; use leaderboard, gpu, or gpus")
        if option in found:
            raise ValueError(f"line {number}: option {match[1]!r} is given twice; keep one")
        found[option] = tuple(match[2].split())
    boards = found.get("leaderboard", ())
    return Header(boards[0] if boards else None, found.get("gpu", ()))


def check_server_rules(data: bytes, name: str = "submission.py") -> list[Finding]:
    """Returns the reasons for which a server would refuse any file."""
    findings = []
    if not name.endswith(".py"):
        findings.append(Finding(0, f"the file is called {name}; its name must end in .py"))
    if len(data) > MAX_BYTES:
        findings.append(Finding(0, f"{len(data):,} bytes; at most {MAX_BYTES:,} are accepted"))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return [*findings, Finding(data[: error.start].count(b"\n") + 1, "not UTF-8")]
    for number, line in enumerate(text.splitlines(), start=1):
        if FORBIDDEN_WORD in line.lower():
            findings.append(Finding(number, f"holds the word {FORBIDDEN_WORD!r}: {line.strip()}"))
    try:
        read_header(text)
    except ValueError as error:
        findings.append(Finding(0, str(error)))
    return findings


def check_export_rules(text: str, allowed: Sequence[str] = ()) -> list[Finding]:
    """Returns broken rules of our own exports: plain code that imports only modules of a runner and the ``allowed`` ones."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [Finding(error.lineno or 0, f"not Python: {error.msg}")]
    return [*_foreign_imports(tree, (*IMPORTABLE, *allowed)), *_executed_text(tree)]


def check_file(path: Path) -> list[Finding]:
    """Checks the server rules for a file on disk. Raises ValueError if it does not exist."""
    if not path.is_file():
        raise ValueError(f"there is no file `{path}`")
    return check_server_rules(path.read_bytes(), path.name)


def _foreign_imports(tree: ast.Module, importable: Sequence[str]) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Finding(node.lineno, "relative import; a submission is one file")
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            if module.split(".")[0] not in importable and not is_stdlib(module):
                known = ", ".join(importable)
                yield Finding(node.lineno, f"imports {module}; a runner has {known}, and Python's library")


def _executed_text(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXECUTING:
            yield Finding(node.lineno, f"calls {node.func.id}: a submission is plain code")

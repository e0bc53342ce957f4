"""Edits of an assembled file's lines, in groups that happen together or not at all."""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Put:
    """Another text in the place of (first line, column) to (last line, column); columns count bytes of UTF-8."""

    first: int
    start: int
    last: int
    stop: int
    text: str
    reason: str


@dataclass(frozen=True)
class Cut:
    """Lines ``first`` to ``last`` go."""

    first: int
    last: int


@dataclass(frozen=True)
class Dedent:
    """Lines ``first`` to ``last`` begin ``by`` columns earlier."""

    first: int
    last: int
    by: int
    reason: str


Edit = Put | Cut | Dedent
Group = Sequence[Edit]


class Text:
    """The lines, edited pass by pass."""

    def __init__(self, lines: list[Any]):
        """`lines`: ``bundle.Line``, or other dataclasses with ``text`` and ``reasons``."""
        self.lines = lines

    def tree(self) -> ast.Module:
        """The syntax of the lines as they are now."""
        return ast.parse("\n".join(line.text for line in self.lines))

    def apply(self, groups: Iterable[Group]) -> int:
        """Make the edits of every group that touches nothing that one before it touches; how many groups were made."""
        whole: set[int] = set()  # lines that an edit has for itself
        parts: dict[int, list[tuple[int, int]]] = {}  # columns of lines that others may touch elsewhere
        chosen: list[Edit] = []
        count = 0
        for group in groups:
            if self._claim(group, whole, parts):
                chosen += group
                count += 1
        self._make(chosen)
        return count

    def _claim(self, group: Group, whole: set[int], parts: dict[int, list[tuple[int, int]]]) -> bool:
        """Take what a group touches; False, and nothing is taken, where something of it is taken already."""
        lines: set[int] = set()
        places: dict[int, list[tuple[int, int]]] = {}
        for edit in group:
            numbers = set(range(edit.first, edit.last + 1))
            if numbers & (whole | lines):
                return False
            if isinstance(edit, Put) and edit.first == edit.last:
                there = parts.get(edit.first, []) + places.get(edit.first, [])
                if any(start < edit.stop and edit.start < stop for start, stop in there):
                    return False
                places.setdefault(edit.first, []).append((edit.start, edit.stop))
            elif numbers & (parts.keys() | places.keys()):
                return False
            else:
                lines |= numbers
        whole |= lines
        for number, found in places.items():
            parts.setdefault(number, []).extend(found)
        return bool(group)

    def _make(self, edits: list[Edit]) -> None:
        gone: set[int] = set()
        puts = [edit for edit in edits if isinstance(edit, Put)]
        for put in sorted(puts, key=lambda put: (-put.first, -put.start)):
            line, last = self.lines[put.first - 1], self.lines[put.last - 1]
            before, after = line.text.encode()[: put.start], last.text.encode()[put.stop :]
            text = before.decode() + put.text + after.decode()
            self.lines[put.first - 1] = _with(line, text.rstrip(), put.reason)
            gone.update(range(put.first + 1, put.last + 1))
        for edit in edits:
            if isinstance(edit, Cut):
                gone.update(range(edit.first, edit.last + 1))
            elif isinstance(edit, Dedent):
                for number in range(edit.first, edit.last + 1):
                    line = self.lines[number - 1]
                    if line.text[: edit.by].strip() == "":
                        self.lines[number - 1] = _with(line, line.text[edit.by :], edit.reason)
        kept = [line for number, line in enumerate(self.lines, start=1) if number not in gone]
        self.lines = [replace(line, text=text) for line in kept for text in line.text.split("\n")]

    def drop_empty_sections(self, heading: str) -> None:
        """Sections, each begun by a line with ``heading``, in which only comments are left go."""
        starts = [number for number, line in enumerate(self.lines) if line.text.startswith(heading)]
        ends = [*starts, len(self.lines)]
        kept = self.lines[: ends[0]]
        for start, end in pairwise(ends):
            section = self.lines[start:end]
            if any(line.text.strip() and not line.text.startswith("#") for line in section):
                kept += section
        self.lines = kept

    def drop_orphans(self) -> None:
        """Comments of blocks that are gone: indented further than the code on either side."""
        kept: list[Any] = []
        code = ""  # the last line that is not a comment
        for index, line in enumerate(self.lines):
            text = line.text
            if text.strip().startswith("#") and text.startswith(" "):
                following = next(
                    (
                        n.text
                        for n in self.lines[index:]
                        if n.text.strip() and not n.text.lstrip().startswith("#")
                    ),
                    "",
                )
                if not code.rstrip().endswith((":", ",", "(", "[", "{")) and max(
                    map(_indent, (code, following))
                ) < _indent(text):
                    continue
            elif text.strip() and not text.startswith("#"):
                code = text
            elif text.startswith("#"):
                code = ""
            kept.append(line)
        self.lines = kept

    def shorten_headings(self, heading: str) -> None:
        """Sections with neither function nor class need no heading; one blank line below each of the others.

        Of a heading the first paragraph stays, and all of it over a kernel.
        """
        starts = [number for number, line in enumerate(self.lines) if line.text.startswith(heading)]
        ends = [*starts, len(self.lines)]
        kept = self.lines[: ends[0]]
        for start, end in pairwise(ends):
            section = self.lines[start:end]
            stop = next(n for n, line in enumerate(section) if not line.text.startswith("#"))
            top, rest = section[:stop], section[stop:]
            if not any(re.match(r"\s*(def|class) ", line.text) for line in rest):
                top = []
            if not any(line.text.strip() == "@cute.kernel" for line in rest):
                top = top[: next((n for n, line in enumerate(top) if line.text == "#"), len(top))]
            while len(rest) > 1 and not rest[0].text and not rest[1].text:
                rest = rest[1:]
            kept += [*top, *rest]
        self.lines = kept

    def tidy(self) -> None:
        """One blank line where there are several, none at the start of a block."""
        kept: list[Any] = []
        for index, line in enumerate(self.lines):
            if line.text.strip():
                kept.append(line)
                continue
            following = next((later.text for later in self.lines[index:] if later.text.strip()), "")
            inside = following.startswith((" ", ")", "]", "}"))
            before = 0
            while before < len(kept) and not kept[-1 - before].text.strip():
                before += 1
            opens = not kept or re.search(r"[:(\[{]$", kept[-1].text) is not None and inside
            if before >= 1 or opens:
                continue
            kept.append(line)
        while kept and not kept[-1].text.strip():
            kept.pop()
        self.lines = kept


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _with(line: Any, text: str, reason: str) -> Any:
    reasons = line.reasons if reason in line.reasons else (*line.reasons, reason)
    return replace(line, text=text, reasons=reasons)

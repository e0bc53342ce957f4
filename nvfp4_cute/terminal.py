"""Terminal output of commands: tables, and the progress of long work."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30


def bar(steps: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Returns a tqdm bar on stderr, removed when it is full, or nothing if stderr is not a terminal, for loops in the library.

    Queries the terminal's size itself, because tqdm draws nothing in a terminal of unknown size.
    """
    size = shutil.get_terminal_size()
    return tqdm(steps, leave=False, disable=None, ncols=size.columns, nrows=size.lines, **options)


class Progress(tqdm):
    """A tqdm bar, removed when it is full. Prints lines instead if stderr is not a terminal.

    The first line appears when the work begins, or with the first step if the number of steps is unknown. Another one appears
    with a step that ends ``SECONDS_BETWEEN_LINES`` or more after the last line.
    """

    def __init__(self, steps: Iterable[Any] | None = None, *, desc: str, unit: str, total: int | None = None):
        """`steps`: iterable of steps. `desc`: the activity. `unit`: name of one step. `total`: number of steps."""
        size = shutil.get_terminal_size()  # see ``bar``
        given = {"desc": desc, "unit": unit, "total": total, "ncols": size.columns, "nrows": size.lines}
        super().__init__(steps, leave=False, disable=None, **given)
        self._what, self._unit = desc, unit
        self._begun = self._last_said = monotonic()
        self._has_begun = False
        if self.disable and self.total is not None:
            self._say_first()

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the steps; each counts as done when the next one is requested."""
        if not self.disable:
            yield from super().__iter__()
            return
        for step in self.iterable:
            yield step
            self.update()

    def update(self, n: float | None = 1) -> bool | None:
        """Counts `n` more steps as done."""
        if not self.disable:
            return super().update(n)
        self.n += n or 0
        if not self._has_begun:
            self._say_first()
        now = monotonic()
        if now - self._last_said >= SECONDS_BETWEEN_LINES:
            self._last_said = now
            of_all = f" of {self.total}" if self.total is not None else ""
            self._say(f"{self.n}{of_all} {self._unit}s done after {now - self._begun:.0f} s")
        return None

    def _say_first(self) -> None:
        self._has_begun = True
        if self.total is None:
            self._say("begun")
        elif self.total > 0:
            self._say(f"{self.total} {self._unit}{'' if self.total == 1 else 's'} to do")

    def _say(self, text: str) -> None:
        print(f"{self._what}: {text}", file=sys.stderr, flush=True)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Formats columns of equal width, two spaces apart; "" without rows.

    The first ``left`` columns are left-aligned; the others, which are numbers, are right-aligned.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

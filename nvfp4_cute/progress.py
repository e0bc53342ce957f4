"""How far a long command is: a bar on a terminal, and a plain line on stderr now and then elsewhere."""

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30


class Progress(tqdm):
    """A bar of tqdm, removed when it is full. Where stderr is no terminal, lines take its place.

    The first line comes when the work begins, or with the first step where the number of steps is not known before. Another
    one comes with a step that ends ``SECONDS_BETWEEN_LINES`` or more after the last line.
    """

    def __init__(self, steps: Iterable[Any] | None = None, *, desc: str, unit: str, total: int | None = None):
        """`steps`: what is iterated over. `desc`: what is done. `unit`: of a step, in the singular. `total`: steps in all."""
        super().__init__(steps, desc=desc, unit=unit, total=total, leave=False, disable=None)
        self._what, self._unit = desc, unit
        self._begun = self._last_said = monotonic()
        self._has_begun = False
        if self.disable and self.total is not None:
            self._say_first()

    def __iter__(self) -> Iterator[Any]:
        """The steps; each counts when the next one is asked for."""
        if not self.disable:
            yield from super().__iter__()
            return
        for step in self.iterable:
            yield step
            self.update()

    def update(self, n: float | None = 1) -> bool | None:
        """Count `n` steps more."""
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
            self._say(f"{self.total} {self._unit}{'' if self.total == 1 else 's'}")

    def _say(self, text: str) -> None:
        print(f"{self._what}: {text}", file=sys.stderr, flush=True)

"""Finished work of a run, one job per line in a file, so that a stopped run can continue."""

import json
from pathlib import Path
from typing import Any

from nvfp4_cute.prove.outcome import SKIPPED, Outcome


class State:
    """Outcomes by kind and name, stored as they arrive.

    Args:
        file: path; None keeps them only in memory.
        identity: properties that a run must share with the one that wrote the file; otherwise it starts over.
        fresh: start over in any case.
    """

    def __init__(self, file: Path | None, identity: dict[str, Any], *, fresh: bool = False) -> None:
        self._file = file
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        self.resumed = 0
        if file is None:
            return
        if not fresh and self._read(file, identity):
            self.resumed = len(self.outcomes)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(identity, sort_keys=True) + "\n")

    def _read(self, file: Path, identity: dict[str, Any]) -> bool:
        """Reads the outcomes of an earlier equal run, up to a line that was cut off."""
        try:
            head, *lines = file.read_text().splitlines()
            if json.loads(head) != json.loads(json.dumps(identity)):
                return False
        except (OSError, ValueError):
            return False
        for line in lines:
            try:
                outcome = Outcome(**json.loads(line))
            except (ValueError, TypeError):
                break
            self.outcomes[outcome.kind, outcome.name] = outcome
        return True

    def has(self, kind: str, name: str) -> bool:
        """Whether a job is done."""
        return (kind, name) in self.outcomes

    def add(self, outcome: Outcome) -> None:
        """Stores an outcome. A job for which no time was left does not count as done."""
        if outcome.verdict == SKIPPED:
            return
        self.outcomes[outcome.kind, outcome.name] = outcome
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(outcome.record()) + "\n")

    def of(self, kind: str) -> list[Outcome]:
        """Returns outcomes of a kind, in order of arrival."""
        return [outcome for (its_kind, _), outcome in self.outcomes.items() if its_kind == kind]

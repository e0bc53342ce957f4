"""Outcomes of `prove` jobs, as plain data that fits through pipes and files."""

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED = "passed"
WRONG = "wrong"  # a result that differs from the reference
FAULT = "fault"  # the GPU or the emulator reported a fault
HANG = "hang"  # stopped by its time limit
REFUSED = "refused"  # the library reports that it does not support this
BROKEN = "broken"  # the job itself failed, before or after its kernel
NOT_HERE = "not here"  # for another architecture
SKIPPED = "not run"  # no time was left
VERDICTS = (PASSED, WRONG, FAULT, HANG, REFUSED, BROKEN, NOT_HERE, SKIPPED)
FAILURES = (WRONG, FAULT, HANG, BROKEN)


@dataclass(frozen=True)
class Job:
    """Something to run in a child process.

    Attributes:
        kind: a key of ``jobs.KINDS``.
        name: unique within its kind.
        backend: "cuda" or "emulator:ARCH".
        arguments: arguments of the kind's function; plain data.
    """

    kind: str
    name: str
    backend: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job.

    Attributes:
        kind, name: the job's.
        verdict: one of ``VERDICTS``.
        detail: text for people: where results differ, the driver's message, or the observation.
        seconds: duration of the job.
        numbers: measured figures by name.
        notes: texts by name.
    """

    kind: str
    name: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Returns all fields as plain data; ``Outcome(**record)`` restores the outcome."""
        return asdict(self)

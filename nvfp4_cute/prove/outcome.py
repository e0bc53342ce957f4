"""What a job of `prove` can come to, as plain data that goes through pipes and files."""

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED = "passed"
WRONG = "wrong"  # a result that is not the reference's
FAULT = "fault"  # the GPU or the emulator refused to go on
HANG = "hang"  # ended by its time limit
REFUSED = "refused"  # the library says that it does not do this
BROKEN = "broken"  # the job itself failed, before or after its kernel
NOT_HERE = "not here"  # another architecture's
SKIPPED = "not run"  # no time was left
VERDICTS = (PASSED, WRONG, FAULT, HANG, REFUSED, BROKEN, NOT_HERE, SKIPPED)
FAILURES = (WRONG, FAULT, HANG, BROKEN)


@dataclass(frozen=True)
class Job:
    """Something to run in a child process.

    Attributes:
        kind: a key of ``jobs.KINDS``.  name: unique in its kind.
        backend: "cuda" or "emulator:ARCH".
        arguments: of the kind's function; plain data.
    """

    kind: str
    name: str
    backend: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a job came to.

    Attributes:
        kind, name: the job's.  verdict: one of ``VERDICTS``.
        detail: for people: where results differ, what the driver said, or what was seen.
        seconds: that it took.
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
        """Everything as plain data; ``Outcome(**record)`` is the same again."""
        return asdict(self)

"""Problems by name. Defines the contents of a problem's folder, so that a new folder is a new problem.

A folder ``problems/NAME`` holds

- ``spec.py``: ``TESTS`` and ``BENCHMARKS``, tuples of cases, ``HARNESS``, ``RTOL`` and ``ATOL``, and ``DEADLINE``, the time
  when its leaderboard closes (an aware datetime, or None). A case is a frozen dataclass with ``name``, ``seed``, ``sol_us`` and
  ``arguments``, its entries in a case file; ``CASE.from_arguments`` is the inverse;
- ``inputs.py``: ``make_inputs(case, device, seed)``, ``outputs(data)``, ``CPU_ENTRIES``;
- ``reference.py``: ``reference(data)`` and ``check(received, expected)``;
- ``submission.py``, if there is a kernel: ``custom_kernel(data)``; and ``frozen_constants()``, which returns the constants that
  an export replaces, each with a Python expression;
- ``torch_submission.py``: ``custom_kernel(data)`` computed by torch, for comparison.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nvfp4_cute.problems.harness_rules import HarnessRules

PACKAGE = "nvfp4_cute.problems"


@dataclass(frozen=True)
class Problem:
    """One competition problem.

    Attributes:
        name: name of the folder and of the leaderboard.
        tests, benchmarks: its cases.
        case_type: class of the cases; ``from_arguments`` makes one from a line of a case file or of a task.yml.
        harness: how its server tests and times.
        rtol, atol: tolerances of its server.
        deadline: time when its leaderboard closes; None if unknown.
        make_inputs: (case, device, seed) -> the argument of ``custom_kernel``.
        reference: the argument of ``custom_kernel`` -> the right answer.
        check: (answer, right answer) -> (whether it is accepted, message).
        output: the argument of ``custom_kernel`` -> the tensors that may be written in place: C of every group.
        cpu_entries: indices of the argument's entries that are on the CPU.
        submission: module with ``custom_kernel``; None if there is no kernel.
    """

    name: str
    tests: tuple[Any, ...]
    benchmarks: tuple[Any, ...]
    case_type: Any
    harness: HarnessRules
    rtol: float
    atol: float
    deadline: datetime | None
    make_inputs: Callable[..., Any]
    reference: Callable[[Any], Any]
    check: Callable[[Any, Any], tuple[bool, str]]
    output: Callable[[Any], list[Any]]
    cpu_entries: tuple[int, ...]
    submission: str | None


def names() -> tuple[str, ...]:
    """Returns the names of all problems that have a folder, anywhere on the package's path."""
    folders = importlib.import_module(PACKAGE).__path__
    return tuple(sorted(path.parent.name for folder in folders for path in Path(folder).glob("*/spec.py")))


def load(name: str) -> Problem:
    """Returns the problem called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in names():
        raise ValueError(f"problem {name!r} is unknown; there are {', '.join(names())}")
    spec, inputs, reference = (
        importlib.import_module(f"{PACKAGE}.{name}.{part}") for part in ("spec", "inputs", "reference")
    )
    submission = f"{PACKAGE}.{name}.submission"
    return Problem(
        name=name,
        tests=spec.TESTS,
        benchmarks=spec.BENCHMARKS,
        case_type=type(spec.TESTS[0]),
        harness=spec.HARNESS,
        rtol=spec.RTOL,
        atol=spec.ATOL,
        deadline=spec.DEADLINE,
        make_inputs=inputs.make_inputs,
        reference=reference.reference,
        check=reference.check,
        output=inputs.outputs,
        cpu_entries=inputs.CPU_ENTRIES,
        submission=submission if importlib.util.find_spec(submission) else None,
    )

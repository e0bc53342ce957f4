"""The steps of a run: their jobs, number of workers, and time."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvfp4_cute.prove import cases, constants, moe, problems
from nvfp4_cute.prove.outcome import Job
from nvfp4_cute.prove.probes import PROBES

STEPS = ("probes", "configs", "problems", "constants", "timed", "host")
MAX_WORKERS = 12
"""Largest number of children that compile at a time. Each takes about a gigabyte, and half a gigabyte of the GPU."""


MAX_PROBES = 8


@dataclass(frozen=True)
class Amounts:
    """Amount of work in a run.

    Attributes:
        problems: number of random problems.
        configs: largest number of configs; None means all.
        soak_s: seconds of the soak test.
        minutes: time limit of steps that may be cut off, by name.
        job_s: seconds until a job counts as hung.
        small: draw problems that an emulator can run.
    """

    problems: int
    configs: int | None
    soak_s: float
    minutes: dict[str, float]
    job_s: float
    small: bool


WHOLE = Amounts(
    500, None, 15.0,
    {"configs": 2.5, "problems": 2.5, "probes": 1.5, "constants": 1.0, "timed": 3.0, "host": 1.0}, 60.0, False,
)  # fmt: skip
QUICK = Amounts(
    24, 12, 2.0,
    {"probes": 0.5, "configs": 0.3, "problems": 0.3, "constants": 0.3, "timed": 0.5, "host": 0.3}, 30.0, False,
)  # fmt: skip
EMULATED = Amounts(6, 4, 0.0, dict.fromkeys(STEPS, 30.0), 600.0, True)
EMULATED_QUICK = Amounts(2, 1, 0.0, dict.fromkeys(STEPS, 10.0), 600.0, True)


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        jobs: its jobs.
        workers: number of children at a time.
        fresh: whether each job has its own child.
    """

    jobs: list[Job]
    workers: int
    fresh: bool = False


def amounts(is_emulated: bool, quick: bool) -> Amounts:
    """Returns the amount of work in a run."""
    if is_emulated:
        return EMULATED_QUICK if quick else EMULATED
    return QUICK if quick else WHOLE


def steps(arch: str, backend: str, much: Amounts, quick: bool) -> dict[str, Step]:
    """Returns every step that a backend can run, in order."""
    cores = len(os.sched_getaffinity(0))
    many = max(1, min(MAX_WORKERS, cores - 1))
    makers: dict[str, Callable[[], Step]] = {
        "configs": lambda: Step(_spread(_configs(arch, backend), much.configs), many),
        "problems": lambda: Step(
            [
                Job("problem", f"seed {seed}", backend, {"seed": seed, "small": much.small})
                for seed in range(much.problems)
            ],
            many,
        ),
        "probes": lambda: Step(
            [Job("probe", name, backend, {"probe": name}) for name in PROBES],
            max(1, min(MAX_PROBES, many)),
            fresh=True,
        ),
        "constants": lambda: Step(
            [
                Job("constant", name, backend, {"constant": name})
                for name, constant in constants.CONSTANTS.items()
                if arch in constant.archs
            ],
            1,
        ),
        "timed": lambda: Step(
            [Job("timed", name, backend, {"case": name}) for name in timed_names(quick)], 1
        ),
        "host": lambda: Step(
            [
                Job("host", "what calls cost", backend, {"measure": "costs"}),
                Job("host", "soak", backend, {"measure": "soak", "seconds": much.soak_s}),
            ],
            1,
        ),
    }
    able = STEPS if backend == "cuda" else STEPS[:3]
    return {name: makers[name]() for name in able}


def _configs(arch: str, backend: str) -> list[Job]:
    found: dict[str, Job] = {}
    for operation, form, is_quantized, config in problems.configs(arch):
        name = f"{operation} {form}{' nvfp4' * is_quantized} {config}"
        arguments: dict[str, Any] = {
            "operation": operation, "form": form, "is_quantized": is_quantized, "config": config,
        }  # fmt: skip
        found[name] = Job("config", name, backend, arguments)
    return list(found.values())


def _spread(jobs: list[Job], count: int | None) -> list[Job]:
    """Returns `count` of the jobs, spread from the first to the last; all if ``count`` is None."""
    if count is None or count >= len(jobs):
        return jobs
    return [jobs[index * len(jobs) // count] for index in range(count)]


def timed_names(quick: bool) -> list[str]:
    """Returns the names of timed cases, and of layers of experts unless the run is quick."""
    names = [str(case) for case in cases.timed(quick=quick)]
    return names if quick else [*names, *map(moe.name_of, moe.TOKENS)]

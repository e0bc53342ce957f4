"""`nvfp4-cute prove`: runs every step in child processes, keeps finished work, and writes the report after each step."""

import datetime
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nvfp4_cute import env
from nvfp4_cute.backends import installed
from nvfp4_cute.bench import provenance
from nvfp4_cute.bench.command import RESULTS
from nvfp4_cute.compile import disk_cache
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.gpus import targets, verdicts
from nvfp4_cute.planning.arch import ARCHS
from nvfp4_cute.prove import machine, plan, pool, predictions, reader, report
from nvfp4_cute.prove.outcome import NOT_HERE, Outcome
from nvfp4_cute.prove.predictions import file_name
from nvfp4_cute.prove.probes import PROBES
from nvfp4_cute.prove.state import State

KIND_OF_STEP = {
    "probes": "probe", "configs": "config", "problems": "problem", "constants": "constant", "timed": "timed", "host": "host",
}  # fmt: skip


def run(
    *,
    steps: Sequence[str] = (),
    quick: bool = False,
    fresh: bool = False,
    emulator: str | None = None,
    out: Path | None = None,
    workers: int | None = None,
    predicted: Path = RESULTS,
) -> int:
    """Tests the GPU of this machine, writes the report after every step, and returns 0 if nothing is wrong, else 1.

    Args:
        steps: names of ``plan.STEPS``; empty means all.
        quick: one or two minutes instead of ten.
        fresh: repeat the work of an earlier run.
        emulator: the GPU to emulate instead of using a real one.
        out: folder of the report; None means the working folder.
        workers: number of child processes at a time; None chooses, 0 runs everything in this process.
        predicted: folder of predictions.

    Raises:
        ValueError: an unknown step.
        UnsupportedTarget: no GPU with a kernel, and no emulator requested.
    """
    unknown = [name for name in steps if name not in plan.STEPS]
    if unknown:
        raise ValueError(f"step {unknown[0]!r} is unknown; use {', '.join(plan.STEPS)}")
    backend, arch = _where(emulator)
    description = machine.describe()
    much = plan.amounts(emulator is not None, quick)
    all_steps = plan.steps(arch, backend, much, quick)
    state = State(
        _state_file(backend, description, quick), _identity(backend, description, quick), fresh=fresh
    )
    if state.resumed:
        print(f"{state.resumed} jobs of an earlier run are kept; --fresh does them again")
    run_ = _Run(backend, arch, quick, description, all_steps, state, out or Path(), predicted)
    for name in list(all_steps):
        if steps and name not in steps:
            continue
        step = all_steps[name]
        limits = pool.Limits(
            step.workers if workers is None else min(workers, step.workers),
            much.job_s,
            60 * much.minutes[name],
            step.fresh,
        )
        _do(name, step, limits, state)
        if name == "probes" and backend == "cuda":
            _keep_verdicts(description, state.of("probe"))
            # Features that the probes have shown to work add configs.
            all_steps["configs"] = plan.steps(arch, backend, much, quick)["configs"]
        found = run_.write()
    print(run_.told(found))
    return 0 if found["summary"]["is_good"] else 1


def _where(emulator: str | None) -> tuple[str, str]:
    """Returns backend and architecture."""
    if emulator is not None:
        target = targets.lookup(emulator)
        return f"emulator:{target.arch}", target.arch
    native = installed.native_gpus()
    if not native:
        present = (
            ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in installed.gpus()) or "no GPU that torch can use"
        )
        raise UnsupportedTarget(
            f"here: {present}; there are kernels for {', '.join(ARCHS)}. On such a GPU this does {', '.join(plan.STEPS)}: "
            f"{plan.WHOLE.problems} random problems, every config, {len(PROBES)} probes, microbenchmarks, and "
            f"{len(plan.timed_names(False))} cases against torch, in ten minutes. Here, `--emulator sm_100a` (or another GPU) "
            "does a few problems, configs and all probes on the emulator; `--predict GPU` predicts times; `--read FILE` reads a "
            "report"
        )
    return "cuda", native[0].arch


def _identity(backend: str, description: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Returns the properties that two runs with the same jobs share."""
    return {
        "schema": report.SCHEMA,
        "backend": backend,
        "quick": quick,
        "sources": disk_cache.source_digest()[:16],
        "machine": description,
    }


def _state_file(backend: str, description: dict[str, Any], quick: bool) -> Path | None:
    folder = env.cache_dir()
    if folder is None:
        return None
    gpu = description["gpu"]
    name = gpu["name"] if backend == "cuda" and gpu is not None else backend
    return folder / "prove" / f"state-{file_name(name)}{'-quick' * quick}.jsonl"


def _do(name: str, step: plan.Step, limits: pool.Limits, state: State) -> None:
    """Runs the remaining jobs of a step, with a progress bar."""
    left = [job for job in step.jobs if not state.has(job.kind, job.name)]
    # tqdm draws nothing in a terminal that reports no size.
    size = shutil.get_terminal_size()
    begun = time.monotonic()
    with tqdm(
        total=len(step.jobs), initial=len(step.jobs) - len(left), desc=f"{name:9}", unit="job", disable=None,
        ncols=size.columns, nrows=size.lines,
    ) as bar:  # fmt: skip

        def on_outcome(outcome: Outcome) -> None:
            state.add(outcome)
            bar.update()
            bar.set_postfix_str(outcome.name[:30], refresh=False)

        pool.run(left, limits, on_outcome)
    if not sys.stderr.isatty():
        print(f"{name}: {len(left)} jobs, {time.monotonic() - begun:.0f} s", flush=True)


class _Run:
    """Data for the report of this run."""

    def __init__(
        self,
        backend: str,
        arch: str,
        quick: bool,
        description: dict[str, Any],
        steps: dict[str, plan.Step],
        state: State,
        out: Path,
        predicted: Path,
    ) -> None:
        self._backend, self._arch, self._quick, self._description = backend, arch, quick, description
        self._steps, self._state, self._out = steps, state, out
        target = machine.target_of(description)
        gpu = None if backend != "cuda" or target is None else target.name
        self._prediction = None if gpu is None else predictions.load(gpu, predicted)
        self._written: list[Path] = []

    def write(self) -> dict[str, Any]:
        """Writes the current report, and returns it."""
        outcomes = list(self._state.outcomes.values())
        steps = {
            name: {
                "jobs": len(step.jobs),
                "done": sum(self._state.has(job.kind, job.name) for job in step.jobs),
                "seconds": round(sum(o.seconds for o in self._state.of(KIND_OF_STEP[name])), 1),
            }
            for name, step in self._steps.items()
        }
        found = report.make(
            made=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            backend=self._backend,
            arch=self._arch,
            quick=self._quick,
            description=self._description,
            sources=disk_cache.source_digest()[:16],
            commit=provenance.commit(),
            steps=steps,
            outcomes=outcomes,
            prediction=self._prediction,
        )
        self._written = reader.write(found, self._out)
        return found

    def told(self, found: dict[str, Any]) -> str:
        """Returns the closing text of a run, for a terminal."""
        return f"{reader.short(found)}\n\nwritten: {', '.join(path.name for path in self._written)}"


def _keep_verdicts(description: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Stores the probes' verdicts where planning finds them."""
    gpu = description["gpu"]
    found = {o.name: o.verdict for o in outcomes if o.verdict != NOT_HERE}
    try:
        verdicts.store(gpu["target"] or gpu["name"], gpu["arch"], found)
    except OSError as error:
        print(f"verdicts were not kept for planning: {error}")


def read(path: Path, out: Path | None) -> int:
    """Prints a report's page and its constants, and returns 0. With ``out``, writes the page and the picture there.

    Raises:
        ValueError, OSError: see ``reader.load``.
    """
    found = reader.load(path)
    print(reader.page(found))
    text = reader.constants_text(found)
    if text:
        print(f"Constants, as nvfp4_cute/gpus/timing_figures.py has them:\n\n{text}")
    if out is not None:
        print(f"\nwritten: {', '.join(written.name for written in reader.write(found, out))}")
    return 0

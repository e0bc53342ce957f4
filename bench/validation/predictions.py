"""Predictions before measurements: launches are modelled here, measured elsewhere, and compared.

    nvfp4-cute bench --predict h100.json --target H100 [--jobs 32]     models every launch, and notes the commit
    nvfp4-cute bench --against h100.json                               on that GPU: measures them, and compares

The launches are those of a committed set (``errors.PREDICTIONS``), Triton's matrix product if Triton is installed, and
CUTLASS's kernels if NVFP4_CUTE_CUTLASS names a checkout: dense, grouped, few rows, 16-bit rows, quantization, and
layers, called as by users. A prediction is the time between CUDA events around a replayed graph of the call on a cold
L2 (``roofline.modelled.modelled_chain``). Measured times are reduced by the excess of an empty interval over the
probe's. Recordings of the emulator may be stored (``--recordings``), so a call is modelled again in seconds as long as
only the timing model has changed.
"""

import json
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nvfp4_cute.bench import processes, provenance
from nvfp4_cute.bench.layers import INTERVAL_US
from nvfp4_cute.bench.validation import cutlass, triton_matmul
from nvfp4_cute.bench.validation.calls import case_named
from nvfp4_cute.bench.validation.errors import PREDICTIONS, committed, errors_of, summary_of, wrong_pairs
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.errors import EmulatorError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.roofline.modelled import modelled_launches, recorded_chain
from nvfp4_cute.terminal import Progress, text_table

MAKER = "nvfp4-cute bench --predict"
NEWEST = next(reversed(PREDICTIONS))
BURSTS, PAUSE_S = 3, 0.1
OTHERS = (triton_matmul, cutlass)
"""Modules of other people's kernels: ``PREFIX`` of their names, ``is_there``, ``recorded``, and ``call`` on a GPU."""
MODEL_OF_TIME = ("timing/", "gpus/timing_figures.py", "gpus/power.py")
"""Sources that no recording depends on."""


# ---- predictions -----------------------------------------------------------------------------------------------------
def predict(
    path: Path, target: Target, *, calls: str = NEWEST, jobs: int = 1, recordings: Path | None = None
) -> int:
    """Models all calls of a set and writes the predictions, by name, with the commit. Returns 0. Keeps times in the file.

    Args:
        path: file of predictions.
        target: the GPU.
        calls: a key of `errors.PREDICTIONS`.
        jobs: number of processes.
        recordings: folder for the emulator's recording of each call.

    Raises:
        ValueError: the file's predictions are for another GPU or from other sources.
    """
    sources = provenance.digest()
    known: dict[str, Any] = {
        "gpu": target.name, "commit": provenance.commit(), "sources": sources, "made": _now(), "us": {}, "launches": {},
        "missing": {},
    }  # fmt: skip
    if path.exists():
        known = provenance.read_object(path, tuple(known), MAKER)
        if (known["gpu"], known["sources"]) != (target.name, sources):
            raise ValueError(
                f"{path} has predictions for {known['gpu']} by sources {known['sources']}, not for {target.name} by {sources}; "
                "name a new file"
            )
    missing = [name for name in names_of(calls) if name not in known["us"] and name not in known["missing"]]
    with Progress(total=len(missing), desc=f"predicting {target.name}", unit="call") as bar:
        predicted = partial(prediction, target_name=target.name, recordings=recordings)
        for name, found in processes.in_processes(predicted, missing, jobs):
            if isinstance(found, str):
                known["missing"][name] = found
            else:
                known["us"][name], known["launches"][name] = found
            processes.write_json(path, known)
            bar.update()
    print(f"{len(known['us'])} calls on an {target.name} predicted by {_made_by(known)}: {path}")
    for name, why in known["missing"].items():
        print(f"- {name}: {why}")
    return 0


def names_of(calls: str) -> list[str]:
    """Returns the names of a set's calls: Triton's where it is installed, CUTLASS's where there is a checkout."""
    found = committed(calls)
    names = [*found["us"], *found["missing"]]
    return [name for name in names if (maker := _maker_of(name)) is None or maker.is_there()]


def _maker_of(name: str) -> Any:
    """Returns the module that has a call of other people's; None for ours."""
    return next((maker for maker in OTHERS if name.startswith(maker.PREFIX)), None)


def prediction(name: str, target_name: str, recordings: Path | None = None) -> tuple[float, int] | str:
    """Returns us and launches of a call; or why there is no prediction."""
    target = targets.lookup(target_name)
    try:
        timing = modelled_launches(recorded(name, target, recordings), target)
    except (UnsupportedProblem, UnsupportedTarget, EmulatorError, cutlass.CaptureError) as error:
        return str(error).splitlines()[0]
    return round(timing.us, 3), len(timing.launches)


def recorded(name: str, target: Target, folder: Path | None = None) -> list[LaunchTrace]:
    """Returns the emulator's recording of a call; a stored one if only the timing model has changed since."""
    kept = None
    if folder is not None:
        sources = provenance.digest(without=MODEL_OF_TIME)
        kept = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', f'{target.name} {name}')}-{sources}.pickle"
        if kept.exists():
            return pickle.loads(kept.read_bytes())  # written by this function: the folder must be trusted
    other = _maker_of(name)
    if other is not None:
        traces = [other.recorded(name, target)]
    else:
        traces = recorded_chain(case_named(name).call("cpu"), target)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(traces, protocol=5))
        os.replace(unfinished, kept)
    return traces


def _made_by(predictions: dict[str, Any]) -> str:
    commit = f"commit {predictions['commit']}, " if predictions["commit"] else ""
    return f"{commit}sources {predictions['sources']}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---- measured ----------------------------------------------------------------------------------------------------------
def against(path: Path, *, results: Path | None = None, jobs: int = 1) -> int:
    """Measures the predicted calls on this machine's GPU, and compares. Returns 0.

    Args:
        path: file of predictions.
        results: file for all measured times as JSON, next to the predictions; written after every call.
        jobs: processes that make each call once before anything is measured, to compile its kernels into the disk
            cache.

    Raises:
        ValueError: the file has no predictions, the GPU is a different one, or there is none.
    """
    predictions = provenance.read_object(path, ("gpu", "us"), MAKER)
    here = targets.detect()
    if here is None or here.name != predictions["gpu"]:
        found = "no GPU of the table" if here is None else f"an {here.name}"
        raise ValueError(f"{path} predicts times of an {predictions['gpu']}; this machine has {found}")
    names = list(predictions["us"])
    if jobs > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            list(pool.map(run_once, names))
    record = {**predictions, "measured": {}, "failed": {}, "measured_at": _now(), "torch": torch.__version__}
    for name in Progress(names, desc=f"measuring {here.name}", unit="call"):
        found_us = measure(name)
        record["failed" if isinstance(found_us, str) else "measured"][name] = found_us
        if results is not None:
            results.write_text(json.dumps(record, indent=1) + "\n")
    print(comparison(record))
    return 0


def on_the_gpu(name: str) -> Callable[[], object]:
    """Returns a call with operands on this machine's GPU."""
    other = _maker_of(name)
    if other is not None:
        return other.call(name)
    call = case_named(name).call("cuda")
    return lambda: call("cuda")


def run_once(name: str) -> None:
    """Compiles a call's kernels. Errors are reported when it is measured."""
    with suppress(Exception):
        on_the_gpu(name)()


def measure(name: str) -> float | str:
    """Returns us of a call between events minus the excess of an empty interval over the probe's; or why there is none.

    It is the median of times measured in bursts with pauses between them: twenty rounds take five milliseconds, which
    other work on the machine can delay completely.
    """
    from nvfp4_cute.tuning import stopwatch

    try:
        run = on_the_gpu(name)
        bursts = []
        for _ in range(BURSTS):
            samples = stopwatch.measure({name: _call_of(run)}, 1, rounds=20, clean=True)
            bursts.append(samples[name].median - samples[stopwatch.EMPTY].median)
            time.sleep(PAUSE_S)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    torch.cuda.empty_cache()
    return round(median(bursts) + INTERVAL_US, 3)


def _call_of(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: run()


def comparison(record: dict[str, Any]) -> str:
    """Returns errors of predictions: one line per call, and a summary."""
    pairs = {name: (record["us"][name], us) for name, us in record["measured"].items()}
    errors = errors_of(record)
    rows = [
        (name, f"{us:.2f}", f"{predicted:.2f}", f"{100 * errors[name]:+.0f} %")
        for name, (predicted, us) in pairs.items()
    ]
    middle, nine, worst = summary_of(record)
    wrong, gaps = wrong_pairs(record)
    lines = [
        f"{record['gpu']}: predicted {record['made']} by {_made_by(record)}; measured {record['measured_at']}.",
        text_table(("call", "measured us", "predicted us", "error"), rows, left=1),
        f"{len(errors)} calls: median error {100 * middle:.1f} %, nine in ten within {100 * nine:.0f} %, worst "
        f"{100 * worst:.0f} %; {len(wrong)} of {gaps} pairs whose times differ by over 10 % predicted in the wrong order.",
        *(f"- not measured: {name}: {why}" for name, why in record["failed"].items()),
    ]
    return "\n".join(lines)

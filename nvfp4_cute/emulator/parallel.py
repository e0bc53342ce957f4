"""A launch on several cores: its clusters divided among forked processes that share the writable memory.

Clusters of one launch may run in any order and need not run together, so a launch can be divided unless its code
communicates between clusters. Processes, not threads: warps are Python closures, and only one thread runs Python.
"""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.code import Code
from nvfp4_cute.errors import EmulatorError

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Launch, Machine, Stats

Origin = tuple[int, int, int]

MIN_CLUSTERS = 16
"""Below this, starting processes costs more than they save."""

_SCOPES = {"gpu", "sys", "gl"}


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def communicates(code: Code) -> bool:
    """Whether clusters may see one another: atomics, reductions, or ordering on global memory, or work stealing.

    Kernels that call (printf) count: what they print has one order.
    """
    for inst in code.insts:
        shared = any(mod.startswith("shared") for mod in inst.mods)
        if inst.opcode in ("atom", "red") and not shared:
            return True
        if inst.opcode in ("clusterlaunchcontrol", "multimem", "call") or "reduce" in inst.mods:
            return True
        if inst.opcode in ("ld", "st", "fence", "membar") and _SCOPES & set(inst.mods) and not shared:
            return True
        if inst.opcode in ("ld", "st") and "volatile" in inst.mods and not shared:
            return True
    return False


def can_divide(machine: "Machine", launch: "Launch", origins: Sequence[Origin]) -> bool:
    """Whether a launch gains from several processes and may be divided."""
    return (
        machine.jobs > 1
        and len(origins) >= MIN_CLUSTERS
        and sys.platform == "linux"
        and machine.memory.is_checked  # otherwise nobody knows what memory to share
        and not communicates(launch.code)
    )


def run(machine: "Machine", launch: "Launch", origins: Sequence[Origin]) -> None:
    """Run the clusters at `origins` on `machine.jobs` cores; stores, statistics and progress end up in `machine`.

    Raises:
        EmulatorError: the first that a process met; the others are stopped.
    """
    context = multiprocessing.get_context("fork")
    finished, per_cluster = 0, int(np.prod(launch.cluster))
    with machine.memory.shared():
        pipes = [context.Pipe(duplex=False) for _ in range(machine.jobs)]
        workers = [
            context.Process(
                target=_work, args=(machine, launch, origins[i :: machine.jobs], send), daemon=True
            )
            for i, (_, send) in enumerate(pipes)
        ]
        with warnings.catch_warnings():
            # Forking a process that has threads: the children run Python and NumPy only, and never return.
            warnings.simplefilter("ignore", DeprecationWarning)
            for worker in workers:
                worker.start()
        for _, send in pipes:
            send.close()
        waiting: list[Connection] = [receive for receive, _ in pipes]
        try:
            while waiting:
                for pipe in wait(waiting):
                    message = _receive(pipe)  # type: ignore[arg-type]
                    if message == "cluster":
                        finished += per_cluster
                        if machine.progress is not None:
                            machine.progress(finished, len(origins) * per_cluster)
                        continue
                    if isinstance(message, BaseException):
                        raise message
                    stats, traces = message
                    _add(machine.stats, stats)
                    if machine.recorder is not None:
                        machine.recorder.traces += traces
                    waiting.remove(pipe)  # type: ignore[arg-type]
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


def _work(machine: "Machine", launch: "Launch", origins: Sequence[Origin], send: Connection) -> None:
    """A child process: run some clusters, then send what they counted, or the exception."""
    machine.stats = type(machine.stats)()
    if machine.recorder is not None:
        machine.recorder.traces.clear()
    try:
        machine.run_clusters(launch, list(origins), lambda: send.send("cluster"))
        send.send((machine.stats, machine.recorder.traces if machine.recorder is not None else []))
    except EmulatorError as error:
        send.send(error)
    except Exception as error:
        send.send(EmulatorError(f"{type(error).__name__}: {error}"))


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return EmulatorError("a process of the emulator died; run with one job to see why")


def _add(total: "Stats", part: "Stats") -> None:
    for field in fields(part):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))

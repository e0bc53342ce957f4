"""Runs a launch on several cores: forked processes share the writable memory and divide the clusters.

Clusters of one launch may run in any order and need not run together, so a launch can be divided unless its code
communicates between clusters. Workers are processes, because warps are Python closures and only one thread runs Python
at a time.
"""

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.check.global_races import Footprint
from nvfp4_cute.emulator.check.hazards import Checker
from nvfp4_cute.emulator.check.ledger import Hazard
from nvfp4_cute.emulator.check.pdl import Progress
from nvfp4_cute.emulator.memory import GlobalMemory
from nvfp4_cute.emulator.record.recorder import Recorder
from nvfp4_cute.emulator.state import Executable, Launch, Stats
from nvfp4_cute.errors import EmulatorError

Origin = tuple[int, int, int]


class Divided(Protocol):
    """A machine whose launches may be divided (`machine.Machine`)."""

    jobs: int
    memory: GlobalMemory
    stats: Stats
    progress: Callable[[int, int], None] | None

    @property
    def checker(self) -> Checker | None:
        """Finds hazards, or is None."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Records everything that takes time, or is None."""
        ...

    def run_clusters(self, launch: Launch, origins: list[Origin], finished: Callable[[], None]) -> None:
        """Runs clusters one after the other; calls `finished` after each."""
        ...


MIN_CLUSTERS = 16
"""Least number of clusters for which starting processes saves time."""

_SCOPES = {"gpu", "sys", "gl"}


def available_cores() -> int:
    """Returns the number of cores for this process: one if another process started it next to others."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def communicates(code: Executable) -> bool:
    """Whether clusters may see one another: atomics, reductions, or ordering on global memory, or work stealing.

    Kernels with calls (printf) count, because their output has one order.
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


def can_divide(machine: Divided, launch: Launch, origins: Sequence[Origin]) -> bool:
    """Whether a launch may be divided and gains from several processes."""
    return (
        machine.jobs > 1
        and len(origins) >= MIN_CLUSTERS
        and sys.platform == "linux"
        and not multiprocessing.current_process().daemon  # a pool's worker may not have children
        and machine.memory.is_checked  # otherwise the memory to share is unknown
        and not communicates(launch.code)
    )


def run(machine: Divided, launch: Launch, origins: Sequence[Origin]) -> None:
    """Runs the clusters at `origins` on `machine.jobs` cores. `machine` receives stores, statistics and progress.

    Raises:
        EmulatorError: the first error of any process; the other processes are stopped.
    """
    with machine.memory.shared(), closing(_shares(machine, launch, origins)) as shares:
        for share in shares:
            _keep(machine, share)


def run_checked(machine: Divided, launch: Launch, origins: Sequence[Origin]) -> bool:
    """Runs the clusters at `origins` under the hazard checker, and keeps the result if there is nothing to report.

    Clusters that do not communicate can only harm each other by touching memory that another one writes. So each
    process checks its own clusters, and then the touched ranges are compared.

    Returns:
        Whether the launch was clean. If not, memory is restored: run the launch again in one process, which words the
        report.
    """
    checker, kept = machine.checker, list[_Share]()
    assert checker is not None
    checker.begin_launch(launch, machine.memory)
    with machine.memory.shared() as copies:
        try:
            with closing(_shares(machine, launch, origins)) as shares:
                for share in shares:
                    if not share.clean or any(share.touched.meets(other.touched) for other in kept):
                        copies.clear()
                        return False
                    kept.append(share)
        except EmulatorError:
            copies.clear()
            return False
    touched = Footprint()
    for share in kept:
        _keep(machine, share)
        touched.add(share.touched)
        checker.dependencies.progress.add(share.progress)
        for hazard in share.hazards:
            checker.adopt(hazard)
    checker.dependencies.end_launch(touched)
    return True


@dataclass
class _Share:
    """Message of a process whose clusters are done.

    Attributes:
        stats: statistics of its clusters.
        traces: traces of its clusters; only with a recorder.
        clean: no hazard is an error.
        touched: touched global memory; only with the checker, like hazards and progress.
    """

    stats: Stats
    traces: list[Any] = field(default_factory=list)
    clean: bool = True
    touched: Footprint = field(default_factory=Footprint)
    hazards: list[Hazard] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)


def _shares(machine: Divided, launch: Launch, origins: Sequence[Origin]) -> Generator[_Share]:
    """Starts `machine.jobs` processes and yields their shares as they end, reporting progress meanwhile."""
    context = multiprocessing.get_context("fork")
    finished, per_cluster = 0, int(np.prod(launch.cluster))
    pipes = [context.Pipe(duplex=False) for _ in range(machine.jobs)]
    workers = [
        context.Process(target=_work, args=(machine, launch, origins[i :: machine.jobs], send), daemon=True)
        for i, (_, send) in enumerate(pipes)
    ]
    with warnings.catch_warnings():
        # Forking a process with threads is safe here: the children run only Python and NumPy, and never return.
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
                waiting.remove(pipe)  # type: ignore[arg-type]
                yield message
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(machine: Divided, launch: Launch, origins: Sequence[Origin], send: Connection) -> None:
    """Runs some clusters in a child process, then sends its share, or the exception."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends its workers
    machine.stats = type(machine.stats)()
    checker, recorder = machine.checker, machine.recorder
    if recorder is not None:
        recorder.traces.clear()
    if checker is not None:
        checker.globals.keep_reads()
    try:
        machine.run_clusters(launch, list(origins), lambda: send.send("cluster"))
        share = _Share(machine.stats, [] if recorder is None else recorder.traces)
        if checker is not None:
            share.clean, share.touched = not checker.failed, checker.globals.footprint()
            share.hazards = checker.of_this_launch()
            share.progress = checker.dependencies.progress
        send.send(share)
    except EmulatorError as error:
        send.send(error)
    except Exception as error:
        send.send(EmulatorError(f"{type(error).__name__}: {error}"))


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return EmulatorError("a process of the emulator died; run with one job to see why")


def _keep(machine: Divided, share: _Share) -> None:
    _add(machine.stats, share.stats)
    if machine.recorder is not None:
        machine.recorder.traces += share.traces


def _add(total: Stats, part: Stats) -> None:
    for counter in fields(part):
        setattr(total, counter.name, getattr(total, counter.name) + getattr(part, counter.name))

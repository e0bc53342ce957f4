"""The emulator as a backend: the kernel's own host code launches the kernel's own PTX on the CPU."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4_cute.emulator.check.ledger import Hazard
from nvfp4_cute.emulator.check.pdl import Dependent
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.gpus.targets import B200, Target
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.launch import workspace
from nvfp4_cute.launch.plan import Plan
from nvfp4_cute.launch.task import Launch, Task
from nvfp4_cute.operands.overlap import span_bytes
from nvfp4_cute.timing.clock import Chain, Clock
from nvfp4_cute.timing.result import Timing

# Native host code of any thread launches on the emulator that last became the process's device.
_one_at_a_time = threading.RLock()


def _after_fork_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = (
        threading.RLock()
    )  # a thread of the parent may hold the old lock, and nothing here would release it


os.register_at_fork(after_in_child=_after_fork_in_child)


WorkOf = Callable[[Task, Launch, str], Sequence[LaunchWork | None]]
"""Maps a task, its launch, and the architecture to the work of each launch's clusters; None if unknown."""


@dataclass
class Observer:
    """The view that a caller of :func:`observe` has of emulated launches.

    Attributes:
        progress: called with (CTAs finished, CTAs launched) as a launch proceeds, or None.
        mode: when asynchronous operations happen, see ``emulator.fronts.driver.Emulator``.
        check: whether to look for hazards.
        timing: whether to model the time of every launch instead of computing its result.
        with_data: whether to compute results in addition to modelled times.
        timeline: whether modelled times include the actions of every warp.
        all_layouts: whether to model times in every layout of memory.
        count_banks: whether to count bank conflicts (``stats[i].banks``).
        chain: if given, launches are stored there to be modelled together, not one by one.
        work_of: if given, returns the work of a launch's clusters, so that equal clusters are executed only once.
        plans: plans of all grouped GEMM launches, in order.
        stats: statistics of all launches, in order (``emulator.machine.Stats``).
        timings: modelled times of all launches, in order.
        hazards: findings of the checker, including notes.
        last_launch: the checked launch that the next one follows.
    """

    progress: Callable[[int, int], None] | None = None
    mode: str = "eager"
    check: bool = False
    timing: bool = False
    with_data: bool = False
    timeline: bool = False
    all_layouts: bool = False
    count_banks: bool = False
    work_of: WorkOf | None = None
    chain: Chain | None = None
    plans: list[Plan] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    last_launch: Dependent | None = None


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observe(
    progress: Callable[[int, int], None] | None = None,
    *,
    mode: str = "eager",
    check: bool = False,
    timing: bool = False,
    with_data: bool = False,
    timeline: bool = False,
    all_layouts: bool = False,
    count_banks: bool = False,
    work_of: WorkOf | None = None,
    chain: Chain | None = None,
) -> Iterator[Observer]:
    """Context manager that watches the launches that this thread makes on the emulator.

    ``mode``, ``check`` and ``count_banks`` set how they run; hazards are raised as an EmulatorError. ``timing`` models
    their times instead of computing results; ``with_data`` does both. ``work_of`` executes equal clusters only once.
    ``chain`` stores the records instead.
    """
    observer = Observer(
        progress, mode, check, timing, with_data, timeline, all_layouts, count_banks, work_of, chain
    )
    token = _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.reset(token)


@contextmanager
def on_emulator(
    progress: Callable[[int, int], None] | None = None,
    *,
    mode: str = "eager",
    check: bool = False,
    count_banks: bool = False,
    target: Target = B200,
    timing: bool = False,
    with_data: bool = False,
    timeline: bool = False,
    all_layouts: bool = False,
    chain: Chain | None = None,
) -> Iterator[Emulator]:
    """Context manager for an emulated GPU, by default a B200, that runs the launches of CuTe DSL functions compiled inside it.

    ``timing``: model the times of launches instead of computing their results. ``with_data``: do both. ``chain``: only record
    the launches, in this chain.

    Raises:
        EmulatorError: the launch shim is missing, or the emulated program broke a rule of the machine.
    """
    prepare_cutlass()
    clock: Clock | Chain | None = chain
    if timing and chain is None:
        clock = Clock(constants_of(target), with_data=with_data, timeline=timeline, all_layouts=all_layouts)
    with Emulator(
        target.arch,
        target.num_sms,
        progress,
        mode=mode,
        check=check,
        count_banks=count_banks,
        timing=clock,
    ) as emulator:
        yield emulator


def run(task: Task, target: Target = B200) -> None:
    """Executes the kernel of ``target`` on CPU operands and returns when it is done.

    Raises:
        ValueError: CUDA operands.
        EmulatorError: the kernel broke a rule of the machine.
    """
    with _emulated(task.device, target) as (observer, emulator):
        launch = task.launch(target.gpu, for_emulator=True)
        emulator.register(launch.kernel.ptx, launch.kernel.cubin)
        tensors = list(task.tensors())
        if observer.chain is not None:
            observer.chain.held.append(tensors)
        # Results of a chain are also read, and some are written twice; each needs one range.
        written = {tensor.data_ptr() for _, tensor, writable in tensors if writable}
        by_size = sorted(tensors, key=lambda entry: span_bytes(entry[1]))
        by_address = {tensor.data_ptr(): (name, tensor) for name, tensor, _ in by_size}
        for address, (name, tensor) in by_address.items():
            emulator.add_range(name, address, span_bytes(tensor), address in written)
        if observer.work_of is not None:
            emulator.expect(*observer.work_of(task, launch, target.arch))
        held = launch.attach(task.device, 0)
        if held is not None:  # memory that the kernel's launches pass on
            if observer.chain is not None:
                observer.chain.held.append(held)
            emulator.add_range("workspace", held.address, held.nbytes, True)
            if held.counters:
                emulator.add_range("counters", held.counters, workspace.COUNTER_BYTES, True)
        launch.enqueue(0)
    if launch.plan is not None:
        observer.plans.append(launch.plan)


@contextmanager
def _emulated(device: torch.device, target: Target) -> Iterator[tuple[Observer, Emulator]]:
    """Context manager for the emulated GPU with the settings of the block's observer. Yields the observer and the GPU."""
    if device.type != "cpu":
        raise ValueError(
            f'backend="emulator" takes CPU tensors; operands are on {device}: move them with .cpu()'
        )
    observer = _observer.get() or Observer()
    with (
        _one_at_a_time,
        on_emulator(
            observer.progress,
            mode=observer.mode,
            check=observer.check,
            count_banks=observer.count_banks,
            target=target,
            timing=observer.timing,
            with_data=observer.with_data,
            timeline=observer.timeline,
            all_layouts=observer.all_layouts,
            chain=observer.chain,
        ) as emulator,
    ):
        checker = emulator.machine.checker
        if checker is not None:
            checker.dependencies.last = observer.last_launch
        try:
            yield observer, emulator
        finally:
            observer.hazards += emulator.hazards
            if checker is not None:
                observer.last_launch = checker.dependencies.last
    observer.stats.append(emulator.stats)
    if observer.chain is None:
        observer.timings += emulator.timings

"""The emulator as a backend: the kernel's own host code launches the kernel's own PTX on the CPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.compiler import CompiledKernel, table_pointer
from nvfp4_cute.emulator.check.ledger import Hazard
from nvfp4_cute.emulator.check.pdl import Dependent
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.gpus.targets import B200, Target
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch.plan import Plan, make_plan
from nvfp4_cute.launch.task import Task
from nvfp4_cute.launch.workspace import attach
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedOperands, GroupedProblem
from nvfp4_cute.timing.clock import Clock
from nvfp4_cute.timing.result import Timing

# Native host code of any thread launches on the emulator that became the process's device last.
_one_at_a_time = threading.RLock()


WorkOf = Callable[[Plan | Task, GroupedOperands | None, str], LaunchWork | None]
"""Of a launch, its operands if it is a plan's, and the architecture: what the clusters compute, None where it is not known."""


@dataclass
class Observer:
    """What a caller of :func:`observe` sees of the emulated launches.

    Attributes:
        progress: called with (CTAs finished, CTAs launched) as a launch proceeds, or None.
        mode: when asynchronous operations happen, as ``emulator.fronts.driver.Emulator`` takes it.
        check: whether to look for hazards.
        timing: whether to model the time of every launch instead of computing its result.
        timeline: whether the modelled times say what every warp did when.
        all_layouts: whether they are modelled in every layout of memory.
        count_banks: whether to count bank conflicts (``stats[i].banks``).
        work_of: where given, what the clusters of a launch compute: those that are alike are executed once, for their time.
        plans: the plan of every launch, in order.
        stats: statistics of every launch, in order (``emulator.machine.Stats``).
        timings: modelled times of every launch, in order.
        hazards: what the checker found, notes among it.
        last_launch: which checked launch the next one follows.
    """

    progress: Callable[[int, int], None] | None = None
    mode: str = "eager"
    check: bool = False
    timing: bool = False
    timeline: bool = False
    all_layouts: bool = False
    count_banks: bool = False
    work_of: WorkOf | None = None
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
    timeline: bool = False,
    all_layouts: bool = False,
    count_banks: bool = False,
    work_of: WorkOf | None = None,
) -> Iterator[Observer]:
    """Watch the launches that this thread makes on the emulator inside the block.

    ``mode``, ``check`` and ``count_banks`` are how they run; hazards are raised as an EmulatorError. With ``timing``
    their times are modelled, and their results are not computed; ``work_of`` has clusters that are alike executed once.
    """
    observer = Observer(progress, mode, check, timing, timeline, all_layouts, count_banks, work_of)
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
    timeline: bool = False,
    all_layouts: bool = False,
) -> Iterator[Emulator]:
    """An emulated GPU, by default a B200, on which CuTe DSL functions compiled inside the block launch.

    ``timing``: model the times of launches instead of computing their results.

    Raises:
        EmulatorError: the launch shim is missing, or the emulated program broke a rule of the machine.
    """
    prepare_cutlass()
    clock = None
    if timing:
        clock = Clock(constants_of(target), with_data=False, timeline=timeline, all_layouts=all_layouts)
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


def run(
    problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None, target: Target = B200
) -> None:
    """Execute the kernel of ``target`` on CPU operands and return when it is done.

    Raises:
        ValueError: CUDA operands. EmulatorError: the kernel broke a rule of the machine.
    """
    with _emulated(operands.device, target) as (observer, emulator):
        config = config or tuned.find(problem, target.gpu)
        plan = make_plan(problem, target.arch, target.num_sms, config, for_emulator=True)
        emulator.register(plan.kernel.ptx)
        tensors = list(_tensors(operands))
        # Results of a chain are read, too, and some are written twice: one range each.
        written = {tensor.data_ptr() for _, tensor, writable in tensors if writable}
        by_address = {tensor.data_ptr(): (name, tensor) for name, tensor, _ in reversed(tensors)}
        for address, (name, tensor) in by_address.items():
            emulator.add_range(name, address, _span_bytes(tensor), address in written)
        if observer.work_of is not None:
            emulator.expect(observer.work_of(plan, operands, target.arch))
        if plan.schedule.num_tiles:
            _launch(emulator, plan.kernel, plan.table(operands), operands.device)
    observer.plans.append(plan)


def run_task(task: Task, target: Target = B200) -> None:
    """Execute the kernel of ``target`` on CPU operands and return when it is done.

    Raises:
        ValueError: CUDA operands. EmulatorError: the kernel broke a rule of the machine.
    """
    with _emulated(task.device, target) as (observer, emulator):
        kernel = get_kernel(task.key(target.arch), for_emulator=True)
        emulator.register(kernel.ptx)
        for name, tensor, writable in task.tensors():
            emulator.add_range(name, tensor.data_ptr(), _span_bytes(tensor), writable)
        if observer.work_of is not None:
            emulator.expect(observer.work_of(task, None, target.arch))
        _launch(emulator, kernel, task.table(), task.device)


def _launch(emulator: Emulator, kernel: CompiledKernel, table: np.ndarray, device: torch.device) -> None:
    """Launch with this table; the emulator knows the memory, if any, that the kernel's launches hand on."""
    import cuda.bindings.driver as cuda

    held = attach(kernel, table, device, 0)
    if held is not None:
        emulator.add_range("workspace", held.address, held.nbytes, True)
    kernel.function(table_pointer(table.ctypes.data), cuda.CUstream(0))


@contextmanager
def _emulated(device: torch.device, target: Target) -> Iterator[tuple[Observer, Emulator]]:
    """The emulated GPU as the block's observer wants it, and that observer."""
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
            timeline=observer.timeline,
            all_layouts=observer.all_layouts,
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
    observer.timings += emulator.timings


def _tensors(operands: GroupedOperands) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name in ("a", "b", "a_scale", "b_scale", "out"):
        for group, tensor in enumerate(getattr(operands, name)):
            yield f"{name}[{group}]", tensor, name == "out"
    if operands.alpha is not None:
        yield "alpha", operands.alpha, False
    if operands.chain is not None:
        yield "counters of the chain", operands.chain, True
    if operands.second is not None:
        for name in ("b", "b_scale"):
            for group, tensor in enumerate(getattr(operands.second, name)):
                yield f"second {name}[{group}]", tensor, False
        if operands.second.alpha is not None:
            yield "second alpha", operands.second.alpha, False
    if operands.out_scales is not None:
        for group, tensor in enumerate(operands.out_scales.scale):
            yield f"out scale[{group}]", tensor, True
        if operands.out_scales.global_scale is not None:
            yield "out_global_scale", operands.out_scales.global_scale, False


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, gaps between rows included."""
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()

"""Backends, where a task runs: a GPU, the emulator, or the float64 reference."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module

import torch

from nvfp4_cute import env
from nvfp4_cute.backends.host_floats import ieee_floats
from nvfp4_cute.compile.cache import NotCompiled, is_planning
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch.task import Launch, Task

# Prefix of the GPU to emulate: "emulator:RTX 5090", "emulator:sm_120a".
EMULATOR_OF = "emulator:"
Run = Callable[[Task], Launch | None]


def resolve(name: str, device: torch.device) -> str:
    """Returns the backend that ``name`` means for tensors on ``device``.

    ``auto`` follows NVFP4_CUTE_BACKEND, then the device.

    Raises:
        ValueError: ``name`` is unknown.
        TypeError: ``name`` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend={name!r} is no name; use one of {', '.join(env.BACKENDS)}, or leave it out")
    if name.startswith(EMULATOR_OF):
        return name
    if name not in env.BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; use one of {', '.join(env.BACKENDS)}")
    if name == "auto":
        name = env.backend()
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "reference"
    return name


def get(name: str, device: torch.device) -> Run:
    """Returns the run function of a backend. Imports it on first use, because only some backends need cutlass.

    Raises:
        ValueError: ``name`` is unknown.
        UnsupportedTarget: the GPU to emulate is unknown.
    """
    module, _, target = resolve(name, device).partition(":")
    run = import_module(f"{__name__}.{module}").run
    return partial(run, target=targets.lookup(target)) if target else run


def run_task(name: str, task: Task) -> Launch | None:
    """Runs a task on a backend; a task without work is a no-op.

    Returns:
        The launch on a GPU, which a similar call may reuse; None from other backends.

    Raises:
        ValueError: ``name`` is unknown, or does not support the task's device.
        UnsupportedTarget: no kernel for the GPU.
        UnsupportedProblem, ConfigError: no kernel computes the task.
    """
    run = get(name, task.device)
    if task.is_empty:
        return None
    if is_planning():
        _plan(name, task)
        return None
    if task.device.type == "cuda":
        return run(task)
    with ieee_floats():
        return run(task)


def planned(name: str, task: Task) -> Launch | None:
    """Returns the launch of a task on a GPU without enqueuing it.

    Returns None for other backends, for a task without work, and while kernels are only planned.
    """
    if resolve(name, task.device) != "cuda" or task.is_empty or is_planning():
        return None
    if task.device.type != "cuda":  # only on the CPU, checks of later calls read the integers
        _clear_integers(task)
    from nvfp4_cute.backends import cuda

    return cuda.planned(task)


def _plan(name: str, task: Task) -> None:
    """Requests the kernel of a task without launching it."""
    _clear_integers(task)
    if resolve(name, task.device) == "reference":
        return
    is_emulated = task.device.type != "cuda"
    with suppress(NotCompiled):
        task.launch(gpu_of(name, task.device), for_emulator=is_emulated)


def _clear_integers(task: Task) -> None:
    """Sets the integers to 0 that a task would write and later operations read, such as ends of groups."""
    for _, tensor, is_written in task.tensors():
        if is_written and tensor.dtype == torch.int32:
            tensor.zero_()


def gpu_of(name: str, device: torch.device) -> targets.Gpu:
    """Returns the GPU that a backend computes on or emulates. The reference plans for a B200.

    Raises:
        ValueError: ``name`` is unknown.
        UnsupportedTarget: the GPU to emulate is unknown.
    """
    return _gpu(resolve(name, device), device)


def gpu_of_kernels(name: str, device: torch.device) -> targets.Gpu | None:
    """Returns the GPU of :func:`gpu_of`; None for the reference, which has no kernels."""
    resolved = resolve(name, device)
    return None if resolved == "reference" else _gpu(resolved, device)


def _gpu(resolved: str, device: torch.device) -> targets.Gpu:
    if resolved == "cuda" and device.type == "cuda":
        return targets.gpu_of(device) if device.index is None else targets.gpu_at(device)
    target = resolved.partition(":")[2]
    return (targets.lookup(target) if target else targets.B200).gpu

"""Where a plan runs: a GPU, the emulator, or the float64 reference."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from nvfp4_cute import env
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch.task import Task
from nvfp4_cute.planning.config import KernelConfig, check_config
from nvfp4_cute.problem import GroupedOperands, GroupedProblem

# What precedes the name of the GPU to emulate: "emulator:RTX 5090", "emulator:sm_120a".
EMULATOR_OF = "emulator:"
Run = Callable[[GroupedProblem, GroupedOperands, KernelConfig | None], None]


def resolve(name: str, device: torch.device) -> str:
    """The backend that ``name`` stands for with tensors on ``device``: ``auto`` follows NVFP4_CUTE_BACKEND, then the device.

    Raises:
        ValueError: ``name`` is unknown.
    """
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
    """The run function of a backend for grouped problems.

    Raises:
        ValueError: ``name`` is unknown. UnsupportedTarget: the GPU to emulate is unknown.
    """
    return _function("run", name, device)


def run_problem(
    name: str, problem: GroupedProblem, operands: GroupedOperands, config: KernelConfig | None
) -> None:
    """Run a grouped problem on a backend.

    Raises:
        ValueError: ``name`` is unknown. UnsupportedTarget: no kernel for the GPU. TypeError: ``config`` is no KernelConfig.
    """
    check_config(config)
    get(name, operands.device)(problem, operands, config)


def run_task(name: str, task: Task) -> None:
    """Run a task on a backend; a task without work is a no-op.

    Raises:
        ValueError: ``name`` is unknown, or is not for the task's device. UnsupportedTarget: no kernel for the GPU.
    """
    run = _function("run_task", name, task.device)
    if not task.is_empty:
        run(task)


def gpu_of(name: str, device: torch.device) -> targets.Gpu:
    """The GPU that a backend computes on or emulates; the reference plans for a B200.

    Raises:
        ValueError: ``name`` is unknown. UnsupportedTarget: the GPU to emulate is unknown.
    """
    module, _, target = resolve(name, device).partition(":")
    if module == "cuda" and device.type == "cuda":
        return targets.gpu_of(device)
    return (targets.lookup(target) if target else targets.B200).gpu


def _function(function: str, name: str, device: torch.device) -> Callable[..., None]:
    """A function of a backend, which is imported when it is first asked for: only some need cutlass."""
    module, _, target = resolve(name, device).partition(":")
    run = getattr(import_module(f"{__name__}.{module}"), function)
    return partial(run, target=targets.lookup(target)) if target else run

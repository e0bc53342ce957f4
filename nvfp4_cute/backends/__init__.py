"""Where a plan runs: a GPU, the emulator, or the float64 reference."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from nvfp4_cute import env, targets
from nvfp4_cute.config import KernelConfig
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
    """The run function of a backend. A backend is imported when it is first asked for: only some need cutlass.

    Raises:
        ValueError: ``name`` is unknown. UnsupportedTarget: the GPU to emulate is unknown.
    """
    module, _, target = resolve(name, device).partition(":")
    run = import_module(f"{__name__}.{module}").run
    return partial(run, target=targets.lookup(target)) if target else run

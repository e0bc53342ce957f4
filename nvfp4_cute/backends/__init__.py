"""Where a plan runs: a GPU, the emulator, or the float64 reference."""

from collections.abc import Callable
from importlib import import_module

import torch

from nvfp4_cute import env
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.problem import GroupedOperands, GroupedProblem

Run = Callable[[GroupedProblem, GroupedOperands, KernelConfig | None], None]


def resolve(name: str, device: torch.device) -> str:
    """The backend that ``name`` stands for with tensors on ``device``: ``auto`` follows NVFP4_CUTE_BACKEND, then the device.

    Raises:
        ValueError: ``name`` is unknown.
    """
    if name not in env.BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; use one of {', '.join(env.BACKENDS)}")
    if name == "auto":
        name = env.backend()
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "reference"
    return name


def get(name: str, device: torch.device) -> Run:
    """The run function of a backend. A backend is imported when it is first asked for: only some need cutlass."""
    return import_module(f"{__name__}.{resolve(name, device)}").run

"""Keeping what a checked launch has worked out, for the next call of its kind (``prepared``)."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch

from nvfp4_cute import backends
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.task import Task
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedOperands, GroupedProblem

Tensors = Sequence[torch.Tensor]


class RepeatedTask(Task, Protocol):
    """A task that says where its table holds addresses."""

    def address_places(self) -> list[int]:
        """Where in the flat launch table addresses go: of what ``tensors`` names, in its order."""


def keep_list(
    key: tuple | None,
    backend: str,
    problem: GroupedProblem,
    operands: GroupedOperands,
    config: KernelConfig | None,
    inputs: Tensors,
    outs: Tensors,
) -> None:
    """Keep a launch in list or batched form. ``inputs``, ``outs``: in the order of ``Plan.address_places``."""
    if not _is_kept(key, backend, outs):
        return
    assert key is not None
    plan = import_module("nvfp4_cute.backends.cuda").plan_for(problem, operands.device, config)
    scales = operands.out_scales
    places = plan.address_places(has_global_scale=scales is not None and scales.global_scale is not None)
    prepared.remember(key, plan.kernel, plan.table(operands), places, [*inputs, *outs], len(outs))


def keep_task(key: tuple | None, backend: str, task: RepeatedTask, inputs: Tensors, outs: Tensors) -> None:
    """Keep the launch of a task. ``inputs``, ``outs``: in the order of the task's tensors."""
    if not _is_kept(key, backend, outs):
        return
    assert key is not None
    kernel = import_module("nvfp4_cute.backends.cuda").kernel_for(task)
    prepared.remember(key, kernel, task.table(), task.address_places(), [*inputs, *outs], len(outs))


def _is_kept(key: tuple | None, backend: str, outs: Tensors) -> bool:
    """Only launches on a GPU are kept, and those that do something."""
    if key is None or not any(t.numel() for t in outs):
        return False
    return backends.resolve(backend, outs[0].device) == "cuda"

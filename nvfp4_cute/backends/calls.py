"""The one way of every call: known by its signature and launched at once, or checked, planned, run and remembered."""

from collections.abc import Callable
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch.task import Task


def call(
    backend: str,
    settings: tuple,
    inputs: list[Any],
    outs: list[Any],
    check: Callable[..., tuple[Task, list[torch.Tensor]]],
    *arguments: Any,
) -> list[torch.Tensor]:
    """Compute; the second call with operands of the same kind only fills in addresses (``launch.prepared``).

    Args:
        backend: its name, as of the operation.
        settings: all else that decides how the call is made, hashable: the operation, arguments that are no tensors, counts
            of operands.
        inputs: what it reads, in the order of the task's tensors.
        outs: what it writes, where the caller gives it. What is no tensor, in either, sends the call the long way.
        check, arguments: the long way: checks the arguments; returns the task, and what it writes.

    Returns:
        What was written: ``outs``, or new tensors.
    """
    key, known = prepared.lookup(inputs + outs if outs else inputs, *settings, len(outs), backend)
    if known is not None:
        launched = known.try_launch(inputs, outs)
        if launched is not None:
            return launched
    task, results = check(*arguments)
    launch = backends.run_task(backend, task)
    if launch is not None and key is not None:
        prepared.remember(key, launch, [*inputs, *results], len(results))
    return results


def run(backend: str, task: TableTask) -> None:
    """Compute a checked task. The second one of its kind is launched without its table being made (``launch.prepared``).

    Args:
        backend: its name, as of the operation.
        task: whose table follows from its fields, but for addresses: from shapes, strides and dtypes of tensors, and all else.
    """
    tensors = [*task.tensors()]
    inputs, outs = ([x for _, x, is_written in tensors if is_written == side] for side in (False, True))
    call(backend, task.settings, inputs, outs, lambda: (task, outs))

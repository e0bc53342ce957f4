"""The one way of every call: known by its signature and launched at once, or checked, planned, run and remembered.

Calls that follow each other are remembered together (``chain``): the next time one comparison of signatures serves all of them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch.task import Task


@dataclass(frozen=True)
class _Made:
    """A call that was launched as it was prepared: what it read, and new tensors that it wrote."""

    call: prepared.Launchable
    inputs: list[torch.Tensor]
    outs: list[torch.Tensor]


class _OfThread(threading.local):
    """Attributes: made: calls of the chain that is being watched, None for one that cannot be part of it; None: there is none."""

    made: list[_Made | None] | None = None


_watched = _OfThread()


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
            if _watched.made is not None:
                _watched.made.append(None if outs else _Made(known, inputs, launched))
            return launched
    if _watched.made is not None:
        _watched.made.append(None)
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
    inputs, outs, settings = task.call()
    call(backend, settings, inputs, outs, lambda: (task, outs))


@dataclass(frozen=True)
class Chain:
    """Calls in a row, each of which reads what the chain was given and what calls before it wrote.

    Attributes:
        steps: each call, and the places of what it reads among the tensors given to the chain and all that was written before.
        result: the place of the chain's result.
        aliases: pairs of places whose tensors have to have the same address, as they had when the calls were watched.
    """

    steps: tuple[tuple[prepared.Launchable, tuple[int, ...]], ...]
    result: int
    aliases: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls, inputs: Sequence[torch.Tensor], made: Sequence[_Made | None], result: torch.Tensor
    ) -> "Chain | None":
        """The chain of calls that were watched; None where one was not prepared, or reads or gives back anything else.

        Tensors are told apart by their addresses.
        """
        places: dict[int, int] = {}
        aliases = [
            (place, number)
            for number, tensor in enumerate(inputs)
            if (place := places.setdefault(tensor.data_ptr(), number)) != number
        ]
        known = list(inputs)
        steps = []
        for one in made:
            if one is None:
                return None
            read = [places.get(tensor.data_ptr()) for tensor in one.inputs]
            if any(place is None for place in read):
                return None
            steps.append((one.call, tuple(place for place in read if place is not None)))
            for out in one.outs:
                places[out.data_ptr()] = len(known)
                known.append(out)
        last = [number for number, tensor in enumerate(known) if tensor is result]
        return cls(tuple(steps), last[0], tuple(aliases)) if steps and last else None

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """As of PreparedCall: the result alone; ``outs`` is empty."""
        tensors = list(inputs)
        if any(tensors[one].data_ptr() != tensors[other].data_ptr() for one, other in self.aliases):
            return None
        for step, places in self.steps:
            made = step.try_launch([tensors[place] for place in places], [])
            if made is None:
                return None
            tensors += made
        return [tensors[self.result]]


def chain(
    backend: str,
    settings: tuple,
    inputs: list[torch.Tensor],
    run: Callable[..., torch.Tensor],
    *arguments: Any,
) -> torch.Tensor:
    """``run(*arguments)``, whose calls are launched together once each of them was prepared.

    Args:
        backend: its name, as of the operations. settings: what else decides how the calls are made, hashable.
        inputs: all tensors that the calls read and do not write themselves.
        run: calls operations, which only write new tensors; what it does follows from ``settings`` and the kind of ``inputs``.

    Returns:
        What ``run`` returns.
    """
    if _watched.made is not None:  # part of another chain
        return run(*arguments)
    key, known = prepared.lookup(inputs, *settings, backend)
    if known is not None:
        launched = known.try_launch(inputs, [])
        if launched is not None:
            return launched[0]
    made: list[_Made | None] = []
    _watched.made = made
    try:
        result = run(*arguments)
    finally:
        _watched.made = None
    if key is not None and made and made[-1] is not None:
        found = Chain.of(inputs, made, result)
        if found is not None:
            prepared.keep(key, found)
    return result

"""The one way of every call: known by its signature and launched at once, or checked, planned, run and remembered.

Calls that follow each other are remembered together (``chain``): the next time one comparison of signatures serves all of them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared import PreparedCall
from nvfp4_cute.launch.prepared_chain import Made, PreparedChain
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch.task import Task


class LaunchedChain(NamedTuple):
    """A chain that was launched as it was prepared: what it read, and what it wrote."""

    chain: PreparedChain
    inputs: list[torch.Tensor]
    result: torch.Tensor


class _OfThread(threading.local):
    """What is being watched; None: nothing is.

    Attributes:
        made: calls of a chain, None for one that cannot be part of it.
        launched: chains.
    """

    made: list[Made | None] | None = None
    launched: list[LaunchedChain] | None = None


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
                _watched.made.append(
                    Made(known, inputs, launched) if isinstance(known, PreparedCall) else None
                )
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


def chain(backend: str, run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Compute ``run(*arguments)``, whose launches are repeated as one once each of them was prepared.

    Args:
        backend: its name, as of the operations.
        run: a function of a module. It calls operations that write new tensors and nothing else, reads only tensors among its
            arguments, and what it does follows from the kind of those and from the other arguments.
        arguments: tensors, records and tuples of tensors, and hashable settings.

    Returns:
        What ``run`` returns.
    """
    if _watched.made is not None:  # part of another chain
        return run(*arguments)
    inputs: list[torch.Tensor] = []
    key, known = prepared.lookup(inputs, run, _settings(arguments, inputs), backend)
    if known is not None:
        launched = known.try_launch(inputs, [])
        if launched is not None:
            if _watched.launched is not None and isinstance(known, PreparedChain):
                _watched.launched.append(LaunchedChain(known, inputs, launched[0]))
            return launched[0]
    made: list[Made | None] = []
    _watched.made = made
    try:
        result = run(*arguments)
    finally:
        _watched.made = None
    known_ones = [one for one in made if one is not None]
    if key is not None and made and len(known_ones) == len(made):
        found = PreparedChain.of(inputs, known_ones, result)
        if found is not None:
            prepared.keep(key, found)
    return result


# Settings whose kind is looked at first: arguments are few tensors and many of these.
_PLAIN = frozenset((str, int, float, bool, type(None), torch.dtype, BlockFormat))


def _settings(arguments: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """All that arguments say but for their tensors, which are appended to ``tensors``, those in records and tuples too."""
    settings: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind not in _PLAIN:
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
                argument = torch.Tensor
            elif isinstance(argument, tuple):
                argument = _settings(argument, tensors)
            elif is_dataclass(kind):
                argument = kind, _settings(vars(argument).values(), tensors)
        settings.append(argument)
    return tuple(settings)


@contextmanager
def watching_chains() -> Iterator[list[LaunchedChain]]:
    """The chains that this thread launches in the meantime."""
    launched: list[LaunchedChain] = []
    before, _watched.launched = _watched.launched, launched
    try:
        yield launched
    finally:
        _watched.launched = before

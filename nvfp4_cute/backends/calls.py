"""The common path of every call: a known signature launches at once; others are checked, planned, run and remembered.

Consecutive calls are remembered together (``chain``). The next time, one comparison of signatures serves all of them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    """A chain that was launched from its preparation, with its inputs and results."""

    chain: PreparedChain
    inputs: list[torch.Tensor]
    result: torch.Tensor


class _OfThread(threading.local):
    """State of the watched block; None outside.

    Attributes:
        made: calls of a chain, None for a call that cannot be part of it.
        launched: launched chains.
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
    """Computes. Later calls with operands of the same kind only replace addresses (``launch.prepared``).

    Args:
        backend: name of the backend, see the operation.
        settings: everything else that determines the call, hashable: the operation, arguments that are not tensors,
            numbers of operands.
        inputs: operands, in the order of the task's tensors.
        outs: outputs given by the caller. A value in ``inputs`` or ``outs`` that is not a tensor disables the short
            path.
        check, arguments: the full path: checks the arguments; returns the task and its outputs.

    Returns:
        The outputs: ``outs``, or new tensors.
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
    """Computes a checked task. The second task of its kind is launched without building its table (``launch.prepared``).

    Args:
        backend: name of the backend, see the operation.
        task: a task whose table depends only on its fields, except for addresses: shapes, strides and dtypes of
            tensors, and all other values.
    """
    inputs, outs, settings = task.call()
    call(backend, settings, inputs, outs, lambda: (task, outs))


def outside_of_launches() -> None:
    """Tells the current chain, if any, that torch computes a part of it, so that its launches alone cannot repeat it."""
    if _watched.made is not None:
        _watched.made.append(None)


def chain(backend: str, run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Computes ``run(*arguments)``. After each of its launches has been prepared, they are repeated as one.

    Args:
        backend: name of the backend, see the operations.
        run: a function of a module. It calls only operations that write new tensors, and reads no tensors but its
            arguments. Its work depends only on the kind of these tensors and on the other arguments.
        arguments: tensors, records and tuples of tensors, and hashable settings.

    Returns:
        The result of ``run``.
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


# Types of settings that are checked first: arguments are few tensors and many settings.
_PLAIN = frozenset((str, int, float, bool, type(None), torch.dtype, BlockFormat))


def _settings(arguments: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Returns all arguments except their tensors, which are appended to ``tensors``, including those in records and tuples."""
    settings: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind not in _PLAIN:
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
                argument = torch.Tensor
            elif isinstance(argument, tuple):
                argument = _settings(argument, tensors)
            elif hasattr(kind, "__dataclass_fields__"):  # without the Python calls of is_dataclass
                argument = kind, _settings(vars(argument).values(), tensors)
        settings.append(argument)
    return tuple(settings)


@contextmanager
def watching_chains() -> Iterator[list[LaunchedChain]]:
    """Context manager that returns the list of chains launched by this thread within the block."""
    launched: list[LaunchedChain] = []
    before, _watched.launched = _watched.launched, launched
    try:
        yield launched
    finally:
        _watched.launched = before

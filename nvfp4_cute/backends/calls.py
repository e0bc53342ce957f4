"""The common path of every call: a known signature launches at once; others are checked, planned, run and remembered.

``chain`` remembers consecutive calls together, so that later one comparison of signatures serves all of them. ``chain_of_rows``
remembers them for a whole range of row counts.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.cache import is_planning
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared import Launchable, PreparedCall
from nvfp4_cute.launch.prepared_chain import Made, PreparedChain, PreparedSteps, TorchStep
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch.task import Task
from nvfp4_cute.planning.rows import rounded_rows

# From this many rows on, servers pass any number of rows, outside of CUDA graphs.
MANY_ROWS = 64


class LaunchedChain(NamedTuple):
    """A launch of a prepared chain.

    Attributes:
        chain: the prepared chain.
        inputs: tensors that it read.
        result: tensor that it wrote.
        serves_fewer_rows: whether it serves a range of row counts.
    """

    chain: Launchable
    inputs: list[torch.Tensor]
    result: torch.Tensor
    serves_fewer_rows: bool


class _OfThread(threading.local):
    """State of the watched block; None outside.

    Attributes:
        made: calls of a chain, and None for each call that cannot be part of it.
        is_rehearsed: whether calls are only prepared, not launched. A call that cannot be prepared raises _CannotRehearse.
        launched: launched chains.
    """

    made: list[Made | TorchStep | None] | None = None
    is_rehearsed = False
    launched: list[LaunchedChain] | None = None


_watched = _OfThread()


class _CannotRehearse(Exception):  # noqa: N818, not an error: the calls run one by one
    """Raised in a rehearsal by a call that cannot be prepared without running it."""


class _RunsOneByOne:
    """Kept in place of a chain that a rehearsal could not prepare."""

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> None:
        """Returns None, so that the calls run one by one."""


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
    if _watched.is_rehearsed:
        return _rehearsed(backend, key, known, inputs, outs, check, *arguments)
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


def _rehearsed(
    backend: str,
    key: tuple | None,
    known: Launchable | None,
    inputs: list[Any],
    outs: list[Any],
    check: Callable[..., Any],
    *arguments: Any,
) -> list[torch.Tensor]:
    """Prepares a call that a chain will launch, and returns its results, which nothing writes.

    Remembers the call if it does not depend on the rows, such as the one that dequantizes weights.
    """
    if isinstance(known, PreparedCall):
        call, results = known, outs or known.new_outs()
    else:
        task, results = check(*arguments)
        launch = backends.planned(backend, task)
        made = None if launch is None else prepared.prepare(launch, [*inputs, *results], len(results))
        if made is None:
            raise _CannotRehearse
        call = made
        if key is not None and call.rows is not None and not call.rows.rows:
            prepared.keep(key, call)
    assert _watched.made is not None
    _watched.made.append(Made(call, inputs, results))
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
    if _watched.is_rehearsed:
        raise _CannotRehearse
    if _watched.made is not None:
        _watched.made.append(None)


def by_torch(
    compute: Callable[..., torch.Tensor],
    *tensors: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns ``compute(*tensors)``, a part of a chain that torch computes, such as a product with dequantized weights.

    Args:
        compute: a function whose result depends only on these tensors.
        tensors: inputs of the chain and results of its calls; None for absent ones.
        shape, dtype: those of the result.
    """
    if _watched.is_rehearsed and _watched.made is not None:
        first = next(tensor for tensor in tensors if tensor is not None)
        result = first.new_empty(shape, dtype=dtype)
        _watched.made.append(TorchStep(compute, tensors, result))
        return result
    outside_of_launches()
    return compute(*tensors)


def chain_of_rows(
    backend: str, run: Callable[..., torch.Tensor], with_rows: int, *arguments: Any
) -> torch.Tensor:
    """Computes like ``chain``. From ``MANY_ROWS`` rows on, prepares the launches once per range of ``rounded_rows``.

    All row counts of a range use the same kernels. A rehearsal with the largest row count of the range prepares all launches
    without running them. Each call then rewrites the few numbers of the launch tables that depend on its rows, so a new row count
    costs no more than one that was passed before.

    Args:
        backend, run: see ``chain``.
        with_rows: number of leading arguments that have one row per row of the result, or are None.
        arguments: see ``chain``; ``run`` refuses a first one that is not a matrix.
    """
    shape = getattr(arguments[0], "shape", ())
    rows = shape[0] if shape else 0
    if rows < MANY_ROWS or _watched.made is not None:
        return chain(backend, run, *arguments)
    inputs: list[torch.Tensor] = []
    settings = _settings(arguments, inputs)
    capacity, open_ones = rounded_rows(rows), with_rows - settings[:with_rows].count(None)
    if open_ones > 1 and not prepared.have_equal_rows(inputs[:open_ones]):
        return run(*arguments)  # raises
    key, known = prepared.lookup(inputs, run, settings, capacity, backend, with_rows=open_ones)
    if known is None and is_planning():  # also request the kernels of the largest row count
        _rehearse(run, capacity, with_rows, open_ones, arguments)
    elif known is None and key is not None:
        known = _rehearse(run, capacity, with_rows, open_ones, arguments)
        if known is not None:
            prepared.keep(key, known)
    result = _launched(known, inputs, serves_fewer_rows=True)
    return chain(backend, run, *arguments) if result is None else result


def _launched(
    known: Launchable | None, inputs: list[torch.Tensor], serves_fewer_rows: bool = False
) -> torch.Tensor | None:
    """Launches what was prepared for a chain. Returns its result; None if its calls have to run one by one."""
    launched = None if known is None else known.try_launch(inputs, [])
    if launched is None:
        return None
    if _watched.launched is not None:
        assert known is not None
        _watched.launched.append(LaunchedChain(known, inputs, launched[0], serves_fewer_rows))
    return launched[0]


def _rehearse(
    run: Callable[..., torch.Tensor], capacity: int, with_rows: int, open_ones: int, arguments: Sequence[Any]
) -> Launchable | None:
    """Prepares ``run`` for up to ``capacity`` rows without a launch. While kernels are planned, only requests the kernels.

    Returns None if an operand was refused, or if memory for that many rows is lacking. The call itself then raises the same
    error, or succeeds with its own rows.
    """
    made: list[Made | TorchStep | None] = []
    _watched.made, _watched.is_rehearsed = made, not is_planning()
    try:
        roomy = {
            id(x): x.new_empty_strided((capacity, *x.shape[1:]), x.stride())
            for x in arguments[:with_rows]
            if x is not None
        }
        arguments = [*(roomy.get(id(x)) for x in arguments[:with_rows]), *arguments[with_rows:]]
        result = run(*arguments)
    except _CannotRehearse:
        return _RunsOneByOne()
    except (TypeError, ValueError, UnsupportedTarget, torch.OutOfMemoryError):
        return None
    finally:
        _watched.made, _watched.is_rehearsed = None, False
    if is_planning():
        return _RunsOneByOne()
    inputs: list[torch.Tensor] = []
    _settings(arguments, inputs)
    calls = [one for one in made if isinstance(one, Made)]
    found: Launchable | None = None
    if len(calls) == len(made):
        found = PreparedChain.of(inputs, calls, result, open_ones)
    else:
        found = PreparedSteps.of(inputs, made, result, open_ones)
    return found or _RunsOneByOne()


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
    repeated = _launched(known, inputs)
    if repeated is not None:
        return repeated
    made: list[Made | TorchStep | None] = []
    _watched.made = made
    try:
        result = run(*arguments)
    finally:
        _watched.made = None
    known_ones = [one for one in made if isinstance(one, Made)]
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

"""Chains: consecutive prepared calls, launched together. Their tables are filled in at once, and only the result is allocated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeGuard

import numpy as np
import torch

from nvfp4_cute import private_api
from nvfp4_cute.compile.compiler import Launcher
from nvfp4_cute.launch import workspace
from nvfp4_cute.launch.prepared import OUT_ALIGN_BYTES, Addresses, Place, PreparedCall
from nvfp4_cute.launch.task import ByRows
from nvfp4_cute.launch_table import Header
from nvfp4_cute.operands.overlap import span_bytes

# Memory between calls that is kept for the next chain. Larger memory is freed; for long launches the allocation does not
# matter.
MAX_KEPT_BYTES = 4 << 20
# Launch tables begin at multiples of a cache line, in numbers.
TABLE_ALIGN = 8
_data_ptr = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Made:
    """A prepared call that was launched, with the tensors that it read and the new ones that it wrote."""

    call: PreparedCall
    inputs: list[torch.Tensor]
    outs: list[torch.Tensor]


@dataclass(frozen=True)
class TorchStep:
    """A part of a chain that torch computes: ``compute(*tensors)``."""

    compute: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor | None, ...]
    result: torch.Tensor


class ChainRows:
    """Numbers of a chain's launch tables that depend on its number of rows, which is that of its first input.

    Args:
        capacity: number of rows for which the tables were made, and the largest that fits.
        numbers: places in the tables, with the rows of their launch per row of the chain.
    """

    def __init__(self, capacity: int, numbers: Sequence[tuple[ByRows, int]]):
        self._rows, self._capacity = capacity, capacity
        made = [(number.place, times, *number[1:]) for number, times in numbers]
        self._places, self._times, self._steps, self._each, self._most = (
            np.array(made, np.int64).reshape(-1, 5).T.copy()
        )

    def write(self, tables: np.ndarray, rows: int) -> bool:
        """Writes the numbers for ``rows``. Returns False if ``rows`` is larger than the capacity."""
        if rows == self._rows:
            return True
        if rows > self._capacity:
            return False
        tiles = -(-rows * self._times // self._steps) * self._each
        tables[self._places] = np.minimum(tiles, self._most)
        self._rows = rows
        return True


class PreparedChain:
    """Calls in a row, each of which reads the chain's inputs and results of earlier calls. Belongs to one thread.

    The results between calls, and the workspaces, are in memory that the chains of a stream share (``launch.workspace``),
    because launches on a stream follow each other.

    Args:
        inputs: the chain's inputs when its calls were recorded.
        made: the calls.
        result: the final result, written by one of them.
        places: for each call, the numbers of its tensors among ``inputs`` and all written tensors.
        aliases: pairs of inputs whose addresses were equal, and have to be equal.
        capacity: rows of the first input if later calls may have fewer; None if all calls have the same number.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        made: Sequence[Made],
        result: torch.Tensor,
        places: Sequence[Sequence[int]],
        aliases: Sequence[tuple[int, int]],
        capacity: int | None = None,
    ):
        # Numbers of the result, of the memory between calls, and of counters.
        own, memory, counters = range(len(inputs), len(inputs) + 3)
        where, nbytes, spans = {number: (number, 0) for number in range(own)}, 0, dict[int, int]()
        for one, numbers in zip(made, places, strict=True):
            for tensor, number in zip((*one.inputs, *one.outs), numbers, strict=True):
                spans[number] = max(spans.get(number, 0), span_bytes(tensor))
                if tensor is result:
                    where[number] = (own, 0)
        for number, span in spans.items():
            if number not in where:
                where[number] = (memory, nbytes)
                nbytes += -(-span // OUT_ALIGN_BYTES) * OUT_ALIGN_BYTES
        self._nbytes = nbytes + max(one.call.workspace_bytes for one in made)
        self._has_counters = any(one.call.has_counters for one in made)
        sizes = [-(-one.call.table.size // TABLE_ALIGN) * TABLE_ALIGN for one in made]
        tables, filled = np.zeros(sum(sizes), np.int64), []
        low_bits, self._launchers, by_rows = [0] * (own + 3), [], list[tuple[ByRows, int]]()
        for one, numbers, size, end in zip(made, places, sizes, np.cumsum(sizes).tolist(), strict=True):
            call, start = one.call, end - size
            table = tables[start : start + call.table.size]
            table[:] = call.table
            self._launchers.append(Launcher(call.function, table))
            if capacity is not None and call.rows is not None:
                times = call.rows.rows // capacity
                by_rows += [(one._replace(place=start + one.place), times) for one in call.rows.numbers]
            for place, index, offset in call.places:
                number, begin = where[numbers[index]]
                filled.append(Place(start + place, number, begin + offset))
            for number, bits in zip(numbers, call.low_bits, strict=True):
                low_bits[where[number][0]] |= bits
            if call.workspace_bytes:
                filled.append(Place(start + Header.WORKSPACE, memory, nbytes))
            if call.has_counters:
                filled.append(Place(start + Header.COUNTERS, counters, 0))
        self._addresses = Addresses(
            tables, filled, low_bits, [*(t.numel() > 0 for t in (*inputs, result)), False, False]
        )
        self._aliases, self._tables = aliases, tables
        self._rows = None if capacity is None else ChainRows(capacity, by_rows)
        self._index = result.device.index
        self._new, self._layout = result.new_empty(0).new_empty_strided, (result.shape, result.stride())

    @classmethod
    def of(
        cls,
        inputs: Sequence[torch.Tensor],
        made: Sequence[Made],
        result: torch.Tensor,
        with_rows: int = 0,
    ) -> "PreparedChain | None":
        """Makes a chain of recorded calls; None if a call reads anything else or writes to ``inputs``.

        Tensors are identified by their addresses.

        Args:
            inputs, made, result: of the recorded run.
            with_rows: number of leading inputs with one row per row of the result. If it is not 0, the chain also serves fewer
                rows; the result is None if a call cannot.
        """
        numbers: dict[int, int] = {}
        aliases = [
            (known, number)
            for number, tensor in enumerate(inputs)
            if (known := numbers.setdefault(tensor.data_ptr(), number)) != number
        ]
        places, written = [], len(inputs)
        for one in made:
            read = [numbers.get(tensor.data_ptr()) for tensor in one.inputs]
            if any(number is None for number in read):
                return None
            outs = []
            for out in one.outs:  # an output of an earlier call keeps its place
                outs.append(numbers.setdefault(out.data_ptr(), written))
                written += outs[-1] == written
            if any(number < len(inputs) for number in outs):
                return None
            places.append([*(number for number in read if number is not None), *outs])
        if not any(out is result for one in made for out in one.outs):
            return None
        if not with_rows:
            return cls(inputs, made, result, places, aliases)
        capacity = len(inputs[0])
        follow = {*range(with_rows)} | {
            number
            for one, numbers in zip(made, places, strict=True)
            for tensor, number in zip((*one.inputs, *one.outs), numbers, strict=True)
            if tensor is result
        }
        if len(result) != capacity or not all(map(_follows, made, places, repeat(capacity), repeat(follow))):
            return None
        return cls(inputs, made, result, places, aliases, capacity)

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueues and returns only the result; ``outs`` is empty. See :meth:`PreparedCall.try_launch`."""
        index = self._index
        if private_api.current_device() != index:
            with torch.cuda.device(index):
                return self.try_launch(inputs, outs)
        shape, strides = self._layout
        if self._rows is not None:
            rows = inputs[0].shape[0]
            if not self._rows.write(self._tables, rows):
                return None
            shape = torch.Size((rows, *shape[1:]))
        result = self._new(shape, strides)
        stream, nbytes, between, counted = private_api.current_stream(index), self._nbytes, 0, 0
        if nbytes:
            is_kept = nbytes <= MAX_KEPT_BYTES
            held = workspace.take(index, stream, nbytes) if is_kept else workspace.allocate(index, nbytes)
            between = held.address
        if self._has_counters:
            with_counters = workspace.take(index, stream, 0, counters=True)
            counted = with_counters.counters
        addresses = self._addresses
        packed = addresses.pack(*map(_data_ptr, inputs), _data_ptr(result), between, counted)
        if not addresses.write(packed, self._are_others if self._aliases else None):
            return None
        for launch in self._launchers:
            launch(stream)
        return [result]

    def _are_others(self, addresses: np.ndarray) -> bool:
        return any(addresses[one] != addresses[other] for one, other in self._aliases)


def _follows(one: Made, numbers: Sequence[int], capacity: int, follow: set[int]) -> bool:
    """Returns whether a call can run with fewer rows: its table can, or it does not touch tensors with rows of the chain."""
    rows = one.call.rows
    if rows is None or rows.rows % capacity:
        return False
    return rows.rows > 0 or follow.isdisjoint(numbers)


class PreparedSteps:
    """A chain in which torch computes some steps, such as products with dequantized weights. Belongs to one thread.

    Serves row counts up to that of the recorded run. Every call allocates the tensors between launches, as large as in that run.

    Args:
        steps: functions of a list of tensors and the number of rows. They append their results to the list, and return False
            if all checks have to run. The list begins with None, for absent arguments, and the inputs.
        result: index of the result in this list.
    """

    def __init__(
        self,
        steps: Sequence[Callable[[list[torch.Tensor | None], int], bool]],
        result: int,
    ):
        self._steps, self._result = steps, result

    @classmethod
    def of(
        cls, inputs: Sequence[torch.Tensor], made: Sequence[Any], result: torch.Tensor, with_rows: int
    ) -> "PreparedSteps | None":
        """Makes the steps of a recorded run; None if it did anything else. Arguments: see :meth:`PreparedChain.of`."""
        capacity, held = len(inputs[0]), [None, *inputs]
        by_address = {tensor.data_ptr(): number for number, tensor in enumerate(inputs, 1)}
        steps: list[Callable[[list[torch.Tensor | None], int], bool]] = []
        if len(by_address) < len(inputs) or None in made:
            return None
        for one in made:
            if isinstance(one, TorchStep):
                known = {_kind(tensor): number for number, tensor in enumerate(held)}
                takes = [known.get(_kind(tensor)) for tensor in one.tensors]
                if None in takes or len(takes) < 2:
                    return None
                steps.append(_Compute(one.compute, [*filter(_is_known, takes)]))
                new = [one.result]
            else:
                new = [out for out in one.outs if out.data_ptr() not in by_address]
                for number, out in enumerate(new, len(held)):
                    by_address[out.data_ptr()] = number
                numbers = [by_address.get(tensor.data_ptr()) for tensor in (*one.inputs, *one.outs)]
                taken = [*filter(_is_known, numbers)]
                follow = {*range(1, 1 + with_rows)}
                follow.update(by_address[out.data_ptr()] for out in one.outs if out is result)
                if len(taken) < max(len(numbers), 2) or not _follows(one, taken, capacity, follow):
                    return None
                steps.append(_Launch(one.call, taken, new, result, capacity))
            held += new
            by_address |= {
                tensor.data_ptr(): number for number, tensor in enumerate(held) if tensor is not None
            }
        at = [number for number, tensor in enumerate(held) if tensor is result]
        return cls(steps, at[0]) if at else None

    def try_launch(self, inputs: list[Any], outs: list[Any]) -> list[torch.Tensor] | None:
        """Enqueues and returns only the result; ``outs`` is empty. See :meth:`PreparedCall.try_launch`."""
        rows, held = inputs[0].shape[0], [None, *inputs]
        for step in self._steps:
            if not step(held, rows):
                return None
        return [held[self._result]]


class _Launch:
    """A step that launches. Allocates tensors like ``new`` of the recorded run, but the result with the rows of the call."""

    def __init__(
        self,
        call: PreparedCall,
        takes: Sequence[int],
        new: Sequence[torch.Tensor],
        result: torch.Tensor,
        capacity: int,
    ):
        self._call, self._takes = call, itemgetter(*takes)
        self._new = [
            (tensor.new_empty(0).new_empty_strided, tensor.shape, tensor.stride(), tensor is result)
            for tensor in new
        ]
        rows = call.rows
        assert rows is not None
        of_chain = [(number, rows.rows // capacity) for number in rows.numbers]
        self._rows = ChainRows(capacity, of_chain) if of_chain else None

    def __call__(self, held: list[torch.Tensor | None], rows: int) -> bool:
        for new, shape, strides, is_result in self._new:
            held.append(new((rows, *shape[1:]) if is_result else shape, strides))
        call = self._call
        if self._rows is not None and not self._rows.write(call.table, rows):
            return False
        if not call.take(self._takes(held), own_out=False):
            return False
        call.launch()
        return True


class _Compute:
    """A step that torch computes."""

    def __init__(self, compute: Callable[..., torch.Tensor], takes: Sequence[int]):
        self._compute, self._takes = compute, itemgetter(*takes)

    def __call__(self, held: list[torch.Tensor | None], rows: int) -> bool:
        held.append(self._compute(*self._takes(held)))
        return True


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _is_known(number: int | None) -> TypeGuard[int]:
    return number is not None

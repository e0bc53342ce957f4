"""Tasks without schedule and config, which a table with one row of integers describes completely."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.task import ByRows, Key, Launch, Rows

Addresses = Mapping[str, tuple[IntEnum, torch.Tensor]]


@cache
def _names(task: Any) -> tuple[str, ...]:
    """Returns the names of a task's fields, cached because every call needs them."""
    return tuple(field.name for field in fields(task))


class TableTask:
    """A task (``task.Task``) whose table has one column per tensor address, and numbers.

    A subclass is a frozen dataclass with ``key``, ``numbers`` and ``reference``. Its fields are tensors with the names of their
    columns, or None, and other parameters. A subclass whose tensors are not fields has ``addresses``.

    Attributes:
        columns: columns of the launch table.
        written: names of the tensors that the kernel writes.
        natural: names of the tensors that it reads element by element (``task.Launch``).
    """

    columns: ClassVar[type[IntEnum]]
    written: ClassVar[tuple[str, ...]] = ("out",)
    natural: ClassVar[tuple[str, ...]] = ()

    def key(self, gpu: Gpu) -> Key:
        """Returns the kernel's key. Raises UnsupportedTarget for an architecture without a kernel."""
        raise NotImplementedError

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns all columns except addresses."""
        raise NotImplementedError

    def by_rows(self) -> tuple[int, Mapping[IntEnum, int]] | None:
        """Returns the number of rows and, by column of the table that depends on it, a step: the column has ceil(rows / step).

        Returns None, the default, if another number of rows needs another launch.
        """
        return None

    def reference(self) -> None:
        """Computes without a kernel."""
        raise NotImplementedError

    @property
    def _names(self) -> tuple[str, ...]:
        kind: Any = type(self)
        return _names(kind)

    def addresses(self) -> Addresses:
        """Returns columns of addresses, and tensors, by name: inputs in the order of the operation's arguments, then outputs."""
        named, written = self.__dict__, self.written
        given = [name for name in self._names if isinstance(named[name], torch.Tensor)]
        inputs, outs = ([x for x in given if (x in written) == side] for side in (False, True))
        return {name: (self.columns[name.upper()], named[name]) for name in inputs + outs}

    def call(self) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[Any, ...]]:
        """Returns the tensors read, the tensors written, and a hashable description of everything else.

        Tensors are in the order of ``addresses``. Only for tasks whose tensors are fields.
        """
        named, written = self.__dict__, self.written
        inputs: list[torch.Tensor] = []
        outs: list[torch.Tensor] = []
        settings: list[Any] = [type(self)]
        for name in self._names:
            value = named[name]
            if isinstance(value, torch.Tensor):
                (outs if name in written else inputs).append(value)
                value = None
            settings.append(value)
        return inputs, outs, tuple(settings)

    def table(self, gpu: Gpu) -> np.ndarray:
        """Returns the launch table for a GPU."""
        addresses = self.addresses().values()
        # A variant of a kernel may have entries after the columns.
        size = max(len(self.columns), *(1 + column for column, _ in addresses))
        table = np.zeros(size, np.int64)
        for column, tensor in addresses:
            table[column] = tensor.data_ptr()
        for column, number in self.numbers(gpu).items():
            table[column] = number
        return table

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Compiles for a GPU. Raises UnsupportedTarget if it has no kernel."""
        kernel = get_kernel(self.key(gpu), for_emulator=for_emulator)
        places = {name: int(column) for name, (column, _) in self.addresses().items()}
        natural = frozenset(places[name] for name in self.natural if name in places)
        by_rows = self.by_rows()
        rows = None
        if by_rows is not None:
            rows = Rows(by_rows[0], tuple(ByRows(int(place), step) for place, step in by_rows[1].items()))
        return Launch(kernel, self.table(gpu), [*places.values()], natural=natural, rows=rows)

    @property
    def device(self) -> torch.device:
        """Device of the task's operands."""
        return next(tensor.device for _, tensor, _ in self.tensors())

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to write."""
        return not any(tensor.numel() for _, tensor, is_written in self.tensors() if is_written)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Iterates over name, tensor, and whether it is written, in the order of ``addresses``."""
        return ((name, tensor, name in self.written) for name, (_, tensor) in self.addresses().items())

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over nothing, because no operand has a tensor map."""
        return iter(())

"""Tasks of one row: no schedule and no configuration, a table of integers says everything."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.task import Key, Launch

Addresses = Mapping[str, tuple[IntEnum, torch.Tensor]]


@cache
def _names(task: Any) -> tuple[str, ...]:
    """Of its fields: every call asks."""
    return tuple(field.name for field in fields(task))


class TableTask:
    """A task (``task.Task``) whose table has a column for the address of every tensor, and numbers.

    A subclass is a frozen dataclass with ``key``, ``numbers`` and ``reference``; its fields are tensors that are called as
    their columns, or None, and whatever else it needs. One whose tensors are elsewhere has ``addresses``.

    Attributes:
        columns: the launch table's.
        written: names of the tensors that the kernel writes.
        natural: those that it reads element by element (``task.Launch``).
    """

    columns: ClassVar[type[IntEnum]]
    written: ClassVar[tuple[str, ...]] = ("out",)
    natural: ClassVar[tuple[str, ...]] = ()

    def key(self, gpu: Gpu) -> Key:
        """What to compile. Raises UnsupportedTarget for an architecture without a kernel."""
        raise NotImplementedError

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """All columns but those of addresses."""
        raise NotImplementedError

    def reference(self) -> None:
        """Compute without a kernel."""
        raise NotImplementedError

    @property
    def _names(self) -> tuple[str, ...]:
        kind: Any = type(self)
        return _names(kind)

    def addresses(self) -> Addresses:
        """Columns of addresses, and tensors, by name: inputs in the order of the operation's arguments, then outputs."""
        named, written = self.__dict__, self.written
        given = [name for name in self._names if isinstance(named[name], torch.Tensor)]
        inputs, outs = ([x for x in given if (x in written) == side] for side in (False, True))
        return {name: (self.columns[name.upper()], named[name]) for name in inputs + outs}

    def call(self) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[Any, ...]]:
        """Tensors that are read, and that are written, in the order of ``addresses``; and all else that says what is launched,
        hashable. Of a task whose tensors are its fields."""
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
        """The launch table."""
        addresses = self.addresses().values()
        # A variant of a kernel may have entries behind the columns.
        size = max(len(self.columns), *(1 + column for column, _ in addresses))
        table = np.zeros(size, np.int64)
        for column, tensor in addresses:
            table[column] = tensor.data_ptr()
        for column, number in self.numbers(gpu).items():
            table[column] = number
        return table

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Compile for a GPU. Raises UnsupportedTarget where no kernel exists for it."""
        kernel = get_kernel(self.key(gpu), for_emulator=for_emulator)
        places = {name: int(column) for name, (column, _) in self.addresses().items()}
        natural = frozenset(places[name] for name in self.natural if name in places)
        return Launch(kernel, self.table(gpu), [*places.values()], natural=natural)

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return next(tensor.device for _, tensor, _ in self.tensors())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not any(tensor.numel() for _, tensor, is_written in self.tensors() if is_written)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written."""
        return ((name, tensor, name in self.written) for name, (_, tensor) in self.addresses().items())

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No operand has a tensor map."""
        return iter(())

"""Probes as tasks: what is compiled, and a launch of it on any backend."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.launch_table import Probe as Table


@dataclass(frozen=True)
class ProbeKey:
    """A probe's kernel for an architecture, by its name in ``kernels.probes.table``."""

    arch: str
    name: str

    def to_name(self) -> str:
        """Readable, unique; the kernel's symbol starts with it."""
        return f"nvfp4_probe_{self.name}_{self.arch}"

    def make_kernel(self) -> Any:
        """The CuTe DSL object to compile."""
        from nvfp4_cute.kernels.probes.probe_kernel import ProbeKernel
        from nvfp4_cute.kernels.probes.table import body_of

        return ProbeKernel(body_of(self.name, self.arch), self.to_name())


@dataclass(frozen=True)
class ProbeTask:
    """One launch of a probe.

    Attributes:
        name: in ``kernels.probes.table``.
        out, data: what the kernel writes; what it reads, or reads and writes.
        ctas: of the grid.  arg0, arg1: as the probe takes them.
    """

    name: str
    out: torch.Tensor
    data: torch.Tensor
    ctas: int
    arg0: int = 0
    arg1: int = 0

    @property
    def device(self) -> torch.device:
        """Of both tensors."""
        return self.out.device

    @property
    def is_empty(self) -> bool:
        """A probe always does something."""
        return False

    def key(self, arch: str) -> ProbeKey:
        """What to compile."""
        return ProbeKey(arch, self.name)

    def table(self) -> np.ndarray:
        """``launch_table.Probe``."""
        table = np.zeros(len(Table), np.int64)
        table[Table.OUT], table[Table.DATA] = self.out.data_ptr(), self.data.data_ptr()
        table[Table.ARG0], table[Table.ARG1], table[Table.CTAS] = self.arg0, self.arg1, self.ctas
        return table

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Both are written."""
        yield "out", self.out, True
        yield "data", self.data, True

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: what a driver encodes wrongly is what a probe may want to see."""
        return iter(())

    def reference(self) -> None:
        """There is none: a probe asks the machine."""
        raise NotImplementedError("a probe has no reference; run it on a GPU or on the emulator")

    def launch(self, backend: str) -> None:
        """Enqueue it on the GPU, or execute it on the emulator."""
        backends.run_task(backend, self)

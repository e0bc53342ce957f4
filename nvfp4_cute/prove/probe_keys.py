"""Probes as tasks: their kernels, and launches of them on any backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import Probe as Table


@dataclass(frozen=True)
class ProbeKey:
    """A probe's kernel for an architecture, by its name in ``kernels.probes.table``."""

    arch: str
    name: str

    def to_name(self) -> str:
        """Returns a readable, unique name; the kernel's symbol starts with it."""
        return f"nvfp4_probe_{self.name}_{self.arch}"

    def make_kernel(self) -> Any:
        """Returns the CuTe DSL object to compile."""
        from nvfp4_cute.kernels.probes.probe_kernel import ProbeKernel
        from nvfp4_cute.kernels.probes.table import body_of

        return ProbeKernel(body_of(self.name, self.arch), self.to_name())


@dataclass(frozen=True, eq=False)
class ProbeTask(TableTask):
    """One launch of a probe. It has no tensor maps, because a probe may test what a driver encodes wrongly.

    Attributes:
        name: name in ``kernels.probes.table``.
        out, data: tensor that the kernel writes; tensor that it reads, or reads and writes.
        ctas: CTAs of the grid.
        arg0, arg1: arguments of the probe.
    """

    columns = Table
    written = ("out", "data")

    name: str
    out: torch.Tensor
    data: torch.Tensor
    ctas: int
    arg0: int = 0
    arg1: int = 0

    @property
    def is_empty(self) -> bool:
        """False: a probe always has work."""
        return False

    def key(self, gpu: Gpu) -> ProbeKey:
        """Returns the key of the kernel to compile."""
        return ProbeKey(gpu.arch, self.name)

    def numbers(self, gpu: Gpu) -> Mapping[IntEnum, int]:
        """Returns the entries of ``launch_table.Probe``."""
        return {Table.ARG0: self.arg0, Table.ARG1: self.arg1, Table.CTAS: self.ctas}

    def reference(self) -> None:
        """Does nothing: a probe has no reference, because it tests the machine."""
        raise NotImplementedError("a probe has no reference; run it on a GPU or on the emulator")

    def run(self, backend: str) -> None:
        """Enqueues the probe on the GPU, or executes it on the emulator."""
        backends.run_task(backend, self)

"""``Task``: checked operands of one operation, which every backend runs without knowing the operation."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nvfp4_cute.compile.compiler import CompiledKernel, Launcher
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.workspace import Workspace, attach
from nvfp4_cute.problem import INT32_MAX


class Key(Hashable, Protocol):
    """Everything that affects the generated code of one kernel, and nothing else: no sizes, no data."""

    @property
    def arch(self) -> str:
        """Architecture, such as ``sm_90a``."""

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the kernel's symbol begins."""

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object to compile, which is called with a launch table and a stream."""


class ByRows(NamedTuple):
    """A number of a launch table that depends on the task's rows: ``min(ceil(rows / step) * each, most)`` at ``place``."""

    place: int
    step: int = 1
    each: int = 1
    most: int = INT32_MAX


class Rows(NamedTuple):
    """Number of rows of a launch, and all numbers of its table that depend on it. Fewer rows change only these numbers.

    Without such numbers, a launch does not depend on the rows, or reads their number from the device.
    """

    rows: int
    numbers: tuple[ByRows, ...] = ()


@dataclass(frozen=True, eq=False)
class Launch:
    """A task prepared for one GPU.

    Attributes:
        kernel: compiled code.
        table: the launch table (``launch_table``), int64, contiguous. The kernel has read it once it is enqueued.
        places: places in the flat table of the addresses of the task's tensors, in their order.
        plan, operands: for a grouped GEMM (``plan.Plan``), and its operands in bands (``launch.bands``); None otherwise.
        align_bytes: alignment of operands' addresses in device memory.
        natural: places of inputs that are read element by element, such as a bias, and need the alignment of an element.
        rows: how the table depends on the rows; None if another number of rows needs another launch.
    """

    kernel: CompiledKernel
    table: np.ndarray
    places: list[int]
    plan: Any = None
    align_bytes: int = TMA_ALIGN_BYTES
    natural: frozenset[int] = frozenset()
    operands: Any = None
    rows: Rows | None = None

    def attach(self, device: torch.device, stream: int) -> Workspace | None:
        """Writes the address of a ``workspace`` into the table if the kernel needs one, which is allocated or grown.

        Args:
            device: device of the operands.
            stream: handle of the device's current CUDA stream (``torch.cuda.current_stream().cuda_stream``).

        Returns:
            The workspace, to be held until the kernel is enqueued; None if it needs none.
        """
        return attach(self.kernel, self.table, device, stream)

    def enqueue(self, stream: int) -> None:
        """Enqueues on a stream of the current device. Copies no data and waits for nothing."""
        Launcher(self.kernel.function, self.table)(stream)


class Task(Protocol):
    """The interface of checked operands of one operation."""

    @property
    def device(self) -> torch.device:
        """The device of all operands."""

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to compute."""

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Plans and compiles for a GPU. Raises UnsupportedTarget, UnsupportedProblem or ConfigError if that is impossible."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Iterates over name, tensor and whether it is written: inputs in the order of arguments, then outputs."""

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over name and bytes of every operand that a tensor map describes."""

    def reference(self) -> None:
        """Computes on the operands' device without a kernel, and writes the outputs."""

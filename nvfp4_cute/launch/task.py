"""Task: checked operands of one operation, in whatever form: what every backend runs without knowing which operation it is."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from nvfp4_cute.compile.compiler import CompiledKernel, Launcher
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.workspace import Workspace, attach


class Key(Hashable, Protocol):
    """What changes the generated code of one kernel, and nothing else: no sizes, no data."""

    @property
    def arch(self) -> str:
        """Such as ``sm_90a``."""

    def to_name(self) -> str:
        """Readable, unique; the kernel's symbol starts with it."""

    def make_kernel(self) -> Any:
        """The CuTe DSL object to compile: called with a launch table and a stream."""


@dataclass(frozen=True, eq=False)
class Launch:
    """What a task comes to on one GPU.

    Attributes:
        kernel: compiled code.
        table: the launch table (``launch_table``), int64, contiguous. The kernel has read it when it is enqueued.
        places: where in the flat table the addresses of the task's tensors are, in their order.
        plan, operands: of a grouped GEMM (``plan.Plan``), and what its kernel takes (``launch.bands``); None otherwise.
        align_bytes: of addresses of operands, bytes in device memory.
        natural: places of inputs that are read element by element, such as a bias: those lie at multiples of an element's size.
    """

    kernel: CompiledKernel
    table: np.ndarray
    places: list[int]
    plan: Any = None
    align_bytes: int = TMA_ALIGN_BYTES
    natural: frozenset[int] = frozenset()
    operands: Any = None

    def attach(self, device: torch.device, stream: int) -> Workspace | None:
        """Write into the table where the kernel finds a ``workspace``, if it needs one, which is allocated or grown.

        Args:
            device: of the operands.
            stream: handle of the device's current CUDA stream (``torch.cuda.current_stream().cuda_stream``).

        Returns:
            It, to be held until the kernel was enqueued.
        """
        return attach(self.kernel, self.table, device, stream)

    def enqueue(self, stream: int) -> None:
        """Launch on a stream of the current device. Copies no data and waits for nothing."""
        Launcher(self.kernel.function, self.table)(stream)


class Task(Protocol):
    """Checked operands of one operation."""

    @property
    def device(self) -> torch.device:
        """The device that every operand is on."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""

    def launch(self, gpu: Gpu, *, for_emulator: bool = False) -> Launch:
        """Plan and compile for a GPU. Raises UnsupportedTarget, UnsupportedProblem or ConfigError where it cannot be done."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor and whether it is written: inputs in the order of the operation's arguments, then outputs."""

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and bytes of every operand that a tensor map describes."""

    def reference(self) -> None:
        """Compute on the operands' device without a kernel, and write the outputs."""

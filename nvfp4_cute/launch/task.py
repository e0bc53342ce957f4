"""Task: one launch of a kernel of ``kernels/simt``, ready for any backend.

These operations have no schedule and no configuration: a table of integers says everything. Whoever has a task can run
it on a GPU, on the emulator, or as its float64 reference, without knowing which operation it is.
"""

from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import numpy as np
import torch


class Key(Hashable, Protocol):
    """What changes the generated code of one kernel, and nothing else: no sizes, no data."""

    @property
    def arch(self) -> str:
        """Such as ``sm_90a``."""

    def to_name(self) -> str:
        """Readable, unique; the kernel's symbol starts with it."""

    def make_kernel(self) -> Any:
        """The CuTe DSL object to compile: called with a launch table and a queue."""


class Task(Protocol):
    """Checked operands of one operation."""

    @property
    def device(self) -> torch.device:
        """The device that every operand is on."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""

    def key(self, arch: str) -> Key:
        """What to compile. Raises UnsupportedTarget for an architecture without a kernel."""

    def table(self) -> np.ndarray:
        """The launch table, int64, one row."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor and whether it is written, of every operand."""

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and bytes of every operand that a tensor map describes."""

    def reference(self) -> None:
        """Compute on the operands' device without a kernel, and write the outputs."""

"""What tasks of two NVFP4 operands share: their operands, by name, and where addresses go in a launch table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from nvfp4_cute.launch_table import FewRows, Gemv


@dataclass(frozen=True)
class ProductTask:
    """Checked operands of a product of ``a`` and ``b``, uint8, scales uint8 [L, bytes] blocked.

    ``alpha_step``: bytes from one batch's factor to the next one's.
    ``COLUMNS``: the launch table's.
    ``OPERANDS``: fields by what the caller calls them, in the order of its arguments.
    """

    COLUMNS: ClassVar[type[Gemv] | type[FewRows]]
    OPERANDS: ClassVar = {"a": "a", "b": "b", "a_scale": "a_scale", "b_scale": "b_scale"}

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    alpha_step: int
    out: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.a.device

    @property
    def is_empty(self) -> bool:
        """Whether the output has no elements."""
        return self.out.numel() == 0

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No operand has a tensor map."""
        return iter(())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written."""
        for name, field in (self.OPERANDS | {"alpha": "alpha", "out": "out"}).items():
            tensor = getattr(self, field)
            if tensor is not None:
                yield name, tensor, name == "out"

    def address_places(self) -> list[int]:
        """Where in the launch table addresses go: of what :meth:`tensors` names, in its order."""
        columns = self.COLUMNS
        places = {"a": columns.A, "b": columns.B, "a_scale": columns.SFA, "b_scale": columns.SFB}
        factor = [] if self.alpha is None else [columns.ALPHA]
        return [*(places[field] for field in self.OPERANDS.values()), *factor, columns.OUT]

"""``Operand``: one operand of a product after its checks, in whatever form it was given."""

from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import BlockFormat, format_of_values


@dataclass(frozen=True, eq=False)
class Operand:
    """Rows of K elements and their block scales: views of the caller's memory, except for converted scales.

    Attributes:
        data: bytes, uint8 ``[rows, row bytes]`` or ``[batches, rows, row bytes]``, unit stride within a row. Rows of 16 bits
            have their own dtype, ``[..., rows, K]``.
        scale: bytes of the scales in the layout of the format, uint8, 1-D, or ``[batches, bytes]``; empty for 16-bit rows.
        format: format of the data.
        rows: M or N of one batch.
        k: K in elements.
        batches: number of equally sized operands in ``data``; 1 if it has two dimensions.
        row_scale: global scale per row, float32 ``[rows]`` or ``[batches, rows]``, contiguous; None without.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: BlockFormat
    rows: int
    k: int
    batches: int = 1
    row_scale: torch.Tensor | None = None

    @classmethod
    def of_values(cls, rows: torch.Tensor) -> "Operand":
        """Makes the operand of checked rows of 16 bits, [rows, K] or [batches, rows, K]."""
        num_rows, k = rows.shape[-2:]
        batches = len(rows) if rows.ndim == 3 else 1
        no_scale = rows.new_empty(0, dtype=torch.uint8)
        return cls(rows, no_scale, format_of_values(rows.dtype), num_rows, k, batches)

    @property
    def pitch(self) -> int:
        """Elements between rows."""
        return self._elements(self.data.stride(-2))

    @property
    def batch_pitch(self) -> int:
        """Elements between batches; 0 if there is one."""
        return self._elements(self.data.stride(0)) if self.data.ndim > 2 else 0

    def _elements(self, stride: int) -> int:
        return self.format.elements(stride * self.data.element_size())

    @property
    def atom_row_bytes(self) -> int:
        """Bytes between rows of scale atoms."""
        return self.format.atom_row_bytes(self.k)

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.data.device

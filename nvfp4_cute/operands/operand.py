"""``Operand``: one operand of a product after its checks, in whatever form it was given."""

from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import BlockFormat


@dataclass(frozen=True, eq=False)
class Operand:
    """Rows of K elements and their block scales: views of the caller's memory, except for converted scales.

    Attributes:
        data: bytes, uint8 ``[rows, row bytes]`` or ``[batches, rows, row bytes]``, unit stride within a row.
        scale: bytes of the scales in the layout of the format, uint8, 1-D, or ``[batches, bytes]``.
        format: format of the bytes.
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

    @property
    def pitch(self) -> int:
        """Elements between rows."""
        return self.format.elements(self.data.stride(-2))

    @property
    def batch_pitch(self) -> int:
        """Elements between batches; 0 if there is one."""
        return self.format.elements(self.data.stride(0)) if self.data.ndim > 2 else 0

    @property
    def atom_row_bytes(self) -> int:
        """Bytes between rows of scale atoms."""
        return self.format.atom_row_bytes(self.k)

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.data.device

"""One operand of a product after its checks: where its bytes are and what they stand for, whatever form it came in."""

from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import BlockFormat


@dataclass(frozen=True, eq=False)
class Operand:
    """Rows of K elements and their block scales; views of the caller's memory but where scales were converted.

    Attributes:
        data: bytes, uint8 ``[rows, row bytes]`` or ``[batches, rows, row bytes]``, unit stride in a row.
        scale: bytes of the scales as the format lays them out, uint8, 1-D, or ``[batches, bytes]``.
        format: what the bytes stand for.
        rows: M or N of one batch.
        k: K in elements.
        batches: operands of one size in ``data``; 1 where it has two dimensions.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: BlockFormat
    rows: int
    k: int
    batches: int = 1

    @property
    def pitch(self) -> int:
        """Elements from row to row."""
        return self.format.elements(self.data.stride(-2))

    @property
    def batch_pitch(self) -> int:
        """Elements from batch to batch; 0 where there is one."""
        return self.format.elements(self.data.stride(0)) if self.data.ndim > 2 else 0

    @property
    def atom_row_bytes(self) -> int:
        """Bytes from one row of scale atoms to the next."""
        return self.format.atom_row_bytes(self.k)

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.data.device

"""Rows of experts, quantized or not, and how they are allocated."""

from typing import NamedTuple

import torch

from nvfp4_cute.formats.block_format import BlockFormat


class ExpertRows(NamedTuple):
    """Rows sorted by expert, as a ragged product reads them.

    Attributes:
        data: [R, K] in 16 bits, or quantized, [R, bytes of K].
        scale: block scales, in the layout of ragged groups, or row-major; None in 16 bits.
        row_scale: float32 [R], global scales that the launch computed; None without them.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None


def new_rows(
    rows: int, k: int, experts: int, format: BlockFormat, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates uninitialized uint8 data [rows, bytes of K] and scales: blocked ones of ragged groups, or float32 per row."""
    data = torch.empty((rows, format.row_bytes(k)), dtype=torch.uint8, device=device)
    if format.scale_layout == "rowmajor":
        return data, torch.empty(format.scale_shape(rows, k), dtype=torch.float32, device=device)
    return data, torch.empty(format.ragged_scale_shape(rows, k, experts), dtype=torch.uint8, device=device)

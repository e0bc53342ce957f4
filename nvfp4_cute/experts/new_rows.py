"""Allocates quantized rows of experts."""

import torch

from nvfp4_cute.formats.block_format import BlockFormat


def new_rows(
    rows: int, k: int, experts: int, format: BlockFormat, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates uninitialized uint8 data [rows, bytes of K] and scales: blocked ones of ragged groups, or float32 per row."""
    data = torch.empty((rows, format.row_bytes(k)), dtype=torch.uint8, device=device)
    if format.scale_layout == "rowmajor":
        return data, torch.empty(format.scale_shape(rows, k), dtype=torch.float32, device=device)
    return data, torch.empty(format.ragged_scale_shape(rows, k, experts), dtype=torch.uint8, device=device)

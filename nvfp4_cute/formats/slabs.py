"""Weights in slabs of eight rows: the order in which the warps of ``kernels/warp_mma`` read them.

A slab holds eight consecutive rows: 64 bytes of each row, row after row, then the next 64 bytes of each. One load of a warp is
then one run of 512 bytes, and consecutive loads are adjacent. The last part of a slab is shorter if rows are not multiples of
64 bytes. The tensor keeps its shape, and scales are not moved.
"""

from dataclasses import replace

import torch

from nvfp4_cute.formats.block_format import PART_BYTES, SLAB_ROWS, BlockFormat
from nvfp4_cute.formats.fp8_order import from_fp8_order


def to_slabs(data: torch.Tensor) -> torch.Tensor:
    """Copies weights [..., N, row bytes] into slabs, a contiguous tensor of the same shape. N is a multiple of 8."""
    rows, whole = _rows_of_slabs(data)
    parts = rows[:, :, :whole].unflatten(2, (-1, PART_BYTES)).transpose(1, 2) if whole else rows[:, :, :0]
    return _like(data, torch.cat([parts.flatten(1), rows[:, :, whole:].flatten(1)], 1))


def from_slabs(data: torch.Tensor) -> torch.Tensor:
    """Copies weights from slabs to rows; the inverse of :func:`to_slabs`."""
    rows, whole = _rows_of_slabs(data)
    flat, size = rows.flatten(1), SLAB_ROWS * whole
    parts = (
        flat[:, :size].unflatten(1, (-1, SLAB_ROWS, PART_BYTES)).transpose(1, 2).flatten(2)
        if whole
        else rows[:, :, :0]
    )
    rest = (
        flat[:, size:].unflatten(1, (SLAB_ROWS, rows.shape[2] - whole))
        if rows.shape[2] > whole
        else rows[:, :, :0]
    )
    return _like(data, torch.cat([parts, rest], 2))


def in_rows(data: torch.Tensor, format: BlockFormat) -> tuple[torch.Tensor, BlockFormat]:
    """Returns weights in rows and their format. Copies weights in another order; scales of MXFP4_FP8 stay relative."""
    if format.order == "fp8":
        return from_fp8_order(data), replace(format, order="rows")
    return (from_slabs(data), format.in_rows) if format.order == "slabs" else (data, format)


def _rows_of_slabs(data: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns bytes [slabs, 8, row bytes] and the bytes per row in whole parts. Raises ValueError for leftover rows."""
    if data.shape[-2] % SLAB_ROWS:
        raise ValueError(
            f"{data.shape[-2]} rows are not whole slabs of {SLAB_ROWS}: pad the weights, or keep them in rows"
        )
    rows = data.contiguous().view(torch.uint8)
    return rows.view(-1, SLAB_ROWS, rows.shape[-1]), rows.shape[-1] // PART_BYTES * PART_BYTES


def _like(data: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Views bytes in the shape and dtype of ``data``."""
    return made.contiguous().view(*data.shape[:-1], -1).view(data.dtype)

"""Weights in slabs of eight rows: the order in which the warps of ``kernels/warp_mma`` read them.

A slab holds eight consecutive rows: 64 bytes of each of them, row after row, then the next 64 bytes. A load of a warp is then one run
of 512 bytes, and consecutive loads follow each other. Rows of 64 bytes far apart take an H200's memory 10 to 20 % longer. The last
part of a slab is shorter where rows are not multiples of 64 bytes. The tensor keeps its shape; scales stay where they are.
"""

import torch

SLAB_ROWS, PART_BYTES = 8, 64


def to_slabs(data: torch.Tensor) -> torch.Tensor:
    """Copies weights [..., N, row bytes] into slabs, a contiguous tensor of the same shape. N is a multiple of 8."""
    return _exchanged(data, SLAB_ROWS, False)


def from_slabs(data: torch.Tensor) -> torch.Tensor:
    """Copies weights out of slabs: the inverse of :func:`to_slabs`."""
    return _exchanged(data, SLAB_ROWS, True)


def _exchanged(data: torch.Tensor, rows: int, back: bool) -> torch.Tensor:
    *lead, n, row_bytes = data.shape
    if n % rows:
        raise ValueError(f"{n} rows are not whole slabs of {rows}: pad the weights, or keep them in rows")
    whole = row_bytes // PART_BYTES * PART_BYTES
    slabs = data.contiguous().view(torch.uint8).reshape(-1, rows * row_bytes)
    shape = (rows, whole // PART_BYTES, PART_BYTES)
    if back:
        first = slabs[:, : rows * whole].reshape(-1, shape[1], rows, PART_BYTES).transpose(1, 2)
        rest = slabs[:, rows * whole :].reshape(-1, rows, row_bytes - whole)
        made = torch.cat([first.reshape(-1, rows, whole), rest], 2)
    else:
        plain = slabs.view(-1, rows, row_bytes)
        first = plain[:, :, :whole].reshape(-1, *shape).transpose(1, 2).reshape(-1, rows * whole)
        made = torch.cat([first, plain[:, :, whole:].reshape(-1, rows * (row_bytes - whole))], 1)
    return made.reshape(*lead, n, row_bytes).view(data.dtype)

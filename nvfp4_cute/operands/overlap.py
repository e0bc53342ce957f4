"""Finds tensors that share bytes. Rows of two matrices may interleave in memory without overlap."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """Bytes of a tensor or of a part of it: intervals of ``row_bytes``, ``pitch`` bytes apart."""

    start: int
    stop: int
    row_bytes: int
    pitch: int
    name: str
    is_out: bool


def span_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first to the last element, including gaps between rows."""
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_overlap(outs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError, with both names, if an output shares a byte with an input or another output.

    Args:
        outs, inputs: tensors of any strides, by their names for messages.
    """
    regions = [region for name, tensor in inputs.items() for region in _regions(name, tensor, False)]
    regions += [region for name, tensor in outs.items() for region in _regions(name, tensor, True)]
    live: list[Region] = []
    for region in sorted(regions):
        live = [other for other in live if other.stop > region.start]
        for other in live:
            # `region` starts at or after `other`, because they are sorted.
            if other.name != region.name and (region.is_out or other.is_out) and _share_bytes(region, other):
                first, second = sorted((region, other), key=lambda r: not r.is_out)
                raise ValueError(
                    f"{first.name} overlaps {second.name} in memory (from address 0x{region.start:x}); "
                    "pass an output of its own that no operand lies in"
                )
        live.append(region)


def _regions(name: str, tensor: torch.Tensor, is_out: bool) -> Iterator[Region]:
    """Splits a tensor into matrices of rows along the smallest strides, one region per matrix."""
    if tensor.numel() == 0:
        return
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0)
    size, length = tensor.element_size(), 1
    if dims:
        step, extent = dims.pop(0)
        length = (extent - 1) * step + 1
    while dims and dims[0][0] <= length:  # dimensions without gaps
        step, extent = dims.pop(0)
        length += (extent - 1) * step
    pitch, rows = dims.pop(0) if dims else (length, 1)
    while dims and dims[0][0] == pitch * rows:
        rows *= dims.pop(0)[1]
    stop = ((rows - 1) * pitch + length) * size
    for place in product(*(range(0, extent * step, step) for step, extent in dims)):
        start = tensor.data_ptr() + sum(place) * size
        yield Region(start, start + stop, length * size, pitch * size, name, is_out)


def _share_bytes(x: Region, y: Region) -> bool:
    """Returns whether rows of x and y overlap; x starts at or after y. Interleaved column slices of a buffer do not."""
    for start in range(x.start, x.stop, x.pitch):
        # The last row of y that starts at or before this row of x, and the one after it.
        below = start - (start - y.start) % y.pitch
        for row in (below, below + y.pitch):
            if row < y.stop and row < start + x.row_bytes and start < row + y.row_bytes:
                return True
    return False

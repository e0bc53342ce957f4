"""Whether tensors share bytes: rows of two matrices may interleave in memory without touching."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch


class Region(NamedTuple):
    """Bytes of a tensor: ``num_rows`` intervals of ``row_bytes``, ``pitch`` bytes apart."""

    start: int
    stop: int
    row_bytes: int
    pitch: int
    name: str


def regions_of(named: Mapping[str, Iterable[torch.Tensor]], alphas: Mapping[str, Any]) -> list[Region]:
    """The regions of all tensors by address; names are those of messages."""
    found = [
        _region(f"{name}[{g}]", tensor) for name, tensors in named.items() for g, tensor in enumerate(tensors)
    ]
    found += [_region(name, alpha) for name, alpha in alphas.items() if isinstance(alpha, torch.Tensor)]
    return sorted(region for region in found if region is not None)


def _region(name: str, tensor: torch.Tensor) -> Region | None:
    """Of a matrix, or of a contiguous vector as one row."""
    if tensor.numel() == 0:
        return None
    if tensor.ndim == 2 and tensor.stride(0) < tensor.stride(1):
        tensor = tensor.T
    (rows, cols), (pitch, step) = (
        (tensor.shape, tensor.stride()) if tensor.ndim == 2 else ((1, tensor.shape[0]), (0, 1))
    )
    size, start = tensor.element_size(), tensor.data_ptr()
    row_bytes = ((cols - 1) * step + 1) * size
    return Region(start, start + (rows - 1) * pitch * size + row_bytes, row_bytes, max(pitch * size, 1), name)


def check_overlap(regions: list[Region]) -> None:
    """No output shares a byte with an input or another output; ``regions`` are sorted by address."""
    live: list[Region] = []
    for region in regions:
        live = [other for other in live if other.stop > region.start]
        for other in live:
            # `region` starts at or after `other`: they are sorted.
            if (region.name.startswith("out") or other.name.startswith("out")) and _share_bytes(
                region, other
            ):
                first, second = sorted((region.name, other.name), key=lambda name: not name.startswith("out"))
                raise ValueError(
                    f"{first} overlaps {second} in memory (from address 0x{region.start:x}); "
                    f"give every group an output of its own that no operand lies in"
                )
        live.append(region)


def _share_bytes(x: Region, y: Region) -> bool:
    """Whether rows of x and y meet, x starting at or after y: column slices of one buffer interleave and do not."""
    for start in range(x.start, x.stop, x.pitch):
        # The last row of y that starts at or before this row of x, and the one after it.
        below = start - (start - y.start) % y.pitch
        for row in (below, below + y.pitch):
            if row < y.stop and row < start + x.row_bytes and start < row + y.row_bytes:
                return True
    return False

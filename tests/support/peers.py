"""Buffers of several ranks in one process, or in a file that processes share. On GPUs, peer pointers reach them."""

from collections.abc import Iterator
from pathlib import Path

import torch

from nvfp4_cute.experts.symmetric import BufferLayout, PeerBuffers

SECONDS = 200.0


def local_peers(layout: BufferLayout, seconds: float = SECONDS, fill: int = 0xFF) -> list[PeerBuffers]:
    """Returns the buffers as every rank sees them. Bytes that nothing has written hold ``fill``, which is NaN."""
    peers = tuple(torch.full((layout.nbytes,), fill, dtype=torch.uint8) for _ in range(layout.num_ranks))
    return list(_views(layout, peers, seconds))


def _views(layout: BufferLayout, peers: tuple[torch.Tensor, ...], seconds: float) -> Iterator[PeerBuffers]:
    for peer in peers:
        peer[: layout.ids_at] = 0
    for rank in range(layout.num_ranks):
        yield PeerBuffers(layout, peers, rank, seconds, torch.zeros(1, dtype=torch.int32))


def shared_peers(folder: Path, layout: BufferLayout, rank: int, seconds: float = SECONDS) -> PeerBuffers:
    """Returns the buffers of this process: every rank's buffer is a file that starts with zeros."""
    name = f"{layout.capacity}-{layout.top_k}-{layout.rows.hidden}-{layout.rows.dtype}-{layout.nbytes}"
    peers = tuple(
        torch.from_file(str(folder / f"{name}-{peer}"), shared=True, size=layout.nbytes, dtype=torch.uint8)
        for peer in range(layout.num_ranks)
    )
    return PeerBuffers(layout, peers, rank, seconds, torch.zeros(1, dtype=torch.int32))

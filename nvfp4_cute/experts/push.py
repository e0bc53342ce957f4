"""Stores tokens and results directly into the memory of other ranks' GPUs, without a collective or a waiting host.

::

    send            quantizes tokens into the buffers of the ranks of their experts     home rank
    receive         waits for all ranks' tokens, and sorts them by expert               rank of the experts
    (the products)
    return_results  stores results into the buffers of their tokens' ranks              rank of the experts
    (the sum, which waits for all ranks' results)                                       home rank
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts import dispatch
from nvfp4_cute.experts.keys import PushResultsKey, PushRowsKey
from nvfp4_cute.experts.new_rows import ExpertRows
from nvfp4_cute.experts.permutation import Permutation
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.rank_tasks import ALIGNMENT, look_up, row_parts
from nvfp4_cute.experts.symmetric import PeerBuffers
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import MAX_PEERS, PeerHeader, PushResults, PushRows
from nvfp4_cute.planning.arch.simt import WARP_SIZE, push_ctas

PEERS = tuple(f"peer_{number}" for number in range(MAX_PEERS))
# 4-byte words that a warp copies at once, as 16-byte vectors.
CHUNK_WORDS = 4 * WARP_SIZE


def send(
    x: torch.Tensor,
    ids: torch.Tensor,
    placement: Placement,
    buffers: PeerBuffers,
    scale: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Stores this rank's tokens, at most ``capacity``, into the buffers of the ranks of their experts.

    Args:
        x, ids: see ``moe``.
        placement: ranks of the experts.
        buffers: buffers of all ranks.
        scale: global scale where values are NVFP4, or None.
        backend: see ``moe``.

    Returns:
        int32 [T, k]: the position in ``buffers.results`` at which the result of every choice will arrive, or -1.
    """
    layout = buffers.layout
    results = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    factor = scale.view(-1) if layout.rows.is_quantized and scale is not None else None
    tables = placement.tables(buffers.rank, ids.device)
    task = PushRowsTask(
        x, factor, ids, *tables, layout.capacity, layout.rows.is_quantized, layout.ids_at, layout.rows_at,
        layout.rows.scales.start, layout.rows.row_bytes, results, **_places(buffers),
    )  # fmt: skip
    run(backend, task)
    return results


def receive(
    buffers: PeerBuffers,
    num_experts: int,
    scale: torch.Tensor | None,
    count: int | None,
    backend: str,
    format: BlockFormat | None = NVFP4,
) -> tuple[ExpertRows, Permutation]:
    """Converts all ranks' tokens to operands; see ``dispatch.unpack``. ``count`` is an upper bound of the choices."""
    rows = buffers.layout.rows
    return dispatch.unpack(
        buffers.rows, buffers.ids, rows, num_experts, scale, count, backend, buffers.inbox, format
    )


def return_results(down: torch.Tensor, order: Permutation, buffers: PeerBuffers, backend: str) -> None:
    """Stores results of the local experts, [rows, H] in the order of ``receive``, into the buffers of their tokens' ranks."""
    layout = buffers.layout
    run(backend, PushResultsTask(down, order.rows, layout.results_at, **_places(buffers)))


def _places(buffers: PeerBuffers) -> dict[str, Any]:
    """Returns the fields that both push tasks share."""
    return {"rank": buffers.rank, **dict(zip(PEERS, buffers.peers, strict=False))}


@dataclass(frozen=True, kw_only=True)
class PushTask(TableTask):
    """The fields of both push launches.

    Attributes:
        rank: the rank that stores.
        peer_0 ...: buffers by rank, uint8; None from the number of ranks on.
    """

    rank: int
    peer_0: torch.Tensor | None = None
    peer_1: torch.Tensor | None = None
    peer_2: torch.Tensor | None = None
    peer_3: torch.Tensor | None = None
    peer_4: torch.Tensor | None = None
    peer_5: torch.Tensor | None = None
    peer_6: torch.Tensor | None = None
    peer_7: torch.Tensor | None = None

    @property
    def peers(self) -> list[torch.Tensor]:
        """Returns the buffers of all ranks."""
        named = (getattr(self, name) for name in PEERS)
        return [peer for peer in named if peer is not None]

    @property
    def is_empty(self) -> bool:
        """Returns False: even without tokens there are signals to send."""
        return False

    def signal(self, first: PeerHeader, rank: int, ctas: int) -> None:
        """Adds to the counters of all ranks."""
        for peer in self.peers:
            peer[: 4 * PeerHeader.WORDS].view(torch.int32)[first + rank] += ctas


@dataclass(frozen=True)
class PushRowsTask(PushTask):
    """Stores tokens into peers' buffers.

    Attributes:
        x: [T, K].
        global_scale: float32 with one element, or None for 1.
        ids: int32 or int64 [T, k].
        to_rank, to_local: see ``Placement.tables``.
        capacity: places for tokens of each rank.
        is_quantized: whether values are NVFP4.
        ids_at, rows_at: offsets of ids and rows in a buffer.
        scales: offset of the scales in a row of ``row_bytes``.
        results: int32 [T, k], written.
    """

    columns = PushRows
    written = ("results", *PEERS)
    x: torch.Tensor
    global_scale: torch.Tensor | None
    ids: torch.Tensor
    to_rank: torch.Tensor
    to_local: torch.Tensor
    capacity: int
    is_quantized: bool
    ids_at: int
    rows_at: int
    scales: int
    row_bytes: int
    results: torch.Tensor

    @property
    def ctas(self) -> int:
        """Number of CTAs, which is the same on every rank."""
        return push_ctas(self.capacity * -(-NVFP4.num_k_blocks(self.x.shape[1]) // WARP_SIZE))

    def key(self, gpu: Gpu) -> PushRowsKey:
        """Returns the key of the row push kernel."""
        has_scale = self.global_scale is not None
        return PushRowsKey(gpu.arch, len(self.peers), self.x.dtype, self.is_quantized, has_scale)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of a row push."""
        tokens, top_k = self.ids.shape
        experts, period = self.to_rank.shape
        return {
            PushRows.X_PITCH: self.x.stride(0) * self.x.element_size(),
            PushRows.ID_BYTES: self.ids.element_size(),
            PushRows.TOKENS: tokens,
            PushRows.TOP_K: top_k,
            PushRows.K: self.x.shape[1],
            PushRows.RANK: self.rank,
            PushRows.CAPACITY: self.capacity,
            PushRows.EXPERTS: experts,
            PushRows.PERIOD: period,
            PushRows.IDS_AT: self.ids_at,
            PushRows.ROWS_AT: self.rows_at,
            PushRows.SCALES: self.scales,
            PushRows.ROW_BYTES: self.row_bytes,
            PushRows.CTAS: self.ctas,
        }

    def reference(self) -> None:
        """Stores the rows, rank by rank."""
        tokens, top_k = self.ids.shape
        ranks, local = look_up(self.ids, self.to_rank, self.to_local)
        slots = torch.arange(tokens * top_k, dtype=torch.int32, device=ranks.device).view(tokens, top_k)
        self.results.copy_(torch.where(ranks >= 0, slots, -1))
        parts = row_parts(self.x, self.global_scale, self.is_quantized, 0, self.scales) if tokens else {}
        first = self.rank * self.capacity
        for goal, peer in enumerate(self.peers):
            ids = peer[self.ids_at : self.rows_at].view(torch.int32)
            mine = ids[first * top_k : (first + self.capacity) * top_k].view(self.capacity, top_k)
            mine.fill_(-1)[:tokens] = torch.where(ranks == goal, local, -1)
            going = (ranks == goal).any(1).nonzero().flatten()
            start, length = self.rows_at + first * self.row_bytes, self.capacity * self.row_bytes
            rows = peer[start : start + length].view(self.capacity, self.row_bytes)
            for begin, part in parts.items():
                rows[going, begin : begin + part.shape[1]] = part[going]
        self.signal(PeerHeader.DISPATCHED, self.rank, self.ctas)


@dataclass(frozen=True)
class PushResultsTask(PushTask):
    """Stores results into peers' buffers.

    Attributes:
        h: [R, H].
        rows: int32 [ranks * capacity, k], from ``permute``.
        results_at: offset of the results in a buffer.
    """

    columns = PushResults
    written = PEERS
    h: torch.Tensor
    rows: torch.Tensor
    results_at: int

    @property
    def row_words(self) -> int:
        """16-byte vectors per row."""
        return self.h.shape[1] * self.h.element_size() // ALIGNMENT

    @property
    def ctas(self) -> int:
        """Number of CTAs, equal on all ranks, on which the counters rely."""
        return push_ctas(self.rows.numel() * -(-self.row_words // CHUNK_WORDS))

    def key(self, gpu: Gpu) -> PushResultsKey:
        """Returns the key of the result push kernel."""
        return PushResultsKey(gpu.arch, len(self.peers))

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of a result push."""
        return {
            PushResults.RANK: self.rank,
            PushResults.SLOTS: self.rows.numel() // len(self.peers),
            PushResults.ROW_WORDS: self.row_words,
            PushResults.RESULTS_AT: self.results_at,
            PushResults.CTAS: self.ctas,
        }

    def reference(self) -> None:
        """Stores the results by indexing the peers' buffers."""
        for peer, rows in zip(self.peers, self.rows.chunk(len(self.peers)), strict=True):
            results = peer[self.results_at :].view(self.h.dtype).view(-1, self.h.shape[1])
            slots = (rows.flatten() >= 0).nonzero().flatten()
            results[slots] = self.h[rows.flatten()[slots].long()]
        self.signal(PeerHeader.COMBINED, self.rank, self.ctas)

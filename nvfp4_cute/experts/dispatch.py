"""Moves tokens to the ranks of their experts, and results back.

A token is sent once to every rank that holds any of its experts, as one row of bytes::

    | ids, int32 [k] | values | block scales | padding |

``ids`` are indices of the receiver's experts, or -1 for choices of other ranks. Values are NVFP4 codes, with their scales in
row-major order. They are 16-bit values where every expert has its own input scale, or where products do not take NVFP4 rows.
Every part begins at a multiple of 16 bytes.

One result per choice returns, in the dtype of x, because only the home rank can add them up in the order of k. Partial sums per
rank would be fewer bytes, but would not have the bits of one GPU.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.new_rows import ExpertRows
from nvfp4_cute.experts.permutation import Permutation, new_order, permute
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.rank_tasks import (
    ALIGNMENT,
    ID_BYTES,
    CollectTask,
    PackTask,
    RankChoicesTask,
    UnpackTask,
)
from nvfp4_cute.experts.signals import Inbox, fields_of
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.planning.arch.simt import FEW_SLOTS


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of a row.

    Attributes:
        hidden: H.
        top_k: k.
        dtype: dtype of x.
        is_quantized: whether values are NVFP4.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    is_quantized: bool

    @cached_property
    def values(self) -> slice:
        """Byte range of the values."""
        start = _aligned(self.top_k * ID_BYTES)
        length = NVFP4.row_bytes(self.hidden) if self.is_quantized else self.hidden * self.dtype.itemsize
        return slice(start, start + length)

    @cached_property
    def scales(self) -> slice:
        """Byte range of the block scales; empty for 16-bit values."""
        start = self.values.stop
        return slice(start, start + (NVFP4.num_k_blocks(self.hidden) if self.is_quantized else 0))

    @cached_property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return _aligned(self.scales.stop)

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the ids, int32 [R, k], as a view of rows."""
        return rows[:, : self.top_k * ID_BYTES].view(torch.int32)


@dataclass(frozen=True, eq=False)
class Routes:
    """Destinations of the choices of a rank's tokens.

    Attributes:
        ids: [T, k], as given.
        ranks: int32 [T, k], the rank of every choice; -1 where there is no such expert.
        locals: int32 [T, k], the index of the expert on that rank; -1 where there is no such expert.
        tokens: order of the existing pairs (token, rank) by rank, then token; its ``rows`` and ``places`` are [T, ranks].
    """

    ids: torch.Tensor
    ranks: torch.Tensor
    locals: torch.Tensor
    tokens: Permutation

    @classmethod
    def of(cls, ids: torch.Tensor, placement: Placement, rank: int, backend: str) -> "Routes":
        """Finds the destinations of a rank's tokens from their ids, int32 or int64 [T, k]."""
        to_rank, to_local = placement.tables(rank, ids.device)
        ranks, local = (torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(2))
        goals = ranks.new_empty((len(ids), placement.num_ranks))
        run(backend, RankChoicesTask(ids, to_rank, to_local, ranks, local, goals))
        return cls(ids, ranks, local, permute(goals, placement.num_ranks, backend=backend))

    def choices(self, backend: str) -> Permutation:
        """Orders the choices by rank, then token, then k, the order in which results return without a capacity."""
        return permute(self.ranks, len(self.tokens.offs), backend=backend)


def pack(
    x: torch.Tensor,
    routes: Routes,
    layout: RowLayout,
    scale: torch.Tensor | None,
    count: int,
    capacity: int | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Makes the rows of all pairs (token, rank), ordered by rank.

    Args:
        x: [T, H].
        routes: destinations of the tokens.
        layout: byte layout of the rows.
        scale: global scale where values are NVFP4, or None.
        count: number of pairs.
        capacity: rows reserved per rank, whatever ``count`` is; None places rows one after the other.
        backend: see ``moe``.

    Returns:
        rows: uint8 [count, row_bytes]. With a capacity [ranks * capacity, row_bytes], where unused rows have ids -1.
        results: with a capacity, int32 [T, k]: the position at which the result of every choice returns (k per row), or -1.
    """
    if capacity is not None:
        count = len(routes.tokens.offs) * capacity
    rows = torch.empty((count, layout.row_bytes), dtype=torch.uint8, device=x.device)
    results = None if capacity is None else torch.empty_like(routes.ranks)
    if capacity is not None and not len(x):
        rows.fill_(0xFF)
    factor = scale.view(-1) if layout.is_quantized and scale is not None else None
    task = PackTask(
        x, factor, routes.ranks, routes.locals, routes.tokens.rows, routes.tokens.offs, rows, results, layout.is_quantized,
        capacity, layout.values.start, layout.scales.start,
    )  # fmt: skip
    run(backend, task)
    return rows, results


def unpack(
    rows: torch.Tensor,
    ids: torch.Tensor,
    layout: RowLayout,
    num_experts: int,
    scale: torch.Tensor | None,
    count: int | None,
    backend: str,
    inbox: Inbox | None = None,
    format: BlockFormat | None = NVFP4,
) -> tuple[ExpertRows, Permutation]:
    """Converts received rows to ragged operands of the local experts.

    Args:
        rows: uint8 [R, row_bytes].
        ids: int32 [R, k], local, contiguous.
        layout: byte layout of the rows.
        num_experts: number of local experts.
        scale: float32 [num_experts], where values are 16-bit and products quantize.
        count: upper bound of the choices of local experts, if the host knows one.
        backend: see ``moe``.
        inbox: see ``permute``, where rows and ids are still arriving.
        format: format of the operands; None keeps 16-bit values.

    Returns:
        rows, order: see ``gather``. Rows after the last choice are undefined.
    """
    if not layout.is_quantized:
        if inbox is not None:
            permute(ids, num_experts, inbox=inbox, backend=backend)
        x = rows[:, layout.values].view(layout.dtype)
        return gather(x, ids, num_experts, format=format, global_scale=scale, backend=backend)
    finds_order = ids.numel() <= FEW_SLOTS
    if finds_order:
        order = new_order(ids, num_experts)
        if not ids.numel():
            order.offs.zero_()
    else:
        order = permute(ids, num_experts, inbox=inbox, backend=backend)
    room = ids.numel() if count is None else min(_room(count), ids.numel())
    data = rows.new_empty((room, NVFP4.row_bytes(layout.hidden)))
    blocked = rows.new_empty(NVFP4.ragged_scale_shape(room, layout.hidden, num_experts))
    task = UnpackTask(
        rows, ids, order.rows, order.places, order.offs, order.slots, data, blocked, layout.hidden, layout.values.start,
        layout.scales.start, finds_order, *fields_of(inbox if finds_order else None),
    )  # fmt: skip
    run(backend, task)
    return ExpertRows(data, blocked.view(torch.float8_e4m3fn)), order


def _room(count: int) -> int:
    """Rounds up by at most an eighth, so that few sizes occur and cached plans are reused."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def collect(
    down: torch.Tensor, ids: torch.Tensor, order: Permutation, count: int | None, backend: str
) -> torch.Tensor:
    """Arranges results in the order in which their choices arrived, ready to send back.

    Args:
        down: [rows, H], from ``LocalExperts.rows``.
        ids, order: see ``unpack``.
        count: choices of local experts. None gives a result for every entry of ``ids``, undefined where it is -1.
        backend: see ``moe``.
    """
    back = down.new_empty((ids.numel() if count is None else count, down.shape[1]))
    # With every expert's id replaced by 0, the row of a choice is its position among all of them.
    goals = None if count is None else permute(ids.clamp(max=0), 1, backend=backend).rows
    run(backend, CollectTask(down, order.rows, goals, back))
    return back

"""Tokens on their way to the ranks of their experts, and results on their way back.

A token goes once to every rank on which any of its experts lies, as one row of bytes::

    | ids, int32 [k] | values | block scales | padding |

``ids`` are indices of the receiver's experts, -1 where a choice goes elsewhere. Values are NVFP4 codes and their scales in
row-major order; or the 16-bit values, where every expert has an input scale of its own, or products take no NVFP4 rows. Every
part begins at a multiple of 16 bytes.

A result comes back for every choice, in the dtype of x, since only the home rank can add them up in the order of k: partial
sums of a rank would be fewer bytes, and other bits than those of one GPU.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from nvfp4_cute.backends.calls import run
from nvfp4_cute.experts.gather import gather_as
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
    """Where the parts of a row lie.

    Attributes:
        hidden: H. top_k: k. dtype: of x. is_quantized: whether values are NVFP4.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    is_quantized: bool

    @cached_property
    def values(self) -> slice:
        """Bytes of the values."""
        start = _aligned(self.top_k * ID_BYTES)
        length = NVFP4.row_bytes(self.hidden) if self.is_quantized else self.hidden * self.dtype.itemsize
        return slice(start, start + length)

    @cached_property
    def scales(self) -> slice:
        """Bytes of the block scales: none of 16-bit values."""
        start = self.values.stop
        return slice(start, start + (NVFP4.num_k_blocks(self.hidden) if self.is_quantized else 0))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return _aligned(self.scales.stop)

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """int32 [R, k] of rows, a view."""
        return rows[:, : self.top_k * ID_BYTES].view(torch.int32)


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the choices of a rank's tokens go.

    Attributes:
        ids: [T, k], as given. ranks: int32 [T, k]: the rank of every choice. locals: int32 [T, k]: what its expert is called
        there. Both are -1 where there is no such expert.
        tokens: orders the pairs (token, rank) that there are by rank, then token: ``rows`` and ``places`` are [T, ranks].
    """

    ids: torch.Tensor
    ranks: torch.Tensor
    locals: torch.Tensor
    tokens: Permutation

    @classmethod
    def of(cls, ids: torch.Tensor, placement: Placement, rank: int, backend: str) -> "Routes":
        """Of the tokens of a rank, from their ids, int32 or int64 [T, k]."""
        to_rank, to_local = placement.tables(rank, ids.device)
        ranks, local = (torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(2))
        goals = ranks.new_empty((len(ids), placement.num_ranks))
        run(backend, RankChoicesTask(ids, to_rank, to_local, ranks, local, goals))
        return cls(ids, ranks, local, permute(goals, placement.num_ranks, backend=backend))

    def choices(self, backend: str) -> Permutation:
        """Orders the choices by rank, then token, then k: as their results come back without a capacity."""
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
    """Rows of all pairs (token, rank), ordered by rank.

    Args:
        x: [T, H]. scale: global scale where values are NVFP4, or None. count: how many pairs there are.
        capacity: room for tokens for every rank, whatever ``count``; None: rows one after the other.

    Returns:
        rows: uint8 [count, row_bytes], or [ranks * capacity, row_bytes], where rows of no token have ids -1.
        results: with a capacity, int32 [T, k]: where the result of every choice comes back, k for every row, or -1.
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
) -> tuple[torch.Tensor, torch.Tensor | None, Permutation]:
    """Rows that have come, as ragged operands of the local experts.

    Args:
        rows: uint8 [R, row_bytes]. ids: int32 [R, k], local, contiguous. scale: float32 [num_experts], where values are 16-bit.
        count: choices that go to local experts, or more, where the host knows it.
        inbox: as of ``permute``, where rows and ids are coming.
        format: of the operands; None: values of 16 bits stay what they are.

    Returns:
        data, scale, order: as of ``gather_as``, rows behind the last choice undefined.
    """
    if not layout.is_quantized:
        if inbox is not None:
            permute(ids, num_experts, inbox=inbox, backend=backend)
        x = rows[:, layout.values].view(layout.dtype)
        return gather_as(format, x, ids, num_experts, scale, backend=backend)
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
    return data, blocked.view(torch.float8_e4m3fn), order


def _room(count: int) -> int:
    """At most an eighth more, so that there are few sizes: what depends on a product's size is found once for many calls."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def collect(
    down: torch.Tensor, ids: torch.Tensor, order: Permutation, count: int | None, backend: str
) -> torch.Tensor:
    """Results in the order in which their choices came: what goes back.

    Args:
        down: [rows, H], as of ``LocalExperts.rows``. ids, order: as of ``unpack``.
        count: choices that went to local experts; None: a result for every entry of ``ids``, undefined where it is -1.
    """
    back = down.new_empty((ids.numel() if count is None else count, down.shape[1]))
    # Every id of an expert becomes 0, so that its row is its place among all of them.
    goals = None if count is None else permute(ids.clamp(max=0), 1, backend=backend).rows
    run(backend, CollectTask(down, order.rows, goals, back))
    return back

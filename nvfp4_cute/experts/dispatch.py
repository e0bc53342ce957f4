"""Tokens on their way to the ranks of their experts, and results on their way back.

A token goes once to every rank on which any of its experts lies, as one row of bytes::

    | ids, int32 [k] | values | block scales | padding |

``ids`` are indices of the receiver's experts, -1 where a choice goes elsewhere. Values are NVFP4 codes and their scales in
row-major order, or the 16-bit values where every expert has an input scale of its own. Every part begins at a multiple of
16 bytes.

A result comes back for every choice, in the dtype of x, since only the home rank can add them up in the order of k: partial
sums of a rank would be fewer bytes, and other bits than those of one GPU.
"""

from dataclasses import dataclass

import torch

from nvfp4_cute.experts.gather import gather_quantize
from nvfp4_cute.experts.permutation import Permutation, permute
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.formats.block_format import ATOM_COLS, ATOM_ROWS, NVFP4
from nvfp4_cute.ops.quantize import quantize

ALIGNMENT = 16
ID_BYTES = 4
# What rows are copied by.
WORD = torch.int64


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

    @property
    def values(self) -> slice:
        """Bytes of the values."""
        start = _aligned(self.top_k * ID_BYTES)
        length = NVFP4.row_bytes(self.hidden) if self.is_quantized else self.hidden * self.dtype.itemsize
        return slice(start, start + length)

    @property
    def scales(self) -> slice:
        """Bytes of the block scales: none of 16-bit values."""
        start = self.values.stop
        return slice(start, start + (NVFP4.num_k_blocks(self.hidden) if self.is_quantized else 0))

    @property
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
        ids: int32 [T, k], global; -1 where there is no such expert.
        ranks: int32 [T, k]: the rank of every choice, or -1.
        tokens: orders the pairs (token, rank) that there are by rank, then token: ``rows`` and ``places`` are [T, ranks].
        choices: orders the choices by rank, then token, then k.
    """

    ids: torch.Tensor
    ranks: torch.Tensor
    tokens: Permutation
    choices: Permutation

    @classmethod
    def of(cls, ids: torch.Tensor, placement: Placement, rank: int, backend: str) -> "Routes":
        """Of the tokens of a rank, from their ids, int32 or int64 [T, k]."""
        to_rank, _ = placement.tables(rank, ids.device)
        experts, period = to_rank.shape
        ids = torch.where((ids >= 0) & (ids < experts), ids, -1).int()
        turn = torch.arange(len(ids), device=ids.device)[:, None] % period
        ranks = torch.where(ids >= 0, to_rank[ids.clamp(min=0), turn], -1)
        every = torch.arange(placement.num_ranks, dtype=torch.int32, device=ids.device)
        goes = (ranks[:, :, None] == every).any(1)
        goals = torch.where(goes, every, -1)
        tokens = permute(goals, placement.num_ranks, backend=backend)
        return cls(ids, ranks, tokens, permute(ranks, placement.num_ranks, backend=backend))

    def rows_with_capacity(self, capacity: int, top_k: int) -> torch.Tensor:
        """int32 [T, k]: where the result of every choice comes back, k for every place of a token, or -1."""
        ranks = self.ranks.clamp(min=0).long()
        place = self.tokens.rows.gather(1, ranks) - self.starts()[ranks]
        index = torch.arange(top_k, dtype=torch.int32, device=place.device)
        rows = (self.ranks * capacity + place) * top_k + index
        return torch.where(self.ranks >= 0, rows, -1)

    def starts(self) -> torch.Tensor:
        """int32 [ranks]: the first of every rank's pairs."""
        return torch.cat([self.tokens.offs.new_zeros(1), self.tokens.offs[:-1]])


def encode(x: torch.Tensor, layout: RowLayout, scale: torch.Tensor | None, backend: str) -> torch.Tensor:
    """Of every token, what follows the ids in its row: values, block scales, zeros. uint8 [T, row_bytes - bytes of the ids]."""
    if not layout.is_quantized:
        parts = [x.contiguous().view(torch.uint8)]
    else:
        codes = quantize(x, global_scale=scale, scale_layout="rowmajor", backend=backend)
        parts = [codes.data, codes.scale.view(torch.uint8)]
    padding = layout.row_bytes - layout.scales.stop
    return torch.cat([*parts, parts[0].new_zeros((len(x), padding))], 1)


def pack(
    encoded: torch.Tensor, routes: Routes, placement: Placement, rank: int, layout: RowLayout, count: int
) -> torch.Tensor:
    """Rows of all pairs (token, rank), ordered by rank: uint8 [count, row_bytes].

    Args:
        encoded: of ``encode``. rank: of this process. count: how many pairs there are.
    """
    pairs = routes.tokens.slots[:count]
    tokens, goals = pairs // placement.num_ranks, pairs % placement.num_ranks
    return _rows(encoded, tokens, _local_ids(routes, placement, rank, tokens, goals), layout)


def pack_fixed(
    encoded: torch.Tensor, routes: Routes, placement: Placement, rank: int, layout: RowLayout, capacity: int
) -> torch.Tensor:
    """The same with room for ``capacity`` tokens for every rank: uint8 [ranks * capacity, row_bytes]; other rows have ids -1."""
    ranks, slots = placement.num_ranks, routes.tokens.slots
    place = torch.arange(capacity, dtype=torch.int32, device=slots.device)
    starts = routes.starts()[:, None]
    is_there = (starts + place < routes.tokens.offs[:, None]).flatten()
    if not len(encoded):
        return torch.full(
            (ranks * capacity, layout.row_bytes), 0xFF, dtype=torch.uint8, device=encoded.device
        )
    pairs = slots[(starts + place).clamp(max=len(slots) - 1).flatten()]
    tokens = torch.where(is_there, pairs // ranks, 0)
    goals = torch.arange(ranks, device=slots.device).repeat_interleave(capacity)
    ids = _local_ids(routes, placement, rank, tokens, goals)
    return _rows(encoded, tokens, torch.where(is_there[:, None], ids, -1), layout)


def _local_ids(routes: Routes, placement: Placement, rank: int, tokens, goals) -> torch.Tensor:
    """int32 [R, k]: what the choices of tokens are called on the ranks that they go to."""
    _, to_local = placement.tables(rank, routes.ids.device)
    local = to_local[goals[:, None], routes.ids[tokens].clamp(min=0)]
    return torch.where(routes.ranks[tokens] == goals[:, None], local, -1)


def _rows(encoded: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    rows = torch.empty((len(tokens), layout.row_bytes), dtype=torch.uint8, device=encoded.device)
    layout.ids(rows).copy_(ids)
    rows.view(WORD)[:, layout.values.start // WORD.itemsize :] = _taken(encoded, tokens).view(WORD)
    return rows


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]`` of rows that are a multiple of eight bytes, contiguous."""
    return rows.view(WORD).index_select(0, index).view(rows.dtype)


def unpack(
    rows: torch.Tensor,
    layout: RowLayout,
    num_experts: int,
    scale: torch.Tensor | None,
    count: int | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Permutation]:
    """Rows that have come, as ragged operands of the local experts.

    Args:
        rows: uint8 [R, row_bytes]. scale: float32 [num_experts], where values are 16-bit.
        count: choices that go to local experts, where the host knows it.

    Returns:
        ids: int32 [R, k], local. data, scale, order: as of ``gather_quantize``, rows behind the last choice undefined.
    """
    ids = layout.ids(rows).contiguous()
    if not layout.is_quantized:
        x = rows[:, layout.values].view(layout.dtype)
        return ids, *gather_quantize(x, ids, num_experts, global_scale=scale, backend=backend)
    order = permute(ids, num_experts, backend=backend)
    # Entries of slots behind the last choice are not written: they may be anything.
    slots = order.slots[:count].clamp(0, max(ids.numel() - 1, 0)).long()
    sources = slots // layout.top_k
    data = _taken(rows[:, layout.values], sources)
    atoms = NVFP4.scale_shape((len(slots) // ATOM_ROWS + num_experts) * ATOM_ROWS, layout.hidden)
    blocked = torch.empty((atoms[0] + 1, *atoms[1:]), dtype=torch.uint8, device=rows.device)
    # Scales of four blocks are a word: (row, word).
    start = layout.scales.start
    words = rows[:, start : start + atoms[1] * ATOM_COLS].view(torch.int32).index_select(0, sources)
    # A choice's row of scales, -1: the atoms behind the last, which are cut off.
    places = order.places.flatten()[slots].long()
    if count is None:
        is_row = torch.arange(len(slots), device=rows.device) < order.offs[-1]
        places = torch.where(is_row, places, -1)
    atom, inside = torch.div(places, ATOM_ROWS, rounding_mode="floor"), places % ATOM_ROWS
    blocked.view(torch.int32)[atom, :, inside % 32, inside // 32, 0] = words
    return ids, data, blocked[:-1].view(torch.float8_e4m3fn), order


def collect(
    down: torch.Tensor, ids: torch.Tensor, order: Permutation, count: int | None, backend: str
) -> torch.Tensor:
    """Results in the order in which their choices came: what goes back.

    Args:
        down: [rows, H], as of ``LocalExperts.rows``. ids, order: as of ``unpack``.
        count: choices that went to local experts; None: a result for every entry of ``ids``, undefined where it is -1.
    """
    if not len(down):
        return down.new_empty((0 if count is not None else ids.numel(), down.shape[1]))
    if count is None:
        return _taken(down, order.rows.flatten().clamp(min=0))
    is_local = torch.where(ids >= 0, 0, -1)
    slots = permute(is_local, 1, backend=backend).slots[:count]
    return _taken(down, order.rows.flatten()[slots])

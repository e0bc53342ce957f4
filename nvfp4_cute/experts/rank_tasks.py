"""The launches of ``dispatch``: they prepare rows for other ranks, and convert received rows."""

from dataclasses import dataclass
from enum import IntEnum

import torch

from nvfp4_cute.experts.keys import CollectRowsKey, PackRowsKey, RankChoicesKey, UnpackRowsKey
from nvfp4_cute.experts.permutation import PermuteTask
from nvfp4_cute.experts.signals import Wait
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import ATOM_COLS, ATOM_ROWS, NVFP4
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import CollectRows, PackRows, RankChoices, UnpackRows

ALIGNMENT = 16
ID_BYTES = 4


def look_up(
    ids: torch.Tensor, to_rank: torch.Tensor, to_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks up rank and local expert of every choice, int32 [T, k], -1 where there is none; see ``RankChoicesTask``."""
    experts, period = to_rank.shape
    is_expert = (ids >= 0) & (ids < experts)
    ids = torch.where(is_expert, ids, 0).long()
    turn = torch.arange(len(ids), device=ids.device)[:, None] % period
    ranks = to_rank[ids, turn]
    local = to_local[ranks.long(), ids]
    return torch.where(is_expert, ranks, -1), torch.where(is_expert, local, -1)


def row_parts(
    x: torch.Tensor, global_scale: torch.Tensor | None, is_quantized: bool, values: int, scales: int
) -> dict[int, torch.Tensor]:
    """Returns the bytes of the parts of rows, uint8 [T, bytes], by their offset in a row; arguments are those of ``PackTask``."""
    if not is_quantized:
        return {values: x.contiguous().view(torch.uint8)}
    codes = block_scaled.quantize(x, global_scale=global_scale, scale_layout="rowmajor")
    return {values: codes.data.view(torch.uint8), scales: codes.scale.view(torch.uint8)}


@dataclass(frozen=True)
class RankChoicesTask(TableTask):
    """Looks up destinations: ids [T, k]; to_rank, to_local from ``Placement.tables``; other fields as in ``Routes``."""

    columns = RankChoices
    written = ("ranks", "locals", "goals")
    ids: torch.Tensor
    to_rank: torch.Tensor
    to_local: torch.Tensor
    ranks: torch.Tensor
    locals: torch.Tensor
    goals: torch.Tensor

    def key(self, gpu: Gpu) -> RankChoicesKey:
        """Returns the key of the lookup kernel."""
        return RankChoicesKey(gpu.arch)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of a lookup."""
        tokens, top_k = self.ids.shape
        experts, period = self.to_rank.shape
        return {
            RankChoices.ID_BYTES: self.ids.element_size(),
            RankChoices.TOKENS: tokens,
            RankChoices.TOP_K: top_k,
            RankChoices.EXPERTS: experts,
            RankChoices.PERIOD: period,
            RankChoices.NUM_RANKS: len(self.to_local),
        }

    def reference(self) -> None:
        """Looks up the choices with torch."""
        ranks, local = look_up(self.ids, self.to_rank, self.to_local)
        self.ranks.copy_(ranks)
        self.locals.copy_(local)
        every = torch.arange(len(self.to_local), dtype=torch.int32, device=ranks.device)
        goes = (self.ranks[:, :, None] == every).any(1)
        self.goals.copy_(torch.where(goes, every, -1))


@dataclass(frozen=True)
class PackTask(TableTask):
    """Packs rows to send.

    Attributes:
        x: [T, K].
        global_scale: float32 with one element, or None for 1.
        ranks, locals: see ``Routes``.
        pairs, offs: ``rows`` and ``offs`` of ``Routes.tokens``.
        sent: uint8 [rows, bytes of a row], written.
        results: int32 [T, k] with a capacity, written; else None.
        is_quantized: whether values are NVFP4.
        capacity: rows of every rank, or None.
        values, scales: offsets of these parts in a row.
    """

    columns = PackRows
    x: torch.Tensor
    global_scale: torch.Tensor | None
    ranks: torch.Tensor
    locals: torch.Tensor
    pairs: torch.Tensor
    offs: torch.Tensor
    sent: torch.Tensor
    results: torch.Tensor | None
    is_quantized: bool
    capacity: int | None
    values: int
    scales: int

    @property
    def written(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that the packing kernel writes."""
        return ("sent",) if self.results is None else ("sent", "results")

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no tokens to pack."""
        return self.ranks.numel() == 0

    def key(self, gpu: Gpu) -> PackRowsKey:
        """Returns the key of the packing kernel."""
        has_scale = self.global_scale is not None
        return PackRowsKey(gpu.arch, self.x.dtype, self.is_quantized, has_scale, self.capacity is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of packing."""
        tokens, top_k = self.ranks.shape
        return {
            PackRows.X_PITCH: self.x.stride(0) * self.x.element_size(),
            PackRows.TOKENS: tokens,
            PackRows.TOP_K: top_k,
            PackRows.K: self.x.shape[1],
            PackRows.NUM_RANKS: len(self.offs),
            PackRows.CAPACITY: self.capacity or 0,
            PackRows.VALUES: self.values,
            PackRows.SCALES: self.scales,
            PackRows.ROW_BYTES: self.sent.shape[1],
        }

    def reference(self) -> None:
        """Packs rows of ``quantize`` or of x, one at a time."""
        top_k, ranks = self.ranks.shape[1], len(self.offs)
        pairs = self.pairs.long()
        if self.capacity is not None:
            self.sent[:, : top_k * ID_BYTES].view(torch.int32).fill_(-1)
            starts = torch.cat([self.offs.new_zeros(1), self.offs[:-1]]).long()
            first = torch.arange(ranks, device=starts.device) * self.capacity - starts
            pairs = torch.where(pairs >= 0, pairs + first, -1)
        tokens, goals = (pairs >= 0).nonzero(as_tuple=True)
        rows = pairs[tokens, goals]
        ids = torch.where(self.ranks[tokens] == goals[:, None], self.locals[tokens], -1)
        self.sent[:, : top_k * ID_BYTES].view(torch.int32)[rows] = ids
        parts = row_parts(self.x, self.global_scale, self.is_quantized, self.values, self.scales)
        for start, part in parts.items():
            self.sent[rows, start : start + part.shape[1]] = part[tokens]
        if self.results is not None:
            places = pairs.gather(1, self.ranks.clamp(min=0).long())
            index = torch.arange(top_k, device=places.device)
            self.results.copy_(torch.where(self.ranks >= 0, places * top_k + index, -1))


@dataclass(frozen=True)
class UnpackTask(TableTask):
    """Converts received rows.

    Attributes:
        came: uint8 [R, bytes of a row].
        ids: int32 [R, k].
        rows, places, offs, slots: see ``Permutation``.
        data, scale: see ``gather``.
        k: values per row.
        values, scales: offsets of these parts in a row.
        finds_order: whether the order is written, not read.
        host_fault, header, wait: set in a launch that waits for other ranks (``signals.Inbox``).
    """

    columns = UnpackRows
    came: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    offs: torch.Tensor
    slots: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor
    k: int
    values: int
    scales: int
    finds_order: bool
    host_fault: torch.Tensor | None
    header: torch.Tensor | None
    wait: Wait | None

    @property
    def written(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that the unpacking kernel writes."""
        order = ("rows", "places", "offs", "slots") if self.finds_order else ()
        return ("data", "scale", *order, "host_fault", "header")

    def key(self, gpu: Gpu) -> UnpackRowsKey:
        """Returns the key of the unpacking kernel."""
        return UnpackRowsKey(gpu.arch, self.finds_order, self.wait is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of unpacking."""
        return {
            UnpackRows.NUM_ROWS: len(self.came),
            UnpackRows.TOP_K: self.rows.shape[1],
            UnpackRows.K: self.k,
            UnpackRows.VALUES: self.values,
            UnpackRows.SCALES: self.scales,
            UnpackRows.ROW_BYTES: self.came.shape[1],
            UnpackRows.EXPERTS: len(self.offs),
            **({} if self.wait is None else self.wait.numbers(UnpackRows)),
        }

    @property
    def is_empty(self) -> bool:
        """Returns whether no rows were received."""
        return self.rows.numel() == 0

    def reference(self) -> None:
        """Copies rows by index, with scales as words of four blocks, and zeros after the last block."""
        if self.finds_order:
            order = (self.ids, self.offs, self.slots, self.rows, self.places)
            waits = (self.host_fault, self.header, self.wait)
            PermuteTask(*order, None, 0, "whole", *waits).reference()
        sources, choices = (self.rows >= 0).nonzero(as_tuple=True)
        rows, places = self.rows[sources, choices].long(), self.places[sources, choices].long()
        self.data[rows] = self.came[sources, self.values : self.values + self.data.shape[1]]
        words = self.came[:, self.scales : self.scales + self.scale.shape[1] * ATOM_COLS].clone()
        words[:, self.data.shape[1] * 2 // NVFP4.block_k :] = 0
        atom, inside = places // ATOM_ROWS, places % ATOM_ROWS
        blocked = self.scale.view(torch.int32)
        blocked[atom, :, inside % 32, inside // 32, 0] = words.view(torch.int32)[sources]


@dataclass(frozen=True)
class CollectTask(TableTask):
    """Arranges results to send back:

    ``back[goals[i]] = h[rows[i]]``, or ``back[i]`` without goals, where ``rows[i]`` is not -1.
    """

    columns = CollectRows
    written = ("back",)
    h: torch.Tensor
    rows: torch.Tensor
    goals: torch.Tensor | None
    back: torch.Tensor

    def key(self, gpu: Gpu) -> CollectRowsKey:
        """Returns the key of the collecting kernel."""
        return CollectRowsKey(gpu.arch, self.goals is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of collecting."""
        return {
            CollectRows.SLOTS: self.rows.numel(),
            CollectRows.ROW_WORDS: self.h.shape[1] * self.h.element_size() // ALIGNMENT,
        }

    def reference(self) -> None:
        """Copies results by index."""
        rows = self.rows.flatten()
        slots = (rows >= 0).nonzero().flatten()
        goals = slots if self.goals is None else self.goals.flatten()[slots].long()
        self.back[goals] = self.h[rows[slots].long()]

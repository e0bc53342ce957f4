"""The launches that prepare rows for other ranks, and take apart what has come: tasks of ``dispatch``."""

from dataclasses import dataclass
from enum import IntEnum

import torch

from nvfp4_cute.experts.keys import CollectRowsKey, PackRowsKey, RankChoicesKey, UnpackRowsKey
from nvfp4_cute.experts.permutation import PermuteTask
from nvfp4_cute.experts.signals import Wait
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import ATOM_COLS, ATOM_ROWS
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import CollectRows, PackRows, RankChoices, UnpackRows

ALIGNMENT = 16
ID_BYTES = 4


def look_up(
    ids: torch.Tensor, to_rank: torch.Tensor, to_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank and local expert of every choice, int32 [T, k], -1 where there is none; arguments as of ``RankChoicesTask``."""
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
    """Bytes of rows, uint8 [T, bytes], by where in a row they begin: arguments as of ``PackTask``."""
    if not is_quantized:
        return {values: x.contiguous().view(torch.uint8)}
    codes = block_scaled.quantize(x, global_scale=global_scale, scale_layout="rowmajor")
    return {values: codes.data.view(torch.uint8), scales: codes.scale.view(torch.uint8)}


@dataclass(frozen=True)
class RankChoicesTask(TableTask):
    """Where choices go: ids [T, k]; to_rank, to_local as of ``Placement.tables``; the others as of ``Routes``."""

    columns = RankChoices
    written = ("ranks", "locals", "goals")
    ids: torch.Tensor
    to_rank: torch.Tensor
    to_local: torch.Tensor
    ranks: torch.Tensor
    locals: torch.Tensor
    goals: torch.Tensor

    def key(self, gpu: Gpu) -> RankChoicesKey:
        """What to compile."""
        return RankChoicesKey(gpu.arch)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Extents."""
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
        """By look-ups."""
        ranks, local = look_up(self.ids, self.to_rank, self.to_local)
        self.ranks.copy_(ranks)
        self.locals.copy_(local)
        every = torch.arange(len(self.to_local), dtype=torch.int32, device=ranks.device)
        goes = (self.ranks[:, :, None] == every).any(1)
        self.goals.copy_(torch.where(goes, every, -1))


@dataclass(frozen=True)
class PackTask(TableTask):
    """Rows to send.

    Attributes:
        x: [T, K]. global_scale: float32, one element, or None for 1. ranks, locals: as of ``Routes``.
        pairs, offs: ``rows`` and ``offs`` of ``Routes.tokens``.
        sent: uint8 [rows, bytes of a row]. results: int32 [T, k] with a capacity, else None.
        is_quantized: whether values are NVFP4. capacity: rows of every rank, or None.
        values, scales: where these begin in a row.
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
        """Names of the fields that the kernel writes."""
        return ("sent",) if self.results is None else ("sent", "results")

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens."""
        return self.ranks.numel() == 0

    def key(self, gpu: Gpu) -> PackRowsKey:
        """What to compile."""
        has_scale = self.global_scale is not None
        return PackRowsKey(gpu.arch, self.x.dtype, self.is_quantized, has_scale, self.capacity is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Extents."""
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
        """Row by row of ``quantize``'s, or of x."""
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
    """Rows that have come.

    Attributes:
        came: uint8 [R, bytes of a row]. ids: int32 [R, k]. rows, places, offs, slots: as of ``Permutation``.
        data, scale: as of ``gather_quantize``. k: values of a row. values, scales: where these begin in it.
        finds_order: whether the order is written, not read.
        host_fault, header, wait: of a launch that waits for other ranks (``signals.Inbox``).
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
        """Names of the fields that the kernel writes."""
        order = ("rows", "places", "offs", "slots") if self.finds_order else ()
        return ("data", "scale", *order, "host_fault", "header")

    def key(self, gpu: Gpu) -> UnpackRowsKey:
        """What to compile."""
        return UnpackRowsKey(gpu.arch, self.finds_order, self.wait is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Extents."""
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
        """Whether nothing has come."""
        return self.rows.numel() == 0

    def reference(self) -> None:
        """By indices: scales of four blocks are a word."""
        if self.finds_order:
            order = (self.ids, self.offs, self.slots, self.rows, self.places)
            waits = (self.host_fault, self.header, self.wait)
            PermuteTask(*order, None, 0, "whole", *waits).reference()
        sources, choices = (self.rows >= 0).nonzero(as_tuple=True)
        rows, places = self.rows[sources, choices].long(), self.places[sources, choices].long()
        self.data[rows] = self.came[sources, self.values : self.values + self.data.shape[1]]
        words = self.came[:, self.scales : self.scales + self.scale.shape[1] * ATOM_COLS].contiguous()
        atom, inside = places // ATOM_ROWS, places % ATOM_ROWS
        blocked = self.scale.view(torch.int32)
        blocked[atom, :, inside % 32, inside // 32, 0] = words.view(torch.int32)[sources]


@dataclass(frozen=True)
class CollectTask(TableTask):
    """Results to go back: ``back[goals[i]] = h[rows[i]]``, or ``back[i]`` without goals, where ``rows[i]`` is not -1."""

    columns = CollectRows
    written = ("back",)
    h: torch.Tensor
    rows: torch.Tensor
    goals: torch.Tensor | None
    back: torch.Tensor

    def key(self, gpu: Gpu) -> CollectRowsKey:
        """What to compile."""
        return CollectRowsKey(gpu.arch, self.goals is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Extents."""
        return {
            CollectRows.SLOTS: self.rows.numel(),
            CollectRows.ROW_WORDS: self.h.shape[1] * self.h.element_size() // ALIGNMENT,
        }

    def reference(self) -> None:
        """By indices."""
        rows = self.rows.flatten()
        slots = (rows >= 0).nonzero().flatten()
        goals = slots if self.goals is None else self.goals.flatten()[slots].long()
        self.back[goals] = self.h[rows[slots].long()]

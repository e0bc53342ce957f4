"""permute: the order of rows by expert, found on the device."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from nvfp4_cute.backends import gpu_of
from nvfp4_cute.backends.calls import run
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.experts.checks import check_ids
from nvfp4_cute.experts.keys import PermuteKey
from nvfp4_cute.experts.signals import Inbox, Wait, fields_of
from nvfp4_cute.formats.scale_layout import ATOM_ROWS
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch_table import PeerHeader, Permute
from nvfp4_cute.operands import rules as checks
from nvfp4_cute.planning.arch.simt import (
    MAX_EXPERTS,
    PERMUTE_CLUSTER,
    PERMUTE_SLOTS_AT_ONCE,
    PERMUTE_SLOTS_OF_CTA,
    PERMUTE_SLOTS_PER_CTA,
    has_clusters,
    permute_capacity,
)

MAX_SLOTS = 2**30
Phase = Literal["whole", "cluster", "count", "place"]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Rows of all local experts one after the other, those of one by token, then k. All int32, on the device of the ids.

    Attributes:
        offs: [E_local], inclusive ends: of a ragged ``grouped_gemm``.
        slots: [T * k]: of every row, token * k + k's index; entries behind the last row are not written.
        rows: [T, k]: the row of every choice; -1 where the expert is not local, or the id none.
        places: [T, k]: the same where every expert's rows begin a block of 128, as their scales do.
        is_older: whether a launch came before the one that wrote the rows, and wrote all of this.
    """

    offs: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    is_older: bool = False


def permute(
    ids: torch.Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    inbox: Inbox | None = None,
    backend: str = "auto",
) -> Permutation:
    """Order the choices of all tokens by expert; nothing waits for the device.

    In one launch, or two above 65,536 choices; before Hopper, which has no clusters, above 2,048.

    Args:
        ids: int32 or int64 [T, k], as of :func:`route`. One that is not of a local expert, such as -1, has no row; a token may
            choose an expert more than once.
        num_experts: local experts, at most 1,024. first_expert: the id of the first.
        inbox: where other ranks signal that they have stored ``ids``: the launch waits for them. None: ids are there.
        backend: as of :func:`route`.

    Returns:
        The order: the same bits in every run.

    Example:
        >>> order = permute(torch.tensor([[1, 0], [1, -1], [0, 1]]), 2)
        >>> order.offs.tolist(), order.slots[:5].tolist(), order.rows.tolist()
        ([2, 5], [1, 4, 0, 2, 5], [[2, 0], [3, -1], [1, 4]])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an argument breaks a rule. UnsupportedTarget: no kernel for the GPU.
    """
    checks.check_tensors({"ids": ids})
    check_ids(ids)
    check_experts(num_experts)
    checks.check_extent("T * k", ids.numel(), MAX_SLOTS)
    order = new_order(ids, num_experts)
    shared = (ids, order.offs, order.slots, order.rows, order.places)
    waits = fields_of(inbox)
    if ids.numel() <= PERMUTE_SLOTS_OF_CTA:
        run(backend, PermuteTask(*shared, None, first_expert, "whole", *waits))
        return order
    phases: tuple[Phase, ...] = ("cluster",)
    ctas = PERMUTE_CLUSTER
    if ids.numel() > PERMUTE_SLOTS_AT_ONCE or not has_clusters(gpu_of(backend, ids.device).arch):
        phases, ctas = ("count", "place"), -(-ids.numel() // PERMUTE_SLOTS_PER_CTA)
    counts = torch.empty((ctas, num_experts), dtype=torch.int32, device=ids.device)
    for phase in phases:
        run(backend, PermuteTask(*shared, counts, first_expert, phase, *waits))
        waits = fields_of(None)
    return order


def new_order(ids: torch.Tensor, num_experts: int) -> Permutation:
    """Not initialised."""
    empty = lambda *shape: torch.empty(shape, dtype=torch.int32, device=ids.device)
    return Permutation(empty(num_experts), empty(ids.numel()), empty(*ids.shape), empty(*ids.shape))


def check_experts(num_experts: int) -> None:
    """Raise UnsupportedProblem unless shared memory has room for counts of so many."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise UnsupportedProblem(f"num_experts={num_experts} is not from 1 to {MAX_EXPERTS}")


@dataclass(frozen=True)
class PermuteTask(TableTask):
    """One launch of ``permute``: fields as of ``Permutation``; ``counts`` int32 [CTAs, E_local] where there are several CTAs.

    One that waits for other ranks has ``host_fault``, ``header`` and ``wait`` (``signals.Inbox``).
    """

    columns = Permute
    written = ("offs", "slots", "rows", "places", "counts", "host_fault", "header")
    ids: torch.Tensor
    offs: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor | None
    first_expert: int
    phase: Phase
    host_fault: torch.Tensor | None = None
    header: torch.Tensor | None = None
    wait: Wait | None = None

    @property
    def is_empty(self) -> bool:
        """Never: there are offsets to write."""
        return False

    def key(self, gpu: Gpu) -> PermuteKey:
        """What to compile."""
        return PermuteKey(gpu.arch, permute_capacity(len(self.offs)), self.phase, self.wait is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Extents."""
        ctas = 1 if self.counts is None else len(self.counts)
        return {
            Permute.ID_BYTES: self.ids.element_size(),
            Permute.NUM_SLOTS: self.ids.numel(),
            Permute.FIRST_EXPERT: self.first_expert,
            Permute.EXPERTS: len(self.offs),
            Permute.CTAS: ctas,
            Permute.SLOTS_PER_CTA: -(-self.ids.numel() // ctas),
            **({} if self.wait is None else self.wait.numbers(Permute)),
        }

    def reference(self) -> None:
        """By a stable sort."""
        if self.wait is not None and self.header is not None and self.host_fault is not None:
            self.wait.reference(PeerHeader.DISPATCHED, self.header, self.host_fault)
        if self.phase == "count":
            return
        experts = len(self.offs)
        local = self.ids.flatten().long() - self.first_expert
        is_local = (local >= 0) & (local < experts)
        sizes = torch.bincount(local[is_local], minlength=experts)
        order = local.masked_fill(~is_local, experts).argsort(stable=True)[: int(is_local.sum())]
        rows = torch.full_like(local, -1)
        rows[order] = torch.arange(len(order), device=rows.device)
        blocks = -(-sizes // ATOM_ROWS)
        shifts = (blocks.cumsum(0) - blocks) * ATOM_ROWS - (sizes.cumsum(0) - sizes)
        places = torch.where(is_local, rows + shifts[local.clamp(0, experts - 1)], -1)
        self.offs.copy_(sizes.cumsum(0))
        self.slots[: len(order)] = order.int()
        self.rows.copy_(rows.view_as(self.rows))
        self.places.copy_(places.view_as(self.places))

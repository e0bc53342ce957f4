"""``permute``: sorts the choices of tokens by expert, on the device."""

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
    """Order of the rows of all local experts: by expert, then token, then k. All int32, on the device of the ids.

    Attributes:
        offs: [E_local], inclusive ends of the experts' rows, for a ragged ``grouped_gemm``.
        slots: [T * k], for every row its token * k + its index in k; entries after the last row are not written.
        rows: [T, k], the row of every choice; -1 if the expert is not local or does not exist.
        places: [T, k], the row of every choice if every expert's rows begin a block of 128, as their scales do.
        is_older: whether a launch before the one that wrote the rows wrote all of this.
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
    """Sorts the choices of all tokens by expert; nothing waits for the device.

    Takes one launch, or two above 65,536 choices. Before Hopper, which introduced clusters, it takes two above 2,048.

    Args:
        ids: int32 or int64 [T, k], from :func:`route`. Ids of no local expert, such as -1, get no row. A token may choose an
            expert more than once.
        num_experts: local experts, at most 1,024.
        first_expert: id of the first local expert.
        inbox: where other ranks signal that they have stored ``ids``; the launch waits for them. None: ids are complete.
        backend: see :func:`route`.

    Returns:
        The order, with the same bits in every run.

    Example:
        >>> order = permute(torch.tensor([[1, 0], [1, -1], [0, 1]]), 2)
        >>> order.offs.tolist(), order.slots[:5].tolist(), order.rows.tolist()
        ([2, 5], [1, 4, 0, 2, 5], [[2, 0], [3, -1], [1, 4]])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an argument breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    checks.check_tensors({"ids": ids})
    check_ids(ids)
    check_experts(num_experts)
    checks.check_extent("T * k", ids.numel(), MAX_SLOTS)
    order = new_order(ids, num_experts)
    shared = (ids, order.offs, order.slots, order.rows, order.places)
    waits = fields_of(inbox)
    is_clustered = has_clusters(gpu_of(backend, ids.device).arch)
    if ids.numel() <= PERMUTE_SLOTS_OF_CTA[is_clustered]:
        run(backend, PermuteTask(*shared, None, first_expert, "whole", *waits))
        return order
    phases: tuple[Phase, ...] = ("cluster",)
    ctas = PERMUTE_CLUSTER
    if ids.numel() > PERMUTE_SLOTS_AT_ONCE or not is_clustered:
        phases, ctas = ("count", "place"), -(-ids.numel() // PERMUTE_SLOTS_PER_CTA)
    counts = torch.empty((ctas, num_experts), dtype=torch.int32, device=ids.device)
    for phase in phases:
        run(backend, PermuteTask(*shared, counts, first_expert, phase, *waits))
        waits = fields_of(None)
    return order


def new_order(ids: torch.Tensor, num_experts: int) -> Permutation:
    """Allocates an uninitialized order."""
    empty = lambda *shape: torch.empty(shape, dtype=torch.int32, device=ids.device)
    return Permutation(empty(num_experts), empty(ids.numel()), empty(*ids.shape), empty(*ids.shape))


def check_experts(num_experts: int) -> None:
    """Raises UnsupportedProblem unless shared memory has room for one counter per expert."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise UnsupportedProblem(f"num_experts={num_experts} is not from 1 to {MAX_EXPERTS}")


@dataclass(frozen=True)
class PermuteTask(TableTask):
    """One launch of ``permute``, with the fields of ``Permutation``.

    ``counts`` is int32 [CTAs, E_local] if there are several CTAs. ``host_fault``, ``header`` and ``wait`` (``signals.Inbox``)
    are set in a launch that waits for other ranks.
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
        """Returns False: even without tokens there are offsets to write."""
        return False

    def key(self, gpu: Gpu) -> PermuteKey:
        """Returns the key of the permutation kernel."""
        return PermuteKey(gpu.arch, permute_capacity(len(self.offs)), self.phase, self.wait is not None)

    def numbers(self, gpu: Gpu) -> dict[IntEnum, int]:
        """Returns the extents for the launch table of a permutation."""
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

    def by_rows(self) -> tuple[int, dict[IntEnum, int]] | None:
        """Returns the number of choices."""
        if self.wait is not None:
            return None
        ctas = 1 if self.counts is None else len(self.counts)
        return self.ids.numel(), {Permute.NUM_SLOTS: 1, Permute.SLOTS_PER_CTA: ctas}

    def reference(self) -> None:
        """Sorts the choices with a stable sort."""
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

"""Expert parallelism: each rank of a group computes its own experts for the tokens of all ranks.

::

    routes    destinations of this rank's choices                                  home rank
    pack      tokens, as NVFP4 or in 16 bits, once per token, and ids              home rank
    dispatch  one row per pair (token, rank of one of its experts)                 home -> experts
    products  of the local experts                                                 rank of the experts
    collect   results in the order in which their choices arrived                  rank of the experts
    combine   one row per choice                                                   experts -> home
    sum       weighted, in float32, in the order of k: the bits of one GPU         home rank

Between GPUs of one host, kernels store rows into buffers of other ranks (``push``); otherwise the group's backend moves them.
The exact form first exchanges sizes, for which the host waits. The form with a capacity always has buffers of the same size, so
no host waits, and a CUDA graph can capture it. A checksum of everything that has to be equal on all ranks travels with the
sizes. If the checksums differ, all ranks exchange the reasons and raise.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nvfp4_cute.backends.calls import run
from nvfp4_cute.errors import RankError, UnsupportedTarget
from nvfp4_cute.experts import dispatch, push
from nvfp4_cute.experts.board import exchange
from nvfp4_cute.experts.checks import check_row_pitch
from nvfp4_cute.experts.combine import FinalizeTask, check_call
from nvfp4_cute.experts.dispatch import Routes, RowLayout
from nvfp4_cute.experts.exchange import agree, gather, send_rows
from nvfp4_cute.experts.new_rows import ExpertRows
from nvfp4_cute.experts.permutation import Permutation, permute
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.experts.records import Activations, LayerOfExperts, Parallel
from nvfp4_cute.experts.signals import Inbox, fields_of
from nvfp4_cute.experts.symmetric import BufferLayout, PeerBuffers, buffers_of
from nvfp4_cute.formats.block_format import NVFP4

REFUSALS = (TypeError, ValueError, UnsupportedTarget)
FACTS = (
    "hidden_size",
    "top_k",
    "dtype of x",
    "num_experts",
    "placement",
    "capacity",
    "bytes of a row",
    "activations",
)
Facts = tuple[int, ...]
# Checksum of a rank whose operands break a rule.
FAULT = -1
# Smallest number of tokens per rank for which buffers of the exact form have room.
LEAST_ROOM = 16
# Facts on which the ranks of a group have agreed, in the form with a capacity.
_agreed: "WeakKeyDictionary[dist.ProcessGroup, set[Facts]]" = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Ranks:
    """The group, and what this rank knows about the others.

    Attributes:
        group: a group of ``torch.distributed``.
        rank: rank of this process in it.
        placement: ranks of all experts.
        capacity: largest number of tokens per rank, or None.
    """

    group: dist.ProcessGroup
    rank: int
    placement: Placement
    capacity: int | None

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, placement: Placement | None, capacity: int | None, local_experts: int
    ) -> "Ranks":
        """Checks the arguments, and places experts evenly if no placement is given. Raises TypeError, ValueError."""
        size, rank = group.size(), group.rank()  # torch.distributed looks these up by name
        if placement is None:
            placement = Placement.even(local_experts * size, size)
        held = len(placement.experts[rank]) if placement.num_ranks == size else None
        if held != local_experts:
            raise ValueError(
                f"rank {rank} of {size} has the weights of {local_experts} experts; the placement has {placement.num_ranks} "
                f"ranks, and {held} experts for this one"
            )
        if capacity is not None and not isinstance(capacity, int):
            raise TypeError(
                f"capacity={capacity!r} is not an int; pass the largest number of tokens per rank"
            )
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity} is not positive; pass the most tokens that a rank has")
        return cls(group, rank, placement, capacity)


@dataclass(frozen=True, eq=False)
class Call:
    """Checked arguments of one call of ``moe`` with a group."""

    experts: LocalExperts
    ranks: Ranks
    layout: RowLayout
    bias2: torch.Tensor | None
    backend: str

    @cached_property
    def facts(self) -> Facts:
        """Returns the numbers that have to be the same on every rank, by the names in ``FACTS``."""
        placement, layout = self.ranks.placement, self.layout
        return (
            layout.hidden,
            layout.top_k,
            layout.dtype.itemsize * 2 + (layout.dtype == torch.bfloat16),
            placement.num_experts,
            placement.checksum,
            self.ranks.capacity or 0,
            layout.row_bytes,
            get_args(Activations).index(self.experts.activations),
        )

    def routes(self, ids: torch.Tensor) -> Routes:
        """Finds the destinations of this rank's choices."""
        return Routes.of(ids, self.ranks.placement, self.ranks.rank, self.backend)

    def pack(
        self, x: torch.Tensor, routes: Routes, count: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Makes the rows to send and, with a capacity, the positions of returning results; see ``dispatch.pack``."""
        return dispatch.pack(
            x, routes, self.layout, self.experts.input_scale, count, self.ranks.capacity, self.backend
        )

    def compute(self, rows: torch.Tensor, count: int | None) -> torch.Tensor:
        """Computes the results for received rows. ``count`` choices belong to local experts."""
        experts, layout = self.experts, self.layout
        if not experts.count or count == 0:
            results = 0 if count is not None else len(rows) * layout.top_k
            return rows.new_zeros((results, layout.hidden * layout.dtype.itemsize)).view(layout.dtype)
        ids = layout.ids(rows).contiguous()
        sorted_rows, order = dispatch.unpack(
            rows,
            ids,
            layout,
            experts.count,
            self.experts.input_scale,
            count,
            self.backend,
            format=experts.row_format,
        )
        down = self.rows(sorted_rows, ids, order)
        return dispatch.collect(down, ids, order, count, self.backend)

    def rows(self, rows: ExpertRows, ids: torch.Tensor, order: Permutation) -> torch.Tensor:
        """Runs ``LocalExperts.rows``. There is room for the choices of all ranks, and each expert gets its share on average."""
        mean = -(-len(rows.data) // self.ranks.placement.num_places)
        return self.experts.rows(
            rows,
            ids,
            order,
            dtype=self.layout.dtype,
            first_expert=0,
            backend=self.backend,
            mean_rows=mean,
        )

    def buffers(self, capacity: int) -> BufferLayout:
        """Returns the layout of buffers with room for ``capacity`` tokens of each rank."""
        layout = self.layout
        return BufferLayout(self.ranks.placement.num_ranks, capacity, layout.top_k, replace(layout, top_k=0))

    def send(self, buffers: PeerBuffers, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Stores this rank's tokens into the buffers of other ranks; see ``push.send``."""
        return push.send(x, ids, self.ranks.placement, buffers, self.experts.input_scale, self.backend)

    def serve(self, buffers: PeerBuffers, count: int | None = None) -> None:
        """Computes the tokens that arrive in this rank's buffer, at most ``count`` choices, and returns the results."""
        experts = self.experts
        if experts.count:
            rows, order = push.receive(
                buffers, experts.count, self.experts.input_scale, count, self.backend, experts.row_format
            )
            down = self.rows(rows, buffers.ids, order)
        else:
            order = permute(buffers.ids, 1, inbox=buffers.inbox, backend=self.backend)
            down = buffers.results[:0]
        push.return_results(down, order, buffers, self.backend)

    def sum(
        self,
        back: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        inbox: Inbox | None = None,
    ) -> torch.Tensor:
        """Adds up the results of this rank's tokens.

        ``rows``, int32 [T, k], are the positions of the results, which may still be arriving.
        """
        y = torch.empty((len(ids), self.layout.hidden), dtype=self.layout.dtype, device=ids.device)
        bias = self.bias2
        given = shared, bias, None if bias is None else ids, *fields_of(inbox)
        run(self.backend, FinalizeTask(back, rows, weights, y, *given))
        return y


def moe_over_ranks(
    layer: LayerOfExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    parallel: Parallel,
) -> torch.Tensor:
    """Runs ``moe`` with a group that divides experts; arguments are those of ``moe.compute``.

    Raises:
        Whatever ``moe`` raises, on the rank whose operands break a rule, and RankError on the others.
    """
    group, capacity = parallel.group, parallel.capacity
    assert group is not None
    call = None
    try:
        experts, bias2 = LocalExperts.of(x, layer), layer.w2.bias
        ranks = Ranks.of(group, parallel.placement, capacity, experts.count)
        _check(x, ids, weights, experts.input_scale, bias2, shared, ranks.placement)
        call = Call(experts, ranks, layout_of(x, ids, experts), bias2, layer.backend)
        if experts.count and call.facts not in _agreed.get(group, ()):
            experts.check(x, layer.backend)
    except REFUSALS as fault:
        # With a capacity, ranks that agreed before do not exchange checksums again.
        if isinstance(x, torch.Tensor) and (capacity is None or not _agreed.get(group)):
            _exchange_sizes(group, x.device, None, fault=fault)
        raise
    compute = _exact if capacity is None else _with_capacity
    return compute(group, call, x, ids, weights, shared)


def layout_of(x: torch.Tensor, ids: torch.Tensor, experts: LocalExperts) -> RowLayout:
    """Returns the layout of rows between ranks: NVFP4 if every expert would quantize them alike, otherwise 16 bits."""
    is_one = experts.input_scale is None or experts.input_scale.numel() == 1
    return RowLayout(x.shape[1], ids.shape[1], x.dtype, experts.row_format == NVFP4 and is_one)


def _exact(group, call: Call, x, ids, weights, shared) -> torch.Tensor:
    """Exchanges the numbers of tokens, then uses buffers with room for the largest, or sends exactly the existing rows."""
    tokens = _exchange_sizes(group, x.device, call, len(x))
    buffers = buffers_of(group, call.buffers(_room_for(max(tokens))), x.device)
    if buffers is None:
        return _exchanged(group, call, x, ids, weights, shared)
    return _pushed(call, buffers, x, ids, weights, shared, sum(tokens) * call.layout.top_k)


def _exchanged(group, call: Call, x, ids, weights, shared) -> torch.Tensor:
    """Sends rows through the group's backend, to every rank as many as there are."""
    routes = call.routes(ids)
    order = routes.choices(call.backend)
    placement, rank = call.ranks.placement, call.ranks.rank
    ends = gather(group, torch.cat([routes.tokens.offs, order.offs]))
    tokens, choices = (_differences(part) for part in ends.split(placement.num_ranks, 1))  # [from][to]
    sent, received = tokens[rank], [row[rank] for row in tokens]
    rows, _ = call.pack(x, routes, sum(sent))
    rows = send_rows(rows, group, sent, received)
    wanted, owed = choices[rank], [row[rank] for row in choices]
    back = send_rows(call.compute(rows, sum(owed)), group, owed, wanted)
    return call.sum(back, order.rows, ids, weights, shared)


def _pushed(call: Call, buffers: PeerBuffers, x, ids, weights, shared, count: int | None) -> torch.Tensor:
    """Sends rows through buffers into which all ranks store. ``count``: choices of all ranks, if the host knows them."""
    buffers.check()
    places = call.send(buffers, x, ids)
    call.serve(buffers, count)
    return call.sum(buffers.results, places, ids, weights, shared, buffers.inbox)


def _with_capacity(group, call: Call, x, ids, weights, shared) -> torch.Tensor:
    """Sends the same sizes in every call: ``capacity`` rows to every rank, and k * ``capacity`` back."""
    agreed = _agreed.setdefault(group, set())
    if call.facts not in agreed:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RankError("ranks have not agreed on these sizes: call the layer once before the capture")
        _exchange_sizes(group, x.device, call)
        agreed.add(call.facts)
    tokens, capacity = len(x), call.ranks.capacity
    assert capacity is not None
    if tokens > capacity:  # other ranks depend on this one's experts
        x, ids, weights = x[:0], ids[:0], weights[:0]
        shared = None if shared is None else shared[:0]
    buffers = buffers_of(group, call.buffers(capacity), x.device)
    if buffers is None:
        routes = call.routes(ids)
        rows, places = call.pack(x, routes)
        assert places is not None
        back = send_rows(call.compute(send_rows(rows, group), None), group)
        result = call.sum(back, places, ids, weights, shared)
    else:
        result = _pushed(call, buffers, x, ids, weights, shared, None)
    if tokens > capacity:
        raise ValueError(
            f"{tokens} tokens are more than capacity={capacity}; pass a larger one on every rank"
        )
    return result


def _exchange_sizes(
    group, device: torch.device, call: Call | None, tokens: int = 0, fault: Exception | None = None
) -> list[int]:
    """Exchanges checksums and numbers of tokens with all ranks, and returns the tokens of each.

    If checksums differ, every rank raises.
    """
    checksum = FAULT if call is None else hash(call.facts) & 0x7FFFFFFF
    found = exchange(group, device, checksum, tokens)
    if fault is not None or any(other != checksum for other, _ in found):
        facts = (0,) * len(FACTS) if call is None else call.facts
        agree(group, device, dict(zip(FACTS, facts, strict=True)), fault)
    return [count for _, count in found]


def _room_for(tokens: int) -> int:
    """Rounds up to few sizes, because buffers are kept."""
    return max(1 << max(tokens - 1, 0).bit_length(), LEAST_ROOM)


def _differences(ends: torch.Tensor) -> list[list[int]]:
    """Returns counts from inclusive ends."""
    return ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1)).tolist()


def _check(x, ids, weights, input_scale, bias2, shared, placement: Placement) -> None:
    """Raises whatever the launches at the home rank would refuse."""
    check_call(x, ids, weights, shared, bias2, placement.num_experts, {"input_scale": input_scale})
    check_row_pitch("H", x.shape[1])
    if input_scale is not None and input_scale.dtype != torch.float32:
        raise ValueError(f"input_scale is {input_scale.dtype}; expected torch.float32")

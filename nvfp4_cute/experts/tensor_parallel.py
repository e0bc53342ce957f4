"""Tensor parallelism of a layer of experts: every rank of a group holds a share of the width of every expert.

All ranks pass the same tokens. Each computes a layer of width I / R; only rank 0 adds ``bias2`` and ``shared``. An all-reduce
in float32 adds up the results; with ``batch_invariant``, more than two ranks gather them instead. No token moves, and all ranks
have the same work however skewed the routing is. Partial results are rounded to x's dtype, and the sum is rounded once more, so
all ranks get equal bits, but not those of one GPU.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.errors import UnsupportedTarget
from nvfp4_cute.experts.board import exchange
from nvfp4_cute.experts.exchange import agree
from nvfp4_cute.formats.block_scaled import check_is_tensor

FACTS = ("tokens", "hidden_size", "top_k", "dtype of x", "num_experts", "intermediate_size of a rank")
REFUSALS = (TypeError, ValueError, UnsupportedTarget)
FAULT = -1


def shard(
    gate_up: torch.Tensor, down: torch.Tensor, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects a rank's share of the width of experts, which is then quantized.

    Args:
        gate_up: [E, 2 I, H], gate first; I a multiple of 32 * ``ranks``.
        down: [E, H, I].
        rank: this rank.
        ranks: number of ranks.

    Returns:
        [E, 2 I / ranks, H] (concatenated from views) and [E, H, I / ranks].

    Raises:
        TypeError: weights are not tensors, or ranks are not ints.
        ValueError: I does not divide, or shapes or ``rank`` do not fit.
    """
    check_is_tensor("gate_up", gate_up)
    check_is_tensor("down", down)
    if not (isinstance(rank, int) and isinstance(ranks, int)):
        raise TypeError(f"rank={rank!r} of ranks={ranks!r}; pass two ints")
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks}; expected a rank from 0 to ranks - 1")
    if down.ndim != 3 or tuple(gate_up.shape) != (len(down), 2 * down.shape[2], down.shape[1]):
        raise ValueError(
            f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}; expected [E, 2 I, H] and [E, H, I]"
        )
    width = down.shape[-1]
    if width % (32 * ranks):
        raise ValueError(
            f"I={width} is not a multiple of 32 * {ranks} ranks: a rank's rows start 16 bytes apart"
        )
    share = width // ranks
    part = slice(rank * share, (rank + 1) * share)
    gate, up = gate_up.chunk(2, 1)
    return torch.cat([gate[:, part], up[:, part]], 1), down[:, :, part]


def add_shares(
    local: Callable[[], torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
    w2: object,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Computes the sum of all ranks' layers.

    Args:
        local: computes this rank's layer.
        x, ids, w2: see ``moe``.
        group: the ranks.

    Raises:
        What ``local`` raises; RankError on the other ranks, and on all ranks if sizes differ. Ranks do not exchange checks
        while a CUDA graph is captured, so call once before the capture.
    """
    if isinstance(x, torch.Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return _summed(local(), group)
    try:
        y = local()
        data = getattr(w2, "data", x)
        code = x.dtype.itemsize * 2 + (x.dtype == torch.bfloat16)
        facts = (len(x), x.shape[1], ids.shape[1], code, len(data), data.shape[-1])
    except REFUSALS as fault:
        if isinstance(x, torch.Tensor):
            exchange(group, x.device, FAULT)
            agree(group, x.device, dict.fromkeys(FACTS, 0), fault)
        raise
    checksum = hash(facts) & 0x7FFFFFFF
    if any(other != checksum for other, _ in exchange(group, x.device, checksum)):
        agree(group, x.device, dict(zip(FACTS, facts, strict=True)))
    return _summed(y, group)


def _summed(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = y.float()
    ranks = dist.get_world_size(group)
    if (
        is_batch_invariant() and ranks > 2
    ):  # an all-reduce may add up in an order that depends on a row's place in the buffer
        shares = [torch.empty_like(total) for _ in range(ranks)]
        dist.all_gather(shares, total.contiguous(), group=group)
        return sum(shares[1:], shares[0]).to(y.dtype)
    dist.all_reduce(total, group=group)
    return total.to(y.dtype)

"""A layer whose ranks hold shares of every expert's width: the sum of their layers, equal on all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_layers import moe, some_layer
from ranks import run_ranks

from nvfp4_cute import MoE, Parallel
from nvfp4_cute.errors import RankError
from nvfp4_cute.experts import board
from nvfp4_cute.experts.symmetric import check_ranks
from nvfp4_cute.experts.tensor_parallel import shard

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 4, 2, 64, 256, 5


def some_weights(dtype):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    gate_up, down = draw(EXPERTS, 2 * WIDTH, HIDDEN) / 8, draw(EXPERTS, HIDDEN, WIDTH) / 16
    x, bias2, shared = draw(TOKENS, HIDDEN), draw(EXPERTS, HIDDEN), draw(TOKENS, HIDDEN)
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator)
    return gate_up, down, bias2, (x, ids, torch.rand(TOKENS, TOP_K, generator=generator), shared)


def layer_of(gate_up, down, bias2, rank, ranks, **options):
    return MoE.from_experts(*shard(gate_up, down, rank, ranks), bias2=bias2, **options)


def over_ranks(rank: int, ranks: int) -> list[list[list[float]]]:
    """Returns the result, the sum of all shares in one process, and the undivided layer's result."""
    gate_up, down, bias2, arguments = some_weights(torch.bfloat16)
    group = dist.group.WORLD
    y = layer_of(gate_up, down, bias2, rank, ranks, parallel=Parallel(group, divide="tensor"))(*arguments)
    x, ids, weights, _ = arguments
    first = layer_of(gate_up, down, bias2, 0, ranks)(*arguments)
    none = torch.zeros_like(bias2)  # with a bias, the activation is a launch of its own
    rest = [layer_of(gate_up, down, none, other, ranks)(x, ids, weights) for other in range(1, ranks)]
    total = torch.stack([share.float() for share in (first, *rest)]).sum(0).to(y.dtype)
    whole = MoE.from_experts(gate_up, down, bias2=bias2)(*arguments)
    return [result.tolist() for result in (y, total, whole)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_add_up(ranks):
    found = run_ranks(over_ranks, ranks, ranks)
    for one in found:
        assert not isinstance(one, Exception), one
        y, want, whole = one
        assert y == found[0][0]
        if ranks == 2:  # with more ranks, float32 sums depend on the order
            assert y == want
        error = torch.tensor(y) - torch.tensor(whole)
        assert error.norm() / torch.tensor(whole).norm() < 0.06  # other global scales give other codes


def refused(rank: int) -> list[str]:
    """Passes other sizes, then a wrong operand, on rank 1; then exchanges numbers without shared memory."""
    layer = some_layer(TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH)
    x, ids, weights, w13, w2 = layer.arguments()
    said = []
    for arguments in (
        (x[rank:], ids[rank:], weights[rank:]),
        (x, ids, weights.double() if rank else weights),
    ):
        try:
            moe(*arguments, w13, w2, **layer.options, group=dist.group.WORLD, divide="tensor")
        except (RankError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    group = dist.new_group([0, 1])
    board.FOLDER = Path("/nowhere") if rank else board.FOLDER
    said.append(str(board.exchange(group, x.device, rank - 1, 7)))
    assert board._boards[dist.group.WORLD] is not None and board._boards[group] is None
    return said


def test_faults_are_errors_on_every_rank():
    home, other = run_ranks(refused, 2)
    assert (
        home[0] == other[0] == "RankError: tokens is [5, 4] on the ranks in turn; pass the same on every rank"
    )
    assert "RankError: rank 1 refused its operands: ValueError: weights is torch.float64" in home[1]
    assert "ValueError: weights is torch.float64" in other[1]
    assert home[2] == other[2] == "[(-1, 7), (0, 7)]"


def test_arguments():
    gate_up, down, _, (x, ids, weights, _) = some_weights(torch.bfloat16)
    with pytest.raises(ValueError, match=r"I=256 is not a multiple of 32 \* 3 ranks"):
        shard(gate_up, down, 0, 3)
    layer = some_layer(TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH)
    with pytest.raises(ValueError, match="also pass the group"):
        moe(*layer.arguments(), **layer.options, divide="tensor")
    with pytest.raises(ValueError, match="divide"):
        moe(*layer.arguments(), **layer.options, divide="rows")
    with pytest.raises(TypeError, match="group is a str; pass a torch.distributed.ProcessGroup"):
        moe(*layer.arguments(), **layer.options, group="ranks")
    with pytest.raises(ValueError, match="rank=2 of ranks=2; expected a rank from 0"):
        shard(gate_up, down, 2, 2)
    with pytest.raises(TypeError, match="rank='0' of ranks=2; pass two ints"):
        shard(gate_up, down, "0", 2)
    with pytest.raises(ValueError, match=r"expected \[E, 2 I, H\] and \[E, H, I\]"):
        shard(down, gate_up, 0, 2)
    with pytest.raises(TypeError, match="group is None"):
        check_ranks(None)

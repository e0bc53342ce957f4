"""moe over the ranks of a group: the bits of one process with all experts; a fault raises on every rank."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks_on_gpus
import torch
import torch.distributed as dist
from expert_layers import moe, some_layer
from oracle import assert_bitwise_equal
from ranks import TIMEOUT_SECONDS, differences, part_of, run_ranks

from nvfp4_cute import MoE, Parallel
from nvfp4_cute.errors import RankError, UnsupportedProblem
from nvfp4_cute.experts import board
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.launch_table import MAX_PEERS


def random_layers(rank: int, seeds: range, sizes: tuple[int, ...]) -> list[str]:
    """Returns the differences found, over groups of several sizes of the same processes."""
    groups = [dist.new_group(range(size)) for size in sizes]
    found = []
    for seed in seeds:
        group, size = groups[seed % len(sizes)], sizes[seed % len(sizes)]
        if rank < size:
            found.append(differences(seed, group, (None, 40)[seed // len(sizes) % 2]))
    return [text for text in found if text]


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 354), marks=pytest.mark.slow)], ids=str)
def test_random_layers_have_the_bits_of_one_process(seeds):
    for rank, found in enumerate(run_ranks(random_layers, 4, seeds, (1, 2, 4))):
        assert found == [], f"rank {rank}"


@pytest.mark.slow
def test_what_two_gpus_are_asked_runs_without_them():
    """Runs the script for GPUs over gloo: its warm-up, with biases, and its layers, one of them on the emulator."""
    for seed in range(12):
        ranks_on_gpus.warm_layer(seed, "cpu")
    for seeds, backend in ((range(4), "auto"), (range(1), "emulator:sm_90a")):
        for found in run_ranks(ranks_on_gpus.random_layers, 2, seeds, "cpu", backend):
            assert found["layers"] == len(seeds) and found["wrong"] == []


def test_more_ranks_than_buffers_have_peers():
    """With nine ranks the group's backend moves the rows."""
    for rank, found in enumerate(run_ranks(random_layers, MAX_PEERS + 1, range(4), (MAX_PEERS + 1,))):
        assert found == [], f"rank {rank}"


# ---- faults ----------------------------------------------------------------------------------------------------

FAULTY_SECONDS = 3.0


def refused(call) -> str:
    """Returns the type and text of a call's error."""
    try:
        call()
    except (RankError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wait_no_longer(group: dist.ProcessGroup, seconds: float) -> None:
    """Shortens this rank's timeout from now on. A group made with so short a timeout might lose a rank that is merely slow."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    if group in board._boards:
        board._boards[group]._seconds = seconds


def faults(rank: int) -> dict[str, str]:
    """Returns this rank's errors by fault. One group serves all of them except the last."""
    group, placement = dist.group.WORLD, Placement.even(4, 2)
    layer = some_layer(12, 2, 4, 64, 64)
    part = part_of(layer, placement, [7, 5], rank)
    x, ids, weights, w13, w2 = part.arguments()
    run = lambda *arguments, **options: moe(*arguments, **part.options, group=group, **options)
    narrow = part_of(some_layer(12, 2, 4, 32, 64), placement, [7, 5], rank)
    found = {
        "sizes": refused(lambda: run(*(part if rank else narrow).arguments())),
        "operand": refused(lambda: run(x, ids, weights.double() if rank else weights, w13, w2)),
        "no tensor": refused(lambda: run(x, ids.float() if rank else ids, weights, w13, w2)),
        "capacities": refused(lambda: run(x, ids, weights, w13, w2, capacity=8 + rank)),
        "forms": refused(lambda: run(x, ids, weights, w13, w2, capacity=8 if rank else None)),
        "rows": refused(lambda: run(x, ids, weights, w13, w2, activations="nvfp4" if rank else "16bit")),
        "experts": refused(
            lambda: run(
                x, ids, weights, w13, w2, placement=Placement(((0, 1), (2, 3)) if rank else ((2, 1), (0, 3)))
            )
        ),
    }
    want = moe(*layer.arguments(), **layer.options)[7 * rank :][: len(x)]
    assert_bitwise_equal(run(*part.arguments()), want)
    assert_bitwise_equal(run(*part.arguments(), capacity=8), want)
    nine = some_layer(9, 2, 4, 64, 64).arguments()[:3]
    found["overflow"] = refused(
        lambda: (
            run(*nine, w13, w2, capacity=8)
            if rank
            else assert_bitwise_equal(run(*part.arguments(), capacity=8), want)
        )
    )
    if not rank:
        wait_no_longer(group, FAULTY_SECONDS)
        began = time.monotonic()
        found["stop"] = refused(lambda: run(*part.arguments()))
        found["seconds"] = str(time.monotonic() - began)
    return found


def test_faults_are_errors_on_every_rank_and_leave_the_group_usable():
    home, other = run_ranks(faults, 2)
    for found in (home, other):
        assert not isinstance(found, Exception), found
        assert "RankError: hidden_size is [32, 64]" in found["sizes"]
        assert "RankError: capacity is [8, 9]" in found["capacities"]
        assert "RankError: capacity is [0, 8]" in found["forms"]
        assert "RankError: placement is" in found["experts"]
        assert "RankError: bytes of a row is" in found["rows"]
    assert "RankError: rank 1 refused its operands: ValueError: weights is torch.float64" in home["operand"]
    assert "ValueError: weights is torch.float64" in other["operand"]
    assert "RankError: rank 1 refused its operands: TypeError: dtype of ids" in home["no tensor"]
    assert "TypeError: dtype of ids" in other["no tensor"]
    assert home["overflow"] == "nothing"
    assert "ValueError: 9 tokens are more than capacity=8" in other["overflow"]
    assert "RankError: rank 0: another of 2 ranks stopped, or did not come within 3 s" in home["stop"]
    assert FAULTY_SECONDS < float(home["seconds"]) < TIMEOUT_SECONDS


def late(rank: int) -> str:
    """Returns a rank's error about another rank that is too late."""
    part = part_of(some_layer(8, 2, 4, 64, 64), Placement.even(4, 2), [4, 4], rank)
    if rank:
        time.sleep(2 * FAULTY_SECONDS)
        return ""
    wait_no_longer(dist.group.WORLD, FAULTY_SECONDS)
    return refused(lambda: moe(*part.arguments(), **part.options, group=dist.group.WORLD))


@pytest.mark.slow
def test_a_rank_that_comes_too_late():
    began = time.monotonic()
    home, _ = run_ranks(late, 2)
    assert "RankError: rank 0: another of 2 ranks stopped, or did not come within 3 s" in home
    assert time.monotonic() - began > FAULTY_SECONDS


def test_arguments_that_need_a_group():
    layer = some_layer(4, 2, 3, 64, 128)
    with pytest.raises(ValueError, match="also pass the group"):
        moe(*layer.arguments(), **layer.options, capacity=4)


# ---- placement -------------------------------------------------------------------------------------------------


def test_even_placement():
    assert Placement.even(5, 3).experts == ((0, 1), (2, 3), (4,))
    assert Placement.even(1, 2).experts == ((0,), ())


def test_tokens_use_their_own_rank_or_the_copies_in_turn():
    placement = Placement(((0, 1), (0, 2), (0, 1)))
    to_rank, to_local = placement.tables(1, torch.device("cpu"))
    assert to_rank.tolist() == [[1, 1], [2, 0], [1, 1]]
    assert to_local.tolist() == [[0, 1, -1], [0, -1, 1], [0, 1, -1]]
    assert (placement.num_ranks, placement.num_experts, placement.ranks_of(1)) == (3, 3, (0, 2))


@pytest.mark.parametrize(
    "experts, error, text",
    [
        (((0,), (2,)), ValueError, "every id from 0"),
        (((0, 0), (1,)), ValueError, "rank 0 holds an expert twice"),
        (((), ()), ValueError, "every id"),
        (((0,),) * 33, UnsupportedProblem, "33 ranks; at most 32"),
    ],
)
def test_refused_placements(experts, error, text):
    with pytest.raises(error, match=text):
        Placement(experts)


# ---- the module ------------------------------------------------------------------------------------------------


def module_result(rank: int) -> tuple[list, list]:
    """Returns the values of a layer over both ranks, and of the same layer on one."""
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(4, 2 * 32, 64, generator=generator).bfloat16()
    down, bias2 = (torch.randn(4, *shape, generator=generator).bfloat16() for shape in ((64, 32), (64,)))
    x, held = torch.randn(6, 64, generator=generator).bfloat16(), slice(2 * rank, 2 * rank + 2)
    ids = torch.randint(0, 4, (6, 2), generator=generator)
    weights = torch.rand(6, 2, generator=generator)
    layer = MoE.from_experts(gate_up, down, bias2=bias2)
    part = MoE.from_experts(gate_up[held], down[held], bias2=bias2, parallel=Parallel(dist.group.WORLD))
    mine = slice(3 * rank, 3 * rank + 3)
    return part(x[mine], ids[mine], weights[mine]).tolist(), layer(x, ids, weights)[mine].tolist()


def test_module():
    for got, want in run_ranks(module_result, 2):
        assert got == want


# ---- two GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.gpu("sm_90a")
def test_two_gpus_have_the_bits_of_one():
    """Covers 300 random layers, graphs with changing routings, and a short soak."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU here; two are needed")
    script = Path(__file__).parent.parent / "support" / "ranks_on_gpus.py"
    subprocess.run([sys.executable, script, "--soak", "20"], check=True, timeout=900)

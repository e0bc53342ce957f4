"""Layers whose ranks store into each other's buffers: bits of one process, on the emulator and without a kernel."""

import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_layers import moe, some_layer
from oracle import assert_bitwise_equal
from peers import local_peers, shared_peers
from ranks import differences, part_of, run_ranks, some_layer_of_ranks

from nvfp4_cute import ActivationFormat, Experts
from nvfp4_cute.activation import activation_of
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.errors import RankError
from nvfp4_cute.experts import parallel, push, symmetric
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.dispatch import RowLayout
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.permutation import permute
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.experts.records import LayerOfExperts
from nvfp4_cute.experts.symmetric import BufferLayout
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.launch import tuned
from nvfp4_cute.launch_table import MAX_PEERS
from nvfp4_cute.planning.arch.simt import FEW_SLOTS

ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)]


def some_rows(tokens, hidden, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, hidden, generator=generator) * 3).to(dtype)


def layout_of(ranks, capacity, top_k, hidden, dtype=torch.bfloat16, is_quantized=True):
    return BufferLayout(ranks, capacity, top_k, RowLayout(hidden, 0, dtype, is_quantized))


@pytest.mark.parametrize("ranks, capacity", [(1, 8), (MAX_PEERS + 1, 8), (2, 1 << 20)])
def test_ranks_without_such_buffers_are_known_without_a_question(ranks, capacity):
    """Covers one rank, more ranks than columns of addresses, and buffers that are too large; no other rank is asked."""
    assert symmetric._make(None, layout_of(ranks, capacity, 8, 7168), torch.device("cuda")) is None


# ---- launches on the emulator ------------------------------------------------------------------------------------


def there_and_back(peers, tokens, ids, placement, scale, backend, h, weights):
    """Runs every launch of all ranks, phase by phase; returns what each rank received, ordered, and got back."""
    results = [
        push.send(x, i, placement, mine, scale, backend)
        for x, i, mine in zip(tokens, ids, peers, strict=True)
    ]
    came = [push.receive(mine, 3, None, None, backend) for mine in peers]
    for mine, (_, order), rows in zip(peers, came, h, strict=True):
        push.return_results(rows, order, mine, backend)
    sums = [
        finalize(mine.results, places, weight, inbox=mine.inbox, backend=backend)
        for mine, places, weight in zip(peers, results, weights, strict=True)
    ]
    parts = [(*rows[:2], order.offs, order.rows, order.places, order.slots) for rows, order in came]
    return [*results, *sums, *(part for one in parts for part in one)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "shares, top_k, hidden, dtype, scale, is_quantized",
    [
        ((5, 0), 4, 96, torch.float16, torch.tensor([0.02]), True),
        ((3, 8), 8, 1056, torch.bfloat16, None, True),
        ((1, 4), 2, 544, torch.bfloat16, None, False),
        pytest.param((2, 0, 7, 8), 5, 544, torch.bfloat16, None, True, marks=pytest.mark.slow),
    ],
)
def test_kernels_have_the_bits_of_the_reference(
    shares, top_k, hidden, dtype, scale, is_quantized, arch, monkeypatch
):
    """Two consecutive calls share the buffers, and the hazard checks are on."""
    # Entries that nothing writes are equal on both sides.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    ranks = len(shares)
    placement = (
        Placement(((0, 1, 3), (0, 2), (), (1, 4, 5))) if ranks == 4 else Placement(((0, 3, 4), (1, 2, 0)))
    )
    layout = layout_of(ranks, 8, top_k, hidden, dtype, is_quantized)
    # The kernel writes scales by fours, so zeros follow the last scale of a row.
    emulated, expected = local_peers(layout, fill=0), local_peers(layout, fill=0)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tokens = [some_rows(share, hidden, dtype, seed) for share in shares]
        ids = [
            torch.randint(-1, 6, (share, top_k), generator=generator, dtype=(torch.int32, torch.int64)[seed])
            for share in shares
        ]
        weights = [torch.rand(share, top_k, generator=generator) for share in shares]
        h = [some_rows(ranks * 8 * top_k, hidden, dtype, rank) for rank in range(ranks)]
        arguments = (tokens, ids, placement, scale)
        with observe(mode=("eager", "random:1")[seed], check=True) as observer:
            got = there_and_back(emulated, *arguments, f"emulator:{arch}", h, weights)
        want = there_and_back(expected, *arguments, "reference", h, weights)
        few = ranks * 8 * top_k <= FEW_SLOTS
        assert (
            len(observer.stats) == (4 if is_quantized and few else 5 + (not is_quantized and not few)) * ranks
        )
        for one, other in zip(got, want, strict=True):
            assert_bitwise_equal(one, other)
        for one, other in zip(emulated, expected, strict=True):
            assert_bitwise_equal(one.peers[one.rank], other.peers[other.rank])


def test_a_wait_for_many_ids_is_a_clusters():
    """There are more ids than one CTA can order."""
    layout = layout_of(2, 160, 8, 64)
    peers, placement = local_peers(layout), Placement.even(6, 2)
    for mine in peers:
        ids = torch.randint(-1, 6, (150, 8), generator=torch.Generator().manual_seed(mine.rank))
        push.send(some_rows(150, 64, torch.bfloat16), ids, placement, mine, None, "reference")
    for mine in peers:
        got = permute(mine.ids, 3, inbox=mine.inbox, backend="emulator:sm_90a")
        want = permute(mine.ids, 3, backend="reference")
        assert_bitwise_equal(got.rows, want.rows)


@pytest.mark.parametrize("backend", ["reference", "emulator:sm_90a"])
def test_launches_wait_for_a_rank_that_comes_later(backend):
    layout = layout_of(2, 4, 2, 64)
    mine, other = local_peers(layout)
    x, ids = some_rows(3, 64, torch.bfloat16), torch.tensor([[0, 1], [2, 3], [0, -1]], dtype=torch.int32)
    h, placement = some_rows(16, 64, torch.bfloat16), Placement.even(4, 2)
    places = push.send(x, ids, placement, mine, None, "reference")
    later = lambda call: threading.Timer(0.3, call).start()
    began = time.monotonic()
    later(lambda: push.send(x, ids, placement, other, None, "reference"))
    _, order = push.receive(mine, 2, None, None, backend)
    assert time.monotonic() - began > 0.3
    assert order.offs.tolist() == [4, 6]  # from the tokens of both ranks
    push.return_results(h, order, mine, "reference")
    later(lambda: push.return_results(h, permute(other.ids, 2, backend="reference"), other, "reference"))
    y = finalize(mine.results, places, torch.ones(3, 2), inbox=mine.inbox, backend=backend)
    assert time.monotonic() - began > 0.6
    want = finalize(mine.results, places, torch.ones(3, 2), backend="reference")
    assert_bitwise_equal(y, want)
    mine.check()


@pytest.mark.parametrize("backend", ["reference", "emulator:sm_90a"])
def test_a_rank_that_does_not_come_is_an_error_and_nan(backend):
    layout = layout_of(2, 4, 2, 64)
    mine, other = local_peers(layout, seconds=0.2)
    x, ids = some_rows(3, 64, torch.bfloat16), torch.tensor([[0, 1], [2, 3], [0, -1]], dtype=torch.int32)
    push.send(x, ids, Placement.even(4, 2), mine, None, backend)
    mine.check()
    began = time.monotonic()
    permute(mine.ids.fill_(-1), 2, inbox=mine.inbox, backend=backend)
    y = finalize(mine.results, ids, torch.ones(3, 2), inbox=mine.inbox, backend=backend)
    assert time.monotonic() - began >= 0.2
    assert y.isnan().all()
    with pytest.raises(RankError, match="rank 0: rank 1 of 2 stopped, or did not come within 0.2 s"):
        mine.check()
    other.check()


# ---- whole layers ------------------------------------------------------------------------------------------------


def call_of(part, placement, rank, capacity, backend):
    """Returns the checked call of a rank, as ``moe`` makes it."""
    given = part.options.get
    layer = LayerOfExperts(
        Experts(part.w13, given("weight_layout", "concatenated"), given("bias13")),
        Experts(part.w2, "none", given("bias2")),
        activation_of(given("activation"), given("limit")),
        ActivationFormat(given("activations", "nvfp4"), given("input_scale"), given("hidden_scale")),
    )
    experts = LocalExperts.of(part.x, layer)
    layout = parallel.layout_of(part.x, part.ids, experts)
    ranks = parallel.Ranks(None, rank, placement, capacity)
    return parallel.Call(experts, ranks, layout, layer.w2.bias, backend), given("shared")


def pushed(seed, ranks, backend):
    """Returns results of all ranks of a random layer, and those of one process."""
    layer, placement, shares = some_layer_of_ranks(seed, ranks)
    parts = [part_of(layer, placement, shares, rank) for rank in range(ranks)]
    found = [call_of(part, placement, rank, 40, backend) for rank, part in enumerate(parts)]
    peers = local_peers(found[0][0].buffers(40))
    for _ in range(2):
        places = [
            call.send(mine, part.x, part.ids)
            for (call, _), mine, part in zip(found, peers, parts, strict=True)
        ]
        for (call, _), mine in zip(found, peers, strict=True):
            call.serve(mine)
        got = [
            call.sum(mine.results, place, part.ids, part.weights, shared, mine.inbox)
            for (call, shared), mine, place, part in zip(found, peers, places, parts, strict=True)
        ]
    return torch.cat(got), moe(*layer.arguments(), **layer.options)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=str)
def test_random_layers_have_the_bits_of_one_process(seeds):
    for seed in seeds:
        got, want = pushed(seed, (2, 4, 2, 8)[seed % 4], "reference")
        assert_bitwise_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_layers_on_the_emulator(seed):
    got, want = pushed(seed, 2, "emulator:sm_90a")
    assert_bitwise_equal(got, want)


# ---- processes ---------------------------------------------------------------------------------------------------


def over_files(rank: int, seeds: range, folder: str) -> list[str]:
    """Returns the differences where processes store into shared files, as GPUs do into each other's memory."""
    made: dict = {}

    def buffers_of(group, layout, device):
        if layout not in made:
            made[layout] = shared_peers(Path(folder), layout, rank)
        return made[layout]

    parallel.buffers_of = buffers_of
    found = [differences(seed, dist.group.WORLD, capacity) for seed in seeds for capacity in (40, None)]
    assert made
    return [text for text in found if text]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=str)
def test_processes_have_the_bits_of_one(seeds):
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(over_files, 2, seeds, folder):
            assert found == []


def overflow(rank: int, folder: str) -> list[str]:
    """Returns the errors around a rank with too many tokens, and around one that stops."""
    made: dict = {}

    def buffers_of(group, layout, device):
        if layout not in made:
            made[layout] = shared_peers(Path(folder), layout, rank)
        return made[layout]

    parallel.buffers_of = buffers_of
    layer = some_layer(12, 2, 4, 64, 64)
    part = part_of(layer, Placement.even(4, 2), [9, 3], rank)
    want = moe(*layer.arguments(), **layer.options)[9:]
    said = []
    for number in range(4):
        if number > 1 and rank:
            break
        try:
            got = moe(*part.arguments(), **part.options, group=dist.group.WORLD, capacity=8)
            said.append("right" if torch.equal(got, want) else "nan" if got.isnan().all() else "wrong")
        except (RankError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if number == 1 and not rank:
            part = part_of(layer, Placement.even(4, 2), [8, 4], rank)
            made = {layout: replace(buffers, seconds=1.0) for layout, buffers in made.items()}
    return said


def test_too_many_tokens_and_a_rank_that_stops():
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(overflow, 2, folder)
    assert second == ["right", "right"]
    assert all("ValueError: 9 tokens are more than capacity=8" in text for text in first[:2])
    assert first[2] == "nan"
    assert "RankError: rank 0: rank 1 of 2 stopped, or did not come within 1 s" in first[3]


# ---- what kernels are chosen for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weight_layout": "interleaved"}])
def test_kernels_are_chosen_for_the_rows_that_experts_have_in_the_mean(options, monkeypatch):
    """The config is that of a call with the mean rows; a rank has room for all ranks' choices, and expects its share."""
    layer = some_layer(48, 2, 4, 64, 128, **options)
    call, _ = call_of(layer, Placement.even(4, 1), 0, 48, "emulator:H100")
    rows, order = gather(layer.x, layer.ids, 4, format=NVFP4, backend="reference")
    computed = lambda **mean: call.experts.rows(
        rows, layer.ids, order, dtype=layer.x.dtype, first_expert=0, backend="emulator:H100", **mean
    )
    asked = lambda **mean: tuned.request_of(lambda: computed(**mean))
    assert asked() == asked(mean_rows=24) != asked(mean_rows=3)
    means = []
    monkeypatch.setattr(LocalExperts, "rows", lambda *_, mean_rows, **__: means.append(mean_rows))
    part = part_of(layer, placement := Placement(((0, 1, 2), (2, 3))), [24, 24], 0)
    over_ranks, _ = call_of(part, placement, 0, 24, "reference")
    over_ranks.rows(rows, layer.ids, order)
    assert means == [-(-96 // 5)]

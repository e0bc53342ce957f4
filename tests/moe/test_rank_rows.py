"""Launches around the exchange of rows between ranks: kernels give the bits of the torch versions."""

from dataclasses import fields, replace

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts import dispatch
from nvfp4_cute.experts.dispatch import Routes, RowLayout
from nvfp4_cute.experts.permutation import permute
from nvfp4_cute.experts.placement import Placement

PLACEMENTS = (
    Placement.even(6, 2),
    Placement(((0, 1, 3), (0, 2), (), (1, 4, 5))),
)
ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)]


def some_ids(tokens, top_k, seed=0, dtype=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 7, (tokens, top_k), generator=generator, dtype=dtype)


def some_rows(tokens, hidden, dtype):
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(tokens, hidden, generator=generator) * 3).to(dtype)


@pytest.fixture
def both(monkeypatch):
    """Runs every launch of ``dispatch`` on the emulator and in the reference, from equal bits, and compares the results."""
    counts = []
    run = backends.run_task

    def compared(backend, task):
        named = {f.name: getattr(task, f.name) for f in fields(task)}
        copies = {name: named[name].clone() for name in task.written if named[name] is not None}
        with observe(check=True) as observer:
            run(backend, replace(task, **copies))
        counts.append(len(observer.stats))
        run("reference", task)
        for name, copy in copies.items():
            assert_bitwise_equal(copy, named[name])

    monkeypatch.setattr(dispatch, "run", compared)
    return counts


def zeros(monkeypatch):
    """Makes results that are not written equal on both sides."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "tokens, top_k, hidden, dtype, scale",
    [
        (9, 4, 96, torch.float16, torch.tensor([0.02])),
        pytest.param(40, 8, 544, torch.bfloat16, None, marks=pytest.mark.slow),
        (5, 8, 544, torch.bfloat16, None),
    ],
)
def test_there_and_back(tokens, top_k, hidden, dtype, scale, arch, both, monkeypatch):
    zeros(monkeypatch)
    x, backend = some_rows(tokens, hidden, dtype), f"emulator:{arch}"
    for number, placement in enumerate(PLACEMENTS):
        ids = some_ids(tokens, top_k, number, (torch.int32, torch.int64)[number])
        routes = Routes.of(ids, placement, 1, backend)
        for is_quantized in (True, False):
            layout = RowLayout(hidden, top_k, dtype, is_quantized)
            count = int(routes.tokens.offs[-1])
            rows, _ = dispatch.pack(x, routes, layout, scale, count, None, backend)
            fixed, results = dispatch.pack(x, routes, layout, scale, 0, tokens + 3, backend)
            check_results(fixed, results, routes, layout)
        layout = RowLayout(hidden, top_k, dtype, True)
        rows, _ = dispatch.pack(x, routes, layout, scale, count, None, backend)
        local = layout.ids(rows).contiguous()
        (data, _, _), order = dispatch.unpack(rows, local, layout, 3, None, int((local >= 0).sum()), backend)
        h = some_rows(len(data), 1040, dtype)
        for choices in (None, int(order.offs[-1])):
            dispatch.collect(h, local, order, choices, backend)
    assert both and set(both) <= {0, 1}


def check_results(fixed, results, routes, layout):
    """Checks that the row at each expected position has the choice's id."""
    ids = layout.ids(fixed).flatten()
    is_choice = routes.ranks >= 0
    assert torch.equal(results >= 0, is_choice)
    assert torch.equal(ids[results[is_choice].long()], routes.locals[is_choice])
    assert int((ids >= 0).sum()) == int(is_choice.sum())


def test_modes(monkeypatch, both):
    zeros(monkeypatch)
    placement, x = PLACEMENTS[1], some_rows(7, 64, torch.bfloat16)
    routes = Routes.of(some_ids(7, 3), placement, 0, "emulator")
    rows, _ = dispatch.pack(x, routes, RowLayout(64, 3, x.dtype, True), None, 0, 8, "emulator")
    assert permute(routes.ranks, 4).offs.tolist() == routes.choices("emulator").offs.tolist()


def test_room_has_few_sizes():
    assert [dispatch._room(count) for count in (0, 1, 9, 16, 17, 1000)] == [0, 1, 9, 16, 18, 1024]
    assert all(count <= dispatch._room(count) <= count * 9 / 8 + 1 for count in range(5000))

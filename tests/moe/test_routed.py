"""Layers of few tokens with 16-bit rows sort nothing: bits, launches, and the bound."""

import pytest
import torch
from expert_layers import moe, naive, some_layer
from oracle import assert_bitwise_equal

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.batch_invariance import set_batch_invariant
from nvfp4_cute.experts.weights import ExpertWeights


def layer_of(tokens, top_k, experts, **options):
    """A layer with exact sums, one global scale per expert for gate and up, and ids of no local expert."""
    layer = some_layer(tokens, top_k, experts, 64, 128, foreign=True, seed=tokens, **options)
    layer.options["activations"] = "16bit"
    layer.w13 = ExpertWeights(layer.w13.data, layer.w13.scale, torch.ones(experts))
    return layer


@pytest.mark.parametrize(
    ("arch", "tokens", "top_k", "experts"),
    [("sm_90a", 1, 4, 5), ("sm_90a", 2, 2, 32), pytest.param("sm_80", 2, 2, 32, marks=pytest.mark.slow)],
)
def test_few_choices_take_three_launches(arch, tokens, top_k, experts):
    generator = torch.Generator().manual_seed(0)
    added = {"shared": torch.randn(tokens, 64, generator=generator).bfloat16(), "first_expert": 3}
    added["bias2"] = torch.randn(experts, 64, generator=generator).bfloat16()
    if tokens > 1:
        added["bias13"] = torch.randint(-2, 3, (experts, 256), generator=generator).bfloat16()
    layer = layer_of(tokens, top_k, experts, **added)
    layer.ids = layer.ids.long() if tokens > 1 else layer.ids
    with observe(check=True) as observer:
        got = moe(*layer.arguments(), **layer.options, backend=f"emulator:{arch}")
    assert len(observer.stats) == 3
    assert_bitwise_equal(got, naive(layer))
    assert_bitwise_equal(moe(*layer.arguments(), **layer.options, backend="reference"), got)


def test_a_factor_of_gate_or_up_alone():
    """The other one is 1."""
    layer = layer_of(1, 4, 5)
    layer.options["alpha13"] = None, torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25])
    got = moe(*layer.arguments(), **layer.options, backend="emulator:sm_90a")
    assert_bitwise_equal(got, moe(*layer.arguments(), **layer.options, backend="reference"))


@pytest.mark.parametrize(("tokens", "experts", "launches"), [(1, 2, 3), (2, 32, 3), (2, 31, 4)])
def test_more_choices_are_sorted(tokens, experts, launches, monkeypatch):
    """Eight experts for each choice, but for one token."""
    layer = layer_of(tokens, 2, experts)
    tasks = []
    run_task = backends.run_task
    monkeypatch.setattr(
        "nvfp4_cute.backends.run_task", lambda *given: (tasks.append(given[1]), run_task(*given))[1]
    )
    moe(*layer.arguments(), **layer.options, backend="reference")
    assert len(tasks) == launches
    tasks.clear()
    with set_batch_invariant():
        moe(*layer.arguments(), **layer.options, backend="reference")
    assert len(tasks) == 4, "one way for any number of tokens"

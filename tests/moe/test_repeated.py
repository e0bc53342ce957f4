"""Repeated layers of experts: launched as one chain, with the bits of launches one by one, and few Python calls."""

import pytest
import torch
from emulated_gpu import emulated_gpu
from oracle import assert_bitwise_equal
from python_calls import python_calls

from nvfp4_cute import Experts, MoE, moe, quantize, route
from nvfp4_cute.experts import moe as layers
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared, workspace
from nvfp4_cute.launch.prepared_chain import PreparedChain

E, H, I, K = 4, 128, 128, 2
# Python calls per repeated call of a layer. Without a chain there are 254 to 347.
MOST_PYTHON_CALLS = 66
LAYERS = [
    ("H100", "nvfp4", 3, False),
    ("H100", "16bit", 3, False),
    ("A100", "16bit", 3, False),  # its products have counters in their workspace
    pytest.param("H100", "nvfp4", 300, False, marks=pytest.mark.slow),  # choices of several CTAs
    ("H100", "nvfp4", 40, True),
    ("H100", "16bit", 3, True),
]


@pytest.fixture
def gpu(monkeypatch, request):
    """Memory that is not initialised has ones in all bits: a negative number, and a NaN."""
    allocate = workspace.allocate

    def filled(index, nbytes, counters=False):
        found = allocate(index, nbytes, counters)
        found.memory[workspace.COUNTER_BYTES if counters else 0 :].fill_(255)
        return found

    monkeypatch.setattr(workspace, "_in_use", {})
    monkeypatch.setattr(workspace, "allocate", filled)
    with torch.no_grad(), emulated_gpu(monkeypatch, targets.lookup(request.param)) as emulator:
        yield emulator


def some_layer(rows, has_bias):
    bias = {"bias13": torch.randn(E, 2 * I).bfloat16(), "bias2": torch.randn(E, H).bfloat16()}
    weights = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 8
    return MoE.from_experts(*weights, activations=rows, **(bias if has_bias else {}))


def some_call(tokens):
    logits = torch.randn(tokens, E)
    return torch.randn(tokens, H).bfloat16(), *route(logits, K, backend="reference")


def check(call, monkeypatch, given):
    """A third call, which has the bits of launches one by one, checks nothing, and makes few Python calls."""
    for _ in range(2):
        call(*some_call(len(given[0])))
    assert sum(isinstance(one, PreparedChain) for one in prepared.of_thread().values()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(layers, "chain_of_rows", lambda backend, run, with_rows, *arguments: run(*arguments))
        right = call(*given)
    monkeypatch.setattr(LocalExperts, "of", None)
    assert_bitwise_equal(call(*given), right)
    assert python_calls(call, given, monkeypatch)[0] <= MOST_PYTHON_CALLS


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gpu", "rows", "tokens", "has_bias"), LAYERS, ids=str, indirect=["gpu"])
def test_a_repeated_layer_is_one_chain(gpu, monkeypatch, rows, tokens, has_bias):
    """The second call was watched. Another layer of the same sizes is launched like it."""
    first, second = (some_layer(rows, has_bias) for _ in range(2))
    calls = iter((first, first))
    check(lambda *given: next(calls, second)(*given), monkeypatch, some_call(tokens))


@pytest.mark.parametrize("gpu", ["H100"], indirect=True)
def test_a_repeated_operation_is_one_chain(gpu, monkeypatch):
    w13, w2 = quantize(torch.randn(E, 2 * I, H) / 8), quantize(torch.randn(E, H, I) / 8)
    alpha = torch.rand(E)
    given = some_call(3)
    check(lambda *call: moe(*call, w13, Experts(w2, alpha=alpha), shared=call[0]), monkeypatch, given)

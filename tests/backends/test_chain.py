"""Calls in a row that are launched together: their results, and what sends them the long way again."""

import pytest
import torch
from emulated_gpu import emulated_gpu
from oracle import assert_bitwise_equal

from nvfp4_cute import QuantizedLinear, quantize
from nvfp4_cute.backends import calls
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared, prepared_chain, workspace
from nvfp4_cute.launch.prepared_chain import PreparedChain
from nvfp4_cute.nn import products
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.ops.parts import gemm

K, N = 64, 128
WAYS = [{"input_scale": 0.01}, {"input_scale": None}, {"activations": "16bit"}]


@pytest.fixture
def h100(monkeypatch):
    with torch.no_grad(), emulated_gpu(monkeypatch, targets.lookup("H100")) as emulator:
        yield emulator


def some_layer(options, n=N, k=K):
    return QuantizedLinear.from_linear(torch.nn.Linear(k, n).bfloat16(), **options)


def some_mlp(options):
    gate, up, down = (some_layer(options, *sizes) for sizes in ((N, K), (N, K), (K, N)))
    gate.bias = up.bias = None
    return GatedMLP(gate, up, down, torch.nn.functional.silu, "silu")


def rows(count=3):
    return torch.randn(count, K).bfloat16()


def chains():
    return [call for call in prepared._local.calls.values() if isinstance(call, PreparedChain)]


def refuse(*arguments, **options):
    raise AssertionError("the long way")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("make", [some_layer, some_mlp])
def test_the_third_call_is_one(h100, monkeypatch, options, make):
    """The second one was watched. Of another layer of the same sizes, too, on other rows; with the bits of calls one by one."""
    layers = [make(options) for _ in range(2)]
    given = [rows() for _ in layers]
    for _ in range(2):
        layers[0](rows())
    assert len(chains()) == 1 and calls._watched.made is None
    with monkeypatch.context() as patch:
        patch.setattr(products, "chain", lambda backend, settings, inputs, run, *arguments: run(*arguments))
        expected = [layer(x) for layer, x in zip(layers, given, strict=True)]
    for name in ("quantize", "gemm", "dual_gemm", "weight_only_linear"):
        monkeypatch.setattr(products, name, refuse)
    for layer, x, right in zip(layers, given, expected, strict=True):
        assert_bitwise_equal(layer(x), right)
    with pytest.raises(AssertionError, match="the long way"):
        layers[0](rows(5))


@pytest.mark.parametrize("kept", [0, prepared_chain.MAX_KEPT_BYTES])
def test_what_lies_between_is_memory_of_the_stream(h100, monkeypatch, kept):
    """Calls allocate their result alone; what is large is given back."""
    monkeypatch.setattr(workspace, "_in_use", {})
    monkeypatch.setattr(prepared_chain, "MAX_KEPT_BYTES", kept)
    layer = some_layer({"input_scale": 0.01})
    for _ in range(2):
        layer(rows())
    workspace._in_use.clear()
    x = rows()
    right = layer(x)
    (held,) = workspace._in_use.values() if kept else [None]
    assert len(workspace._in_use) == bool(kept)
    for _ in range(2):
        assert_bitwise_equal(layer(x), right)
    assert [*workspace._in_use.values()] == ([held] if kept else [])


@pytest.mark.slow
def test_scales_that_are_one_tensor(h100):
    """Layers that share a global scale, then one that does not: its own is read."""
    mlps = [some_mlp({"activations": "16bit"}) for _ in range(2)]
    for name in ("up_proj", "down_proj"):
        mlps[0].get_submodule(name).weight_global_scale = mlps[0].gate_proj.weight_global_scale
    x = rows()
    for mlp in (*mlps, *mlps, *mlps):
        got = mlp(x)
        parts = [
            getattr(mlp, f"{name}_proj").quantized_weight.dequantize() for name in ("gate", "up", "down")
        ]
        h = torch.nn.functional.silu(x.float() @ parts[0].T) * (x.float() @ parts[1].T)
        exact = h @ parts[2].T + mlp.down_proj.bias
        assert (got - exact).norm() < 0.02 * exact.norm()


def test_rows_that_are_not_aligned(h100):
    """Their addresses are looked at in a chain, too."""
    layer = some_layer({"activations": "16bit"})
    for _ in range(3):
        layer(rows())
    flat = torch.randn(3 * K + 1).bfloat16()
    x = flat[1:].view(3, K)
    assert_bitwise_equal(layer(x), layer(x.clone()))


@pytest.mark.slow
def test_what_is_not_kept(h100):
    """A chain with a product of torch's, one whose result is no call's, and one that an error ended."""
    w, x = quantize(torch.randn(N, K).bfloat16()), rows()

    def run(x, end):
        q = quantize(x)
        y = gemm(q.data, w.data, q.scale, w.scale)
        return {"torch": lambda: y + 1, "view": lambda: y[:1], "error": lambda: 1 // 0, "ours": lambda: y}[
            end
        ]()

    for end in ("torch", "view", "error", "ours"):
        for _ in range(3):
            give = lambda end=end: calls.chain("auto", ("test", end), [x, w.data, w.scale], run, x, end)
            if end == "error":
                with pytest.raises(ZeroDivisionError):
                    give()
            else:
                give()
        assert len(chains()) == (end == "ours") and calls._watched.made is None


def test_what_it_reads_is_told(h100):
    """A tensor that a call reads and the chain was not given could be another one the next time: it is not kept."""
    w, x = quantize(torch.randn(N, K).bfloat16()), rows()

    def run():
        q = quantize(x)
        return gemm(q.data, w.data, q.scale, w.scale)

    for _ in range(3):
        calls.chain("auto", ("test",), [x], run)
    assert not chains()

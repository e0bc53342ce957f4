"""Consecutive calls that are launched together: their results, and what makes them run the checks again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_gpu import emulated_gpu
from flat_parts import gemm
from oracle import assert_bitwise_equal

from nvfp4_cute import QuantizedLinear, quantize
from nvfp4_cute.backends import calls
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared, prepared_chain, workspace
from nvfp4_cute.launch.prepared import Place
from nvfp4_cute.launch.prepared_chain import Made, PreparedChain
from nvfp4_cute.launch_table import Header
from nvfp4_cute.nn import products
from nvfp4_cute.nn.gated_mlp import GatedMLP

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
    """The second call was observed.

    The third one may be of another layer with the same sizes and other rows, and returns the bits of single calls.
    """
    layers = [make(options) for _ in range(2)]
    given = [rows() for _ in layers]
    for _ in range(2):
        layers[0](rows())
    assert len(chains()) == 1 and calls._watched.made is None
    with monkeypatch.context() as patch:
        patch.setattr(products, "chain", lambda backend, run, *arguments: run(*arguments))
        expected = [layer(x) for layer, x in zip(layers, given, strict=True)]
    for name in ("quantize", "gemm", "dual_gemm"):
        monkeypatch.setattr(products, name, refuse)
    for layer, x, right in zip(layers, given, expected, strict=True):
        assert_bitwise_equal(layer(x), right)
    with pytest.raises(AssertionError, match="the long way"):
        layers[0](rows(5))


@pytest.mark.parametrize("kept", [0, prepared_chain.MAX_KEPT_BYTES])
def test_what_lies_between_is_memory_of_the_stream(h100, monkeypatch, kept):
    """Calls allocate only their result; large buffers are returned."""
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
    """Layers that share a global scale, then one with a separate scale, which is used."""
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
    """A chain also checks the addresses of rows."""
    layer = some_layer({"activations": "16bit"})
    for _ in range(3):
        layer(rows())
    flat = torch.randn(3 * K + 1).bfloat16()
    x = flat[1:].view(3, K)
    assert_bitwise_equal(layer(x), layer(x.clone()))


@pytest.mark.slow
def test_what_is_not_kept(h100):
    """Chains with a torch product, with a result that comes from no call, and with an error are not kept."""
    w, x = quantize(torch.randn(N, K).bfloat16()), rows()

    def run(x, data, scale, end):
        q = quantize(x)
        y = gemm(q.data, data, q.scale, scale)
        return {"torch": lambda: y + 1, "view": lambda: y[:1], "error": lambda: 1 // 0, "ours": lambda: y}[
            end
        ]()

    for end in ("torch", "view", "error", "ours"):
        for _ in range(3):
            give = lambda end=end: calls.chain("auto", run, x, w.data, w.scale, end)
            if end == "error":
                with pytest.raises(ZeroDivisionError):
                    give()
            else:
                give()
        assert len(chains()) == (end == "ours") and calls._watched.made is None


def test_what_it_reads_is_told(h100):
    """If a call reads a tensor that the chain was not given, another call could read a different one, so the chain is not kept."""
    w, x = quantize(torch.randn(N, K).bfloat16()), rows()

    def run(x):
        q = quantize(x)
        return gemm(q.data, w.data, q.scale, w.scale)

    for _ in range(3):
        calls.chain("auto", run, x)
    assert not chains()


def stub_call(seen, has_counters, nbytes):
    """A prepared call that reads one tensor, writes one, and records the launch table."""
    table = np.zeros(32, np.int64)
    function = lambda table: seen.append(table.copy())
    places = [Place(20, 0, 0), Place(21, 1, 0)]
    return SimpleNamespace(table=table, function=function, places=places, low_bits=[0, 0], workspace_bytes=nbytes,
                           has_counters=has_counters)  # fmt: skip


def test_counters_lie_apart_from_what_calls_write_to(monkeypatch):
    """Counters are 0 before each launch, and calls do not write to their memory."""
    seen = []
    monkeypatch.setattr(workspace, "_in_use", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(prepared_chain, "Launcher", lambda function, table: lambda stream: function(table))
    x, h, y = torch.ones(3, 64).unbind()
    calls = stub_call(seen, True, 256), stub_call(seen, False, 512)
    found = PreparedChain.of([x], [Made(calls[0], [x], [h]), Made(calls[1], [h], [y])], y)
    (y,) = found.try_launch([x], [])
    (counted,) = (held for key, held in workspace._in_use.items() if key[-1])
    (between,) = (held for key, held in workspace._in_use.items() if not key[-1])
    first, second = seen
    assert first[Header.COUNTERS] == counted.counters and not second[Header.COUNTERS]
    assert len(counted.memory) == workspace.COUNTER_BYTES and not counted.memory.any()
    assert list(first[20:22]) == [x.data_ptr(), between.address] and list(second[20:22]) == [
        between.address,
        y.data_ptr(),
    ]
    assert first[Header.WORKSPACE] == second[Header.WORKSPACE] == between.address + 256
    assert between.nbytes == 256 + 512


def test_calls_that_write_to_one_tensor():
    """The tensor keeps its place, with room for the largest part. A call that writes to an input of the chain is not kept."""
    x, h, y = torch.ones(3, 64).unbind()
    calls = [stub_call([], False, 0) for _ in range(3)]
    for call in calls:
        call.function = None
    made = [Made(calls[0], [x], [h[:8]]), Made(calls[1], [x], [h]), Made(calls[2], [h], [y])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_chain, "Launcher", lambda function, table: None)
        found = PreparedChain.of([x], made, y)
        assert found._nbytes == 256 and PreparedChain.of([x, h], made, y) is None

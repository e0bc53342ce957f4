"""Layers in graphs with a dynamic number of rows: one graph for all of them."""

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import (
    INT8,
    MoE,
    PersistentMLP,
    QuantizedLinear,
    UnsupportedProblem,
    dequantize,
    int4_format,
    quantize,
)
from nvfp4_cute.nn.embedding import QuantizedEmbedding
from nvfp4_cute.nn.experts import ModelExperts

K, N = 96, 40
WAYS = [{}, {"input_scale": 0.01}, {"input_scale": None}, {"activations": "16bit"}]


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.no_grad():
        yield


def layer_of(options):
    return QuantizedLinear.from_linear(torch.nn.Linear(K, N).bfloat16(), **options)


def rows(count):
    return torch.randn(count, K).bfloat16()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_one_graph_for_any_number_of_rows(options):
    """Also covers more than 128 rows, where blocked scales get a second row of atoms."""
    layer = layer_of(options)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 127, 128, 129, 300, 2):
        x = rows(count)
        assert_bitwise_equal(compiled(x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_exported_for_any_number_of_rows(options):
    layer = layer_of(options)
    batch = torch.export.Dim("batch", min=2, max=1000)
    exported = torch.export.export(layer, (rows(20),), dynamic_shapes=({0: batch},)).module()
    for count in (2, 128, 129, 1000):
        x = rows(count)
        assert_bitwise_equal(exported(x), layer(x))


def test_a_draft_of_an_export():
    """A draft export runs the op while it traces."""
    layer, x = QuantizedLinear.from_linear(torch.nn.Linear(K, N).bfloat16(), input_scale=0.01), rows(3)
    assert_bitwise_equal(torch.export.draft_export(layer, (x,)).module()(x), layer(x))


@pytest.mark.parametrize("layer", ["experts", "int4 experts", "table"])
def test_other_layers_are_exported_for_any_number_of_rows(layer):
    if layer == "table":
        module, inputs = QuantizedEmbedding(quantize(torch.randn(9, 64))), lambda n: (torch.arange(n) % 9,)
    else:
        weights = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
        if layer == "experts":
            module = ModelExperts(MoE.from_experts(*weights, format=INT8, activations="int8"))
        else:
            module = ModelExperts(MoE.from_experts(*weights, format=int4_format()))
        inputs = lambda n: (torch.randn(n, 128).bfloat16(), torch.arange(n)[:, None] % 2, torch.rand(n, 1))
    given = inputs(20)
    batch = torch.export.Dim("batch", min=2, max=1000)
    shapes = tuple({0: batch} for _ in given)
    exported = torch.export.export(module, given, dynamic_shapes=shapes).module()
    for count in (2, 129):
        given = inputs(count)
        assert_bitwise_equal(exported(*given), module(*given))


@pytest.mark.parametrize("options", [{}, {"activations": "16bit"}], ids=str)
def test_rows_that_are_not_aligned(options):
    """Views that start at an odd element, or whose rows are an odd number of elements apart, work eagerly and in a graph."""
    layer, x = layer_of(options), rows(7)
    flat = torch.zeros(7 * K + 1).bfloat16()
    apart = torch.zeros(7, K + 1).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for view in (flat[1:].view(7, K), apart[:, 1:], torch.zeros(K, 7).bfloat16().T):
        view.copy_(x)
        assert_bitwise_equal(layer(view), layer(x))
        assert_bitwise_equal(compiled(view), layer(x))


def test_a_chain_in_a_graph():
    """The graph serves numbers of rows with which it was never called."""
    weights = [quantize(torch.randn(64, 64) / 8, global_scale="auto") for _ in range(3)]
    mlp = PersistentMLP(weights, [0.002] * 4)

    def function(x):
        return mlp(quantize(x, global_scale=0.002)).dequantize()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 150, 40):
        x = torch.randn(count, 64).bfloat16()
        assert_bitwise_equal(compiled(x), dequantize(mlp(quantize(x, global_scale=0.002))))


def test_gradients_are_refused():
    compiled = torch.compile(layer_of({}), backend="aot_eager")
    with torch.enable_grad(), pytest.raises(UnsupportedProblem, match="no backward pass"):
        compiled(rows(3).requires_grad_())

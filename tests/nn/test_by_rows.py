"""Layers that choose 4-bit or 16-bit activations by the number of rows of each call."""

import pytest
import torch

from nvfp4_cute import route
from nvfp4_cute.compile.cache import planning
from nvfp4_cute.experts.weights import ExpertWeights, product_factors
from nvfp4_cute.nn import by_rows
from nvfp4_cute.nn.by_rows import ExpertsByRows, LinearByRows, experts_by_rows
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.moe import MoE


@pytest.fixture
def few_in_16_bits(monkeypatch):
    """Keeps 16 bits for up to four rows, also on the CPU."""
    few = lambda most: lambda rows, *_: "16bit" if rows <= most else "nvfp4"
    monkeypatch.setattr(by_rows, "_has_choice", lambda *_: True)
    monkeypatch.setattr(by_rows, "faster_mode", few(4))
    monkeypatch.setattr(by_rows, "faster_mode_of_experts", few(8))


def linear(backend="auto"):
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(
        torch.nn.Linear(64, 48).bfloat16(), activations="nvfp4", input_scale=0.002, backend=backend
    )


def exact(layer):
    return QuantizedLinear.from_quantized(layer.quantized_weight, layer.bias, activations="16bit")


@pytest.mark.parametrize("rows", [1, 4, 5, 9])
def test_a_linear_layer_takes_the_way_of_its_rows(few_in_16_bits, rows):
    quantizing = linear()
    layer, x = by_rows.by_rows(quantizing), torch.randn(rows, 64).bfloat16()
    assert isinstance(layer, LinearByRows)
    expected = exact(quantizing)(x) if rows <= 4 else quantizing(x)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x[None]), expected[None])


def test_one_traced_graph_serves_all_rows(few_in_16_bits):
    layer = by_rows.by_rows(linear())
    compiled = torch.compile(layer, dynamic=True, backend="eager", fullgraph=True)
    for rows in (3, 5, 12):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(compiled(x), layer(x))


def test_both_ways_have_one_copy_of_the_weights(few_in_16_bits):
    layer = by_rows.by_rows(linear())
    for name in ("packed_weight", "weight_scale"):
        assert getattr(layer.exact, name).data_ptr() == getattr(layer.quantizing, name).data_ptr()


@pytest.mark.parametrize("tokens", [2, 6])
def test_experts_take_the_way_of_their_tokens(few_in_16_bits, tokens):
    g = torch.Generator().manual_seed(1)
    w13, w2 = (
        ExpertWeights.quantize(torch.randn(4, *size, generator=g) / 8) for size in ((256, 64), (64, 128))
    )
    scales = {"input_scale": torch.tensor([0.002]), "hidden_scale": torch.full((4,), 0.01)}
    quantizing = MoE.from_quantized(w13, w2, **scales)
    factors = torch.stack(product_factors(w13, None, 4)), product_factors(w2, None, 4)[0]
    layer = experts_by_rows(quantizing, factors)
    assert isinstance(layer, ExpertsByRows)
    assert layer.exact.w13.data_ptr() == quantizing.w13.data_ptr()
    x = torch.randn(tokens, 64, generator=g).bfloat16()
    choice = route(torch.randn(tokens, 4, generator=g), 2)
    expected = MoE.from_quantized(w13, w2, activations="16bit") if tokens <= 4 else quantizing
    assert torch.equal(layer(x, *choice), expected(x, *choice))


def test_the_cpu_and_fp4_tensor_cores_have_no_choice():
    assert isinstance(by_rows.by_rows(linear()), QuantizedLinear)
    assert isinstance(by_rows.by_rows(linear("emulator:B200")), QuantizedLinear)
    assert isinstance(by_rows.by_rows(linear("emulator:H200")), LinearByRows)


def test_on_an_h200_few_rows_are_not_quantized():
    whole = QuantizedLinear(4096, 14336, bias=False, input_scale=0.002, backend="emulator:H200")
    layer, names = by_rows.by_rows(whole), {}
    for rows in (1, 512):
        with planning() as asked:
            layer(torch.zeros(rows, 4096).bfloat16())
        names[rows] = [key.to_name() for key in asked]
    assert len(names[1]) == 1 and names[1][0].startswith("nvfp4_w4a16_sm_90a_m8")
    assert len(names[512]) == 2 and names[512][0].startswith("nvfp4_quantize")


def test_on_an_h200_few_tokens_of_experts_are_not_quantized():
    scales = {"input_scale": 0.002, "hidden_scale": 0.01, "backend": "emulator:H200"}
    layer = experts_by_rows(MoE(8, 512, 256, **scales), (torch.ones(2, 8), torch.ones(8)))
    modes = {rows: by_rows.faster_mode_of_experts(rows, layer.quantizing) for rows in (8, 65536)}
    assert modes == {8: "16bit", 65536: "nvfp4"}

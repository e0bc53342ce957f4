"""Cached results follow their tensors: written in place, through ``.data``, replaced, or swapped for a call."""

import copy

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import MoE, NVFP4Tensor, PersistentMLP, QuantizedLinear, quantize, route
from nvfp4_cute.nn.fused import fuse
from nvfp4_cute.nn.seen import Seen

K = 64
NAMES = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in NAMES:
            layer = torch.nn.Linear(K, 128).bfloat16()
            setattr(self, name, QuantizedLinear.from_linear(layer, input_scale=0.01))

    def forward(self, x):
        return torch.cat([getattr(self, name)(x) for name in NAMES], -1)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = torch.nn.Linear(K, K, False).bfloat16()
            setattr(self, name, QuantizedLinear.from_linear(layer, input_scale=0.01))
        self.act_fn = torch.nn.functional.silu

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def set_scale(name, factor):
    def change(layer):
        getattr(layer, name).mul_(factor)

    return change


def set_bias(layer):
    layer.bias = torch.nn.Parameter(torch.ones_like(layer.bias), requires_grad=False)


def set_bias_data(layer):
    layer.bias.data = torch.ones_like(layer.bias)


CHANGES = {
    "global scale": set_scale("weight_global_scale", 2),
    "input scale": set_scale("input_global_scale", 0.3),
    "bias": lambda layer: layer.bias.add_(1),
    "data of the bias": lambda layer: layer.bias.data.fill_(1),
    "other data": set_bias_data,
    "another bias": set_bias,
    "codes": lambda layer: layer.packed_weight.bitwise_xor_(0x88),
}


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_layers_that_are_one_product(change, again):
    model, x = Attention(), torch.randn(3, K).bfloat16()
    ours = copy.deepcopy(model)
    assert fuse(ours).shared
    ours(x)
    ours = again(ours)
    for one in (model, ours):
        change(one.k_proj)
    for _ in range(2):
        assert_bitwise_equal(ours(x), model(x))


def test_layers_that_are_one_product_for_other_tensors():
    """The merged layers use the swapped tensors for that call only."""
    model, x = Attention(), torch.randn(3, K).bfloat16()
    ours = copy.deepcopy(model)
    fuse(ours)
    plain = ours(x)
    for number in range(3):
        other = {"k_proj.bias": torch.full((128,), float(number)).bfloat16()}
        got, expected = (torch.func.functional_call(one, other, (x,)) for one in (ours, model))
        assert_bitwise_equal(got, expected)
        assert other["k_proj.bias"].eq(number).all()
    assert_bitwise_equal(ours(x), plain)


def test_a_bias_that_is_computed_in_every_call_is_left_alone():
    model = Attention()
    torch.nn.utils.parametrize.register_parametrization(model.k_proj, "bias", torch.nn.Identity())
    assert "computed anew" in fuse(model).left[""]


def test_biases_of_other_dtypes_are_left_alone():
    model = Attention()
    model.k_proj.bias = torch.nn.Parameter(torch.randn(128), requires_grad=False)
    assert "dtypes" in fuse(model).left[""]


def test_a_gated_mlp():
    """Where input scales of gate and up differ, two launches give the bits of the layers."""
    model, x = torch.nn.Sequential(MLP()), torch.randn(3, K).bfloat16()
    ours = copy.deepcopy(model)
    assert fuse(ours).mlps and ours[0].is_fused
    for one in (model, ours):
        one[0].up_proj.input_global_scale.mul_(50)
    assert_bitwise_equal(ours(x), model(x))
    assert not ours[0].is_fused


@pytest.mark.parametrize("swap", [False, True])
def test_factors_of_experts(swap):
    layer = MoE.from_experts(torch.randn(4, 256, K) / 8, torch.randn(4, K, 128) / 8)
    x, (ids, weights) = torch.randn(3, K).bfloat16(), route(torch.randn(3, 4), 2)
    factors = layer.alpha13 * torch.tensor([[1.0], [2.0]])
    other = MoE(4, K, 128)
    other.load_state_dict({**layer.state_dict(), "alpha13": factors})
    expected, before = other(x, ids, weights), layer(x, ids, weights)
    if swap:
        got = torch.func.functional_call(layer, {"alpha13": factors}, (x, ids, weights))
        assert_bitwise_equal(layer(x, ids, weights), before)
    else:
        layer.alpha13[1].mul_(2)
        got = layer(x, ids, weights)
    assert_bitwise_equal(got, expected)


def test_scales_of_a_chain():
    weights = [quantize(torch.randn(128, 128) / 16, global_scale="auto") for _ in range(3)]
    mlp, other = (PersistentMLP(weights, [scale] * 4) for scale in (0.002, 0.004))
    for name in ("input_global_scale", "out_global_scale"):
        getattr(mlp, name).fill_(0.004)
    x = torch.randn(3, 128)
    got, expected = (one(quantize(x, global_scale=one.input_global_scale)) for one in (mlp, other))
    assert isinstance(got, NVFP4Tensor)
    assert_bitwise_equal(got.dequantize(), expected.dequantize())
    assert_bitwise_equal(mlp.alpha, other.alpha)


def test_nothing_seen_is_not_current():
    place = {"x": torch.zeros(1)}
    seen = Seen([(place, "x")])
    assert seen.is_current() and not Seen().is_current() and not copy.deepcopy(seen).is_current()
    place["x"] += 1
    assert not seen.is_current()

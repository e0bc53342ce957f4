"""replace_linears: replaced layers, layers that stay with reasons, and modules that read weights."""

import copy

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.replace import replace_linears


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 64)
        self.first, self.odd = torch.nn.Linear(64, 64), torch.nn.Linear(24, 8)
        self.lm_head = torch.nn.Linear(64, 32, bias=False)
        self.tied = torch.nn.Linear(64, 32, bias=False)
        self.tied.weight = self.embed.weight


def test_what_stays_and_why():
    model = Model().bfloat16()
    done = replace_linears(model)
    assert done.layers == ["first"] and isinstance(model.first, QuantizedLinear)
    assert done.left == {
        "odd": "in_features=24 is not a multiple of 32",
        "lm_head": "by the pattern lm_head",
        "tied": "its weight is also embed.weight",
    }
    assert replace_linears(model).layers == [], "what is replaced is no linear layer any more"


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def patched():
    layer = torch.nn.Linear(64, 32)
    layer.forward = lambda x: x
    return layer


def hooked(register):
    layer = torch.nn.Linear(64, 32)
    getattr(layer, register)(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Scaled(64, 32), "this Scaled has a forward of its own"),
        (patched, "this Linear has a forward of its own"),
        (lambda: hooked("register_forward_hook"), "it has forward hooks"),
        (lambda: hooked("register_forward_pre_hook"), "it has forward hooks"),
        (lambda: weight_norm(torch.nn.Linear(64, 32)), "its weight is parametrized"),
    ],
)
def test_layers_that_compute_more_than_weight_and_bias_stay(make, reason):
    model = torch.nn.Sequential(make(), torch.nn.Linear(32, 32))
    done = replace_linears(model)
    assert done.layers == ["1"] and done.left["0"].startswith(reason)


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_attention_and_the_fast_path(activations):
    """An encoder calls its replaced layers and does not multiply by their dequantized weights."""
    encoder = (
        torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2, enable_nested_tensor=False
        )
        .bfloat16()
        .eval()
    )
    before, calls = copy.deepcopy(encoder), []
    done = replace_linears(encoder, activations=activations)
    assert (
        len(done.layers) == 4
        and len(done.left) == 2
        and "MultiheadAttention" in done.left["layers.0.self_attn.out_proj"]
    )
    for name in done.layers:
        encoder.get_submodule(name).register_forward_hook(lambda m, a, y: calls.append(m))
    x = torch.randn(2, 5, 64).bfloat16()
    y, expected = encoder(x), before(x)
    assert len(calls) == 4 and 0 < relative(y, expected) < 0.2


def test_calibrated_numbers_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval()
    with pytest.raises(KeyError, match="no number for 1"):
        replace_linears(copy.deepcopy(model), input_scale={"0": 0.002})
    replace_linears(model, input_scale={"0": 0.002, "1": 0.001})
    assert [round(float(m.input_global_scale), 4) for m in model] == [0.002, 0.001] and not model[0].training
    with pytest.raises(TypeError, match="from_linear"):
        replace_linears(torch.nn.Linear(64, 64))

"""QuantizedLinear inside models: dtypes, moves, foreign state dicts, and modules that read its weights."""

import copy
import io
import json

import pytest
import torch

from nvfp4_cute import PersistentMLP, QuantizedLinear, dequantize, quantize
from nvfp4_cute.formats.block_format import INT8, NVFP4, FP8_128x128, int4_format

K, N = 128, 64
WAYS = [{}, {"activations": "16bit"}, {"pre_decode": True}]


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def linear(dtype=torch.bfloat16):
    return torch.nn.Linear(K, N).to(dtype)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_dtypes_are_those_of_a_linear_layer(options):
    """Covers float32, 16 bits, and autocast, which leaves float64 alone."""
    x = torch.randn(5, K)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain, layer = linear(dtype), None
        layer = QuantizedLinear.from_linear(plain, **options)
        y, expected = layer(x.to(dtype)), plain(x.to(dtype))
        assert y.dtype == expected.dtype and layer.bias.dtype == plain.bias.dtype == layer.weight.dtype
        assert relative(y, expected) < 0.2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = linear(torch.float32)
        layer = QuantizedLinear.from_linear(plain, **options)
        assert layer(x).dtype == plain(x).dtype == torch.bfloat16


LAYERS = {
    "nvfp4": QuantizedLinear.from_quantized,
    "nvfp4, 16bit": lambda w, bias, **how: QuantizedLinear.from_quantized(
        w, bias, activations="16bit", **how
    ),
    "fp8": QuantizedLinear.from_quantized,
    "fp8, 16bit": lambda w, bias, **how: QuantizedLinear.from_quantized(w, bias, activations="16bit", **how),
    "int8": QuantizedLinear.from_quantized,
    "int4": QuantizedLinear.from_quantized,
}
FORMATS = {"fp8": FP8_128x128, "int8": INT8, "int4": int4_format()}


@pytest.mark.parametrize("name", LAYERS)
def test_biases_that_no_kernel_adds_as_they_are(name):
    """float64 biases are added as float32, and expanded ones by their values."""
    make, x = LAYERS[name], torch.randn(5, K).bfloat16()
    weight = quantize(torch.randn(N, K), format=FORMATS.get(name.split(",")[0], NVFP4))
    bias = torch.randn(N)
    expected = make(weight, bias, dtype=torch.float32)(x)
    assert not torch.equal(expected, make(weight, None)(x))
    layer = make(weight, bias.double(), dtype=torch.float64)
    assert layer.bias.dtype == torch.float64 and torch.equal(layer(x), expected)
    assert torch.equal(make(weight, bias, dtype=torch.float32).double()(x), expected)
    one = torch.full((1,), 0.7)
    layer.bias = torch.nn.Parameter(one.expand(N), requires_grad=False)
    assert torch.equal(layer(x), make(weight, one.repeat(N), dtype=torch.float32)(x))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_to_dtypes_and_back(options):
    """Bias and dequantized weights follow every change, rounded once from the 4-bit weights, which do not change."""
    layer, x = QuantizedLinear.from_linear(linear(), **options), torch.randn(5, K)
    before = layer.packed_weight.clone()
    for dtype in (torch.float32, torch.float16, torch.float32, torch.bfloat16):
        layer.to(dtype)
        assert layer.bias.dtype == layer.dtype == layer.weight.dtype == dtype
        assert layer(x.to(dtype)).dtype == dtype
        assert torch.equal(layer.weight, dequantize(layer.quantized_weight, dtype))
    assert torch.equal(layer.packed_weight, before) and layer.weight_global_scale.dtype == torch.float32
    if "pre_decode" in options:
        assert layer.double()(x.double()).dtype == torch.float64
        assert "pre_decode=torch.float64" in repr(layer)
        layer.half().load_state_dict(layer.state_dict())
        assert layer(x.half()).dtype == torch.float16


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_meta_then_empty_then_load(options):
    source, x = QuantizedLinear.from_linear(linear(), **options), torch.randn(3, K).bfloat16()
    with torch.device("meta"):
        model = torch.nn.Sequential(QuantizedLinear(K, N, **options))
    model.half()
    model.to_empty(device="cpu").bfloat16()
    model.load_state_dict({f"0.{name}": value for name, value in source.state_dict().items()})
    assert torch.equal(model(x), source(x))
    for other in (copy.deepcopy(source), through_a_file(source)):
        assert torch.equal(other(x), source(x)) and other.packed_weight is not source.packed_weight


def through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_decoded_weights_follow_what_is_written():
    layer, x = QuantizedLinear.from_linear(linear(), pre_decode=True), torch.randn(3, K).bfloat16()
    before = layer(x)
    layer.weight_global_scale.mul_(2)
    assert (
        torch.equal(layer(x) - layer.bias, 2 * (before - layer.bias))
        or relative(layer(x), 2 * before - layer.bias) < 0.01
    )
    layer.packed_weight.zero_()
    assert torch.equal(layer(x), layer.bias.expand(3, N))


def test_block_scales_as_bytes_are_bits():
    source = QuantizedLinear.from_linear(linear())
    state = source.state_dict()
    state["weight_scale"] = state["weight_scale"].view(torch.uint8)
    loaded = QuantizedLinear(K, N)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.weight_scale.view(torch.uint8), state["weight_scale"])


def test_state_dicts_of_others():
    """Reciprocal scales, zeros and NaN are refused; state dicts of this and earlier versions load."""
    source = QuantizedLinear.from_linear(linear(), input_scale=0.002)
    state, empty = source.state_dict(), QuantizedLinear(K, N, input_scale=1.0)
    assert json.loads(bytes(state["_extra_state"].tolist())) == {
        "format": "nvfp4",
        "global_scale": "multiplies",
        "version": 1,
    }
    earlier = {name: value for name, value in state.items() if name != "_extra_state"}
    empty.load_state_dict(earlier)
    assert torch.equal(empty.weight, source.weight)
    for name in ("weight_global_scale", "input_global_scale"):
        with pytest.raises(RuntimeError, match=rf"{name} is .* reciprocal.*checkpoints.Checkpoint"):
            empty.load_state_dict(earlier | {name: 1 / earlier[name]})
        for value in (0.0, -1.0, torch.nan, torch.inf):
            with pytest.raises(RuntimeError, match=f"{name} is .* finite and positive"):
                empty.load_state_dict(state | {name: torch.tensor(value)})
    other = torch.frombuffer(
        bytearray(b'{"format": "nvfp4", "global_scale": "divides", "version": 1}'), dtype=torch.uint8
    )
    with pytest.raises(RuntimeError, match="divides"):
        empty.load_state_dict(state | {"_extra_state": other})
    assert torch.equal(empty.weight, source.weight), "nothing was loaded"


@pytest.mark.parametrize("names", [["linear1", "linear2"], ["self_attn.out_proj"]], ids=str)
def test_modules_that_read_the_weight(names):
    """torch's encoder layer multiplies by the weights of its parts directly and gets the dequantized ones."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).bfloat16().eval()
    decoded, x = copy.deepcopy(layer), torch.randn(2, 5, 64).bfloat16()
    for name in names:
        parent, _, child = name.rpartition(".")
        own = QuantizedLinear.from_linear(layer.get_submodule(name))
        setattr(layer.get_submodule(parent), child, own)
        decoded.get_submodule(name).weight.copy_(own.weight)
    torch.testing.assert_close(layer(x), decoded(x))


def test_a_chain_honours_the_scale_of_its_input():
    weights = [quantize(torch.randn(256, 256) / 16, global_scale="auto") for _ in range(3)]
    x, mlp = torch.randn(10, 256), PersistentMLP(weights, [0.002] * 4)
    expected = dequantize(mlp(quantize(x, global_scale=mlp.input_global_scale)))
    for scale in (0.002, "auto", None, 0.004):
        given = quantize(x, global_scale=scale)
        exact = dequantize(given)
        for w in weights:
            exact = exact @ dequantize(w).T
        assert (
            relative(dequantize(mlp(given)), exact) < 0.25
            and relative(dequantize(mlp(given)), expected) < 0.3
        )
    assert set(mlp.state_dict()) >= {"weight_global_scale", "input_global_scale"}
    own = quantize(x, global_scale=mlp.input_global_scale)
    assert mlp._alpha(own.global_scale) is mlp.alpha, "one launch where the scale is the module's"


@pytest.mark.parametrize("value", [torch.nan, 0.0, -1.0, torch.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_a_chain_refuses_scales_that_are_none(value, place):
    weights = [quantize(torch.randn(256, 256) / 16, global_scale="auto") for _ in range(3)]
    scales = [0.002] * 4
    scales[place] = value
    with pytest.raises(ValueError, match=rf"global_scales\[{place}\] is .* finite and positive"):
        PersistentMLP(weights, scales)

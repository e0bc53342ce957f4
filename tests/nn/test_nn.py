"""QuantizedLinear: results in each mode, state dict, and torch.compile."""

import io

import pytest
import torch
from flat_parts import gemm
from oracle import assert_bitwise_equal, bits

from nvfp4_cute import QuantizedLinear, UnsupportedProblem, dequantize, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.nn.shared_input import SharedInput

K, N = 96, 40


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(K, N).bfloat16()


def inputs(*lead):
    return torch.randn(*lead, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def weight_of(layer):
    shape = (layer.out_features, layer.in_features)
    return NVFP4Tensor(layer.state_dict()["weight"], layer.weight_scale, layer.weight_global_scale, shape)


def test_quantized_activations(linear):
    """The bits are those of quantize, and of gemm with the bias."""
    layer, x = QuantizedLinear.from_linear(linear), inputs(2, 5)
    w, q = quantize(linear.weight, global_scale="auto"), quantize(x.view(10, K), global_scale="auto")
    alpha = q.global_scale * w.global_scale
    product = gemm(q.data, w.data, q.scale, w.scale, alpha, bias=linear.bias)
    y = layer(x)
    assert_bitwise_equal(y, product.view(2, 5, N))
    exact = linear(x).double()
    assert (y.double() - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("input_scale", [None, 0.002])
def test_given_input_scale(linear, input_scale):
    layer, x = QuantizedLinear.from_linear(linear, input_scale=input_scale), inputs(3)
    w, q = weight_of(layer), quantize(x, global_scale=input_scale)
    alpha = w.global_scale * (1 if input_scale is None else q.global_scale)
    assert_bitwise_equal(layer(x), gemm(q.data, w.data, q.scale, w.scale, alpha, bias=linear.bias))


def test_weight_only(linear):
    layer, x = QuantizedLinear.from_linear(linear, activations="16bit"), inputs(7)
    w = weight_of(layer)
    assert_bitwise_equal(layer(x), gemm(x, w.data, None, w.scale, w.global_scale, bias=linear.bias))


def test_decoded_weights(linear):
    layer, x = QuantizedLinear.from_linear(linear, pre_decode=True), inputs(7)
    expected = torch.nn.functional.linear(x, dequantize(weight_of(layer), torch.bfloat16), linear.bias)
    assert_bitwise_equal(layer(x), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["emulator", "emulator:sm_90a", "emulator:sm_120a"])
@pytest.mark.parametrize(("activations", "launches"), [("nvfp4", 2), ("16bit", 1)])
def test_on_the_emulator(linear, backend, activations, launches):
    """Every launch is ours, and results differ from the reference only by the order of sums."""
    options = {"activations": activations, "input_scale": 0.002}
    layer, x = QuantizedLinear.from_linear(linear, backend=backend, **options), inputs(5)
    with observe(check=True) as observer:
        y = layer(x)
    assert len(observer.stats) == launches
    reference = QuantizedLinear.from_linear(linear, **options)
    torch.testing.assert_close(y, reference(x), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("pre_decode", [False, True])
def test_state_dict(linear, pre_decode):
    """A file of about 4.5 bits per weight loads into an empty layer, with and without ``pre_decode``."""
    wide = torch.nn.Linear(512, 256).bfloat16()
    layer = QuantizedLinear.from_linear(wide, input_scale=0.01, pre_decode=pre_decode)
    assert set(layer.state_dict()) == {
        "weight", "weight_scale", "weight_global_scale", "input_global_scale", "bias", "_extra_state",
    }  # fmt: skip
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert 8 * file.tell() / (512 * 256) < 5
    file.seek(0)
    state, x = torch.load(file), torch.randn(4, 512).bfloat16()
    for other in (False, True):
        loaded = QuantizedLinear(512, 256, input_scale=1.0, pre_decode=other)
        loaded.load_state_dict(state)
        expected = QuantizedLinear.from_quantized(
            weight_of(layer), layer.bias, input_scale=0.01, pre_decode=other
        )
        assert_bitwise_equal(loaded(x), expected(x))


def test_inside_a_model(linear):
    """Loading and moving a model reach the layer; ``.to(dtype)`` keeps 4-bit weights and scales."""
    layer = QuantizedLinear.from_linear(linear, pre_decode=True)
    model, empty = (
        torch.nn.Sequential(x, torch.nn.SiLU()) for x in (layer, QuantizedLinear(K, N, pre_decode=True))
    )
    empty.load_state_dict(model.state_dict())
    assert_bitwise_equal(empty(inputs(3)), model(inputs(3)))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    model.half()
    for name, value in layer.state_dict().items():
        if name != "bias":
            assert value.dtype == before[name].dtype and torch.equal(bits(value), bits(before[name]))
    assert layer.bias.dtype == layer.decoded.dtype == torch.float16
    assert model(inputs(3).half()).dtype == torch.float16


def test_from_quantized_takes_rowmajor_scales():
    values = torch.randn(N, K)
    blocked, plain = (block_scaled.quantize(values, scale_layout=s) for s in ("blocked", "rowmajor"))
    x = inputs(4)
    layers = [QuantizedLinear.from_quantized(w, dtype=torch.float16) for w in (blocked, plain)]
    assert layers[0].packed_weight.data_ptr() == blocked.data.data_ptr() and layers[0].bias is None
    assert_bitwise_equal(layers[0](x), layers[1](x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"input_scale": 0.01}, {"input_scale": None}, {"activations": "16bit"}, {"pre_decode": True}],
    ids=str,
)
def test_compiled_in_one_graph(linear, options):
    layer = QuantizedLinear.from_linear(linear, **options)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 9):
        assert_bitwise_equal(compiled(inputs(2, rows)), layer(inputs(2, rows)))


def test_compiled_quantize_of_silu():
    x, up = inputs(5), inputs(5) * 2
    torch.compiler.reset()
    function = torch.compile(lambda x, up: quantize(x, up=up).scale, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(function(x, up), quantize(x, up=up).scale)


def test_description_and_refusals(linear):
    assert repr(QuantizedLinear.from_linear(linear)) == (
        "QuantizedLinear(in_features=96, out_features=40, bias=True, activations='nvfp4')"
    )
    with pytest.raises(UnsupportedProblem, match="in_features=48 .* pad the layer's input to 64"):
        QuantizedLinear(48, 8)
    with pytest.raises(ValueError, match="activations='fp8' is unknown"):
        QuantizedLinear(64, 8, activations="fp8")
    with pytest.raises(ValueError, match="input_scale='max'"):
        QuantizedLinear(64, 8, input_scale="max")
    with pytest.raises(ValueError, match=r"expected \[N, K\] of"):
        QuantizedLinear.from_quantized(block_scaled.quantize(torch.randn(2, 3, 32)))
    for activations in ("nvfp4", "16bit"):
        layer = QuantizedLinear.from_linear(linear, activations=activations)
        with torch.enable_grad(), pytest.raises(UnsupportedProblem, match="no backward pass"):
            layer(inputs(2).requires_grad_())


@pytest.mark.parametrize(
    "how", ["few rows", "many rows of kept weights", "decoded ahead", "beside another layer"]
)
def test_a_bias_with_a_gradient_is_refused(how):
    """It is refused for every mode: torch would compute the gradient, kernels would not."""
    options = {
        "many rows of kept weights": {"activations": "16bit", "keep_decoded": True},
        "decoded ahead": {"pre_decode": True},
    }
    linear = torch.nn.Linear(K, 128).bfloat16()
    layer = QuantizedLinear.from_linear(linear, **options.get(how, {}))
    x = inputs(300 if "many" in how else 2)
    if how == "beside another layer":
        SharedInput([layer, QuantizedLinear.from_linear(linear)])
    expected = layer(x)
    layer.bias.requires_grad_(True)
    with (
        torch.enable_grad(),
        pytest.raises(UnsupportedProblem, match="bias has requires_grad=True.*no backward pass"),
    ):
        layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)

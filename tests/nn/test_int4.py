"""Layers with int4 weights: products, moves between devices and dtypes, refusals, and constructors."""

import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.models import layers
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear
from nvfp4_cute.models.inspect import Kind, what_runs
from nvfp4_cute.nn.experts import ModelExperts
from nvfp4_cute.nn.linear import QuantizedLinear

EMULATED = "emulator:sm_90a"
AWQ, KIMI = nv.int4_format(128, "float16", zero_points=True), nv.int4_format(32)
SCHEME = Scheme("pack-quantized", "int4", None)


def weights(*shape, format=AWQ, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nv.quantize(torch.randn(shape, generator=generator) / shape[-1] ** 0.5, format=format)


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("backend", ["reference", pytest.param(EMULATED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_linear_layer(backend, dtype):
    w, bias, x = weights(200, 256), torch.randn(200), rows(3, 7, 256, dtype=dtype)
    layer = QuantizedLinear.from_quantized(w, bias, dtype=torch.float32, backend=backend)
    y = layer(x)
    exact = x.double() @ w.dequantize(torch.float64).T + bias.double()
    assert y.dtype == dtype and y.shape == (3, 7, 200)
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=3e-2)
    assert layer(x[:0]).shape == (0, 7, 200)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)


def test_what_it_keeps():
    w = weights(200, 256)
    layer = QuantizedLinear.from_quantized(w, torch.zeros(200))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    moved = layer.to(torch.float16)
    assert moved.bias.dtype == torch.float16
    for name in ("weight", "weight_scale"):
        assert torch.equal(moved.state_dict()[name], before[name])
    other = QuantizedLinear.from_quantized(weights(200, 256, seed=1), torch.ones(200))
    other.load_state_dict(before)
    assert torch.equal(other.quantized_weight.dequantize(), w.dequantize())
    assert "format=uint4_128_float16" in repr(layer)
    # A state dict without the name also loads; bits of the same sizes in another format do not.
    other.load_state_dict({name: before[name] for name in ("weight", "weight_scale", "bias")})
    wrong = QuantizedLinear.from_quantized(weights(200, 256, format=nv.int4_format(64)), torch.zeros(200))
    assert wrong.weight_scale.shape == layer.weight_scale.shape
    with pytest.raises(
        RuntimeError, match=r"_extra_state says .*int4_64_bfloat16.* reads .*uint4_128_float16"
    ):
        layer.load_state_dict(wrong.state_dict())


def test_what_is_refused():
    with pytest.raises(TypeError, match="weight is a Tensor; pass a BlockScaledTensor"):
        QuantizedLinear.from_quantized(torch.zeros(8, 128))
    with pytest.raises(
        ValueError,
        match=r"weight is INT4_32_BFLOAT16 of shape \[2, 8, 128\]; expected \[N, K\] of .*an int4_format",
    ):
        QuantizedLinear.from_quantized(weights(2, 8, 128, format=KIMI))
    with pytest.raises(ValueError, match=r"bias has shape \[7\]; expected \[8\]"):
        QuantizedLinear.from_quantized(weights(8, 128), torch.zeros(7))
    layer = QuantizedLinear.from_quantized(weights(8, 128))
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 128\]"):
        layer(rows(3, 64))
    with pytest.raises(TypeError, match="x is torch.float64"):
        layer(rows(3, 128, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"w13\) is \[2, 64, 128\] and .* asks for gate_up \[2, 256, 64\]"):
        nv.MoE.from_quantized(weights(2, 64, 128, format=KIMI), weights(2, 64, 128, format=KIMI))
    with pytest.raises(ValueError, match="w13 is INT4_32_BFLOAT16 and w2 NVFP4; quantize both to one format"):
        nv.MoE.from_quantized(weights(2, 256, 128, format=KIMI), nv.quantize(torch.ones(2, 128, 128)))
    experts = ModelExperts(nv.MoE.from_quantized(weights(2, 256, 128), weights(2, 128, 128)))
    ids, factors = torch.zeros(3, 1).int(), torch.ones(3, 1)
    with pytest.raises(TypeError, match="dtype of x"):
        experts(torch.zeros(3, 128).int(), ids, factors)
    with pytest.raises(ValueError, match="ids has 2 rows and x 3"):
        experts(rows(3, 128), ids[:2], factors)


@pytest.mark.parametrize("backend", ["reference", pytest.param(EMULATED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("second", [KIMI, AWQ], ids=str)
def test_experts(backend, second):
    """Compares with sums over dequantized weights; an id of no expert adds nothing."""
    w13, w2 = weights(3, 256, 64, format=KIMI), weights(3, 64, 128, format=second, seed=1)
    bias13, bias2 = rows(3, 256), rows(3, 64)
    layer = ModelExperts(nv.MoE.from_quantized(w13, w2, bias13=bias13, bias2=bias2, backend=backend))
    x, ids, factors = rows(5, 64), torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1], [0, 1]]), torch.rand(5, 2)
    y, first, second = layer(x, ids, factors), w13.dequantize(), w2.dequantize()
    expected = torch.zeros(5, 64)
    for t in range(5):
        for e, factor in zip(ids[t].tolist(), factors[t], strict=True):
            if e >= 0:
                gate, up = (first[e] @ x[t].float() + bias13[e].float()).chunk(2)
                expected[t] += factor * (second[e] @ (torch.nn.functional.silu(gate) * up) + bias2[e].float())
    torch.testing.assert_close(y.float(), expected, rtol=3e-2, atol=3e-2)


def stored(*shape, format=KIMI, seed=0):
    return weights(*shape, format=format, seed=seed).with_scale_layout("rowmajor")


def test_modules_of_a_checkpoint():
    w = stored(200, 256, format=AWQ)
    layer = layers.linear_module(StoredLinear("a", SCHEME, w, None), None, dtype=torch.float16, device="cpu")
    assert isinstance(layer, QuantizedLinear) and layer.format.is_int4
    assert torch.equal(layer.quantized_weight.dequantize(), w.dequantize())
    experts = StoredExperts(
        "e", SCHEME, stored(2, 256, 64), None, stored(2, 64, 128), None, None, None, None, None, True
    )
    options = {"dtype": torch.bfloat16, "device": "cpu"}
    module = layers.experts_module(experts, "silu", **options).experts
    assert isinstance(module, nv.MoE) and all(format.is_int4 for format in module.formats)
    assert layers.experts_module(experts, "silu", decode=True, **options).is_decoded
    function = layers.experts_module(experts, lambda gate, up: gate * up, **options)
    assert function.projections[0].format.is_int4 and not function.waits("cpu"), "weights stay in 4 bits"
    module = layers.experts_module(experts, "silu", backend="emulator:sm_100a", **options).experts
    assert isinstance(module, nv.MoE), "every architecture multiplies 16-bit rows of all experts"
    assert what_runs(Kind("a", SCHEME, "[200, 256]")) == "QuantizedLinear, weight-only"
    assert what_runs(Kind("e", SCHEME, "2 x [256, 64]")).startswith("MoE, weight-only")

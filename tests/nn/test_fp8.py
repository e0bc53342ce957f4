"""Layers with FP8 weights: products, moves between devices and dtypes, refusals."""

import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.models import layers
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear
from nvfp4_cute.models.inspect import Kind, what_runs
from nvfp4_cute.models.layers import experts_module, linear_module
from nvfp4_cute.nn.experts import Projection, SortedExperts
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.rounded import RoundedInput, rounded
from nvfp4_cute.nn.weights import has_products
from nvfp4_cute.ops.parts import dequantized

EMULATED = ("emulator:sm_90a", "emulator:sm_120a", "emulator:sm_100a")
BACKENDS = ("reference", EMULATED[0], *(pytest.param(e, marks=pytest.mark.slow) for e in EMULATED[1:]))
SCHEME = Scheme("fp8", "fp8_128x128", "fp8_1x128")


def weights(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nv.quantize(torch.randn(shape, generator=generator), format=nv.FP8_128x128)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_linear_layer_multiplies_rounded_rows(backend):
    w, bias, x = weights(200, 256), torch.randn(200).bfloat16(), rows(3, 7, 256)
    layer = QuantizedLinear.from_quantized(w, bias, backend=backend)
    exact = (rounded(x, "fp8_1x128").double() @ w.dequantize(torch.float64).T + bias.double()).float()
    y = layer(x)
    assert y.dtype == torch.bfloat16 and y.shape == (3, 7, 200)
    torch.testing.assert_close(y.float(), exact, rtol=2e-2, atol=0.15)
    assert layer(x.float()).dtype == torch.float32
    assert layer(x[:0]).shape == (0, 7, 200)


@pytest.mark.parametrize("backend", ["reference", pytest.param(EMULATED[0], marks=pytest.mark.slow)])
def test_a_linear_layer_with_16_bit_activations(backend):
    w, bias, x = weights(200, 256), torch.randn(200).bfloat16(), rows(3, 7, 256)
    layer = QuantizedLinear.from_quantized(w, bias, activations="16bit", backend=backend)
    sums = (x.double() @ w.dequantize(torch.float64).T).bfloat16()
    torch.testing.assert_close(layer(x), sums + bias, rtol=1e-2, atol=1e-2)
    assert layer(x.float()).dtype == torch.float32 and layer(x[:0]).shape == (0, 7, 200)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    assert "activations='16bit'" in repr(layer)


def test_many_16_bit_rows_decode_weights_first(monkeypatch):
    """torch multiplies weights that are dequantized in GPU memory, each rounded once."""
    monkeypatch.setattr(dequantized, "dequantizes_first", lambda *_: True)
    w, x = weights(200, 256), rows(70, 256)
    want = torch.nn.functional.linear(x, w.dequantize(torch.bfloat16))
    layer = QuantizedLinear.from_quantized(w, activations="16bit", backend="emulator:sm_100a")
    assert torch.equal(layer(x), want)


def test_a_linear_layer_keeps_its_types_and_loads_deepseeks_names():
    layer = QuantizedLinear.from_quantized(weights(128, 256), torch.zeros(128))
    state = layer.state_dict()
    assert sorted(state) == ["_extra_state", "bias", "weight", "weight_scale_inv"]
    other = QuantizedLinear.from_quantized(weights(128, 256, seed=1), torch.ones(128)).to(torch.float16)
    assert other.packed_weight.dtype == torch.float8_e4m3fn and other.weight_scale_inv.dtype == torch.float32
    assert other.bias.dtype == torch.float16
    other.load_state_dict(state)
    x = rows(4, 256)
    assert torch.equal(other(x), layer(x))
    other.load_state_dict({name: state[name] for name in ("bias", "weight", "weight_scale_inv")})
    assert torch.equal(other(x), layer(x)), "files have no description"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_what_a_linear_layer_refuses():
    layer = QuantizedLinear.from_quantized(weights(128, 256))
    with pytest.raises(ValueError, match=r"x has shape \[4, 128\]; expected \[..., 256\]"):
        layer(rows(4, 128))
    with pytest.raises(
        TypeError, match="x is torch.int32; the layer multiplies float16, bfloat16 and float32"
    ):
        layer(rows(4, 256).int())
    with pytest.raises(nv.UnsupportedProblem, match="requires_grad=True"):
        layer(rows(4, 256).requires_grad_())
    with pytest.raises(
        ValueError, match=r"weight is FP8_1X128 of shape .*expected \[N, K\] of .*FP8_128X128"
    ):
        QuantizedLinear.from_quantized(nv.quantize(torch.ones(128, 256), format=nv.FP8_1x128))
    with pytest.raises(ValueError, match="activations='8bit' is not supported; use 'fp8' or '16bit'"):
        QuantizedLinear.from_quantized(weights(128, 256), activations="8bit")
    with pytest.raises(ValueError, match="backend='gpu' is unknown"):
        QuantizedLinear.from_quantized(weights(128, 256), backend="gpu")
    with pytest.raises(ValueError, match="backend='gpu' is unknown"):
        experts(weights(2, 256, 128), weights(2, 128, 128), backend="gpu")


def experts(w13, w2, activations="fp8_1x128", **options):
    return nv.MoE.from_quantized(w13, w2, activations=activations, **options)


def expected(w13, w2, x, ids, factors):
    """Computes token by token; rows are rounded when they are quantized, and nothing else before the sum."""
    y = torch.zeros(len(x), w2.shape[1])
    for t, (chosen, own) in enumerate(zip(ids.tolist(), factors, strict=True)):
        for e, factor in zip(chosen, own, strict=True):
            one = nv.gemm(nv.quantize(x[t : t + 1], format=nv.FP8_1x128), w13[e], out_dtype=torch.float32)
            h = activate_rows(one, "silu", "concatenated", None)
            down = nv.gemm(nv.quantize(h, format=nv.FP8_1x128), w2[e])
            y[t] += down[0].float() * factor
    return y.bfloat16()


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts(backend):
    """Bits equal those of single tokens, also with an expert without rows and ids of no expert."""
    w13, w2, x = weights(4, 512, 128), weights(4, 128, 256, seed=1), rows(5, 128)
    ids, factors = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [1, 3]]), torch.rand(5, 2)
    got = experts(w13, w2, backend=backend)(x, ids, factors)
    want = expected(w13, w2, x, ids, factors)
    if backend == "reference":
        assert torch.equal(got, want)
    # A sum that rounds differently may move a hidden value to the neighboring FP8 value.
    assert (got - want).float().norm() < 0.004 * want.float().norm()
    assert (experts(w13, w2)(x, torch.full_like(ids, 4), factors) == 0).all()


def test_experts_of_a_function():
    """Functions as activations: weights stay in 8 bits, and rows are quantized before both products."""
    w13, w2, x = weights(4, 512, 128), weights(4, 128, 256, seed=1), rows(5, 128)
    ids, factors = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [1, 3]]), torch.rand(5, 2)
    halves = (
        nv.BlockScaledTensor(*parts, None, (4, 256, 128), "rowmajor", format=nv.FP8_128x128)
        for parts in zip(w13.data.chunk(2, 1), w13.scale.chunk(2, 1), strict=True)
    )
    sides = [Projection(w) for w in (*halves, w2)]
    function = lambda gate, up: torch.nn.functional.silu(gate) * up
    layer = SortedExperts(sides, function, activations="fp8_1x128")
    assert not layer.waits(x.device)
    want = expected(w13, w2, x, ids, factors).float()
    assert (layer(x, ids, factors).float() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("backend", ["reference", pytest.param(EMULATED[0], marks=pytest.mark.slow)])
def test_experts_with_16_bit_activations(backend):
    """Rows are not rounded, and ids of no expert add nothing; ``from_experts`` equals quantizing first."""
    w13, w2, x = weights(4, 512, 128), weights(4, 128, 256, seed=1), rows(5, 128)
    ids, factors = torch.tensor([[0, 3], [3, -1], [-1, 0], [3, 7], [0, 3]]), torch.rand(5, 2)
    decoded = [w.dequantize().float() for w in (w13, w2)]
    want = SortedExperts([Projection(w) for w in (*decoded[0].chunk(2, 1), decoded[1])])(x, ids, factors)
    want, got = want.float(), experts(w13, w2, "16bit", backend=backend)(x, ids, factors)
    assert (got.float() - want).norm() < 0.01 * want.norm()
    made = nv.MoE.from_experts(decoded[0], decoded[1], format=nv.FP8_128x128)
    assert torch.equal(made.w13_scale, nv.quantize(decoded[0], format=nv.FP8_128x128).scale)
    assert made.activations == "16bit"


def test_weights_beside_16_bit_activations_of_a_checkpoint():
    options, scheme = (
        {"dtype": torch.bfloat16, "device": "cpu"},
        Scheme("float-quantized", "fp8_128x128", None),
    )
    layer = linear_module(StoredLinear("q", scheme, weights(200, 256), None), None, **options)
    assert (
        isinstance(layer, QuantizedLinear) and layer.format == nv.FP8_128x128 and layer.activations == "16bit"
    )
    sides = weights(2, 256, 128), None, weights(2, 128, 128)
    made = experts_module(StoredExperts("e", scheme, *sides, *[None] * 5, True), "silu", **options)
    assert isinstance(made.experts, nv.MoE) and made.experts.activations == "16bit"
    made = experts_module(
        StoredExperts("e", scheme, *sides, *[None] * 5, True), lambda g, u: g * u, **options
    )
    assert made.projections[0].format == nv.FP8_128x128 and made.activations == "16bit"
    kinds = [
        Kind("e", scheme, "2 x [256, 128]", k_sizes={128}),
        Kind("q", scheme, "[200, 192]", k_sizes={192}),
    ]
    assert what_runs(kinds[0]) == "MoE, weight-only" and what_runs(kinds[1]).startswith(
        "dequantized to 16 bits"
    )


def test_modules_of_a_checkpoint(monkeypatch):
    """FP8 weights are multiplied where there is a kernel and blocks are whole; otherwise they are dequantized."""
    options = {"dtype": torch.bfloat16, "device": "cpu"}
    linear = StoredLinear("q_proj", SCHEME, weights(200, 256), None)
    layer, x = linear_module(linear, None, **options), rows(4, 256)
    assert isinstance(layer, QuantizedLinear) and layer.format == nv.FP8_128x128
    with monkeypatch.context() as patched:
        patched.setattr(layers, "has_products", lambda *args: False)
        decoded = linear_module(linear, None, **options)
    assert isinstance(decoded, RoundedInput)
    torch.testing.assert_close(layer(x).float(), decoded(x).float(), rtol=2e-2, atol=0.2)
    whole = weights(200, 256)
    cut = nv.BlockScaledTensor.from_parts(whole.data[:, :200], whole.scale, format=nv.FP8_128x128)
    assert isinstance(linear_module(StoredLinear("q", SCHEME, cut, None), None, **options), RoundedInput)

    def of_width(width):
        w13, w2 = weights(2, 2 * width, 128), weights(2, 128, width)
        return StoredExperts("experts", SCHEME, w13, None, w2, None, None, None, None, None, True)

    assert experts_module(of_width(128), "silu", **options).experts.activations == "fp8_1x128"
    assert all(
        has_products(backend, torch.device("cpu"), (nv.FP8_1x128, nv.FP8_128x128)) for backend in EMULATED
    )
    monkeypatch.setattr(layers, "has_products", lambda *args: False)
    assert experts_module(of_width(128), "silu", **options).is_decoded


def test_weights_that_do_not_fit_are_refused():
    w13, w2 = weights(2, 256, 128), weights(2, 128, 128)
    wrong = [
        (
            TypeError,
            "weight is a Tensor; pass a BlockScaledTensor",
            lambda: QuantizedLinear.from_quantized(torch.zeros(128, 128)),
        ),
        (
            ValueError,
            "weight is MXFP8_E5M2 of shape",
            lambda: QuantizedLinear.from_quantized(nv.quantize(torch.zeros(128, 128), format=nv.MXFP8_E5M2)),
        ),
        (
            ValueError,
            r"bias has shape \[1\]; expected \[128\]",
            lambda: QuantizedLinear.from_quantized(weights(128, 128), torch.zeros(1)),
        ),
        (TypeError, "w2 is a NoneType; pass a BlockScaledTensor", lambda: experts(w13, None)),
        (
            ValueError,
            r"w13 has data \[128, 128\]; expected \[E, N",
            lambda: experts(weights(128, 128), w2),
        ),
        (
            ValueError,
            r"gate_up \(w13\) is \[2, 256, 128\] .*asks for gate_up \[2, 128, 128\]",
            lambda: experts(w13, w2, weight_layout="none"),
        ),
        (
            ValueError,
            r"bias13 has shape \[2, 128\]; expected",
            lambda: experts(w13, w2, bias13=torch.zeros(2, 128)),
        ),
    ]
    for error, text, make in wrong:
        with pytest.raises(error, match=text):
            make()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"activation": "swiglu_oai", "limit": 7.0}, {"bias13": rows(4, 512)}], ids=str
)
def test_experts_on_the_emulator(options):
    """Fused kernels do not round products before the activation; with biases two launches do."""
    w13, w2, x = weights(4, 512, 128), weights(4, 128, 256, seed=1), rows(5, 128)
    ids, factors = torch.tensor([[0, 3], [3, -1], [-1, 0], [3, 7], [0, 3]]), torch.rand(5, 2)
    backends = "emulator:sm_120a", "reference"
    got, want = (experts(w13, w2, backend=b, **options)(x, ids, factors).float() for b in backends)
    assert want.norm() > 1 and (got - want).norm() < 0.002 * want.norm()

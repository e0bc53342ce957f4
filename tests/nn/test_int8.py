"""Layers with INT8 weights: products, moves between devices and dtypes, refusals, and checkpoints."""

import copy

import pytest
import torch
from checkpoint_files import write

import nvfp4_cute as nv
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.models import layers
from nvfp4_cute.models.checkpoints.checkpoint import Checkpoint
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts
from nvfp4_cute.models.inspect import Kind, what_runs
from nvfp4_cute.models.layers import experts_module, linear_module
from nvfp4_cute.nn.experts import Projection, SortedExperts
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.rounded import RoundedInput

EMULATED = ("emulator:sm_90a", "emulator:sm_120a", "emulator:sm_100a")
BACKENDS = ("reference", *(pytest.param(e, marks=pytest.mark.slow) for e in EMULATED))
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {
        "num_bits": 8,
        "type": "int",
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
    },
}
OPTIONS = {"dtype": torch.bfloat16, "device": "cpu"}


def weights(*shape, seed=0):
    return nv.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), format=nv.INT8)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def stored(tmp_path, w, group=GROUP, scale_dtype=torch.bfloat16):
    """Writes and loads a layer of a checkpoint in llm-compressor's format."""
    tensors = {"model.q_proj.weight": w.data, "model.q_proj.weight_scale": w.scale.to(scale_dtype)}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Checkpoint(write(tmp_path, tensors, quantization)).linear("model.q_proj")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_linear_layer_multiplies_rounded_rows(backend):
    """Every backend gives the bits of exact sums, scaled like the reference."""
    w, bias, x = weights(200, 272), torch.randn(200).bfloat16(), rows(3, 7, 272)
    layer = QuantizedLinear.from_quantized(w, bias, backend=backend)
    q = nv.quantize(x.reshape(21, 272), format=nv.INT8)
    sums = (q.data.long() @ w.data.long().T).float()
    want = (sums * w.scale.T * q.scale + bias).bfloat16()
    assert torch.equal(layer(x), want.reshape(3, 7, 200))
    assert layer(x.float()).dtype == torch.float32 and layer(x[:0]).shape == (0, 7, 200)
    assert (layer(x).float() - (x.double() @ w.dequantize(torch.float64).T + bias).float()).abs().max() < 0.6


def test_a_linear_layer_keeps_its_types():
    layer = QuantizedLinear.from_quantized(weights(128, 256), torch.zeros(128))
    assert sorted(layer.state_dict()) == ["_extra_state", "bias", "weight", "weight_scale"]
    other = QuantizedLinear.from_quantized(weights(128, 256, seed=1), torch.ones(128)).to(torch.float16)
    assert other.packed_weight.dtype == torch.int8 and other.weight_scale.dtype == torch.float32
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(rows(4, 256)), layer(rows(4, 256)))
    assert torch.equal(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(rows(4, 256)), layer(rows(4, 256))
    )


def test_what_a_linear_layer_refuses():
    with pytest.raises(
        ValueError,
        match=r"weight is FP8_1X128 of shape .*of .*INT8, an int4_format: quantize\(weight, format=NVFP4\)",
    ):
        QuantizedLinear.from_quantized(nv.quantize(torch.ones(128, 256), format=nv.FP8_1x128))
    with pytest.raises(ValueError, match="activations='fp8' is not supported"):
        QuantizedLinear.from_quantized(weights(128, 256), activations="fp8")


def test_a_checkpoint(tmp_path, monkeypatch):
    """Stored weights are multiplied, or dequantized where there is no kernel; a scale per tensor is repeated for every row."""
    w, x = weights(40, 64), rows(4, 64)
    found = stored(tmp_path, w)
    assert str(found.scheme) == "W int8, A int8"
    layer = linear_module(found, None, **OPTIONS)
    assert isinstance(layer, QuantizedLinear) and layer.format == nv.INT8
    assert torch.equal(layer.weight_scale, w.scale.bfloat16().float())
    assert torch.equal(found.weight.dequantize(), w.data.float() * layer.weight_scale)
    monkeypatch.setattr(layers, "has_products", lambda *args: False)
    decoded = linear_module(found, None, **OPTIONS)
    assert isinstance(decoded, RoundedInput)
    torch.testing.assert_close(layer(x).float(), decoded(x).float(), rtol=2e-2, atol=0.1)
    alone = {"targets": ["Linear"], "weights": GROUP["weights"]}
    plain = linear_module(stored(tmp_path / "alone", w, alone), None, **OPTIONS)
    assert isinstance(plain, QuantizedLinear) and plain.format == nv.INT8 and plain.activations == "16bit"
    want = (x.double() @ w.data.double().T).float() * plain.weight_scale.T
    assert torch.equal(plain(x), want.bfloat16())


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("weights", {"symmetric": False}, "weights has zero points; .*symmetric=true"),
        ("weights", {"strategy": "group"}, "weights.strategy is 'group'; .*'channel' or 'tensor'"),
        ("weights", {"num_bits": 2}, "weights.num_bits is 2, and its format int8 has 8"),
        ("input_activations", {"strategy": "tensor"}, "strategy is 'tensor'; .*'token'"),
        ("input_activations", {"dynamic": False}, "dynamic is False; .*dynamic=true"),
    ],
)
def test_what_a_checkpoint_is_refused_for(tmp_path, side, change, message):
    with pytest.raises(CheckpointError, match=message):
        stored(tmp_path, weights(40, 64), GROUP | {side: GROUP[side] | change})


IDS = torch.tensor(
    [[0, 3], [3, 0], [-1, 0], [3, 7], [4, 3]]
)  # expert 1 gets no token; some ids belong to no expert
FACTORS = torch.rand(5, 2, generator=torch.Generator().manual_seed(3))


def product(x, w, scale):
    """Computes exact sums of integers, scaled like the reference, in bfloat16."""
    q = nv.quantize(x, format=nv.INT8)
    return ((q.data.long() @ w.long().T).float() * scale.T * q.scale).bfloat16()


def experts(w13, w2, activations="int8", **options):
    return nv.MoE.from_quantized(w13, w2, activations=activations, **options)


def experts_by_hand(w13, w2, bias13, bias2, x, has_gate=True):
    """Computes the layer token by token."""
    y = torch.zeros(len(x), 2, w2.shape[1])
    for t, chosen in enumerate(IDS.tolist()):
        for j, e in enumerate(chosen):
            if not 0 <= e < len(w13.data):
                continue
            h = product(x[t : t + 1], w13.data[e], w13.scale[e]).float() + bias13[e].float()
            kind = ("silu", "concatenated") if has_gate else ("relu2", "none")
            down = product(activate_rows(h, *kind, None).bfloat16(), w2.data[e], w2.scale[e])
            y[t, j] = (down[0].float() + bias2[e].float()) * FACTORS[t, j]
    return y.sum(1).bfloat16()


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts(backend, has_gate):
    """Every backend gives the bits of single tokens, also with an expert without rows and ids of no expert."""
    w13, w2 = weights(4, 2 * 64 if has_gate else 64, 96), weights(4, 96, 64, seed=1)
    bias13, bias2, x = rows(4, w13.shape[1]), rows(4, 96), rows(5, 96)
    kind = {} if has_gate else {"activation": "relu2", "weight_layout": "none"}
    layer = experts(w13, w2, bias13=bias13, bias2=bias2, backend=backend, **kind)
    want = experts_by_hand(w13, w2, bias13, bias2, x, has_gate)
    assert torch.equal(layer(x, IDS, FACTORS), want)
    assert layer(x[:0], IDS[:0], FACTORS[:0]).shape == (0, 96)
    assert not experts(w13, w2, backend=backend, **kind)(x, torch.full_like(IDS, 4), FACTORS).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_of_a_function(backend):
    """Functions as activations, and K that is not a multiple of 32: weights and rows stay in 8 bits, with the same bits anywhere."""
    w13, w2, x = weights(4, 96, 80), weights(4, 80, 48, seed=1), rows(5, 80)
    sides = [*w13.data.chunk(2, 1)], [*w13.scale.chunk(2, 1)]
    halves = [
        nv.BlockScaledTensor(*p, None, (4, 48, 80), "rowmajor", format=nv.INT8)
        for p in zip(*sides, strict=True)
    ]
    function = lambda gate, up: activate_rows(torch.cat([gate, up], 1), "silu", "concatenated", None)
    layer = SortedExperts(
        [Projection(w) for w in (*halves, w2)], function, activations="int8", backend=backend
    )
    want = experts_by_hand(w13, w2, torch.zeros(4, 96), torch.zeros(4, 80), x)
    assert torch.equal(layer(x, IDS, FACTORS), want) and not layer.waits(x.device)
    assert torch.equal(layer(x.float(), IDS, FACTORS).bfloat16(), want)
    assert not layer(x, torch.full_like(IDS, 4), FACTORS).any() and "4 of 80 x 48" in repr(layer)
    moved = copy.deepcopy(layer).to(torch.float16)
    assert moved.projections[0].data.dtype == torch.int8 and moved.projections[0].scale.dtype == torch.float32


def test_experts_from_weights():
    """``from_experts`` equals ``quantize``."""
    gate_up, down = (
        torch.randn(s, generator=torch.Generator().manual_seed(5)) for s in ((4, 128, 96), (4, 96, 64))
    )
    layer, x = nv.MoE.from_experts(gate_up, down, format=nv.INT8, activations="int8"), rows(5, 96)
    quantized = experts(nv.quantize(gate_up, format=nv.INT8), nv.quantize(down, format=nv.INT8))
    assert torch.equal(layer(x, IDS, FACTORS), quantized(x, IDS, FACTORS))
    biased = nv.MoE.from_experts(gate_up, down, format=nv.INT8, bias2=rows(4, 96))
    moved = copy.deepcopy(biased).to(torch.float16)
    assert moved.w13.dtype == torch.int8 and moved.w2_scale.dtype == torch.float32
    assert moved.bias2.dtype == torch.float16 and biased.bias2.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_experts_in_a_graph(activations):
    """A compiled layer is one graph for any number of tokens, with the same bits."""
    layer, x = experts(weights(4, 128, 96), weights(4, 96, 64, seed=1), activations), rows(5, 96)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 3):
        part = x[:tokens], IDS[:tokens], FACTORS[:tokens]
        assert torch.equal(compiled(*part), layer(*part))


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(e, marks=pytest.mark.slow) for e in EMULATED[:2])]
)
def test_experts_with_16_bit_activations(backend):
    """Rows are not rounded: results are close to those of dequantized weights."""
    w13, w2, x = weights(4, 128, 64), weights(4, 64, 64, seed=1), rows(5, 64)
    bias13, bias2 = rows(4, 128), rows(4, 64)
    y = experts(w13, w2, "16bit", bias13=bias13, bias2=bias2, backend=backend)(x, IDS, FACTORS)
    decoded = [*w13.dequantize().float().chunk(2, 1), w2.dequantize().float()]
    biases = [*bias13.chunk(2, 1), bias2]
    layer = SortedExperts([Projection(w, b) for w, b in zip(decoded, biases, strict=True)])
    want = layer(x, IDS, FACTORS).float()
    assert (y.float() - want).norm() < 0.02 * want.norm() and layer.waits(x.device)


def test_what_experts_refuse():
    w13, w2 = weights(2, 64, 96), weights(2, 96, 32)
    with pytest.raises(ValueError, match=r"w13 is MXFP4 and w2 INT8; quantize both to one format"):
        experts(nv.quantize(torch.ones(2, 96, 64), format=nv.MXFP4), w2)
    with pytest.raises(
        ValueError, match=r"gate_up \(w13\) is \[2, 64, 96\] .*asks for gate_up \[2, 32, 96\]"
    ):
        experts(w13, w2, weight_layout="none")
    with pytest.raises(ValueError, match=r"bias2 has shape \[2, 8\]; expected \[2, 96\]"):
        experts(w13, w2, bias2=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="activations='fp8_1x128' with INT8 weights; use '16bit' or 'int8'"):
        experts(w13, w2, "fp8_1x128")
    with pytest.raises(nv.UnsupportedProblem, match="hidden_size=80 is not a positive multiple of 32"):
        experts(weights(2, 96, 80), weights(2, 80, 48))
    with pytest.raises(ValueError, match="hidden_scale with rows of INT8, which have no global scale"):
        experts(w13, w2, hidden_scale=0.5)
    layer = experts(w13, w2)
    with pytest.raises(ValueError, match=r"ids has 2 rows and x 5"):
        layer(rows(5, 96), IDS[:2], FACTORS[:2])
    with pytest.raises(nv.UnsupportedProblem, match="requires_grad=True"):
        layer(rows(5, 96).requires_grad_(), IDS, FACTORS)


def test_experts_of_a_checkpoint(tmp_path, monkeypatch):
    """Loads W8A8 experts in llm-compressor's format, with one projection per expert."""
    w13, w2 = weights(2, 64, 96), weights(2, 96, 32, seed=1)
    sides = {"gate_proj": (w13, slice(32)), "up_proj": (w13, slice(32, 64)), "down_proj": (w2, slice(96))}
    tensors = {}
    for e in range(2):
        for name, (w, part) in sides.items():
            tensors[f"model.mlp.experts.{e}.{name}.weight"] = w.data[e, part]
            tensors[f"model.mlp.experts.{e}.{name}.weight_scale"] = w.scale[e, part].bfloat16()
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    quantization |= {"config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}
    found = Checkpoint(write(tmp_path, tensors, quantization)).read_experts("model.mlp.experts")
    layer = experts_module(found, "silu", **OPTIONS)
    assert torch.equal(layer.experts.w13, w13.data) and layer.experts.activations == "int8"
    assert torch.equal(layer.experts.w13_scale, w13.scale.bfloat16().float())
    assert experts_module(found, "silu", decode=True, **OPTIONS).is_decoded
    kind = Kind("experts", found.scheme, "2 x [64, 96]", k_sizes={96, 32})
    assert what_runs(kind).startswith("MoE on sm_90a, sm_100a")
    assert (
        what_runs(Kind("experts", Scheme("int8", "int8", None), "2 x [96, 64]", k_sizes={64}))
        == "MoE, weight-only"
    )
    weight_only = StoredExperts(
        "e", Scheme("int-quantized", "int8", None), weights(2, 64, 64), None, weights(2, 64, 32),
        None, None, None, None, None, True,
    )  # fmt: skip
    assert experts_module(weight_only, "silu", **OPTIONS).experts.activations == "16bit"
    monkeypatch.setattr(layers, "has_products", lambda *args: False)
    decoded = experts_module(found, "silu", **OPTIONS)
    assert decoded.is_decoded
    x, ids, factors = rows(5, 96), IDS.clamp(0, 1), FACTORS
    want = decoded(x, ids, factors).float()
    assert (layer(x, ids, factors).float() - want).norm() < 0.02 * want.norm()

"""Layers with INT8 weights: products, moves between devices and dtypes, refusals, and checkpoints."""

import copy

import pytest
import torch
from checkpoint_files import write

import nvfp4_cute as nv
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models import layers
from nvfp4_cute.models.checkpoints.checkpoint import Checkpoint
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredWeight
from nvfp4_cute.models.inspect import Kind, what_runs
from nvfp4_cute.models.layers import experts_module, linear_module
from nvfp4_cute.nn.experts import DecodedExperts
from nvfp4_cute.nn.linear import QuantizedLinear
from nvfp4_cute.nn.quantized_experts import QuantizedExperts
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


def experts_by_hand(w13, w2, bias13, bias2, x, has_gate=True):
    """Computes the layer token by token."""
    y = torch.zeros(len(x), 2, w2.shape[1])
    for t, chosen in enumerate(IDS.tolist()):
        for j, e in enumerate(chosen):
            if not 0 <= e < len(w13.data):
                continue
            h = product(x[t : t + 1], w13.data[e], w13.scale[e]) + bias13[e]
            sides = (side.float() for side in h.chunk(2, -1)) if has_gate else (h.float(),)
            function = (
                (lambda g, u: torch.nn.functional.silu(g) * u) if has_gate else (lambda u: u.relu() ** 2)
            )
            down = product(function(*sides).bfloat16(), w2.data[e], w2.scale[e]) + bias2[e]
            y[t, j] = down[0].float() * FACTORS[t, j]
    return y.sum(1).bfloat16()


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts(backend, has_gate):
    """Every backend gives the bits of single tokens, also with an expert without rows and ids of no expert."""
    w13, w2 = weights(4, 2 * 48 if has_gate else 48, 80), weights(4, 80, 48, seed=1)
    bias13, bias2, x = rows(4, w13.shape[1]), rows(4, 80), rows(5, 80)
    activation = "silu" if has_gate else "relu2"
    layer = QuantizedExperts(w13, w2, bias13, bias2, activation, has_gate=has_gate, backend=backend)
    want = experts_by_hand(w13, w2, bias13, bias2, x, has_gate)
    assert torch.equal(layer(x, IDS, FACTORS), want)
    assert layer(x[:0], IDS[:0], FACTORS[:0]).shape == (0, 80)
    assert not layer(x, torch.full_like(IDS, 4), FACTORS).any()


def test_experts_from_weights():
    """``from_experts`` equals ``quantize``; float32 rows are rounded to bfloat16."""
    gate_up, down = (
        torch.randn(s, generator=torch.Generator().manual_seed(5)) for s in ((4, 96, 80), (4, 80, 48))
    )
    layer, x = QuantizedExperts.from_experts(gate_up, down, nv.INT8), rows(5, 80)
    quantized = QuantizedExperts(nv.quantize(gate_up, format=nv.INT8), nv.quantize(down, format=nv.INT8))
    assert torch.equal(layer(x, IDS, FACTORS), quantized(x, IDS, FACTORS))
    assert torch.equal(layer(x.float(), IDS, FACTORS).bfloat16(), layer(x, IDS, FACTORS))
    assert not layer.waits(x.device) and "4 of 80 x 48" in repr(layer)
    biased = QuantizedExperts.from_experts(gate_up, down, nv.INT8, bias2=rows(4, 80))
    moved = copy.deepcopy(biased).to(torch.float16)
    assert moved.w13.dtype == torch.int8 and moved.w2_scale.dtype == torch.float32
    assert moved.bias2.dtype == torch.float16 and biased.bias2.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_experts_in_a_graph(activations):
    """A compiled layer is one graph for any number of tokens, with the same bits."""
    layer, x = (
        QuantizedExperts(weights(4, 96, 80), weights(4, 80, 48, seed=1), activations=activations),
        rows(5, 80),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 3):
        part = x[:tokens], IDS[:tokens], FACTORS[:tokens]
        assert torch.equal(compiled(*part), layer(*part))


def test_experts_with_16_bit_activations(monkeypatch):
    """The grouped product, or one product per expert where there is none, gives the same bits, close to dequantized weights."""
    w13, w2, x = weights(4, 128, 64), weights(4, 64, 64, seed=1), rows(5, 64)
    bias13, bias2 = rows(4, 128), rows(4, 64)
    layer = QuantizedExperts(w13, w2, bias13, bias2, activations="16bit")
    y = layer(x, IDS, FACTORS)
    decoded = [w.dequantize().float() for w in (w13, w2)]
    want = DecodedExperts([*decoded[0].chunk(2, 1), decoded[1]], [*bias13.chunk(2, 1), bias2])(
        x, IDS, FACTORS
    ).float()
    assert (y.float() - want).norm() < 0.02 * want.norm()
    assert not layer.waits(x.device)
    assert "activations='16bit'" in repr(layer)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_experts_with_16_bit_activations_on_the_emulator(arch):
    w13, w2, x = weights(4, 128, 64), weights(4, 64, 64, seed=1), rows(5, 64)
    layers_of = [
        QuantizedExperts(w13, w2, activations="16bit", backend=b) for b in (f"emulator:{arch}", "reference")
    ]
    got, want = (layer(x, IDS, FACTORS).float() for layer in layers_of)
    assert (got - want).norm() < 0.01 * want.norm()


def test_what_experts_refuse():
    w13, w2 = weights(2, 96, 80), weights(2, 80, 48)
    with pytest.raises(ValueError, match=r"w13 is MXFP4 of shape .*expected \[E, 2 I, H\] of FP8_128X128"):
        QuantizedExperts(nv.quantize(torch.ones(2, 96, 64), format=nv.MXFP4), w2)
    with pytest.raises(ValueError, match=r"w2 is MXFP4 of shape .*expected \[E, H, I\] of INT8"):
        QuantizedExperts(w13, nv.quantize(torch.ones(2, 96, 64), format=nv.MXFP4))
    with pytest.raises(
        ValueError, match=r"w13 has shape \[2, 96, 80\]; expected \[2, 48, 80\], .*has_gate=False"
    ):
        QuantizedExperts(w13, w2, has_gate=False)
    with pytest.raises(ValueError, match=r"bias2 has shape \[2, 8\]; expected \[2, 80\]"):
        QuantizedExperts(w13, w2, None, torch.zeros(2, 8))
    with pytest.raises(ValueError, match="activations='fp8' is not supported; use 'int8' or '16bit'"):
        QuantizedExperts(w13, w2, activations="fp8")
    layer = QuantizedExperts(w13, w2)
    with pytest.raises(ValueError, match=r"topk_ids \[2, 2\] .*expected \[T, H\]"):
        layer(rows(5, 80), IDS[:2], FACTORS)
    with pytest.raises(nv.UnsupportedProblem, match="requires_grad=True"):
        layer(rows(5, 80).requires_grad_(), IDS, FACTORS)


def as_stored(w):
    return StoredWeight("int8", w.data, w.scale, None, w.shape)


def test_experts_of_a_checkpoint(tmp_path, monkeypatch):
    """Loads W8A8 experts in llm-compressor's format, with one projection per expert."""
    w13, w2 = weights(2, 96, 80), weights(2, 80, 48, seed=1)
    sides = {"gate_proj": (w13, slice(48)), "up_proj": (w13, slice(48, 96)), "down_proj": (w2, slice(80))}
    tensors = {}
    for e in range(2):
        for name, (w, part) in sides.items():
            tensors[f"model.mlp.experts.{e}.{name}.weight"] = w.data[e, part]
            tensors[f"model.mlp.experts.{e}.{name}.weight_scale"] = w.scale[e, part].bfloat16()
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    quantization |= {"config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}
    found = Checkpoint(write(tmp_path, tensors, quantization)).read_experts("model.mlp.experts")
    layer = experts_module(found, "silu", **OPTIONS)
    assert isinstance(layer, QuantizedExperts)
    assert torch.equal(layer.w13, w13.data) and torch.equal(layer.w13_scale, w13.scale.bfloat16().float())
    assert isinstance(experts_module(found, "silu", decode=True, **OPTIONS), DecodedExperts)
    kind = Kind("experts", found.scheme, "2 x [96, 80]", k_sizes={80, 48})
    assert what_runs(kind).startswith("QuantizedExperts on sm_90a, sm_100a")
    assert (
        what_runs(Kind("experts", Scheme("int8", "int8", None), "2 x [96, 64]", k_sizes={64}))
        == "MoE, weight-only"
    )
    weight_only = StoredExperts(
        "e", Scheme("int-quantized", "int8", None), as_stored(weights(2, 64, 64)), None, as_stored(weights(2, 64, 32)),
        None, None, None, None, None, True,
    )  # fmt: skip
    assert experts_module(weight_only, "silu", **OPTIONS).experts.activations == "16bit"
    monkeypatch.setattr(layers, "has_products", lambda *args: False)
    decoded = experts_module(found, "silu", **OPTIONS)
    assert isinstance(decoded, DecodedExperts)
    x, ids, factors = rows(5, 80), IDS.clamp(0, 1), FACTORS
    want = decoded(x, ids, factors).float()
    assert (layer(x, ids, factors).float() - want).norm() < 0.02 * want.norm()

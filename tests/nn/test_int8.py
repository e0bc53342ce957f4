"""Layers with INT8 weights: what they multiply, what they keep when they are moved, what they refuse; checkpoints that have them."""

import pytest
import torch
from checkpoint_files import write

import nvfp4_cute as nv
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models import layers
from nvfp4_cute.models.checkpoints.checkpoint import Checkpoint
from nvfp4_cute.models.layers import linear_module
from nvfp4_cute.nn.int8 import LinearINT8
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


def weights(n, k, seed=0):
    return nv.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)), format=nv.INT8)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def stored(tmp_path, w, group=GROUP, scale_dtype=torch.bfloat16):
    """A layer of a checkpoint as llm-compressor writes it."""
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
    """Every backend gives the bits of exact sums, scaled as the reference says."""
    w, bias, x = weights(200, 272), torch.randn(200).bfloat16(), rows(3, 7, 272)
    layer = LinearINT8(w, bias, backend=backend)
    q = nv.quantize(x.reshape(21, 272), format=nv.INT8)
    sums = (q.data.long() @ w.data.long().T).float()
    want = (sums * w.scale.T * q.scale).bfloat16() + bias
    assert torch.equal(layer(x), want.reshape(3, 7, 200))
    assert layer(x.float()).dtype == torch.float32 and layer(x[:0]).shape == (0, 7, 200)
    assert (layer(x).float() - (x.double() @ w.dequantize(torch.float64).T + bias).float()).abs().max() < 0.6


def test_a_linear_layer_keeps_its_types():
    layer = LinearINT8(weights(128, 256), torch.zeros(128))
    assert sorted(layer.state_dict()) == ["bias", "weight", "weight_scale"]
    other = LinearINT8(weights(128, 256, seed=1), torch.ones(128)).to(torch.float16)
    assert other.weight.dtype == torch.int8 and other.weight_scale.dtype == torch.float32
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(rows(4, 256)), layer(rows(4, 256)))
    assert torch.equal(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(rows(4, 256)), layer(rows(4, 256))
    )


def test_what_a_linear_layer_refuses():
    with pytest.raises(
        ValueError, match=r"weight is MXFP4 of shape .*of INT8: quantize\(weight, format=INT8\)"
    ):
        LinearINT8(nv.quantize(torch.ones(128, 256), format=nv.MXFP4))
    with pytest.raises(ValueError, match="activations='fp8' is not supported"):
        LinearINT8(weights(128, 256), activations="fp8")


def test_a_checkpoint(tmp_path, monkeypatch):
    """Weights are multiplied as they are stored, or decoded where there is no kernel; a scale of the whole tensor is every row's."""
    w, x = weights(40, 64), rows(4, 64)
    found = stored(tmp_path, w)
    assert str(found.scheme) == "W int8, A int8"
    layer = linear_module(found, None, **OPTIONS)
    assert isinstance(layer, LinearINT8)
    assert torch.equal(layer.weight_scale, w.scale.bfloat16().float())
    assert torch.equal(found.weight.dequantize(), w.data.float() * layer.weight_scale)
    monkeypatch.setattr(layers, "has_products", lambda *args: False)
    decoded = linear_module(found, None, **OPTIONS)
    assert isinstance(decoded, RoundedInput)
    torch.testing.assert_close(layer(x).float(), decoded(x).float(), rtol=2e-2, atol=0.1)
    alone = {"targets": ["Linear"], "weights": GROUP["weights"]}
    plain = linear_module(stored(tmp_path / "alone", w, alone), None, **OPTIONS)
    assert isinstance(plain, LinearINT8) and plain.activations == "16bit"
    want = (x.double() @ w.data.double().T).float() * plain.weight_scale.T
    assert torch.equal(plain(x), want.bfloat16())


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("weights", {"symmetric": False}, "weights has zero points; .*symmetric=true"),
        ("weights", {"strategy": "group"}, "weights.strategy is 'group'; .*'channel' or 'tensor'"),
        ("weights", {"num_bits": 4}, "weights.num_bits is 4, and its format int8 has 8"),
        ("input_activations", {"strategy": "tensor"}, "strategy is 'tensor'; .*'token'"),
        ("input_activations", {"dynamic": False}, "dynamic is False; .*dynamic=true"),
    ],
)
def test_what_a_checkpoint_is_refused_for(tmp_path, side, change, message):
    with pytest.raises(CheckpointError, match=message):
        stored(tmp_path, weights(40, 64), GROUP | {side: GROUP[side] | change})

"""Training of scales and norms: the loss falls, and the checkpoint holds the trained values."""

import copy

import pytest
import torch
from tiny_models import EXPERTS, model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import TensorFiles  # noqa: E402
from nvfp4_cute.models.quantizing import distill as training  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import Calibration, quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.distill import distill  # noqa: E402
from nvfp4_cute.models.quantizing.weights import quantized  # noqa: E402


def windows(count=8, seed=1):
    return list(torch.randint(0, 128, (count, 48), generator=torch.Generator().manual_seed(seed)).split(1))


@torch.no_grad()
def error(model, reference, batches):
    """Relative error of the last hidden states."""
    pairs = [(one.model(ids).last_hidden_state for one in (model, reference)) for ids in batches]
    pairs = [(a, b) for a, b in pairs]
    return float(
        sum((a - b).square().sum() for a, b in pairs).sqrt() / sum(b.square().sum() for _, b in pairs).sqrt()
    )


@pytest.mark.parametrize(
    ("kind", "format"), [("llama", "nvfp4a16"), ("qwen3_moe", "nvfp4a16"), ("llama", "nvfp4")]
)
def test_the_checkpoint_holds_what_was_trained(tmp_path, kind, format, monkeypatch):
    """Scales and norms change, codes of the first block do not, and the model comes closer to the 16-bit model."""
    monkeypatch.setattr(training, "RATE", 1e-2)  # few windows, so few steps
    reference = model_of(kind, **(EXPERTS if kind == "qwen3_moe" else {}))
    reference.save_pretrained(tmp_path / "in")
    found, errors = {}, {}
    for passes in (0, 6):
        out, model = tmp_path / str(passes), copy.deepcopy(reference)
        given = {"method": "gptq", "calibration": Calibration(model, windows()), "distill": passes}
        quantize_checkpoint(tmp_path / "in", out, format=format, **given)
        found[passes] = {layer.name: layer for layer in Checkpoint(out).each_linear()}
        loaded = ours.load(out, decode=True, activations="nvfp4", dtype=torch.float32)
        errors[passes] = error(loaded, reference, windows())
        for name, layer in found[passes].items():
            torch.testing.assert_close(model.get_submodule(name).weight, layer.weight.dequantize())
    assert errors[6] < 0.97 * errors[0], errors
    for name, layer in found[6].items():
        plain = found[0][name].weight
        assert not torch.equal(layer.weight.scale.view(torch.uint8), plain.scale.view(torch.uint8)), name
        if ".layers.0.self_attn." in name and "o_proj" not in name:
            assert torch.equal(layer.weight.data, plain.data), name
    if kind == "qwen3_moe":
        old, new = (Checkpoint(tmp_path / str(n)).read_experts("model.layers.1.mlp.experts") for n in (0, 6))
        for one, other in ((old.w13, new.w13), (old.w2, new.w2)):
            assert (one.scale.float() != other.scale.float()).flatten(1).any(1).all()
    files, given = TensorFiles(tmp_path / "6"), TensorFiles(tmp_path / "in")
    for name in (n for n in given if n.endswith("norm.weight")):
        expected = model.get_parameter(name)
        assert torch.equal(files[name], expected), name
        assert torch.equal(files[name], given[name]) == (name == "model.norm.weight"), name


def test_gradients_are_those_of_the_scales():
    """One linear layer: a step changes each scale's factor against the slope of the loss, computed by hand."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 8, bias=False)
    stored = quantized(layer.weight.detach(), "nvfp4", 2 * layer.weight.detach().abs().max())
    x = torch.randn(1, 64, 32)
    target = x @ layer.weight.detach().T
    with torch.no_grad():
        layer.weight.copy_(stored.dequantize())
    weight = layer.weight.detach().clone().requires_grad_()
    training.loss(x @ weight.T, target).backward()
    slope = (weight.grad * weight.detach()).unflatten(-1, (-1, 16)).sum(-1)
    seen = []
    real = training.RATE
    try:
        training.RATE = 0.2
        (new,) = distill(
            layer, [stored], lambda of: [of(layer).weight], [lambda: seen.append(1) or layer(x)], [target], 1
        )
    finally:
        training.RATE = real
    before, after = (one.scale.float() for one in (stored, new))
    assert len(seen) == 1 and torch.equal(torch.sign(before - after), torch.sign(slope))
    assert torch.equal(layer.weight, new.dequantize())


def test_formats_without_such_scales_stay():
    """MXFP4: the weights are returned as they are; norms train."""
    torch.manual_seed(0)
    block = torch.nn.Sequential()
    block.add_module("norm", torch.nn.RMSNorm(32))
    block.add_module("up", torch.nn.Linear(32, 8, bias=False))
    x = torch.randn(1, 64, 32)
    target = block(x).detach()
    stored = quantized(block.up.weight.detach(), "mxfp4")
    with torch.no_grad():
        block.up.weight.copy_(stored.dequantize())
    before = training.loss(block(x), target).item()
    (new,) = distill(block, [stored], lambda of: [of(block.up).weight], [lambda: block(x)], [target], 20)
    assert new is stored and not torch.equal(block.norm.weight, torch.ones(32))
    assert training.loss(block(x), target).item() < before


def test_command(tmp_path):
    """Rotation, GPTQ and training in one command, whose checkpoint loads; nothing else is left next to it."""
    model = model_of("qwen3", torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--calibrate", "random"]
    command += ["--format", "nvfp4a16", "--method", "gptq", "--rotate", "16", "--distill", "1"]
    assert main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    ids = windows(1)[0]
    with torch.no_grad():
        got, expected = loaded(ids).logits.double(), model(ids).logits.double()
    assert 0.01 < (got - expected).norm() / expected.norm() < 0.5


@pytest.mark.parametrize("given", [{"distill": 2, "method": "search"}, {"distill": -1, "method": "nearest"}])
def test_refused(tmp_path, given, capsys):
    with pytest.raises(ValueError, match='after method="gptq"'):
        quantize_checkpoint(tmp_path, tmp_path / "out", format="nvfp4a16", **given)
    command = ["quantize", str(tmp_path), "--out", str(tmp_path / "out"), "--distill", "2"]
    assert main(command) == 2 and "follows --method gptq" in capsys.readouterr().err

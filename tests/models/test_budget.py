"""More bits for the layers that lose most: measured costs, and the choice within a budget."""

import copy
import json

import pytest
import torch
from tiny_models import model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.budget import Cost, chosen, measured, within_budget  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.layouts import RECIPES  # noqa: E402
from nvfp4_cute.models.quantizing.rules import Layer  # noqa: E402

MXFP8_BITS = 8.25


def layer(name, n=64, k=64):
    return Layer(name, (n, k), RECIPES["nvfp4a16"], name)


def cost(kl, raised=("mxfp8", "16bit")):
    return Cost(kl, 1.0, {f: {"mxfp8": 0.1, "16bit": 0.0}[f] for f in raised})


@pytest.fixture
def model(tmp_path):
    made = model_of()
    made.save_pretrained(tmp_path / "in")
    return made


def windows():
    return list(torch.randint(0, 128, (3, 24), generator=torch.Generator().manual_seed(1)).split(1))


def test_what_a_budget_buys():
    """Steps are ordered by savings per bit; a step that does not fit is skipped for one that does."""
    layers, size = [layer("a"), layer("b"), layer("big", 640)], 64 * 64
    costs = {"a": cost(4.0), "b": cost(3.0), "big": cost(100.0)}
    step = (MXFP8_BITS - 4.5) * size
    assert chosen(layers, costs, 0) == {}
    assert chosen(layers, costs, step) == {"a": "mxfp8"}
    assert chosen(layers, costs, 2 * step) == {"a": "mxfp8", "b": "mxfp8"}
    assert chosen(layers, costs, 10 * step) == {"big": "mxfp8"}
    whole = (16 - 4.5) * size
    assert chosen(layers, costs, 12 * whole) == dict.fromkeys(("a", "b", "big"), "16bit")
    assert chosen(layers, {"a": cost(4.0, ["16bit"])}, whole) == {"a": "16bit"}
    assert chosen(layers, {"a": cost(4.0, ["16bit"])}, whole - 1) == {}


def test_costs_are_those_of_the_model(model):
    """Compares one layer's KL with a value by hand. The model is unchanged, and a layer without influence costs nothing."""
    before = copy.deepcopy(model.state_dict())
    name = "model.layers.1.mlp.down_proj"
    ids = windows()[:1]
    with torch.no_grad():
        expected = model(ids[0]).logits[0].log_softmax(-1)
        found = measured(model, ids, [layer(name, 64, 96)], ("mxfp8", "16bit"))[name]
        own = dict(model.named_modules())[name]
        from nvfp4_cute.models.quantizing.weights import quantized

        own.weight.copy_(quantized(own.weight, "nvfp4", search=True).dequantize())
        got = model(ids[0]).logits[0].log_softmax(-1)
        own.weight.copy_(before[f"{name}.weight"])
    assert found.kl == pytest.approx(float((expected.exp() * (expected - got)).sum(1).mean()), rel=1e-3)
    assert 0 < found.of("mxfp8") < 0.2 * found.kl and found.of("16bit") == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_the_mean_stays_within_the_budget(model, tmp_path, layout):
    folder = tmp_path / "in"
    options = {"format": "nvfp4a16", "layout": layout}
    formats = within_budget(folder, model, windows(), 6.0, **options)
    assert formats and set(formats.values()) <= {"16bit", "mxfp8"}
    assert layout != "modelopt" or set(formats.values()) == {"16bit"}, (
        "ModelOpt has no MXFP8 of weights alone"
    )
    done = quantize_checkpoint(folder, tmp_path / "out", formats=formats, **options)
    assert 5.5 < done.bits_per_weight <= 6.0
    linears = Checkpoint(tmp_path / "out").linears
    raised = {name for name, scheme in linears.items() if scheme.weights == "mxfp8_e4m3"}
    assert raised == {name for name, format in formats.items() if format == "mxfp8"}
    assert all(linears[name].activations is None for name in raised)
    with pytest.raises(ValueError, match="nvfp4a16 takes 4.5"):
        within_budget(folder, model, windows(), 4.0, **options)


def test_command(model, tmp_path, capsys):
    command = ["quantize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--budget"]
    for bits in ("5", "0"):
        assert main([*command, bits]) == 2 and "--budget measures on a text" in capsys.readouterr().err
    assert main([*command, "0", "--calibrate", "random"]) == 2
    assert "budget=0.0 bits per weight; nvfp4 takes 4.5" in capsys.readouterr().err
    command.append("5")
    assert main([*command, "--calibrate", "random", "--method", "gptq"]) == 0
    assert "layers with more bits within 5.0 bits per weight" in capsys.readouterr().out
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert entry["quant_algo"] == "MIXED_PRECISION"

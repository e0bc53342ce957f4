"""Distances of a quantized model from its 16-bit model: numbers computed by hand, and tiny models."""

import copy
import json
import math

import pytest
import torch
from tiny_models import EXPERTS, model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from nvfp4_cute.cli import main  # noqa: E402
from nvfp4_cute.models.accuracy import compare, quantized_copy  # noqa: E402
from nvfp4_cute.models.quantizing.calibrate import largest_inputs  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402


def windows():
    return list(torch.randint(0, 128, (1, 24), generator=torch.Generator().manual_seed(1)).split(12, 1))


class Fixed(torch.nn.Module):
    """A model with the same prediction everywhere."""

    device = torch.device("cpu")

    def __init__(self, probabilities):
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, ids):
        out = type("Output", (), {})()
        out.logits = self.logits.expand(1, ids.shape[1], -1)
        return out


def test_numbers_by_hand():
    """Tokens are 0, 1, 1, so both following tokens are 1."""
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    found = compare(Fixed(p), Fixed(q), [torch.tensor([[0, 1, 1]])])
    assert found.tokens == 2
    assert found.reference_perplexity == pytest.approx(4) and found.perplexity == pytest.approx(2)
    assert found.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2)) == pytest.approx(found.kl_worst)
    assert found.same_choice == 0 and found.ratio == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least two tokens"):
        compare(Fixed(p), Fixed(q), [torch.tensor([[0]])])


def test_a_model_beside_itself():
    model = model_of(dtype=torch.bfloat16)
    found = compare(model, copy.deepcopy(model), windows())
    assert (found.kl, found.same_choice, found.ratio, found.layers) == (0, 1, 1, {})


def test_another_model_is_refused(tmp_path, capsys):
    for other, message in (
        (
            model_of("qwen3"),
            "class of the 16-bit model is LlamaForCausalLM, and Qwen3ForCausalLM of the quantized",
        ),
        (model_of(vocab_size=64), "vocab_size of the 16-bit model is 128, and 64 of"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(model_of(), other, windows())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {}}')
    assert main(["models", "eval", str(tmp_path), "--text", "random"]) == 1
    assert "is quantized already; pass the 16-bit model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_ways(kind):
    """4-bit weights lose less than 4-bit weights and activations; every quantized layer has its error."""
    model = model_of(kind, torch.bfloat16, **(EXPERTS if kind == "qwen3_moe" else {}))
    seen = largest_inputs(model, windows())
    made = {
        "16bit": quantized_copy(model, "16bit"), "nvfp4": quantized_copy(model, "nvfp4"),
        "calibrated": quantized_copy(model, "nvfp4", seen),
    }  # fmt: skip
    found = {way: compare(model, one, windows()) for way, one in made.items()}
    assert 0 < found["16bit"].kl < found["nvfp4"].kl < 10 * found["calibrated"].kl
    names = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    names |= {n for n, m in model.named_modules() if n.endswith(".experts")}
    for one in found.values():
        assert set(one.layers) == names
        assert all(0.01 < error < 0.3 for error in one.layers.values())


def test_command(tmp_path, capsys):
    model_of(dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="nvfp4a16")
    command = ["models", "eval", str(tmp_path / "in"), "--text", "random", "--tokens", "100"]
    assert main([*command, "--json", "--calibrate", "random"]) == 0
    ways = json.loads(capsys.readouterr().out)["schemes"]
    assert list(ways) == ["16bit", "nvfp4", "nvfp4, calibrated"]
    assert main([*command, "--checkpoint", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert (
        "perplexity of the 16-bit model" in out
        and "top-1 agreement" in out
        and "largest errors of layers: model.layers." in out
    )

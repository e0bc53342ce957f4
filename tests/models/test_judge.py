"""Two models on one page."""

import json

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from tiny_models import model_of

from nvfp4_cute.cli import main


def test_two_models_on_one_page(tmp_path, capsys):
    """A model agrees with itself; NVFP4 is further away than FP8, and its layers have the errors of NVFP4."""
    model_of("llama", torch.bfloat16).save_pretrained(tmp_path / "exact")
    for format in ("nvfp4a16", "fp8"):
        command = ["quantize", str(tmp_path / "exact"), "--format", format, "--out", str(tmp_path / format)]
        assert main(command) == 0
    found = {}
    for first, second in (("exact", "exact"), ("exact", "fp8"), ("exact", "nvfp4a16"), ("fp8", "nvfp4a16")):
        capsys.readouterr()
        command = [
            "models",
            "judge",
            str(tmp_path / first),
            str(tmp_path / second),
            "--text",
            "random",
            "--tokens",
            "256",
        ]
        assert main([*command, "--json", "--report", str(tmp_path / "judge.md")]) == 0
        found[first, second] = json.loads(capsys.readouterr().out)
    same, fp8, nvfp4, both = found.values()
    assert (same["kl"], same["same_choice"], same["ratio"], same["layers"]) == (0, 1, 1, {})
    assert 0 < fp8["kl"] < nvfp4["kl"] and fp8["same_choice"] > nvfp4["same_choice"]
    assert len(nvfp4["layers"]) == len(both["layers"]) == 14
    assert all(0.05 < error < 0.2 for error in nvfp4["layers"].values())
    text = (tmp_path / "judge.md").read_text()
    assert (
        text.startswith("# nvfp4a16 against fp8")
        and "top-1 agreement" in text
        and "model.layers.0.mlp.down_proj" in text
    )
    if "![" in text:
        assert (tmp_path / "judge.png").read_bytes()[:4] == b"\x89PNG"

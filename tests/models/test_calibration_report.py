"""The calibration report: planted faults are found, and sound layers are good."""

import json
import re

import pytest
import torch
from model_folder import E, H, seen, source

from nvfp4_cute.cli import main
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.quantizing import report
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint

ATTENTION = "model.layers.0.self_attn"


def written(tmp_path, tensors=(), **options):
    """The notes by layer, and the verdicts, of a model with these tensors."""
    folder, _ = source(tmp_path / "in", **dict(tensors))
    done = quantize_checkpoint(folder, tmp_path / "out", **options)
    return {note.name: note for note in done.notes}, report.verdicts(done.notes)


def planted(change):
    weight = (torch.randn(64, H, generator=torch.Generator().manual_seed(0)) / 8).bfloat16()
    change(weight)
    return {f"{ATTENTION}.o_proj.weight": weight}


def test_sound_layers_are_good(tmp_path):
    notes, verdicts = written(tmp_path, format="nvfp4a16")
    assert set(verdicts.values()) == {report.GOOD} and len(notes) == 4 + 3 * E
    note = notes[f"{ATTENTION}.o_proj"]
    assert 0.08 < note.error < 0.11 and note.tokens is None and note.blocks == 64 * H // 16
    assert (note.outliers, note.saturated, note.subnormal, note.zero) == (0, 0, 0, 0)


def test_outliers_are_found(tmp_path):
    """A column of large values, one in every first block: its neighbours become zeros."""

    def change(weight):
        weight[:, 3] = 30.0

    notes, verdicts = written(tmp_path, planted(change), format="nvfp4a16")
    assert notes[f"{ATTENTION}.o_proj"].outliers == 64
    assert "outliers" in verdicts[f"{ATTENTION}.o_proj"]
    assert [name for name, verdict in verdicts.items() if verdict != report.GOOD] == [f"{ATTENTION}.o_proj"]


def test_zero_and_subnormal_scales_are_found(tmp_path):
    def change(weight):
        weight[0, :16] = 1e-6
        weight[1:9, 16:32] *= 3e-5

    notes, verdicts = written(tmp_path, planted(change), format="nvfp4a16")
    note = notes[f"{ATTENTION}.o_proj"]
    assert note.zero == 1 and "1 blocks lost all their values" in verdicts[note.name]
    assert 0 < note.subnormal <= 8


def test_blocks_over_their_scale_are_found():
    """Weights whose global scale is for smaller values."""
    from nvfp4_cute.models.quantizing.layouts import RECIPES
    from nvfp4_cute.models.quantizing.rules import Layer
    from nvfp4_cute.models.quantizing.weights import quantized

    weight = torch.ones(4, 32)
    weight[2, 16:] = 3.0
    layer = Layer("x", (4, 32), RECIPES["nvfp4a16"], "x")
    note = report.LayerNote.of(layer, weight, quantized(weight, "nvfp4", torch.tensor(1.0)), 5, None)
    assert note.saturated == 1 and "1 blocks are cut" in note.verdict(note.error)


def test_an_expert_without_tokens(tmp_path):
    """Nothing is written; filled as the caller says, the checkpoint and the report name it."""
    folder, _ = source(tmp_path / "in")
    with pytest.raises(
        CheckpointError, match="reached 1 experts, such as model.layers.0.mlp.experts.1: .*--unreached"
    ):
        quantize_checkpoint(folder, tmp_path / "out", seen=seen())
    assert not (tmp_path / "out").exists()
    for fill, first, second in (("largest", 5.0, 7.0), ("median", 3.0, 1.0)):
        done = quantize_checkpoint(folder, tmp_path / fill, seen=seen(), unreached=fill)
        experts = Checkpoint(tmp_path / fill).read_experts("model.layers.0.mlp.experts")
        assert torch.equal(experts.w13_input[1], torch.tensor(first / 2688))
        assert torch.equal(experts.w2_input[1], torch.tensor(second / 2688))
        said = json.loads((tmp_path / fill / "calibration.json").read_text())
        assert (
            said["filled_by"] == fill
            and len(said["unreached"]) == 3
            and all(".1." in n for n in said["unreached"])
        )
        bad = {
            n
            for n, verdict in report.verdicts(done.notes).items()
            if verdict.startswith("no token reached it")
        }
        assert bad == set(said["unreached"])


def test_page_and_picture(tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder, _ = source(tmp_path / "in")
    page = tmp_path / "report.md"
    assert (
        main(
            [
                "quantize",
                str(folder),
                "--out",
                str(tmp_path / "out"),
                "--format",
                "nvfp4a16",
                "--report",
                str(page),
            ]
        )
        == 0
    )
    text = page.read_text()
    assert "13 of 13 layers are good" in text and "![" in text and f"{ATTENTION}.o_proj | nvfp4" in text
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG" and matplotlib
    assert "13 of 13 layers are good" in capsys.readouterr().out


def test_tokens_of_experts_are_counted(tmp_path, capsys):
    """Two experts get all tokens: nothing is written, or the page says which of them got none."""
    pytest.importorskip(
        "transformers", reason="transformers is not installed; make test-transformers installs it"
    )
    from tiny_models import EXPERTS, model_of

    model = model_of("qwen3_moe", torch.bfloat16, **EXPERTS)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    model.save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--calibrate", "random", "--out"]
    assert main([*command, str(tmp_path / "no")]) in (1, 2)
    assert "no token of the calibration reached 2 experts" in capsys.readouterr().err
    page = tmp_path / "report.md"
    assert main([*command, str(tmp_path / "out"), "--unreached", "median", "--report", str(page)]) == 0
    text = page.read_text()
    tokens = 8 * 128  # of random text
    assert re.search(
        rf"\| model.layers.0.mlp.experts \| 4 \| 0 \| {tokens // 2} \| {tokens} \| \d, \d \|", text
    )
    assert re.search(r"\| model.layers.1.mlp.experts \| 4 \| \d+ \| \d+ \| \d+ \| none \|", text)
    assert f"model.layers.0.self_attn.q_proj | nvfp4 | {tokens} |" in text

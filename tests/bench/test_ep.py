"""bench.ep: its page and its picture; measuring needs two GPUs."""

import json

import pytest
import torch

from nvfp4_cute.bench import ep

RESULT = {
    "tokens": 512,
    "us": dict.fromkeys(ep.PHASES, 10.0) | {"exact": 90.0, "capacity": 80.0, "one GPU": 100.0},
    "differing": 0.0,
    "error": 0.0,
    "dispatch_bytes": 600_000,
    "combine_bytes": 8_000_000,
    "bf16_bytes": 2_000_000,
}
REPORT = {
    "gpu": "H",
    "torch": "2",
    "ranks": 2,
    "link_gb_s": 200.0,
    "models": {"qwen3-30b-a3b": [RESULT], "deepseek-v3-slice": [RESULT]},
}


def test_page(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    assert ep.main(["--read", str(path)]) == 0
    text = capsys.readouterr().out
    assert "| 512 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 90.0 | 80.0 | 100.0 | 0.80 |" in text
    assert "| 512 | 0.600 | 60 | 0.30 | 8.000 | 800 | 0 | 0 |" in text


def test_saved_page_says_what_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ep, "RESULTS", tmp_path)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    assert ep.main(["--read", str(path), "--save", "two"]) == 0
    assert (
        "Made by `python -m nvfp4_cute.bench.ep --read ... --save two`" in (tmp_path / "two.md").read_text()
    )


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    ep.draw(REPORT, tmp_path / "ep.png")
    assert (tmp_path / "ep.png").stat().st_size > 1000


def test_too_few_gpus_are_an_exit_code():
    if torch.cuda.device_count() < 2:
        assert ep.main([]) == 2

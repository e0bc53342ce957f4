"""bench.ep: its page and its plot; measurements and comparisons run on processes."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peers import shared_peers
from ranks import run_ranks

from nvfp4_cute.bench import ep
from nvfp4_cute.bench.moe import Model, make_weights
from nvfp4_cute.cli import main
from nvfp4_cute.experts import parallel

RESULT = {
    "tokens": 512,
    "us": dict.fromkeys(ep.PUSHED, 10.0) | {"exact": 90.0, "host": 70.0, "capacity": 80.0, "one GPU": 100.0},
    "differing": 0.0,
    "error": 0.0,
    "dispatch_bytes": 600_000,
    "combine_bytes": 8_000_000,
    "bf16_bytes": 2_000_000,
}
REPORT = {
    "gpu": "NVIDIA H100 80GB",
    "torch": "2",
    "ranks": 2,
    "link_gb_s": 200.0,
    "models": {"qwen3-30b-a3b": [RESULT], "deepseek-v3-slice": [RESULT]},
}


@pytest.fixture
def kept(tmp_path):
    """A report as a file stores it."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    return ["bench", "ep", "--tokens", "512", "--results", str(path)]


def test_page(kept, capsys):
    assert main(kept) == 0
    text = capsys.readouterr().out
    assert "| 512 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 90.0 | 70.0 | 80.0 | - | - | 100.0 | 0.80 |" in text
    assert "| 512 | 0.600 | 60 | 0.30 | 8.000 | 800 | 0 | 0 |" in text
    assert "One large exchange by NCCL: 200 GB/s out of a rank." in text and "may exceed that of NCCL" in text
    assert "into another rank's memory: 390 GB/s." in ep.page(REPORT | {"copy_gb_s": 390.4})
    assert main([*kept, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT


def test_saved_page_says_what_made_it(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(ep, "RESULTS", tmp_path)
    assert main([*kept, "--save"]) == 0
    text = (tmp_path / "h100x2_ep.md").read_text()
    assert "Made by `nvfp4-cute bench ep --results h100x2_ep.json --save`" in text
    assert json.loads((tmp_path / "h100x2_ep.json").read_text()) == REPORT


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    ep.draw(REPORT, tmp_path / "ep.png")
    assert (tmp_path / "ep.png").stat().st_size > 1000


def test_only_what_is_missing_is_measured(kept, tmp_path):
    plan = ep.Plan(ep.CHOSEN, (1, 512), 2, 1, tmp_path / "report.json")
    assert plan.missing(plan.read()) == [(name, 1) for name in ep.CHOSEN]


def test_refusals(kept, capsys):
    for words, text in (
        (["--target", "B200"], "measured on this machine: leave out --target"),
        (["dense"], "name no other suite"),
        (["--containing", "llama"], "no model of ep contains 'llama'"),
    ):
        assert main([*kept[:2], *words, *kept[2:]]) == 2
        assert text in capsys.readouterr().err
    assert main(["bench", "dense", "--ranks", "2"]) == 2
    assert "--ranks is of ep" in capsys.readouterr().err


def test_too_few_gpus_are_an_exit_code():
    if torch.cuda.device_count() < 2:
        assert main(["bench", "ep"]) == 2


def measured(rank: int, folder: str, through_buffers: bool) -> dict:
    """Measures a small model on the CPU, with each call once."""
    made: dict = {}

    def buffers_of(group, layout, device):
        if not through_buffers:
            return None
        return made.setdefault(layout, shared_peers(Path(folder), layout, rank))

    def once(calls, rounds=0):
        return {name: (call(), 1.0)[1] for name, call in calls.items()}

    model = Model(8, 2, 64, 128)
    with (
        patch.multiple(ep, DEVICE="cpu", captured=lambda call: call, timed=once, buffers_of=buffers_of),
        patch.multiple(ep, HOST_CALLS=2),
        patch.object(torch.accelerator, "synchronize", lambda: None),
        patch.object(parallel, "buffers_of", buffers_of),
    ):
        whole = make_weights(model, "cpu").layer
        return asdict(ep.measure(ep.Part(model, whole, rank, 2), whole, 5, 1))


def test_the_links_rate_is_that_of_a_copy_into_the_next_ranks_memory():
    peers = [torch.ones(1 << 10, dtype=torch.uint8) for _ in range(3)]

    def once(calls):
        return {name: (call(), 2.0)[1] for name, call in calls.items()}

    with (
        patch.multiple(ep, DEVICE="cpu", LINK_BYTES=1 << 10, timed=once),
        patch.object(ep.private_api, "symmetric_memory", lambda *_: (peers, None)),
        patch.object(ep.dist, "group"),
    ):
        assert ep.copy_gigabytes_per_s(2, 3) == 0.512
    assert [int(peer.sum()) for peer in peers] == [0, 1 << 10, 1 << 10]


@pytest.mark.parametrize("through_buffers, phases", [(True, ep.PUSHED), (False, ep.EXCHANGED)])
def test_what_is_measured_has_the_results_of_one(through_buffers, phases):
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(measured, 2, folder, through_buffers):
            assert not isinstance(found, Exception), found
            assert found["error"] < 1e-2
            assert {*phases, "exact", "host", "capacity", "one GPU"} <= set(found["us"])
            assert 0 < found["dispatch_bytes"] < found["bf16_bytes"]

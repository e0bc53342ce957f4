"""bench.layers: layers modelled as chains of launches, and the pages with their times."""

import json

import pytest

from nvfp4_cute import MoE, cli
from nvfp4_cute.bench import layers, layers_page
from nvfp4_cute.bench.layers import Cell
from nvfp4_cute.bench.moe import Model
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.roofline import modelled

TINY = Model(experts=16, top_k=4, hidden=256, width=256)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(layers.EXPERTS, "tiny", TINY)
    return "tiny"


def test_cells():
    found = layers.cells(["B200", "GB10"], "qwen3")
    assert {cell.key for cell in found} == {
        f"{target}/qwen3-30b-a3b/{tokens}" for target in ("B200", "GB10") for tokens in layers.TOKENS
    }
    assert [cell.tokens for cell in layers.cells(["B200"], "flashinfer")] == [2048, 128]
    assert all(cell in layers.cells() for cell in (Cell("B200", *key[1:]) for key in layers_page.PUBLISHED))


def test_work_counts_experts_that_a_token_chose(tiny):
    work = layers.layer_work(Cell("B200", tiny, 1))
    expert = (2 * 256 + 256) * (256 // 2 + 256 // 16)
    assert work.bytes == 4 * expert + 2 * 2 * 256
    assert work.flops == 4 * 2 * 3 * 256 * 256


def test_work_of_a_linear_layer_is_a_product_of_two_quantized_operands():
    work = layers.layer_work(Cell("B200", "linear-4096x4096", 128))
    assert work.bytes == 4096 * (4096 // 2 + 4096 // 16) + 2 * 2 * 128 * 4096
    assert work.math == "nvfp4" and work.flops == 2 * 128 * 4096 * 4096


def test_the_call_is_the_layer_with_its_routing(tiny):
    y = layers.layer_call(tiny, 3)("reference")
    assert tuple(y.shape) == (3, 256)
    assert tuple(layers.layer_call("linear-4096x4096", 2)("reference").shape) == (2, 4096)
    with pytest.raises(ValueError, match="layer 'no' is unknown; use one of qwen3"):
        layers.layer_call("no", 1)


def testempty_experts_are_those_of_the_constructor():
    made, empty = MoE(16, 256, 256), layers.empty_experts(TINY)
    state = lambda module: {name: (x.shape, x.dtype) for name, x in module.state_dict().items()}
    assert state(made) == state(empty) and made.num_experts == empty.num_experts


def test_results_are_kept_and_not_modelled_again(tiny, tmp_path, monkeypatch):
    modelled_cells = []
    monkeypatch.setattr(
        layers, "record", lambda cell: modelled_cells.append(cell) or {"floor_us": 1.0, "us": 2.0}
    )
    wanted = [Cell("B200", tiny, 8), Cell("B200", tiny, 1)]
    for _ in range(2):
        known = layers.model_all(wanted, jobs=1, results=tmp_path / "r.json")
    assert modelled_cells == wanted and json.loads((tmp_path / "r.json").read_text()) == known


def test_page():
    bandwidth = lookup("B200").reached_bandwidth_bytes_per_s
    product = {"kernel": "nvfp4_grouped_gemm_sm_100a", "us": 10.0, "hbm_bytes": 0.85e-5 * bandwidth}
    launches = [{"kernel": "moe_route", "us": 2.0, "hbm_bytes": 0}, product]
    known = {
        "B200/deepseek-v3/16": {"floor_us": 300.0, "us": 400.0, "launches": launches, "sources": "def"},
        "GB10/qwen3-30b-a3b/8": {"floor_us": 300.0, "missing": "no kernel", "sources": "abc"},
    }
    text = layers_page.page(known, ["B200", "GB10"], "made by")
    assert "| 16 | 400.0 (75 %; 85) | B200: 428, 365 us (FlashInfer" in text
    assert "- modelled by sources abc, def." in text
    missing = len(layers.cells(["B200", "GB10"])) - 2
    assert f"- {missing} cells were not modelled for lack of time: " in text and "GB10: no kernel" in text


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    known = {"B200/qwen3-30b-a3b/8": {"floor_us": 18.0, "us": 34.0}, "GB10/qwen3-30b-a3b/1": {"missing": "-"}}
    layers_page.picture(tmp_path / "layers.png", known, ["B200", "GB10"])
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_takes_off_what_the_harness_costs():
    us = {"route + layer": 50.0, "an empty interval": layers.INTERVAL_US + 2}
    measured = {"models": {"mixtral-8x7b": [{"tokens": 1, "us": us}, {"tokens": 8, "us": us}]}}
    rows = layers.compare(measured, {"H100 SXM/mixtral-8x7b/1": {"us": 36.0}})
    assert rows == [(Cell("H100 SXM", "mixtral-8x7b", 1), 48.0, 36.0)]
    assert "1 layers: median error 25 %, worst 25 %, 1 modelled too fast" in layers.comparison(rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench layers dense", "name no other suite"),
        ("bench layers --plot x.png", "leave out plot"),
        ("bench dense --explain --jobs 2", "leave out --jobs"),
        ("bench layers --containing nothing", "no layer contains 'nothing'"),
        ("trace nothing", "is neither a problem nor a layer"),
        ("trace nvfp4_gemm --tokens 2", "leave out tokens"),
        ("trace qwen3-30b-a3b --case 2", "leave out case"),
    ],
)
def test_refusals(line, message, capsys):
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", ["B200", "RTX 5090", "H100 SXM"])
def test_of_a_layer_s_clusters_a_few_stand_for_all(tiny, target, monkeypatch):
    works, work_of = [], modelled._work_of
    monkeypatch.setattr(modelled, "_work_of", lambda *launch: works.append(work_of(*launch)) or works[-1])
    few = layers.modelled(Cell(target, tiny, 24))
    assert [any(work) for work in works] == [True, False, True, True, True, True]  # permute is one CTA
    monkeypatch.setattr(modelled, "_work_of", lambda *_: [None])
    full = layers.modelled(Cell(target, tiny, 24))
    assert [timing.kernel for timing in few.launches] == [timing.kernel for timing in full.launches]
    assert few.us == pytest.approx(full.us, rel=0.02)
    assert few.hbm_bytes == pytest.approx(full.hbm_bytes, rel=0.05)


@pytest.mark.slow
def test_bytes_are_counted_once_where_launches_overlap(tiny):
    chain = modelled.modelled_chain(layers.layer_call(tiny, 24), lookup("B200"), timeline=True)
    assert chain.hbm_bytes == sum(nbytes for _, nbytes in chain.memory_log)


@pytest.mark.slow
def test_trace_of_a_layer(tiny, tmp_path, capsys):
    path = tmp_path / "t.json"
    assert cli.main(["trace", "tiny", "--tokens", "2", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert "5 launches: " in text and "moe_finalize" in text and "us (modelled) on B200" in text
    names = {
        event["args"]["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert "tensor cores" in names


def test_results_that_are_no_object_are_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no object; name a file that nvfp4-cute bench layers"):
        layers.model_all([], jobs=1, results=path)

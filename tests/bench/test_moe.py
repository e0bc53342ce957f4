"""bench.moe: the timed code computes the layer, and the output is complete. Times need a GPU."""

import json

import pytest
import torch

from nvfp4_cute.bench import moe
from nvfp4_cute.formats.block_format import MXFP4, NVFP4


@pytest.mark.parametrize(("width", "format"), [(128, NVFP4), (96, NVFP4), (128, MXFP4), (96, MXFP4)], ids=str)
def test_every_call_runs_and_the_layer_is_checked(width, format):
    model = moe.Model(4, 2, 64, width)
    weights = moe.make_weights(model, "cpu", format=format)
    batch = moe.Batch.make(model, 40, "cpu")
    assert 0 < moe.check(weights.layer, weights, batch, moe.WRONG) < moe.WRONG
    moe.check(weights.weight_only, weights, batch, moe.WRONG_16BIT)
    results = {name: call() for name, call in moe.ours(model, weights, batch).items()}
    assert ("activate" in results) == (width == 96)
    layer = weights.layer(batch.x, batch.ids, batch.weights)
    assert torch.equal(results["layer"], layer) and torch.equal(results["finalize"], layer)
    assert torch.equal(results["route + layer"], layer)
    rows = int(batch.order.offs[-1])
    assert torch.equal(results["rows"][:rows], results["down"][:rows])
    plain = {name: call() for name, call in moe.weight_only(model, weights, batch).items()}
    assert torch.equal(plain["rows, 16 bits"][:rows], plain["down, 16 bits"][:rows])
    for layer, most in ((weights.layer, moe.WRONG), (weights.weight_only, moe.WRONG_16BIT)):
        if layer.alpha2 is not None:
            layer.alpha2[0] *= 3
        else:
            layer.w2 = layer.w2 ^ 0x88  # signs
        with pytest.raises(ValueError, match="40 tokens: the layer's result differs"):
            moe.check(layer, weights, batch, most)


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert moe.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_table():
    results = [
        {"tokens": 1, "error": 0.1, "us": {"layer": 12.34, "torch fp8 rows": 2.0}, "missing": {}},
        {"tokens": 8, "error": 0.2, "us": {"layer": 5.0}, "missing": {"torch fp8 rows": "no"}},
    ]
    text = moe.table("model", json.loads(json.dumps(results)))
    assert "| 1 | 12.3 | 2.0 | 0.100 |" in text and "| 8 | 5.0 | - | 0.200 |" in text
    assert "- torch fp8 rows: no" in text


def test_where_it_stands():
    us = {"rows": 12.0, "rows, 16 bits": 9.0, "route + layer": 20.0, "torch bf16 rows": 30.0}
    report = {
        "models": {
            "a": [{"tokens": 1, "us": us}, {"tokens": 8, "us": us}],
            "b": [{"tokens": 8, "us": {"rows": 1.0}}],
        }
    }
    report["peers"] = {"Other 1.2": {"a": {"1": 10.0, "8": 6.0}}}
    assert "| a | 0.90 Other | **1.50** Other |\n| b | - | - |" in moe.standing(report)


@pytest.mark.gpu("sm_90a")
def test_gpu_measures(capsys):
    assert moe.main(["--model", "qwen3-30b-a3b", "--tokens", "1", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["models"]["qwen3-30b-a3b"]
    assert result["us"]["layer"] > 0

"""bench.mx: without a GPU it says so; times themselves need one."""

import json

import pytest
import torch

from nvfp4_cute import MXFP4, NVFP4
from nvfp4_cute.bench import moe, mx


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert mx.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_what_is_wrong_is_not_timed():
    want = torch.randn(4, 8)
    assert mx.error_of(want + 1e-3 * want, want) < mx.TOLERANCE
    with pytest.raises(RuntimeError, match="of the norm"):
        mx.error_of(-want, want)


@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=str)
def test_the_layer_is_what_it_is_compared_with(format):
    model = moe.Model(4, 2, 64, 96)
    made, batch = mx.GptOss(format, model, "cpu"), moe.Batch.make(model, 40, "cpu")
    if format == MXFP4:
        dense = made.dense(made.w13), made.dense(made.w2)
        mx.error_of(made.layer(batch), made.expected(batch, dense))
        with pytest.raises(RuntimeError, match="of the norm"):
            mx.error_of(made.layer(batch), 2 * made.expected(batch, dense))
    rows = made.rows(batch)
    bias = made.bias2[batch.ids.long()].float()
    y = ((rows[batch.order.rows.long()].float() + bias) * batch.weights.unsqueeze(2)).sum(1)
    mx.error_of(made.layer(batch), y)


@pytest.mark.gpu("sm_90a")
def test_gpu_measures(tmp_path):
    assert mx.main(["--only", "products", "--json", str(tmp_path / "mx.json")]) == 0
    assert json.loads((tmp_path / "mx.json").read_text())["products"][0]["us"]["mxfp4"] > 0

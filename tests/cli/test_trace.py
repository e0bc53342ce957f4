"""`nvfp4-cute trace`, and modelled times of this package's own kernels."""

import gzip
import json
import re
from pathlib import Path

import flat_parts as parts
import pytest
import torch

from nvfp4_cute import cli
from nvfp4_cute.bench.modelled import stated_error
from nvfp4_cute.bench.validation.errors import newest, summary_of
from nvfp4_cute.cli import trace
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.gpus.timing_figures import MODEL_ERROR
from nvfp4_cute.roofline.modelled import modelled_times
from nvfp4_cute.roofline.speed_of_light import grouped_gemm, physical_floor


def test_unknown_case_is_refused(capsys):
    assert cli.main(["trace", "nvfp4_group_gemm", "--case", "9"]) == 2
    assert "no benchmark case 9" in capsys.readouterr().err


def test_problem_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="does not answer nvfp4_nothing"):
        trace.model_case("nvfp4_nothing", 0, target_name="B200", out=None)


def test_grouped_gemm_is_never_modelled_faster_than_light():
    m, n, k = 128, 256, 512
    operand = lambda rows: torch.full((rows, k // 2), 0x22, dtype=torch.uint8)
    scales = lambda rows: torch.full((rows * k // 16,), 0x38, dtype=torch.uint8)
    call = lambda backend: parts.grouped_gemm(
        [operand(m)], [operand(n)], [scales(m)], [scales(n)], out_dtype=torch.float16, backend=backend
    )
    (timing,) = modelled_times(call, B200)
    work = grouped_gemm([(m, n, k)])
    assert timing.us >= physical_floor(work, B200).us
    assert timing.hbm_bytes >= sum(operand.bytes for operand in work.operands if not operand.written)
    assert timing.requested_bytes >= timing.hbm_bytes
    assert timing.stored_bytes == 2 * m * n


@pytest.mark.slow
def test_trace_of_a_competition_case(tmp_path, capsys):
    path = tmp_path / "t.json.gz"
    assert cli.main(["trace", "nvfp4_group_gemm", "--case", "3", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert "us (modelled) on B200" in text and "critical path" in text
    rows = {
        e["args"]["name"]
        for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]  # others give the order of rows
    }
    assert any("MMA" in str(row) for row in rows) and "TMA" in rows and "tensor cores" in rows


def test_stated_error_is_that_of_the_committed_table():
    page = (Path(__file__).parents[2] / "bench/results/timing_model.md").read_text()
    cases, middle, worst = re.search(
        r"(\d+) cases\. Median error ([\d.]+) %, worst ([\d.]+) %", page
    ).groups()
    stated = f"On {cases} launches measured on an H200 the model's median error is {float(middle):.0f} %"
    assert stated in MODEL_ERROR and f"the worst {float(worst):.0f} %" in MODEL_ERROR


def test_stated_error_of_predictions_is_that_of_their_file():
    stored = newest()
    middle = 100 * summary_of(stored)[0]
    assert (
        f"{middle:.1f} % over the last {len(stored['measured'])} calls that were predicted before an H100 ran them"
        in stated_error()
    )
    page = (Path(__file__).parents[2] / "bench/results/timing_model.md").read_text()
    first = float(re.search(r"\| first: \d+ \|[^|]*\| ([\d.]+) %", page)[1])
    assert f"{first:.0f} % in the first, {middle:.0f} % in the last" in MODEL_ERROR

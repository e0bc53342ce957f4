"""The page of modelled weight-only products, and its ragged products."""

import json

import pytest
import torch

from nvfp4_cute.bench import modelled, ours, weight_only_modelled
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import make_operands
from nvfp4_cute.gpus.targets import lookup


def test_a_row_of_the_page():
    """33.07 MB in 20 us are 1.65 TB/s, 81 % of an A100's 2.039."""
    (case, *_), target = weight_only_modelled.cases(), lookup("A100")
    page = weight_only_modelled.page({modelled.key_of(case, target): {"time": {"us": 20.0}}})
    (row,) = [line for line in page.splitlines() if line.startswith("| A100")]
    assert row == "| A100 80GB | linear 4096 x 14336, 1 rows | 33.1 | 20.0 | 1.65 | 81 |"


def test_experts_have_the_rows_of_their_tokens():
    cases = weight_only_modelled.cases()
    assert [sum(m for m, _, _ in case.sizes) for case in cases] == [1, 8, 8, 64]
    assert {len(case.sizes) for case in cases if case.form == "ragged"} == {128}


def test_ragged_rows_of_16_bits():
    sizes = ((3, 64, 128), (0, 64, 128), (5, 64, 128))
    case = Case("x", "x", "x", "w4a16", sizes, form="ragged", out="bf16")
    operands = make_operands(case, torch.device("cpu"), 0)
    prepared = ours.prepare(case, operands, "reference")
    prepared.run()
    for a, b, out in zip(*operands.bf16, prepared.out, strict=True):
        torch.testing.assert_close(out.float(), a.float() @ b.float().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", weight_only_modelled.TARGETS)
def test_targets_are_known(name):
    assert lookup(name).floor_bandwidth_bytes_per_s > 0


def test_stored_times_alone_make_a_page(tmp_path, capsys):
    (case, *_), target, file = weight_only_modelled.cases(), lookup("GB10"), tmp_path / "times.json"
    file.write_text(json.dumps({modelled.key_of(case, target): {"time": {"us": 200.0}}}))
    assert weight_only_modelled.main(["--results", str(file), "--stored"]) == 0
    assert capsys.readouterr().out.count("| GB10 |") == 1


def test_the_page_has_every_stored_time():
    known = json.loads(weight_only_modelled.STORED.read_text())
    assert weight_only_modelled.PAGE.read_text() == weight_only_modelled.page(known)
    assert all(known[key]["sources"] for key in known)

"""bench --predict and --against: predicted calls run, files of predictions, comparisons. Measurements need a GPU."""

import json
from collections import Counter
from itertools import chain

import pytest
import torch

from nvfp4_cute import cli, env
from nvfp4_cute.bench import provenance
from nvfp4_cute.bench.validation import cutlass, errors, page, triton_matmul
from nvfp4_cute.bench.validation import predictions as blind
from nvfp4_cute.bench.validation.calls import MAKERS, Case, case_named
from nvfp4_cute.gpus.targets import H100_SXM, detect

PREDICTIONS = errors.PREDICTIONS
SMALL = {
    "gemm": (8, 128, 128),
    "dual_gemm": (8, 128, 128),
    "gemm, 16-bit rows": (4, 128, 128),
    "gemv": (128, 128, 2),
    "grouped_gemm, ragged": (3, 4, 128, 128),
    "grouped_gemm, list": (3, 4, 128, 128),
    "grouped_gemm, ragged, 16-bit rows": (3, 4, 128, 128),
    "quantize": (4, 128),
    "LinearNVFP4": (4, 128, 128),
    "route + MoENVFP4": (5, 8, 2, 128, 128),
}


def test_at_least_forty_calls_each_of_its_own():
    names = {
        calls: [*record["us"], *record["missing"]]
        for calls in PREDICTIONS
        for record in [errors.committed(calls)]
    }
    again = [name for name, count in Counter(chain(*names.values())).items() if count > 1]
    assert again == ["LinearNVFP4 64 x 3072 x 3072"], "what the second set did not explain is measured again"
    for calls, found in names.items():
        cases = [case_named(name) for name in found if blind._maker_of(name) is None]
        # Two calls of the first set were not measured.
        absent = {"grouped_gemm, ragged, 16-bit rows"} if calls == "first" else set()
        assert len(cases) >= 40 and {case.kind for case in cases} | absent == set(SMALL) == set(MAKERS)
        assert any(name.startswith(triton_matmul.PREFIX) for name in found)


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A set of two calls."""
    names = ["gemm 8 x 128 x 128", "gemv 128 x 128 x 2"]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"us": dict.fromkeys(names, 1.0), "missing": {}}))
    monkeypatch.setitem(PREDICTIONS, "few", path)
    return names


def test_cutlass_kernels_need_a_checkout(monkeypatch):
    monkeypatch.delenv(env.CUTLASS.name, raising=False)
    alone = blind.names_of("fourth")
    monkeypatch.setenv(env.CUTLASS.name, "/nowhere")
    others = [name for name in blind.names_of("fourth") if name not in alone]
    assert len(others) == 8 and all(name.startswith(cutlass.PREFIX) for name in others)
    monkeypatch.setattr(cutlass, "recorded", lambda name, target: f"{name} on {target.num_sms}")
    name = others[0]
    assert blind.recorded(name, H100_SXM) == [f"{name} on 132"]
    with pytest.raises(cutlass.CaptureError, match="No such file") as caught:
        cutlass.captured(name)

    def fail(*_):
        raise caught.value

    monkeypatch.setattr(cutlass, "recorded", fail)
    assert "No such file" in blind.prediction(name, "H100 SXM")


@pytest.mark.slow
def test_a_launch_of_cutlass_is_predicted():
    if not env.CUTLASS.read():
        pytest.skip(f"{env.CUTLASS.name} is not set")
    name = next(name for name in blind.names_of("fourth") if name.startswith(cutlass.PREFIX))
    us, launches = blind.prediction(name, "H100 SXM")
    assert launches == 1 and 5 < us < 50


@pytest.mark.parametrize("kind", SMALL)
def test_every_kind_of_call_runs(kind):
    assert Case(kind, SMALL[kind]).call("cpu")("reference") is not None


def test_predictions_are_kept_with_their_sources(few, tmp_path, monkeypatch, capsys):
    path, asked = tmp_path / "p.json", []
    answer = lambda name, target_name, recordings: (
        asked.append(name) or ("no kernel" if "gemv" in name else (2.0, 1))
    )
    monkeypatch.setattr(blind, "prediction", answer)
    for _ in range(2):
        assert blind.predict(path, H100_SXM, jobs=1, calls="few") == 0
    found = json.loads(path.read_text())
    assert asked == few
    assert found["us"] == {"gemm 8 x 128 x 128": 2.0} and found["missing"] == {
        "gemv 128 x 128 x 2": "no kernel"
    }
    assert found["gpu"] == "H100 SXM" and len(found["sources"]) == 16
    assert "- gemv 128 x 128 x 2: no kernel" in capsys.readouterr().out
    monkeypatch.setattr(provenance, "digest", lambda: "other")
    with pytest.raises(ValueError, match="not for H100 SXM by other; name a new file"):
        blind.predict(path, H100_SXM, jobs=1, calls="few")


def test_recordings_are_kept_until_other_sources_than_the_model_of_time_change(tmp_path, monkeypatch):
    case, made = Case("quantize", (4, 128)), []
    record = blind.recorded_chain
    monkeypatch.setattr(blind, "recorded_chain", lambda *given: made.append(given) or record(*given))
    (first,), (second,) = (blind.recorded(case.name, H100_SXM, tmp_path) for _ in range(2))
    assert first == second and len(made) == 1
    assert blind.prediction(case.name, H100_SXM.name, tmp_path)[1] == 1 and len(made) == 1
    monkeypatch.setattr(provenance, "digest", lambda without=(): "other")
    blind.recorded(case.name, H100_SXM, tmp_path)
    assert len(made) == 2 and len(list(tmp_path.iterdir())) == 2


def test_comparison():
    record = {
        "gpu": "H100 SXM", "made": "then", "commit": None, "sources": "abc", "measured_at": "now", "failed": {"d": "why"},
        "us": {"a": 9.0, "b": 22.0, "c": 21.0}, "measured": {"a": 10.0, "b": 20.0, "c": 30.0},
    }  # fmt: skip
    text = blind.comparison(record)
    assert "3 calls: median error 10.0 %, nine in ten within 30 %, worst 30 %; 1 of 3 pairs" in text
    assert "predicted then by sources abc; measured now" in text and "not measured: d: why" in text


def test_the_page_has_the_figures_of_the_committed_files():
    text = page.PAGE.read_text()
    assert list(PREDICTIONS)[:2] == ["first", "second"]
    for part in page.tables():
        assert part in text, "run `python -m nvfp4_cute.bench.validation.page`"


def test_refusals(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"gpu": "GB10", "us": {}}))
    where = detect()
    for line, message in (
        (f"bench --against {path}", "this machine has " + ("no GPU of the table" if where is None else "an")),
        (f"bench --against {path} --target H100", "leave out target"),
        (f"bench dense --predict {path}", "leave out suites"),
        (f"bench --predict {path} --results x", "leave out results"),
        (f"bench --predict {path} --tokens 8", "leave out tokens"),
        (
            f"bench --against {path}s",
            f"there is no file {path}s; name one that nvfp4-cute bench --predict wrote",
        ),
    ):
        assert cli.main(line.split()) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_prediction_is_the_time_of_all_launches():
    us, launches = blind.prediction("LinearNVFP4 4 x 128 x 128", "H100 SXM")
    assert launches == 2 and us > 4


@pytest.mark.gpu("sm_90a")
def test_gpu_measures_what_was_predicted():
    us = blind.measure("gemm 128 x 4096 x 4096")
    assert isinstance(us, float) and us > 1


def test_what_cannot_be_measured_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert isinstance(blind.measure("gemm 128 x 4096 x 4096"), str)


@pytest.mark.parametrize(
    ("content", "text"), [("{", "is not JSON"), ("{}", "has no gpu, us"), ("[]", "has no gpu")]
)
def test_other_files_are_refused(content, text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert cli.main(["bench", "--against", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} {text}" in said and "name a file that nvfp4-cute" in said


def test_a_folder_that_is_not_there_is_said_before_the_work(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--predict", str(tmp_path / "no" / "p.json"), "--target", "H100"])
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err

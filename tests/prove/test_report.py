"""Contents of a report, that it contains nothing private, and that a reader restores it."""

import json
import socket
from pathlib import Path

import pytest

from nvfp4_cute import cli
from nvfp4_cute.gpus import targets
from nvfp4_cute.prove import cases, machine, moe, predictions, reader, report, silicon
from nvfp4_cute.prove.outcome import FAULT, HANG, PASSED, WRONG, Outcome

CASE, OTHER = "nvfp4_group_gemm case 0", "nvfp4_group_gemm case 1"
PREDICTION = {
    "made": "2026-01-01 00:00 UTC",
    "commit": "abc",
    "error": "the model's error is known",
    "cases": {CASE: {"us": 100.0, "kernels": {"k": "1"}}, OTHER: {"us": 50.0, "kernels": {"k": "1"}}},
}
GPU = {
    "name": "NVIDIA H100 80GB HBM3", "target": "H100 SXM", "arch": "sm_90a", "sms": 132, "memory_bytes": 1, "l2_bytes": 1,
    "driver": "580.1", "cuda_of_torch": "13.0", "power_limit": "700 W",
}  # fmt: skip
MACHINE = {"versions": {"python": "3.12", "torch": "2.11"}, "system": "Linux x86_64", "gpu": GPU}


def timed(name, us, kernels=None, **numbers):
    numbers = {"us": us, "low": us, "high": us, "bytes": 1e8, "peer: torch bf16 loop": 2 * us, **numbers}
    return Outcome("timed", name, PASSED, numbers=numbers, notes=kernels or {"k": "1"})


def make(*outcomes, backend="cuda", prediction=PREDICTION, **given):
    return report.make(
        **{
            "made": "2026-01-02 00:00 UTC", "backend": backend, "arch": "sm_90a", "quick": False, "description": MACHINE,
            "sources": "0123", "commit": "def", "steps": {"probes": {"jobs": 2, "done": 1, "seconds": 1.0}},
            "outcomes": outcomes, "prediction": prediction, **given,
        }
    )  # fmt: skip


def test_a_good_run():
    found = make(
        timed(CASE, 120.0),
        Outcome("problem", "seed 0", PASSED, "a problem"),
        Outcome("probe", "st_async", PASSED),
        Outcome("probe", "early_release", WRONG, "open: no surprise"),
    )
    report.check(found)
    assert found["summary"]["is_good"] and found["timed"][0]["ratio"] == 1.2
    assert found["timed"][0]["kernels"] == "as predicted"
    away = {p["name"] for p in found["probes"] if p["verdict"] == "not here"}
    assert "pair_alloc" in away and "wgmma_wait" not in away
    page = reader.page(found)
    assert "no prediction was made" not in page and "at commit abc" in page and "not finished: probes" in page


def test_a_slow_case_is_reported_as_slow():
    found = make(timed(CASE, 151.0), timed(OTHER, 74.0))
    assert found["summary"]["slow"] == [CASE] and not found["summary"]["is_good"]
    page = reader.page(found)
    assert f"slow (more than 1.5 times the prediction): {CASE}\n" in page and "1.51 slow" in page


def test_a_wrong_result_a_fault_and_a_hang_are_reported_as_such():
    found = make(
        Outcome("config", "gemm list t128x64", WRONG, "group 0 element (1, 2)"),
        Outcome("probe", "st_async", FAULT, "CUDA error: illegal"),
        Outcome("probe", "pdl", HANG, "no answer"),
        Outcome("timed", CASE, WRONG, "differs from torch's"),
    )
    assert not found["summary"]["is_good"] and found["summary"]["wrong"] == [CASE]
    page = reader.page(found)
    assert "**wrong** gemm list t128x64: group 0 element (1, 2)" in page
    assert "| **fault** | CUDA error: illegal" in page and "| **hang** | no answer" in page
    assert f"WRONG or failed: {CASE}" in page


def test_predictions_are_of_what_ran_or_it_is_said():
    rows = make(timed(CASE, 1.0, {"k": "2"}), timed(OTHER, 1.0, {"x": "1"}), timed("another", 1.0))["timed"]
    assert [row["kernels"] for row in rows] == [
        "changed since the prediction",
        "others than predicted",
        "not predicted",
    ]
    assert "- 2 of 3 cases were predicted; predictions were made" in reader.page(
        make(timed(CASE, 1.0), timed(OTHER, 1.0), timed("another", 1.0))
    )
    alone = make(timed(CASE, 1.0), prediction=None)
    assert "no prediction was made before" in reader.page(alone) and alone["timed"][0]["ratio"] is None


def test_nothing_private_is_in_a_report(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "wombat-17.example.org")
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "gwendolen")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/gwendolen"))
    text = (
        "File /home/gwendolen/src/kernel.py of wombat-17, /opt/site/cutlass/x.py, ~/secret/place 2 / 3 and/or"
    )
    dumped = json.dumps(make(Outcome("config", "c", WRONG, text), Outcome("probe", "pdl", FAULT, text)))
    for secret in ("gwendolen", "wombat", "/opt", "/home", "src", "secret"):
        assert secret not in dumped
    assert "kernel.py" in dumped and "x.py" in dumped and "2 / 3 and/or" in dumped


def test_a_description_names_no_single_machine():
    described = json.dumps(machine.describe()).lower()
    for name in (*machine.private_names(), str(Path.home()) if str(Path.home()) != "/" else "uuid"):
        assert name.lower() not in described
    assert "uuid" not in described and "serial" not in described


def test_reader_round_trip(tmp_path, capsys):
    clusters = Outcome("probe", "resident_4", PASSED, "all met", numbers={"clusters": 30.0})
    latency = Outcome("constant", "latencies", PASSED, numbers={"l2_latency": 261.5, "hbm_latency": 640.0})
    found = make(timed(CASE, 120.0), clusters, latency)
    written = reader.write(found, tmp_path)
    assert [path.name for path in written] == [
        "prove-h100_sxm.json",
        "prove-h100_sxm.md",
        "prove-h100_sxm.svg",
    ]
    assert reader.load(written[0]) == found
    assert cli.main(["prove", "--read", str(written[0])]) == 0
    told = capsys.readouterr().out
    assert written[1].read_text() in told and '"l2_latency": (261.5, "nvfp4-cute prove on NVIDIA H100' in told
    assert "# resident clusters: 30 of 4" in told
    assert "120" in written[2].read_text() and written[2].read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no report of `nvfp4-cute prove`"),
        (json.dumps({"tool": "nvfp4-cute prove", "schema": 99}), "has schema 99"),
        (json.dumps({"tool": "nvfp4-cute prove", "schema": 1}), "'made' is missing"),
        (
            "no json",
            "prove.json is not JSON (Expecting value: line 1 column 1 (char 0)); give the prove-<gpu>.json",
        ),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "prove.json"
    path.write_text(text)
    assert cli.main(["prove", "--read", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["prove", "--read", f"{path}s"]) == 2
    assert f"there is no file {path}s; give the prove-<gpu>.json" in capsys.readouterr().err


# ---- predictions -----------------------------------------------------------------------------------------------
def test_committed_predictions_are_of_todays_cases():
    names = {str(case) for case in cases.timed()} | {moe.name_of(t) for t in predictions.PREDICTED_TOKENS}
    made = [predictions.load(target.name) for target in targets.TARGETS]
    assert "H100 SXM" in [found["gpu"] for found in made if found]
    for found in filter(None, made):
        assert found["commit"] and found["cases"] and set(found["cases"]) <= names
        assert all(case["us"] > 1 and case["kernels"] for case in found["cases"].values())


def test_predictions_of_another_schema_are_not_read(tmp_path):
    assert predictions.load("H200", tmp_path) is None
    path = predictions.path_for("H200", tmp_path)
    path.write_text(json.dumps({"schema": 99, "cases": {}}))
    assert predictions.load("H200", tmp_path) is None


# ---- two lines of the README and of doctor -----------------------------------------------------------------------
def test_lines_come_from_whole_reports_of_gpus(tmp_path):
    assert "no report is committed" in silicon.lines(tmp_path)[0]
    found = make(Outcome("problem", "seed 0", PASSED))
    reader.write(found, tmp_path)
    emulated = make(backend="emulator:sm_120a", arch="sm_120a")
    reader.write(emulated, tmp_path)
    ran, missing = silicon.lines(tmp_path)
    assert ran.startswith(
        "Run on silicon by `nvfp4-cute prove`: H100 80GB HBM3 (2026-01-02: problems 1 of 1 bit-equal"
    )
    assert "sm_90a" not in missing and "sm_120a (RTX 50" in missing
    reader.write({**found, "quick": True}, tmp_path)
    assert "no report is committed" in silicon.lines(tmp_path)[0]

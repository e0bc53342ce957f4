"""`nvfp4-cute eval` from file to table: one run through every process; the genuine harness from a checkout."""

import json
import os
from pathlib import Path

import pytest
from competition.cheats import HONEST

from nvfp4_cute import cli
from nvfp4_cute.competition import export, genuine, protocol, report
from nvfp4_cute.problems import registry

TASK = """\
files:
  - {name: submission.py, source: "@SUBMISSION@"}
  - {name: eval.py, source: ../eval.py}
config: {main: eval.py}
tests:
  - {m: [8, 12], n: [128, 128], k: [256, 256], g: 2, seed: 1111}
benchmarks:
  - {m: [8], n: [128], k: [256], g: 1, seed: 1111}
ranking_by: geom
ranked_timeout: 300
"""
# A checkout of gpu-mode/reference-kernels, for the slow tests.
CHECKOUT = os.environ.get("REFERENCE_KERNELS")


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "checkout" / "nvfp4_group_gemm" / "task.yml"
    path.parent.mkdir(parents=True)
    path.write_text(TASK)
    (tmp_path / "checkout" / "eval.py").write_text("import sys\nsys.exit(7)\n")
    return path


def test_task_yml(task):
    found = genuine.read_task(task)
    assert found.tests == [{"m": (8, 12), "n": (128, 128), "k": (256, 256), "g": 2, "seed": 1111}]
    assert list(found.files) == ["eval.py"] and found.main == "eval.py" and found.ranking_by == "geom"
    assert found.timeouts_s == {"test": 180, "benchmark": 180, "leaderboard": 300}
    assert genuine.find_task(task.parents[1], "nvfp4_group_gemm") == task
    with pytest.raises(ValueError, match="no nvfp4_gemv/task.yml below"):
        genuine.find_task(task.parents[1], "nvfp4_gemv")
    task.write_text("lang: py\n")
    with pytest.raises(ValueError, match="has no files, tests, benchmarks"):
        genuine.read_task(task)


def test_a_submission_is_tried_from_file_to_json(task, tmp_path, capsys):
    submission = tmp_path / "mine.py"
    submission.write_text(HONEST)
    command = ["eval", str(submission), "--problem", "nvfp4_group_gemm", "--task", str(task)]
    assert cli.main([*command, "--json", "--device", "emulator", "--seed", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["cases"][0]["name"] == "g2_m8-12_n128_k256"
    submission.write_text("# streams\n" + HONEST)
    assert cli.main(command) == 1
    assert "line 1: holds the word" in capsys.readouterr().err


def test_import_step_and_foreign_harness(task, tmp_path, capsys):
    submission = tmp_path / "mine.py"
    submission.write_text("raise ImportError('not here')\n")
    command = ["eval", str(submission), "--problem", "nvfp4_group_gemm", "--device", "emulator"]
    assert cli.main([*command, "--task", str(task)]) == 1
    assert "python3 submission.py ended with exit code 1" in capsys.readouterr().out


def test_table_of_measured_times():
    problem = registry.load("nvfp4_group_gemm")
    log = {"check": "pass"}
    cases = tuple(
        protocol.CaseResult(
            protocol.format_case(case.arguments),
            True,
            "",
            protocol.Stats.of([1e3 * case.sol_us * 2] * 3),
            "measured",
        )
        for case in problem.benchmarks
    )
    results = protocol.Results(cases, True, 0, log)
    rows = report.rows(problem, results)
    text = report.text("benchmark", results, rows)
    assert "37.666" in text and "18.833" in text and "50.0" in text and "measured" in text
    assert "geomean 10.42" in text and "speed of light 5.21" in text
    found = report.as_dict(problem.name, "benchmark", results, rows)
    assert found["geomean_us"] == pytest.approx(10.42, abs=0.01) and found["cases"][0][
        "mean"
    ] == pytest.approx(37.666)


def test_table_of_modelled_times():
    problem = registry.load("nvfp4_group_gemm")
    case = problem.benchmarks[0]
    stats = protocol.Stats.of([1e3 * case.sol_us * 4])
    result = protocol.CaseResult(protocol.format_case(case.arguments), True, "", stats, "modelled")
    results = protocol.Results((result,), True)
    rows = report.rows(problem, results)
    table = report.text("benchmark", results, rows).splitlines()
    assert table[1].split()[2:] == ["modelled", "75.332", "-", "-", "75.332", "75.332", "18.833", "25.0"]
    assert any(line.startswith("modelled: the submission's own kernels on a B200") for line in table)
    found = report.as_dict(problem.name, "benchmark", results, rows)
    assert found["cases"][0]["std"] is None and found["cases"][0]["mean"] == pytest.approx(75.332)
    assert found["notes"][0].startswith("modelled: ")


def test_an_export_is_timed_on_the_emulator(task, tmp_path, capsys):
    """Speed of light of this case is below a nanosecond; a launch takes microseconds, however little it computes."""
    submission = tmp_path / "mine.py"
    submission.write_text(export.make_submission("nvfp4_group_gemm").text)
    command = ["eval", str(submission), "--task", str(task), "--device", "emulator", "--mode", "benchmark"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    case = found["cases"][0]
    assert case["passed"] and case["source"] == "modelled" and case["runs"] == 1 and case["std"] is None
    assert 1 < case["mean"] < 20 and case["best"] == case["mean"] == pytest.approx(found["geomean_us"])


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="REFERENCE_KERNELS names no checkout of gpu-mode/reference-kernels")
class TestGenuine:
    """With the official files."""

    @pytest.mark.parametrize("name", registry.names())
    def test_cases_are_those_of_the_official_task(self, name):
        problem = registry.load(name)
        task = genuine.read_task(genuine.find_task(Path(CHECKOUT), name))
        for ours, theirs in ((problem.tests, task.tests), (problem.benchmarks, task.benchmarks)):
            assert [case.arguments for case in ours] == theirs
        assert (
            task.ranking_by == "geom" and task.timeouts_s["leaderboard"] == problem.harness.ranked_timeout_s
        )

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("name", [n for n in registry.names() if registry.load(n).submission])
    def test_our_export_passes_the_official_tests(self, name, tmp_path, capsys):
        submission = tmp_path / "submission.py"
        submission.write_text(export.make_submission(name).text)
        assert cli.main(["eval", str(submission), "--harness", CHECKOUT, "--device", "emulator"]) == 0
        assert "10 of 10 cases passed; check: pass" in capsys.readouterr().out

"""`nvfp4-cute eval` from file to table: one run through all processes, and the official harness from a checkout."""

import json
import os
from pathlib import Path

import pytest
from cheats import HONEST

from nvfp4_cute import cli
from nvfp4_cute.competition import evaluate, export, protocol, report
from nvfp4_cute.problems import registry, task_file
from nvfp4_cute.problems.nvfp4_group_gemm.spec import GroupCase

TASK = """\
files:
  - {name: submission.py, source: "@SUBMISSION@"}
  - {name: eval.py, source: ../eval.py}
config: {main: eval.py}
tests:
  - {m: [8, 12], n: [128, 128], k: [256, 256], g: 2, seed: 1111}
benchmarks:
  - {m: [256], n: [128], k: [256], g: 1, seed: 1111}
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
    found = task_file.read_task(task)
    assert found.tests == [{"m": (8, 12), "n": (128, 128), "k": (256, 256), "g": 2, "seed": 1111}]
    assert list(found.files) == ["eval.py"] and found.main == "eval.py" and found.ranking_by == "geom"
    assert found.timeouts_s == {"test": 180, "benchmark": 180, "leaderboard": 300}
    assert task_file.find_task(task.parents[1], "nvfp4_group_gemm") == task
    with pytest.raises(ValueError, match="no nvfp4_gemv/task.yml below"):
        task_file.find_task(task.parents[1], "nvfp4_gemv")
    task.write_text("lang: py\n")
    with pytest.raises(ValueError, match="has no files, tests, benchmarks"):
        task_file.read_task(task)


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
    assert table[1].split()[2:] == [
        "modelled",
        "75.332",
        "-",
        "-",
        "75.332",
        "75.332",
        "18.833",
        "25.0",
        "1920",
        "798.2",
    ]
    assert any(line.startswith("modelled: the submission's own kernels on a B200") for line in table)
    found = report.as_dict(problem.name, "benchmark", results, rows)
    assert found["cases"][0]["std"] is None and found["cases"][0]["mean"] == pytest.approx(75.332)
    assert found["notes"][0].startswith("modelled: ")


def result_of(case, us, source="measured"):
    stats = protocol.Stats.of([1e3 * us] * 3)
    return protocol.CaseResult(protocol.format_case(case.arguments), True, "", stats, source)


def test_rates_are_least_traffic_and_operations_over_the_mean():
    problem = registry.load("nvfp4_gemm")
    case = problem.benchmarks[0]
    (row,) = report.rows(problem, protocol.Results((result_of(case, 10),), True))
    m, n, k = case.m, case.n, case.k
    assert row.gb_per_s == pytest.approx(((m + n) * k * 9 / 16 + 2 * m * n) / 10e-6 / 1e9)
    assert row.tflop_per_s == pytest.approx(2 * m * n * k / 10e-6 / 1e12)


def test_speed_of_light_of_an_unpublished_shape_is_computed():
    problem = registry.load("nvfp4_group_gemm")
    first = problem.benchmarks[2]
    other = problem.case_type(first.m, first.n, first.k, seed=5)
    same, computed = (
        report.rows(problem, protocol.Results((result_of(case, 10),), True))[0].sol_us
        for case in (first, problem.tests[0])
    )
    assert same == first.sol_us == 2.406 and 0 < computed < 0.1
    assert report.rows(problem, protocol.Results((result_of(other, 10),), True))[0].sol_us == 2.406


@pytest.mark.parametrize(
    "options, remark",
    [
        ({}, []),
        ({"low_memory": True}, ["not the official timing: 2 inputs a timing, 0.5 GiB written before it"]),
        ({"low_memory": True, "inputs": 9, "l2_gib": 0.0}, ["not the official timing: 9 inputs a timing, 0 GiB written before it"]),
    ],
)  # fmt: skip
def test_less_than_the_official_timing_is_said(monkeypatch, options, remark):
    request = evaluate.Request(Path("x.py"), **options)
    assert evaluate.timing_remarks(request) == []  # the model does not clear L2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert evaluate.timing_remarks(request) == remark


@pytest.mark.slow
def test_an_export_is_timed_on_the_emulator(task, tmp_path, capsys):
    """The floor of this case is below 20 nanoseconds, but a launch takes microseconds even if it computes little."""
    submission = tmp_path / "mine.py"
    submission.write_text(export.make_submission("nvfp4_group_gemm").text)
    command = ["eval", str(submission), "--task", str(task), "--device", "emulator", "--mode", "benchmark"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    case = found["cases"][0]
    assert case["passed"] and case["source"] == "modelled" and case["runs"] == 1 and case["std"] is None
    assert 1 < case["mean"] < 20 and case["best"] == case["mean"] == pytest.approx(found["geomean_us"])


def test_a_profile_on_the_emulator_says_what_took_the_time(verdict):
    text = export.make_submission("nvfp4_group_gemm").text
    results = verdict(text, strict=False, mode="profile", cases=[GroupCase((8,), (128,), (256,))])
    assert results.passed and results.cases[0].source == "not timed"
    shown = report.text("profile", results, report.rows(registry.load("nvfp4_group_gemm"), results))
    assert "us (modelled) on B200" in shown and "critical path: " in shown


def test_exit_codes(tmp_path, monkeypatch):
    problem = registry.load("nvfp4_gemm")
    submission = tmp_path / "mine.py"
    submission.write_text("x = 1\n")
    command = ["eval", str(submission), "--problem", problem.name, "--mode", "benchmark"]
    for passed in (True, False):
        results = protocol.Results((result_of(problem.benchmarks[0], 10),), passed)
        monkeypatch.setattr(evaluate, "evaluate", lambda request, results=results: results)
        assert cli.main(command) == int(not passed)


FOREIGN_HARNESS = """\
import os, sys
from submission import custom_kernel
from case import answer
mode, cases = sys.argv[1:]
with os.fdopen(int(os.environ["POPCORN_FD"]), "w") as log:
    lines = open(cases).read().splitlines()
    print(f"test-count: {len(lines)}", file=log)
    for i, line in enumerate(lines):
        print(f"test.{i}.spec: {line}", file=log)
        print(f"test.{i}.status: {'pass' if custom_kernel(20) == answer else 'fail'}", file=log)
    print("check: pass", file=log)
"""
FOREIGN_TASK = """\
files:
  - {name: submission.py, source: "@SUBMISSION@"}
  - {name: main.py, source: ../main.py}
  - {name: case.py, source: case.py}
config: {main: main.py}
tests:
  - {size: 3, kind: half}
  - {size: [4, 5], kind: full}
benchmarks:
  - {size: 4, kind: full}
"""


@pytest.mark.slow
def test_a_problem_that_is_only_in_the_checkout_is_run_from_its_task_yml(tmp_path, capsys):
    folder = tmp_path / "checkout" / "sums" / "doubling"
    folder.mkdir(parents=True)
    (folder / "task.yml").write_text(FOREIGN_TASK)
    (folder.parent / "main.py").write_text(FOREIGN_HARNESS)
    (folder / "case.py").write_text("answer = 40\n")
    submission = tmp_path / "mine.py"
    submission.write_text("def custom_kernel(x):\n    return 2 * x\n")
    command = ["eval", str(submission), "--problem", "doubling", "--device", "emulator"]
    assert cli.main([*command, "--harness", str(tmp_path / "checkout")]) == 0
    text = capsys.readouterr().out
    assert "size: 3; kind: half" in text and "size: [4, 5]; kind: full" in text
    assert "2 of 2 cases passed" in text
    assert cli.main(command) == 2
    assert "problem 'doubling' is unknown" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="REFERENCE_KERNELS names no checkout of gpu-mode/reference-kernels")
class TestGenuine:
    """Tests with the official files."""

    @pytest.mark.parametrize("name", registry.names())
    def test_cases_are_those_of_the_official_task(self, name):
        problem = registry.load(name)
        task = task_file.read_task(task_file.find_task(Path(CHECKOUT), name))
        for ours, theirs in ((problem.tests, task.tests), (problem.benchmarks, task.benchmarks)):
            assert [case.arguments for case in ours] == theirs
        assert (
            task.ranking_by == "geom" and task.timeouts_s["leaderboard"] == problem.harness.ranked_timeout_s
        )

    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("name", [n for n in registry.names() if registry.load(n).submission])
    def test_our_export_passes_the_official_tests(self, name, tmp_path, capsys):
        submission = tmp_path / "submission.py"
        submission.write_text(export.make_submission(name).text)
        assert cli.main(["eval", str(submission), "--harness", CHECKOUT, "--device", "emulator"]) == 0
        assert "10 of 10 cases passed; check: pass" in capsys.readouterr().out

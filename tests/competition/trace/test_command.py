"""export and eval of folders from the command line."""

import json
from dataclasses import replace

import pytest
from trace_folders import solution, workload, write

from nvfp4_cute import cli
from nvfp4_cute.competition.trace import evaluate, matching
from nvfp4_cute.problems import trace_schema as schema


def test_eval_prints_a_table_and_says_what_is_wrong(tmp_path, capsys):
    write(tmp_path, workloads=[workload(), workload(axes={"M": 7})])
    other = tmp_path / "other.json"
    other.write_text(
        json.dumps(solution("def run(x, factor, y, total):\n    y.fill_(len(x))\n    total.fill_(1)\n"))
    )
    assert cli.main(["eval", str(tmp_path), "--solution", str(other), "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    # Nothing was timed: no column for times.
    assert lines[0].split() == ["workload", "status", "max", "abs", "max", "rel", "matched"]
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["M5", "INCORRECT_NUMERICAL"],
        ["M7", "INCORRECT_NUMERICAL"],
    ]
    assert "of the elements match, 99.00% must" in lines[-1]


def test_a_solution_that_never_ends_is_ended(tmp_path):
    endless = solution("import time\n\ndef run(*a):\n    time.sleep(1e6)\n")
    write(tmp_path, solution_json=endless)
    (result,) = evaluate.evaluate(evaluate.Request(tmp_path, device="cpu", timeout_s=3))
    assert (result.status, result.message) == ("TIMEOUT", "all workloads took more than 3 s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strict"], "--strict goes with a submission"),
        (["--mode", "profile"], "--mode profile goes with a submission"),
        (["--case", "7"], "there are workloads 0 to 0"),
    ],
)
def test_options_that_do_not_go_together(options, message, tmp_path, capsys):
    write(tmp_path)
    assert cli.main(["eval", str(tmp_path), "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("language", ["fortran", "cuda_cpp"])
def test_languages_that_cannot_be_run_are_refused(language, tmp_path, capsys):
    write(tmp_path, solution_json=solution(language=language))
    assert cli.main(["eval", str(tmp_path), "--device", "cpu"]) == 2
    assert f"is written in {language}; eval runs python, " in capsys.readouterr().err


def test_the_binding_is_written_and_read(tmp_path):
    write(tmp_path, solution_json=solution(language="cpp", binding="tvm-ffi"))
    found = schema.read_folder(tmp_path)[2]
    assert schema.solution_json(found)["spec"]["binding"] == "tvm-ffi"
    assert "binding" not in schema.solution_json(replace(found, binding=None))["spec"]


def test_whose_rules(tmp_path):
    write(tmp_path)
    assert evaluate._rules_of(tmp_path) is matching.SOL_EXECBENCH
    write(tmp_path, workloads=[{"definition": "scale_n8", "workload": workload()}])
    assert evaluate._rules_of(tmp_path) is matching.FLASHINFER_BENCH


def test_export_writes_a_folder_of_other_axes(tmp_path, capsys):
    command = ["export", "nvfp4_quantize", "--format", "trace", "-o", str(tmp_path / "q"), "--axes"]
    assert cli.main([*command, "K=256,M=3:5"]) == 0
    definition = json.loads((tmp_path / "q" / "definition.json").read_text())
    lines = (tmp_path / "q" / "workload.jsonl").read_text().splitlines()
    assert definition["axes"]["K"]["value"] == 256 and "pack(codes)" in definition["reference"]
    assert [json.loads(line)["axes"] for line in lines] == [{"M": 3}, {"M": 5}]
    said = capsys.readouterr().err
    assert "nvfp4-cute eval" in said and "--axes" not in said and "export: begun" in said
    assert cli.main([*command[:-1], "--force"]) == 0
    assert "without a GPU" in capsys.readouterr().err
    assert cli.main([*command, "Q=256"]) == 2
    assert "axis Q is unknown; the problem has K, M" in capsys.readouterr().err
    assert cli.main([*command, "K=512"]) == 2
    assert (
        "definition.json would be overwritten; name another folder, or pass --force"
        in capsys.readouterr().err
    )
    assert cli.main([*command, "K=512", "--force"]) == 0

"""A newcomer's way, in four commands: new, an edit, eval, export. And what every kind begins with."""

import json

import pytest

from nvfp4_cute import cli
from nvfp4_cute.competition.trace import folder, new


def edit(path, old, fresh):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, fresh))


def test_new_edit_eval_export(tmp_path, capsys):
    problem = tmp_path / "mine"
    assert cli.main(["new", "elementwise", str(problem)]) == 0
    edit(problem / "reference.py", "factor[:, None])", "factor[:, None] + 1)")
    edit(problem / "kernel.py", "* factor[row])", "* factor[row] + 1.0)")
    assert cli.main(["eval", str(problem), "--device", "emulator"]) == 0
    assert capsys.readouterr().out.count("PASSED") == 2
    assert cli.main(["export", str(problem), "-o", str(tmp_path / "out")]) == 0
    solution = json.loads((tmp_path / "out" / "solution.json").read_text())
    definition = json.loads((tmp_path / "out" / "definition.json").read_text())
    assert [source["content"] for source in solution["sources"]] == [(problem / "kernel.py").read_text()]
    assert definition["reference"] == (problem / "reference.py").read_text()
    assert solution["description"] == "The answer: a CuTe DSL kernel and the function that launches it."


@pytest.mark.slow
def test_a_wrong_kernel_of_a_template_is_found(tmp_path):
    from nvfp4_cute.competition.trace import evaluate

    cli.main(["new", "elementwise", str(tmp_path / "p")])
    wrong = "def run(x, factor, y):\n    y.copy_(x)\n"
    (tmp_path / "p" / "kernel.py").write_text(wrong)
    (first, _) = evaluate.evaluate(evaluate.Request(tmp_path / "p", device="cpu"))
    assert first.status == "INCORRECT_NUMERICAL"


@pytest.mark.parametrize("kind", ["nvfp4_gemv", "nvfp4_quantize"])
def test_a_problem_of_ours_in_files_of_their_own(kind, tmp_path):
    cli.main(["new", kind, str(tmp_path / kind)])
    begun, ours = folder.load(str(tmp_path / kind)), folder.load(kind)
    assert begun == ours
    assert "nvfp4_cute.problems" not in begun[0].reference


def test_nothing_is_overwritten_and_kinds_are_named(tmp_path, capsys):
    assert cli.main(["new", "elementwise", str(tmp_path)]) == 0
    assert cli.main(["new", "elementwise", str(tmp_path)]) == 2
    assert "would be overwritten; name another folder" in capsys.readouterr().err
    assert cli.main(["new", "nothing", str(tmp_path / "x")]) == 2
    assert f"kind 'nothing' is unknown; use one of {', '.join(new.kinds())}" in capsys.readouterr().err

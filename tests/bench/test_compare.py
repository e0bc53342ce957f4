"""Comparison of two results of `bench --json`: ratios, spreads, verdicts, refusals."""

import json

import pytest

from nvfp4_cute import cli
from nvfp4_cute.bench import compare
from nvfp4_cute.bench.report import Time


def write(path, times, kind="measured", target="H200"):
    rows = [
        {"problem": "gemm", "case": name, "time": None if us is None else {"us": us, "kind": kind, "low": low, "high": high}}
        for name, (us, low, high) in times.items()
    ]  # fmt: skip
    path.write_text(json.dumps({"target": target, "rows": rows}))
    return str(path)


BEFORE = {"a": (10.0, 9.5, 10.5), "b": (20.0, 19.0, 21.0), "c": (30.0, 29.0, 31.0), "x": (1.0, 1.0, 1.0)}
AFTER = {"a": (8.0, 7.8, 8.2), "b": (20.5, 19.5, 21.5), "c": (45.0, 44.0, 46.0), "y": (None, None, None)}


@pytest.mark.parametrize(
    ("ratio", "bar"),
    [(1.0, " " * 20 + "|" + " " * 20), (2.0, " " * 20 + "|" + "#" * 20), (0.25, "#" * 20 + "|" + " " * 20)],
)
def test_the_picture_is_a_factor_of_two_on_each_side(ratio, bar):
    assert compare.picture(ratio) == bar


def test_ratios_spreads_and_verdicts(tmp_path, capsys):
    files = write(tmp_path / "a.json", BEFORE), write(tmp_path / "b.json", AFTER)
    assert cli.main(["bench", "--compare", *files]) == 1
    out = capsys.readouterr().out
    cells = [line.split() for line in out.splitlines()[1:4]]
    assert [row[:3] for row in cells] == [
        ["gemm", n, v] for n, v in zip("abc", ("faster", "same", "slower"), strict=True)
    ]
    assert [row[5] for row in cells] == ["0.800", "1.025", "1.500"]
    assert "0.743 to 0.863" in out and "1.419 to 1.586" in out
    assert "geometric mean 1.071; 1 faster, 1 same, 1 slower" in out
    assert "in one of the files only: gemm x" in out


def test_without_deciles_the_ratio_decides():
    change = compare.Change("c", Time(2.0, "modelled"), Time(2.0, "modelled"))
    assert (change.spread, change.verdict) == (None, "same")
    assert compare.Change("c", Time(2.0, "modelled"), Time(2.1, "modelled")).verdict == "slower"


def test_refusals(tmp_path, capsys):
    measured = write(tmp_path / "a.json", BEFORE)
    modelled = write(tmp_path / "b.json", BEFORE, kind="modelled")
    other = write(tmp_path / "c.json", {"z": (1.0, None, None)})
    (tmp_path / "d.json").write_text("[]")
    for second, message in (
        (modelled, "gemm a is measured in one result and modelled in the other"),
        (other, "the two results share no case"),
        (str(tmp_path / "d.json"), "d.json: not what `nvfp4-cute bench --json` prints"),
    ):
        assert cli.main(["bench", "--compare", measured, second]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["bench", "--compare", measured, modelled, "--save"]) == 2
    assert "leave out save" in capsys.readouterr().err


def test_it_reads_what_bench_prints_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "competition", "--containing", "no such"]) == 2
    capsys.readouterr()
    files = [write(tmp_path / f"{n}.json", BEFORE) for n in "ab"]
    assert cli.main(["bench", "--compare", *files, "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 1000

"""Handing a file to popcorn-cli: the command, what is asked, what is kept. A stand-in script plays popcorn-cli."""

import json

import pytest

from nvfp4_cute import cli
from nvfp4_cute.competition import rules, submit

TEXT = rules.header_text("nvfp4_gemv", "B200") + "def custom_kernel(data):\n    return data\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(TEXT)
    return path


@pytest.fixture
def popcorn(tmp_path, monkeypatch):
    """A popcorn that notes its arguments, writes a result, and ends as told."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(result="", error="", code=0):
        script = folder / "popcorn"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
            f"while [ $# -gt 1 ]; do if [ \"$1\" = --output ]; then printf '%s' '{result}' > \"$2\"; fi; shift; done\n"
            f"printf '%s' '{error}' >&2\nexit {code}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return install


def test_dry_run_prints_the_command_and_does_nothing(file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert cli.main(["submit", str(file), "--dry-run", "--mode", "leaderboard"]) == 0
    assert capsys.readouterr().out.strip() == (
        f"popcorn submit --no-tui --leaderboard nvfp4_gemv --gpu B200 --mode leaderboard --output results.txt {file}"
    )


def test_without_popcorn_it_says_what_to_do(file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert cli.main(["submit", str(file)]) == 1
    assert "popcorn register" in capsys.readouterr().err


def test_a_run_is_kept_in_the_history(file, tmp_path, popcorn, capsys):
    popcorn(result="Benchmarks: 18.5 ± 0.02 µs\n 1.2 ± 0.1 ms\n")
    history = tmp_path / "kept" / "history.jsonl"
    for _ in range(2):
        assert cli.main(["submit", str(file), "--mode", "benchmark", "--history", str(history)]) == 0
    assert "18.5" in capsys.readouterr().out
    entries = [json.loads(line) for line in history.read_text().splitlines()]
    assert len(entries) == 2
    assert entries[0]["times_us"] == [18.5, 1200.0] and len(entries[0]["sha256"]) == 64
    assert (entries[0]["leaderboard"], entries[0]["gpu"], entries[0]["mode"]) == (
        "nvfp4_gemv",
        "B200",
        "benchmark",
    )


@pytest.mark.parametrize("answer, calls", [("yes", 1), ("y", 0), ("", 0)])
def test_a_ranked_run_is_confirmed(file, tmp_path, popcorn, monkeypatch, answer, calls):
    popcorn()
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    code = cli.main(["submit", str(file), "--mode", "leaderboard", "--history", str(tmp_path / "history")])
    assert code == (0 if calls else 1)
    assert len((tmp_path / "calls").read_text().splitlines() if calls else []) == calls


@pytest.mark.parametrize(
    "error, advice",
    [
        ("The deadline has passed", "this leaderboard is closed"),
        ("HTTP 429 Too Many Requests", "the server limits how often"),
        ("error sending request: dns error", "the server cannot be reached"),
        ("no cli id in .popcorn.yaml", "popcorn register"),
        ("who knows", "what it said is above"),
    ],
)
def test_refusals_are_explained(file, tmp_path, popcorn, capsys, error, advice):
    popcorn(error=error, code=3)
    assert cli.main(["submit", str(file), "--history", str(tmp_path / "history")]) == 3
    assert advice in capsys.readouterr().err


def test_a_file_that_a_server_refuses_is_not_sent(file, capsys):
    file.write_text(TEXT + "# downstream\n")
    assert cli.main(["submit", str(file), "--dry-run"]) == 1
    assert "line 5" in capsys.readouterr().err


def test_where_to_must_be_known(file, capsys):
    file.write_text("def custom_kernel(data):\n    return data\n")
    assert cli.main(["submit", str(file), "--dry-run"]) == 1
    assert "--leaderboard" in capsys.readouterr().err
    assert submit.read_times_us("no times here") == []

"""Submission of a file through popcorn-cli: the command, its questions, and what is stored. A script replaces popcorn-cli."""

import json
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nvfp4_cute import cli
from nvfp4_cute.competition import rules, server, submit

TEXT = rules.header_text("nvfp4_gemv", "B200") + "def custom_kernel(data):\n    return data\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    """An address without a server, and no deadline in the past."""
    monkeypatch.setenv("POPCORN_API_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(server.registry, "names", lambda: ())
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: pytest.fail("waited"))


@pytest.fixture
def boards(monkeypatch):
    """A server that lists leaderboards."""
    listed: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/leaderboards" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(listed).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        monkeypatch.setenv("POPCORN_API_URL", f"http://127.0.0.1:{http.server_port}/")
        yield listed
        http.shutdown()


@pytest.fixture
def popcorn(tmp_path, monkeypatch):
    """A popcorn-cli that records its arguments, writes a result, and exits with the given code."""
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
    monkeypatch.setattr(server.registry, "names", lambda: ("nvfp4_gemv",))
    assert cli.main(["submit", str(file), "--dry-run", "--mode", "leaderboard"]) == 0
    said = capsys.readouterr()
    assert "leaderboard nvfp4_gemv is closed: its deadline was 2025-11" in said.err
    assert said.out.splitlines() == [
        f"popcorn submit --no-tui --leaderboard nvfp4_gemv --gpu B200 --mode {mode} --output results.txt {file}"
        for mode in ("test", "benchmark", "leaderboard")
    ]


def test_without_popcorn_it_says_what_to_do(file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert cli.main(["submit", str(file)]) == 2
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


@pytest.mark.parametrize("answer, calls", [("yes", 3), ("y", 0), ("", 0)])
def test_a_ranked_run_is_confirmed(file, tmp_path, popcorn, monkeypatch, answer, calls):
    popcorn()
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    code = cli.main(["submit", str(file), "--mode", "leaderboard", "--history", str(tmp_path / "history")])
    assert code == (0 if calls else 1)
    assert len((tmp_path / "calls").read_text().splitlines() if calls else []) == calls


def test_a_ranked_run_needs_a_test_and_a_benchmark(file, tmp_path, popcorn, capsys):
    popcorn(error="1 test failed", code=2)
    options = ["--mode", "leaderboard", "--yes", "--history", str(tmp_path / "history")]
    assert cli.main(["submit", str(file), *options]) == 2
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--mode test" in call and "stopped after this test run" in capsys.readouterr().err
    popcorn()
    assert cli.main(["submit", str(file), *options, "--ungated"]) == 0
    assert "--mode leaderboard" in (tmp_path / "calls").read_text().splitlines()[1]


def test_repeated_runs_give_statistics(file, tmp_path, popcorn, capsys):
    popcorn(result="a: 10.0 ± 0.1 µs\nb: 40 ± 1 µs\n")
    options = ["--mode", "benchmark", "--repeat", "3", "--history", str(tmp_path / "history")]
    assert cli.main(["submit", str(file), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5] == "3 of 3 runs timed"
    assert lines[-1].split() == ["geomean", "20.000", "0.000", "20.000", "20.000", "0.0"]
    assert len((tmp_path / "history").read_text().splitlines()) == 3
    table = submit.summary([[10.0, 2.0], [15.0, 2.0], []])
    assert table.splitlines()[0] == "2 of 3 runs timed"
    assert table.splitlines()[2].split()[2:] == ["12.500", "3.536", "10.000", "15.000", "50.0"]


def test_a_limit_of_the_server_is_waited_for(file, tmp_path, popcorn, monkeypatch):
    popcorn(error="HTTP 429 Too Many Requests", code=3)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            popcorn()

    monkeypatch.setattr(submit.time, "sleep", sleep)
    assert cli.main(["submit", str(file), "--history", str(tmp_path / "history")]) == 0
    assert waited == list(submit.WAITS_S[:2]) and len((tmp_path / "calls").read_text().splitlines()) == 3


OPEN = {"name": "nvfp4_gemv", "deadline": "2999-01-01T00:00:00", "gpu_types": ["NVIDIA", "b200"]}


@pytest.mark.parametrize(
    "board, message",
    [
        (OPEN, ""),
        ({**OPEN, "deadline": "2025-11-29T00:00:00+00:00"}, "is closed: its deadline was 2025-11-29"),
        ({**OPEN, "gpu_types": ["A100"]}, "has no GPU B200; it has A100"),
        ({**OPEN, "name": "other"}, "the server has no leaderboard nvfp4_gemv; it has other"),
    ],
)
def test_the_server_is_asked_first(file, tmp_path, popcorn, boards, capsys, board, message):
    boards.append(board)
    popcorn()
    command = ["submit", str(file), "--history", str(tmp_path / "history")]
    assert cli.main(command) == (2 if message else 0)
    assert message in capsys.readouterr().err and (tmp_path / "calls").exists() == (not message)
    assert cli.main([*command, "--force"]) == 0


def test_without_the_server_known_deadlines_count(file, popcorn, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("POPCORN_API_URL", "http://127.0.0.1:9")
    found, asked = server.objections("nvfp4_gemv", "B200")
    assert not asked and "leaderboard nvfp4_gemv is closed: its deadline was 2025-11-29" in found[0]
    assert server.objections("a_new_one", "B200") == ([], False)
    early = datetime(2025, 11, 1, tzinfo=timezone.utc)
    assert server.objections("nvfp4_gemv", "B200", early) == ([], False)


@pytest.mark.parametrize(
    "error, advice",
    [
        ("The deadline has passed", "this leaderboard is closed"),
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
    assert cli.main(["submit", str(file), "--dry-run"]) == 2
    assert "line 5" in capsys.readouterr().err


def test_where_to_must_be_known(file, capsys):
    file.write_text("def custom_kernel(data):\n    return data\n")
    assert cli.main(["submit", str(file), "--dry-run"]) == 2
    assert "--leaderboard" in capsys.readouterr().err
    assert submit.read_times_us("no times here") == []

"""Lines that long commands say where nobody watches a bar."""

import pytest

from nvfp4_cute import terminal
from nvfp4_cute.terminal import SECONDS_BETWEEN_LINES, Progress, bar


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "monotonic", made)
    return made


def test_a_pipe_gets_a_line_at_the_start_and_now_and_then(clock, capsys):
    steps = iter(Progress("abc", desc="model B200", unit="config"))
    assert next(steps) == "a"
    assert capsys.readouterr().err == "model B200: 3 configs to do\n"
    clock.now += SECONDS_BETWEEN_LINES - 1
    assert next(steps) == "b"
    assert capsys.readouterr().err == ""
    clock.now += 1
    assert list(steps) == ["c"]
    expected = f"model B200: 2 of 3 configs done after {SECONDS_BETWEEN_LINES} s\n"
    assert capsys.readouterr().err == expected


def test_a_number_that_is_known_late(clock, capsys):
    with Progress(desc="tests", unit="case") as bar:
        assert capsys.readouterr().err == ""
        bar.total = 1
        bar.update()
    assert capsys.readouterr().err == "tests: 1 case to do\n"


def test_nothing_to_do_says_nothing(capsys):
    assert list(Progress([], desc="compile", unit="kernel")) == []
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_the_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(Progress([1, 2], desc="compile", unit="kernel")) == [1, 2]
    err = capsys.readouterr().err
    assert "\r" in err and "compile: 2 kernels\n" not in err


def test_a_terminal_that_does_not_know_its_size_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(bar([1, 2], desc="linear layers")) == [1, 2]
    assert "linear layers" in capsys.readouterr().err
    monkeypatch.undo()
    assert list(bar([1, 2], desc="linear layers")) == [1, 2]
    assert capsys.readouterr().err == ""

"""Strict mode finds submissions that do not compute, and accepts one that does."""

import importlib

import pytest
import torch
from cheats import CHEATS, HONEST, UNNOTICED_BY_ONE_CALL

from nvfp4_cute.competition import player, protocol, wire, worker

threads: list[int] = []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mode, strict",
    [("test", False), ("test", True), ("benchmark", True), ("leaderboard", False), ("profile", False)],
)
def test_an_honest_submission_passes(verdict, mode, strict):
    results = verdict(HONEST, strict=strict, mode=mode)
    assert results.passed and results.exit_code == protocol.OK, results
    assert [case.source for case in results.cases] == ["not timed"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(verdict, name):
    text, expected = CHEATS[name]
    results = verdict(text, strict=True)
    assert not results.passed and results.exit_code == protocol.REJECTED
    assert expected in results.cases[0].message


@pytest.mark.slow
@pytest.mark.parametrize("name", UNNOTICED_BY_ONE_CALL)
def test_one_call_does_not_notice(verdict, name):
    """If this fails, the plain mode has become as strict as the strict one."""
    assert verdict(CHEATS[name][0], strict=False).passed


def test_a_queue_that_torch_only_names_is_not_a_new_one(monkeypatch):
    """``Event.record`` asks for the current stream, for which torch creates an object of the class."""
    monkeypatch.setattr("torch.cuda.Stream", type("Stream", (), {"__init__": lambda self, **options: None}))
    monkeypatch.setattr("torch.cuda.ExternalStream", torch.cuda.ExternalStream)
    for module in ("driver", "runtime"):
        bindings = importlib.import_module(f"cuda.bindings.{module}")
        for name in [name for name in vars(bindings) if "StreamCreate" in name]:
            monkeypatch.setattr(bindings, name, getattr(bindings, name))
    made = []
    player.record_queues(made.append)
    torch.cuda.Stream(stream_id=0, device_index=0, device_type=1)
    assert made == []
    torch.cuda.Stream()
    assert made == ["torch.cuda.Stream"]


class FakeEvent:
    """An event. Between two of these, a microsecond passes."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        """Does nothing."""

    def elapsed_time(self, end):
        return 1e-3


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x, y: y.copy_(2 * x), ""),
        (lambda x, y: None, "NaN"),
        (lambda x, y: y.fill_(2.0), "the other input's"),
        (lambda x, y: [y.copy_(2 * x), threads.append(1)], "threads were started"),
    ],
)
def test_every_timed_call_has_an_output_of_its_own_input(monkeypatch, run, message):
    """Checks the outputs of all calls but the warm-ups for two inputs, ones and twos; equal outputs are kept once."""
    threads.clear()
    arena = wire.Arena(1 << 24)
    settings = worker.Settings(None, None, entry=player.Entry(spread=True, written=1), on_gpu=False)
    theirs = player.Player(arena, None, None, settings)
    theirs._kernel = run
    host = worker.Host(settings)
    host.arena = arena
    monkeypatch.setattr(host, "ask", lambda do, **request: getattr(theirs, f"do_{do}")(**request))
    monkeypatch.setattr(host, "threads", lambda: len(threads))
    monkeypatch.setattr(worker, "_host", host, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    inputs = [worker.pack((torch.full((3,), value), torch.full((3,), torch.nan))) for value in (1.0, 2.0)]
    answer = worker.time_fresh_calls(inputs, [1, 0, 1, 0, 0, 1], 2)
    assert message.startswith("threads") == bool(answer.faults) and len(answer.durations_ns) == 4
    found = {
        (index, *worker.unpack(output)[0].tolist())
        for index, output in zip(answer.indices, answer.outputs, strict=True)
    }
    if not message:
        assert found == {(0, 2.0, 2.0, 2.0), (1, 4.0, 4.0, 4.0)} and len(answer.outputs) == 2
    elif "NaN" in message:
        assert all(value != value for _, value, *_ in found)
    elif "other" in message:
        assert (1, 2.0, 2.0, 2.0) in found


def test_what_a_submission_raises_is_a_verdict(verdict):
    results = verdict("def custom_kernel(data):\n    raise KeyError('no such shape')\n", strict=False)
    assert not results.passed and "Encountered KeyError: 'no such shape'" in results.cases[0].message
    results = verdict("import nonsense_of_ours\n", strict=False)
    assert "Encountered ModuleNotFoundError" in results.cases[0].message


@pytest.mark.parametrize(
    "answer, message",
    [
        ("None", "output is a NoneType: expected a list of 2 tensors"),
        ("compute(data)[:1]", "output length mismatch: got 1, expected 2"),
        (
            "[c[:, :, 0] for c in compute(data)]",
            "mismatch found! custom implementation doesn't match reference: 0 ['SIZE MISMATCH']",
        ),
    ],
)
def test_messages_are_those_of_the_official_harness(verdict, answer, message):
    text = HONEST + f"\ndef custom_kernel(data):\n    return {answer}\n"
    assert verdict(text, strict=False).cases[0].message == message

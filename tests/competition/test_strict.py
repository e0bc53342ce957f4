"""Strict mode: submissions that do not compute are caught; one that computes is not."""

import importlib

import pytest
import torch
from cheats import CHEATS, HONEST, UNNOTICED_BY_ONE_CALL

from nvfp4_cute.competition import player, protocol


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mode, strict",
    [("test", False), ("test", True), ("benchmark", True), ("leaderboard", False), ("profile", False)],
)
def test_an_honest_submission_passes(verdict, mode, strict):
    results = verdict(HONEST, strict=strict, mode=mode)
    assert results.passed and results.exit_code == protocol.OK, results
    assert [case.source for case in results.cases] == ["not timed"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(verdict, name):
    text, expected = CHEATS[name]
    results = verdict(text, strict=True)
    assert not results.passed and results.exit_code == protocol.REJECTED
    assert expected in results.cases[0].message


@pytest.mark.slow
@pytest.mark.parametrize("name", UNNOTICED_BY_ONE_CALL)
def test_one_call_does_not_notice(verdict, name):
    """What strict mode is for; if this fails, the plain mode has become as strict."""
    assert verdict(CHEATS[name][0], strict=False).passed


def test_a_queue_that_torch_only_names_is_not_a_new_one(monkeypatch):
    """``Event.record`` asks for the current queue, for which torch makes an object of the class."""
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

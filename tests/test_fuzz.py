"""Hostile calls of every public operation: backends refuse them with the same error or return the same results.

Long runs: ``make fuzz``.
"""

import json
from collections.abc import Iterable
from dataclasses import replace

import flat_parts as parts
import pytest
import torch
from fuzz.calls import ARCHS, MEMBERS, OPERATIONS, SMALLER, Call, Limits, draw
from fuzz.compare import failure_of, outcome
from fuzz.rounds import Plan, Round, pieces

from nvfp4_cute.emulator.fronts.launch_shim import shim_is_built

# Calls of one kind in a test, number of kinds, and the kind that runs without the slow tests.
CHUNK, CHUNKS, FAST = 25, 80, 2
needs_shim = pytest.mark.skipif(not shim_is_built(), reason="needs the launch shim")


def disagreements(calls: Iterable[Call]) -> list[str]:
    return [f"{found}\n    {call}" for call in calls if (found := failure_of(call, f"emulator:{call.arch}"))]


def kinds(first: int, count: int) -> range:
    """Returns the first seeds of ``count`` kinds, from the kind of seed ``first`` on."""
    return range(first, first + count * MEMBERS, MEMBERS)


NOT_PROMISED = {
    "rows behind a masked group's, in an output that the call makes": 40780,
    "elements of b1": 39499,
}


@needs_shim
@pytest.mark.parametrize("seed", NOT_PROMISED.values(), ids=NOT_PROMISED)
def test_what_is_not_promised_is_not_compared(seed):
    assert not disagreements([draw(seed)])


@needs_shim
@pytest.mark.parametrize(
    "chunk", [pytest.param(c, marks=() if c == FAST else pytest.mark.slow) for c in range(CHUNKS)]
)
def test_hostile_calls(chunk):
    first = chunk * MEMBERS
    found = disagreements(draw(seed, hostile=True) for seed in range(first, first + CHUNK))
    assert not found, "\n".join(found)


def test_hostile_calls_are_refused_alike():
    """Runs calls that the reference refuses. No kernel is compiled, unless a backend accepts one of them."""
    calls = [draw(seed, hostile=True, limits=Limits()) for seed in kinds(200_000, 200)]
    refused = [call for call in calls if outcome(call, "reference").refusal]
    assert len(refused) > len(calls) // 3
    assert {call.arch for call in refused} == set(ARCHS)
    found = disagreements(refused)
    assert not found, "\n".join(found)


@needs_shim
@pytest.mark.slow
@pytest.mark.parametrize("kind", range(60))
def test_right_calls(kind):
    first = 100_000 + kind * MEMBERS
    found = disagreements(draw(seed, hostile=False) for seed in range(first, first + 10))
    assert not found, "\n".join(found)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("hostile", [False, True])
def test_calls_on_a_gpu(hostile):
    calls = (draw(seed, hostile=hostile, archs=("sm_90a",)) for seed in kinds(0, 60))
    found = [failure_of(call, "cuda") for call in calls]
    assert [f for f in found if f] == []


def test_every_operation_is_drawn():
    assert {draw(seed, hostile=True, limits=SMALLER[0]).operation for seed in kinds(0, 80)} == set(OPERATIONS)


def test_seeds_of_one_kind_differ_in_nothing_that_kernels_are_compiled_from():
    for first in kinds(0, 40):
        calls = [draw(seed, hostile=False, limits=Limits()) for seed in range(first, first + 3)]
        shared = [
            (
                call.operation, call.arch, call.form, call.formats, call.mode.partition(":")[0],
                call.arguments.get("out_dtype"), "alpha" in call.arguments,
                (config := call.arguments.get("config")) and replace(config, num_cta=None),
                len(call.arguments["a"]) if call.form == "list" else None,
            )
            for call in calls
        ]  # fmt: skip
        assert len(set(shared)) == 1, shared
        assert len({str(call) for call in calls}) > 1, shared


def test_a_call_follows_from_its_seed():
    for seed in kinds(17, 15):
        assert str(draw(seed)) == str(draw(seed))


def test_rounds_are_counted_and_read_from_a_report():
    assert pieces(150, 500) == [(150, 200), (200, 400), (400, 600), (600, 650)]
    assert pieces(400, 10) == [(400, 410)]
    start = next(s for s in kinds(0, 100) if draw(s).operation == "route")
    found = Plan(None, ("sm_100a",)).run((start, start + 3))
    assert sum(found.counts.values()) == 3 and found.failures == []
    assert Round.from_json(json.loads(json.dumps(found.to_json()))).counts == found.counts


def first_of(operation: str) -> object:
    return next(c for seed in kinds(0, 100) if (c := draw(seed, hostile=False)).operation == operation)


def test_a_wrong_bit_a_crash_and_a_refusal_of_one_backend_are_found(monkeypatch):
    """The backend is the reference with one fault."""
    call, right = first_of("gemv"), parts.gemv

    def faulty(fault):
        def gemv(*args, backend, **options):
            result = right(*args, backend="reference", **options)
            if backend == "faulty":
                fault(result)
            return result

        monkeypatch.setitem(vars(parts), "gemv", gemv)
        return failure_of(call, "faulty")

    def crash(_):
        raise AttributeError("no such thing")

    def refuse(_):
        raise ValueError("b is too blue")

    assert faulty(lambda result: None) is None
    assert "differs" in faulty(lambda result: result.view(torch.uint8)[..., :1].bitwise_xor_(1))
    assert "crashed" in faulty(crash)
    assert "refuses" in faulty(refuse) or "crashed" in faulty(refuse)


def test_an_output_that_is_written_before_a_refusal_is_found(monkeypatch):
    def gemv(*args, backend, out, **options):
        if backend == "faulty":
            out.view(torch.uint8)[0] ^= 1
        raise ValueError("b is too blue")

    monkeypatch.setitem(gemv.__globals__, "__name__", "nvfp4_cute.faulty")  # lines of this name may refuse
    monkeypatch.setitem(vars(parts), "gemv", gemv)
    assert failure_of(first_of("gemv"), "right") is None
    assert "wrote to out" in failure_of(first_of("gemv"), "faulty")

"""Hostile calls of every public operation: backends refuse and compute alike. Long runs: ``make fuzz``."""

from collections.abc import Iterable

import pytest
import torch
from fuzz.calls import OPERATIONS, draw
from fuzz.compare import failure_of, outcome

import nvfp4_cute as nv
from nvfp4_cute.emulator.fronts.launch_shim import shim_is_built

# The chunk that is run without the slow tests compiles three kernels.
CHUNK, CHUNKS, FAST = 25, 80, 1
needs_shim = pytest.mark.skipif(not shim_is_built(), reason="needs the launch shim")
ARCHS = ("sm_100a", "sm_120a", "sm_90a")


def disagreements(seeds: Iterable[int], backend: str, *, hostile: bool) -> list[str]:
    calls = ((seed, draw(seed, hostile=hostile)) for seed in seeds)
    return [
        f"seed {seed}: {found}\n    {call}" for seed, call in calls if (found := failure_of(call, (backend,)))
    ]


@needs_shim
@pytest.mark.parametrize(
    "chunk", [pytest.param(c, marks=() if c == FAST else pytest.mark.slow) for c in range(CHUNKS)]
)
def test_hostile_calls(chunk):
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    found = disagreements(seeds, f"emulator:{ARCHS[chunk % 3]}", hostile=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("arch", ARCHS)
def test_hostile_calls_are_refused_alike(arch):
    """Those that the reference refuses: no kernel is compiled, unless a backend takes one of them."""
    seeds = range(200_000, 200_150)
    refused = [seed for seed in seeds if outcome(draw(seed, hostile=True), "reference").refusal]
    assert len(refused) > len(seeds) // 3
    found = disagreements(refused, f"emulator:{arch}", hostile=True)
    assert not found, "\n".join(found)


@needs_shim
@pytest.mark.parametrize("arch", [pytest.param(a, marks=pytest.mark.slow) for a in ARCHS])
def test_right_calls(arch):
    found = disagreements(range(100_000, 100_100), f"emulator:{arch}", hostile=False)
    assert not found, "\n".join(found)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("hostile", [False, True])
def test_calls_on_a_gpu(hostile):
    found = [failure_of(draw(seed, hostile=hostile), ("cuda",)) for seed in range(60)]
    assert [f for f in found if f] == []


def test_every_operation_is_drawn():
    drawn = {draw(seed, hostile=True).operation for seed in range(200)}
    assert drawn == set(OPERATIONS)


def first_of(operation: str) -> object:
    return next(c for seed in range(100) if (c := draw(seed, hostile=False)).operation == operation)


def test_a_wrong_bit_a_crash_and_a_refusal_of_one_backend_are_found(monkeypatch):
    """Of a backend that is the reference but for a fault."""
    call, right = first_of("gemv"), nv.gemv

    def faulty(fault):
        def gemv(*args, backend, **options):
            result = right(*args, backend="reference", **options)
            if backend == "faulty":
                fault(result)
            return result

        monkeypatch.setitem(vars(nv), "gemv", gemv)
        return failure_of(call, ("faulty",))

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

    monkeypatch.setitem(gemv.__globals__, "__name__", "nvfp4_cute.faulty")  # whose lines may refuse
    monkeypatch.setitem(vars(nv), "gemv", gemv)
    assert failure_of(first_of("gemv"), ("right",)) is None
    assert "wrote to out" in failure_of(first_of("gemv"), ("faulty",))

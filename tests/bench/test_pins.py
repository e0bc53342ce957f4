"""Requirements of engines together with those of this package.

A slow test checks a pair or two in the package index; `make test-pins` checks all.
"""

import re

import pytest

from nvfp4_cute.bench import pins


def resolved(*arguments):
    try:
        return pins.outcome_of(*arguments)
    except pins.Unreachable as error:
        pytest.skip(f"requirements were not resolved: {error}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("requirement, python, platform", pins.FAST)
def test_engines_that_pin_exact_versions_can_be_installed(requirement, python, platform):
    peer = next(peer for peer in pins.PEERS if peer.requirement == requirement)
    outcome = resolved(peer, python, platform)
    assert not outcome.fault
    assert outcome.versions[0] == "4.8.0"


def test_a_new_cause_is_a_change_and_another_letter_is_none():
    page = "| vllm 0.33.0 | vllm | x86-64 | - | ({0}) | yes |\n\n- ({0}) {1}\n"
    before = pins.rows_of(page.format("a", "vllm needs Python >=3.11"))
    assert before == pins.rows_of(page.format("b", "vllm needs Python >=3.11"))
    assert before != pins.rows_of(page.format("a", "torch>=9 of this package"))


@pytest.mark.parametrize("dropped, expected", [("torch", True), (None, False)])
def test_the_requirement_at_fault_is_named(monkeypatch, dropped, expected):
    """Without the index: a peer that resolves alone, but together with this package only without one requirement."""

    def resolve(requirements, python, platform, cache):
        conflicts = dropped and any(r.startswith(dropped) for r in requirements) and len(requirements) > 1
        return ({}, "no") if conflicts else ({name: "1" for name in pins.SHOWN}, "")

    monkeypatch.setattr(pins, "resolve", resolve)
    outcome = pins.outcome_of(pins.Peer("vllm==0.33.0", "vllm"), "3.12", "x86-64")
    assert outcome.is_ours is expected
    assert outcome.fault.startswith("torch>=") if expected else outcome.versions == ("1", "1")


def test_requirements_are_those_of_pyproject():
    assert any(r.startswith("vllm>=") for r in pins.requirements_of("vllm"))
    assert "apache-tvm-ffi" in pins.requirements_of("ffi")[-1]
    assert all(re.match(r"[a-z]", r) for r in pins.requirements_of("test"))


@pytest.mark.parametrize(
    "message, cause",
    [
        ("Because the requested Python version (>=3.10) does not satisfy Python>=3.11,<3.15 and vllm==0.32.0 depends on Python", "vllm needs Python >=3.11"),
        ("Because flashinfer-cubin==0.7 has no wheels with a matching Python ABI tag", "flashinfer-cubin has no wheel"),
    ],
)  # fmt: skip
def test_causes_are_short(message, cause):
    assert pins._cause(message) == cause

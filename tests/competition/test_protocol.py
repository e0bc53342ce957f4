"""The protocol between runner and harness: case files, seeds, statistics, results."""

import statistics

import pytest

from nvfp4_cute.competition import protocol
from nvfp4_cute.problems import registry

RESULTS = """\
benchmark-count: 2
benchmark.0.spec: m: 128; seed: 1
benchmark.0.runs: 3
benchmark.0.mean: 2000.0
benchmark.0.std: 10.0
benchmark.0.err: 5.0
benchmark.0.best: 1990.0
benchmark.0.worst: 2010.0
benchmark.1.spec: m: 256; seed: 1
benchmark.1.status: fail
benchmark.1.error: Number of mismatched elements: 2
second line
check: fail
"""


@pytest.mark.parametrize("name", registry.names())
def test_case_lines_round_trip(name):
    for case in registry.load(name).tests + registry.load(name).benchmarks:
        line = protocol.format_case(case.arguments)
        assert protocol.parse_case(line) == case.arguments


def test_case_line_as_the_official_runner_writes_it():
    assert protocol.format_case({"m": (96, 128), "g": 2, "seed": 1111}) == "m: [96, 128]; g: 2; seed: 1111"
    assert protocol.parse_case("m: (1, 2); l: -3; kind: full") == {"m": (1, 2), "l": -3, "kind": "full"}


@pytest.mark.parametrize("line", ["", "m 128", "m: 1.5", "m: 128;"])
def test_a_wrong_line_is_refused(line):
    with pytest.raises(ValueError, match="invalid test case"):
        protocol.parse_case(line)


@pytest.mark.parametrize(
    "public, secret, mixed", [(0, 0, 0), (1111, 0, 618827), (1111, 42, 666392), (3, 5, 39)]
)
def test_seeds_are_mixed_by_cantors_pairing(public, secret, mixed):
    assert protocol.combine_seeds(public, secret) == mixed


def test_statistics():
    durations = [3.0, 5.0, 10.0]
    stats = protocol.Stats.of(durations)
    assert (stats.runs, stats.mean, stats.best, stats.worst) == (3, 6.0, 3.0, 10.0)
    assert stats.std == pytest.approx(statistics.stdev(durations))
    assert stats.err == pytest.approx(stats.std / 3**0.5)
    assert protocol.Stats.of([7.0]) == protocol.Stats(1, 7.0, 0.0, 0.0, 7.0, 7.0)
    assert protocol.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_results_are_read_with_messages_of_several_lines():
    results = protocol.parse_results(RESULTS, 112)
    first, second = results.cases
    assert not results.passed
    assert first.passed and first.stats == protocol.Stats(3, 2000.0, 10.0, 5.0, 1990.0, 2010.0)
    assert first.source == "measured" and second.source == "not timed"
    assert not second.passed and second.message == "Number of mismatched elements: 2\nsecond line"


def test_check_decides_not_the_exit_code():
    """A failed ranked run of the official harness ends with exit code 0."""
    assert not protocol.parse_results(RESULTS, 0).passed
    assert protocol.parse_results(RESULTS.replace("check: fail", "check: pass"), 0).passed
    assert not protocol.parse_results("", 0).passed

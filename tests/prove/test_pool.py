"""A child that faults, hangs or dies loses only its own result."""

import time

import pytest

from nvfp4_cute.prove import pool
from nvfp4_cute.prove.outcome import BROKEN, FAULT, HANG, PASSED, SKIPPED, Job


@pytest.fixture
def limits():
    return lambda **given: pool.Limits(**{"workers": 2, "job_s": 200.0, "module": "faulty_jobs", **given})


def verdicts(whats, limits):
    found = {}
    jobs = [Job("probe", f"{index} {what}", "cuda", {"what": what}) for index, what in enumerate(whats)]
    pool.run(jobs, limits, lambda outcome: found.update({outcome.name: outcome}))
    return [found[job.name] for job in jobs]


def test_what_each_job_came_to(limits, monkeypatch, tmp_path):
    (tmp_path / "faulty_jobs.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    ask = pool._Child.ask  # only the hanging child has a short limit, so a slow machine changes nothing
    monkeypatch.setattr(
        pool._Child, "ask", lambda child, job, s: ask(child, job, 1.0 if "hang" in job.name else s)
    )
    whats = ["pass", "pass", "die", "pass", "hang", "fault", "pass", "break", "pass"]
    outcomes = verdicts(whats, limits(workers=1))
    came = [PASSED, PASSED, FAULT, PASSED, HANG, FAULT, PASSED, BROKEN, PASSED]
    assert [o.verdict for o in outcomes] == came
    assert "signal 11" in outcomes[2].detail and "no answer within 1 s" in outcomes[4].detail
    assert "illegal memory access" in outcomes[5].detail and "KeyError" in outcomes[7].detail
    assert outcomes[0].detail == outcomes[1].detail, "one child for both"
    assert len({outcomes[place].detail for place in (1, 3, 6)}) == 3, "a fault ends its child"


@pytest.mark.slow
def test_a_fresh_child_is_for_one_job(limits):
    fresh = verdicts(["pass", "pass"], limits(fresh=True))
    assert [o.verdict for o in fresh] == [PASSED, PASSED] and fresh[0].detail != fresh[1].detail


def test_no_job_begins_when_the_time_is_over(limits):
    assert [o.verdict for o in verdicts(["pass", "pass"], limits(seconds=-1, workers=0))] == [
        SKIPPED,
        SKIPPED,
    ]


def test_the_start_of_a_child_takes_no_time_from_its_jobs(limits, monkeypatch):
    """A child takes seconds to start. The step's limit is longer than its jobs and much shorter than that."""
    begun = time.monotonic()
    ready = pool._Child.is_ready

    def slow_start(child):
        time.sleep(max(0.0, begun + 2 - time.monotonic()))
        return ready(child)

    monkeypatch.setattr(pool._Child, "is_ready", slow_start)
    outcomes = verdicts(["pass", "pass"], limits(seconds=1.0, workers=1))
    assert [o.verdict for o in outcomes] == [PASSED, PASSED]


def test_a_child_that_does_not_start(limits):
    (outcome,) = verdicts(["pass"], limits(module="no_such_module"))
    assert outcome.verdict == BROKEN and "did not start" in outcome.detail

"""Children that fault, hang or die cost their own result and no other."""

import time
from pathlib import Path

import pytest

from nvfp4_cute.prove import pool
from nvfp4_cute.prove.outcome import BROKEN, FAULT, HANG, PASSED, SKIPPED, Job


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    return lambda **given: pool.Limits(**{"workers": 2, "job_s": 200.0, "module": "faulty_jobs", **given})


def verdicts(whats, limits):
    found = {}
    jobs = [Job("probe", f"{index} {what}", "cuda", {"what": what}) for index, what in enumerate(whats)]
    pool.run(jobs, limits, lambda outcome: found.update({outcome.name: outcome}))
    return [found[job.name] for job in jobs]


def test_what_each_job_came_to(limits, monkeypatch):
    ask = (
        pool._Child.ask
    )  # only for the one that hangs is the time short, so that a slow machine changes nothing
    monkeypatch.setattr(
        pool._Child, "ask", lambda child, job, s: ask(child, job, 1.0 if "hang" in job.name else s)
    )
    outcomes = verdicts(["pass", "die", "pass", "hang", "fault", "pass", "break", "pass"], limits())
    assert [o.verdict for o in outcomes] == [PASSED, FAULT, PASSED, HANG, FAULT, PASSED, BROKEN, PASSED]
    assert "signal 11" in outcomes[1].detail and "no answer within 1 s" in outcomes[3].detail
    assert "illegal memory access" in outcomes[4].detail and "KeyError" in outcomes[6].detail


def test_a_fault_ends_its_child_and_a_fresh_one_is_for_one_job(limits):
    kept = verdicts(["pass", "pass", "fault", "pass"], limits(workers=1))
    assert kept[0].detail == kept[1].detail != kept[3].detail
    fresh = verdicts(["pass", "pass"], limits(workers=1, fresh=True))
    assert fresh[0].detail != fresh[1].detail


def test_nothing_begins_behind_the_deadline(limits):
    outcomes = verdicts(["pass", "pass"], limits(deadline=time.monotonic() - 1))
    assert [o.verdict for o in outcomes] == [SKIPPED, SKIPPED]


def test_a_child_that_does_not_start(limits):
    (outcome,) = verdicts(["pass"], limits(module="no_such_module"))
    assert outcome.verdict == BROKEN and "did not start" in outcome.detail

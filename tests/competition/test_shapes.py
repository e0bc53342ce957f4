"""The exported submissions compute the competition's shapes: a few by default, all of them among the slow tests."""

import pytest

from nvfp4_cute.competition import export
from nvfp4_cute.problems import registry

EXPORTED = [name for name in registry.names() if registry.load(name).submission]
FEW = 2
EACH = pytest.mark.parametrize("name", EXPORTED)


@EACH
def test_first_shapes(verdict, name):
    cases = registry.load(name).tests[:FEW]
    results = verdict(export.make_submission(name).text, strict=False, problem=name, cases=cases)
    assert results.passed and len(results.cases) == FEW, results


@EACH
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_other_shapes(verdict, name):
    cases = registry.load(name).tests[FEW:]
    results = verdict(export.make_submission(name).text, strict=False, problem=name, cases=cases)
    assert results.passed and len(results.cases) == len(cases), results


@EACH
def test_a_modelled_time_is_that_of_the_kernels(verdict, name):
    """Microseconds for a launch, and the same again for the same addresses and sizes."""
    cases = registry.load(name).tests[:1]
    results = verdict(
        export.make_submission(name).text, strict=False, problem=name, cases=cases, mode="benchmark"
    )
    (case,) = results.cases
    assert results.passed and case.source == "modelled" and case.stats.runs == 2
    assert 1e3 < case.stats.best <= case.stats.worst < 2e4 and case.stats.std < 0.1 * case.stats.mean

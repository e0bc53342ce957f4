"""The exported submissions compute the competition's shapes, mostly in slow tests; also the modelled time of one of them."""

import pytest

from nvfp4_cute.competition import export
from nvfp4_cute.problems import registry

EXPORTED = [name for name in registry.names() if registry.load(name).submission]
FEW = 1
EACH = pytest.mark.parametrize("name", EXPORTED)


def shapes(name):
    """Test shapes of a problem, sorted by work."""
    return sorted(registry.load(name).tests, key=lambda case: case.work.flops)


@EACH
@pytest.mark.slow
def test_first_shapes(verdict, name):
    results = verdict(export.make_submission(name).text, strict=False, problem=name, cases=shapes(name)[:FEW])
    assert results.passed and len(results.cases) == FEW, results


@EACH
@pytest.mark.slow
def test_strict_mode(verdict, name):
    results = verdict(export.make_submission(name).text, strict=True, problem=name, cases=shapes(name)[:1])
    assert results.passed, results


@EACH
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_other_shapes(verdict, name):
    cases = shapes(name)[FEW:]
    results = verdict(export.make_submission(name).text, strict=False, problem=name, cases=cases)
    assert results.passed and len(results.cases) == len(cases), results


@pytest.mark.parametrize("name", ["nvfp4_gemv", pytest.param("nvfp4_group_gemm", marks=pytest.mark.slow)])
def test_a_modelled_time_is_that_of_the_kernels(verdict, name):
    """The time is microseconds for a launch, and repeats for the same addresses and sizes."""
    results = verdict(
        export.make_submission(name).text,
        strict=False,
        problem=name,
        cases=shapes(name)[:1],
        mode="benchmark",
    )
    (case,) = results.cases
    assert results.passed and case.source == "modelled" and case.stats.runs == 2
    assert 1e3 < case.stats.best <= case.stats.worst < 2e4 and case.stats.std < 0.1 * case.stats.mean

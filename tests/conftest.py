"""Shared pytest set-up: `@pytest.mark.gpu("sm_100a")` skips, with the reason, where that GPU is missing."""

import pytest

from nvfp4_cute import doctor


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked for when a test is about to run, not at collection: listing tests must not initialise CUDA.
    for marker in item.iter_markers("gpu"):
        reason = doctor.missing_gpu_reason(*marker.args)
        if reason is not None:
            pytest.skip(reason)

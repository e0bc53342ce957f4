"""Shared pytest set-up: a cache of compiled kernels for the session, and tests that need a GPU.

`@pytest.mark.gpu("sm_100a")` skips, with the reason, where that GPU is missing.
"""

from collections.abc import Iterator

import pytest

from nvfp4_cute import doctor


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked for when a test is about to run, not at collection: listing tests must not initialise CUDA.
    for marker in item.iter_markers("gpu"):
        reason = doctor.missing_gpu_reason(*marker.args)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Kernels are compiled anew in every session, once for all its processes; the user's are left alone."""
    base = tmp_path_factory.getbasetemp()
    is_worker = hasattr(pytestconfig, "workerinput")  # whose folder lies in the session's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_CUTE_CACHE_DIR", str((base.parent if is_worker else base) / "kernels"))
        yield

"""Shared pytest set-up: a cache of compiled kernels for the session, and tests that need a GPU.

`@pytest.mark.gpu("sm_100a")` skips a test, with the reason, if that GPU is missing.
"""

import gc
import os
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

# Set before torch is loaded, here and in processes that tests start. With more threads, processes on the same cores
# wait for each other without sleeping, which took two thirds of the time of the format tests. Sums also become
# independent of the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A full collection visits torch's modules and all collected tests, 840,000 objects. Off until these are frozen.
gc.disable()

from nvfp4_cute.backends import installed  # noqa: E402
from nvfp4_cute.emulator import parallel  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Keeps launches of a worker in its process: forks copy its memory, and the other cores have workers of their own."""
    if hasattr(config, "workerinput"):
        parallel.available_cores = lambda: 1


def pytest_collection_finish() -> None:
    """Freezes all objects, so that the garbage collector visits only those of tests. It took 15 % of their time before."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before marks deselect tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but ``count`` of the variants of a ``sampled(count)`` test as slow. The test's name determines the choice."""
    variants = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            variants[item.nodeid.split("[")[0]].append(item)
    for name, tests in variants.items():
        count = tests[0].get_closest_marker("sampled").args[0]
        fast = random.Random(name).sample(range(len(tests)), min(count, len(tests)))
        for index, item in enumerate(tests):
            if index not in fast:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Checked when a test is about to run, not at collection, because listing tests must not initialise CUDA.
    for marker in item.iter_markers("gpu"):
        reason = installed.missing_gpu_reason(*marker.args)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Compiles kernels once per session for all its processes, and does not use the user's cache."""
    base = tmp_path_factory.getbasetemp()
    is_worker = hasattr(pytestconfig, "workerinput")  # whose folder is in the session's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_CUTE_CACHE_DIR", str((base.parent if is_worker else base) / "kernels"))
        yield

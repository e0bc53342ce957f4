"""Memory that the launches of a call hand on: whose it is, how it grows, and which kernels have any."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from nvfp4_cute.launch import workspace


@pytest.fixture(autouse=True)
def no_buffers(monkeypatch):
    monkeypatch.setattr(workspace, "_in_use", {})


def test_it_grows_by_doubling_and_stays():
    first = workspace.take(None, 7, 1000)
    assert first.nbytes == 1000 and workspace.take(None, 7, 1000) is workspace.take(None, 7, 10) is first
    second = workspace.take(None, 7, 1001)
    assert second.nbytes == 2000 and workspace.take(None, 7, 2000) is second
    assert workspace.take(None, 7, 9000).nbytes == 9000


def test_queues_and_threads_have_their_own():
    mine = [workspace.take(None, stream, 100) for stream in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(workspace.take, None, 1, 100).result()
    assert len({buffer.address for buffer in (*mine, other)}) == 3

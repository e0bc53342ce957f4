"""Memory between the launches of a call: who owns it, how it grows, and which kernels need it."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute.gpus.targets import TARGETS
from nvfp4_cute.launch import workspace
from nvfp4_cute.planning.arch import sm90, warp_mma


@pytest.fixture(autouse=True)
def no_buffers(monkeypatch):
    monkeypatch.setattr(workspace, "_in_use", {})


def test_it_grows_by_doubling_and_stays():
    first = workspace.take(None, 7, 1000)
    assert first.nbytes == 1000 and workspace.take(None, 7, 1000) is workspace.take(None, 7, 10) is first
    second = workspace.take(None, 7, 1001)
    assert second.nbytes == 2000 and workspace.take(None, 7, 2000) is second
    assert workspace.take(None, 7, 9000).nbytes == 9000


def test_what_is_kept_is_allocated_by_another_thread(monkeypatch):
    """It is for this thread's stream: torch routes a thread's allocations to a pool of cudagraph trees, or of use_mem_pool."""
    current, seen = threading.local(), []

    @contextmanager
    def stream(one):
        current.stream = one
        yield

    def allocate(index, nbytes, counters):
        seen.append((threading.get_ident(), getattr(current, "stream", None)))
        return workspace.Workspace(torch.empty(0), 0, nbytes)

    monkeypatch.setattr(workspace, "allocate", allocate)
    for name, value in (("current_stream", lambda index: ("stream of", index)), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    for is_captured in (False, True):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured
        )
        assert workspace.take(3, 7, 1000).nbytes == 1000
    (thread, where), (own, _) = seen
    assert thread != threading.get_ident() == own and where == ("stream of", 3)


def test_queues_and_threads_have_their_own():
    mine = [workspace.take(None, stream, 100) for stream in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(workspace.take, None, 1, 100).result()
    assert len({buffer.address for buffer in (*mine, other)}) == 3


def test_a_capture_has_counters_of_its_own(monkeypatch):
    """Launches of a capture on a stream share them. Where none are left, or it has no number, they are cleared in the graph."""
    kept, numbers = workspace.CapturedCounters([torch.zeros(2 * workspace.COUNTER_BYTES)]), [1]
    monkeypatch.setattr(workspace, "_captured", {3: kept})
    monkeypatch.setattr(workspace, "CAPTURES_OF_TENSOR", 2)
    monkeypatch.setattr(workspace.private_api, "capture_id", lambda stream: numbers[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    allocate = workspace.allocate
    monkeypatch.setattr(workspace, "allocate", lambda index, *rest: allocate(None, *rest))
    first, again = (workspace.take(3, 7, 100, counters=True) for _ in range(2))
    assert first.counters == again.counters == kept.memory[0].data_ptr() and first.memory.numel() == 100
    assert workspace.take(3, 8, 100, counters=True).counters == first.counters + workspace.COUNTER_BYTES
    for numbers[0] in (2, None):
        own = workspace.take(3, 7, 100, counters=True)
        assert own.counters == own.memory.data_ptr() == own.address - workspace.COUNTER_BYTES
        assert not own.memory[: workspace.COUNTER_BYTES].any()
    assert workspace.take(3, 7, 100).counters == 0


def test_counters_for_more_captures(monkeypatch):
    """They are allocated outside of captures, up to a limit, when few are left."""
    monkeypatch.setattr(workspace, "CAPTURES_OF_TENSOR", 2)
    monkeypatch.setattr(workspace, "MOST_CAPTURES", 6)
    monkeypatch.setattr(workspace, "_captured", captured := defaultdict(workspace.CapturedCounters))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(workspace.private_api, "outside_of_pools", lambda index, make: make())
    allocate, zeros = workspace.allocate, torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    monkeypatch.setattr(workspace, "allocate", lambda index, *rest: allocate(None, *rest))
    left = []
    for used in (0, 1, 2, 3, 4, 5, 6):
        captured[3].places.update({(number, 0): number for number in range(used)})
        workspace.take(3, 7, 100, counters=True)
        left.append(captured[3].num_left)
    assert left == [2, 3, 2, 3, 2, 1, 0]


def test_counters_of_every_gpu_have_room():
    """A CTA has one counter per warp along rows of weights."""
    for target in TARGETS:
        for config in warp_mma.candidates():
            num_cta = warp_mma.clusters_at_once(config, target.gpu.num_sms)
            assert num_cta * warp_mma.warps_of(config).rows * 4 <= workspace.COUNTER_BYTES
        assert 2 * target.gpu.num_sms * sm90.FIXUP_FLAG_BYTES <= workspace.COUNTER_BYTES

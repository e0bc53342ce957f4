"""The memory of a virtual GPU."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts import virtual_gpu
from nvfp4_cute.emulator.fronts.virtual_gpu import ALLOCATION_ALIGN, aligned_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 513, 1 << 20])
def test_memory_does_not_lie_on_a_low_heap(monkeypatch, nbytes):
    """An interpreter that is linked to a fixed address has its heap below: tensor maps that begin below a tensor wrap."""
    heap = np.zeros(nbytes + 2 * ALLOCATION_ALIGN, np.uint8)
    monkeypatch.setattr(virtual_gpu.np, "empty", lambda size, dtype: heap[:size].view(dtype))
    assert np.shares_memory(aligned_bytes(nbytes), heap)
    monkeypatch.setattr(virtual_gpu, "LOWEST_ADDRESS", heap.ctypes.data + 1)
    memory = aligned_bytes(nbytes)
    assert not np.shares_memory(memory, heap)
    assert memory.size == max(nbytes, 1) and memory.ctypes.data % ALLOCATION_ALIGN == 0
    memory[:] = 1

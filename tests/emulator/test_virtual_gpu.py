"""The memory of a virtual GPU."""

import numpy as np
import pytest
import torch

from nvfp4_cute.emulator.fronts import virtual_gpu
from nvfp4_cute.emulator.fronts.torch_shim import emulated_cuda
from nvfp4_cute.emulator.fronts.virtual_gpu import ALLOCATION_ALIGN, VirtualGpu, aligned_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 513, 1 << 20])
def test_memory_does_not_lie_on_a_low_heap(monkeypatch, nbytes):
    """An interpreter linked to a fixed address has a low heap, and a tensor map that starts before its tensor would wrap."""
    heap = np.zeros(nbytes + 2 * ALLOCATION_ALIGN, np.uint8)
    monkeypatch.setattr(virtual_gpu.np, "empty", lambda size, dtype: heap[:size].view(dtype))
    assert np.shares_memory(aligned_bytes(nbytes), heap)
    monkeypatch.setattr(virtual_gpu, "LOWEST_ADDRESS", heap.ctypes.data + 1)
    memory = aligned_bytes(nbytes)
    assert not np.shares_memory(memory, heap)
    assert memory.size == max(nbytes, 1) and memory.ctypes.data % ALLOCATION_ALIGN == 0
    memory[:] = 1


def test_operations_of_torch_lie_between_launches(monkeypatch):
    """What computes or writes on the device is work there; views, empty tensors and copies to the host are not."""
    gpu, calls = VirtualGpu("sm_100a", check=True), []
    monkeypatch.setattr(gpu, "other_work", lambda: calls.append(1))
    with emulated_cuda(gpu):
        x = torch.empty(4, device="cuda")
        x.view(2, 2).cpu(), torch.ones(3) + 1
        assert not calls
        x.zero_(), x + 1, torch.zeros(3, device="cuda")
    assert len(calls) == 3


def test_a_tensor_records_a_stream():
    """Torch's own method accepts streams of torch only."""
    with emulated_cuda(VirtualGpu("sm_100a")):
        torch.zeros(4, device="cuda").record_stream(torch.cuda.Stream())
    assert torch.Tensor.record_stream is torch._C.TensorBase.record_stream

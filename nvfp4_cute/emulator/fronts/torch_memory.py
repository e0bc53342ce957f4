"""Device memory of the virtual GPU for torch: marked, aligned storages that the emulator knows."""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from nvfp4_cute.emulator.fronts.virtual_gpu import MemoryRange, VirtualGpu

MOST_FREED = 1024
"""Largest number of deleted tensors whose memory stays accessible."""


class DeviceMemory:
    """Records which storages are device memory, and which host memory is pinned (kernels may also access that).

    Memory of deleted tensors stays accessible for a while (`VirtualGpu.freed_bytes`), as with torch's caching
    allocator. Scripts that delete a tensor before its kernel has run work on hardware.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        """Starts without memory."""
        self.gpu = gpu
        self._device: dict[int, tuple[weakref.ref, str]] = {}
        self._pinned: dict[int, tuple[weakref.ref, str]] = {}
        self._fake: dict[int, tuple[weakref.ref, str]] = {}
        self._freed: deque[tuple[str, np.ndarray]] = deque()
        self._freed_bytes = 0

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return self._has(self._fake if isinstance(tensor, FakeTensor) else self._device, tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""
        return self._has(self._pinned, tensor)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Moves a tensor whose storage nobody else uses into device memory, in place. Returns the tensor."""
        if isinstance(tensor, FakeTensor):
            return self.mark_fake(tensor)
        storage = tensor.untyped_storage()
        buffer = self.gpu.new_bytes(storage.nbytes())
        if storage.nbytes():
            fresh = torch.from_numpy(buffer).untyped_storage()
            fresh.copy_(storage)
            moved = torch.empty(0, dtype=tensor.dtype)
            tensor.data = moved.set_(fresh, tensor.storage_offset(), tensor.shape, tensor.stride())
        name = self._mark(self._device, tensor)
        weakref.finalize(tensor.untyped_storage(), self._keep, name, buffer).atexit = False
        return tensor

    def place_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """`place`, unless the tensor is already on the GPU."""
        return tensor if self.is_device(tensor) else self.place(tensor)

    def fresh(self, result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors of a result whose storage no input shares."""
        found = list(tensors_in(result))
        if not found:
            return []
        old = {id(storage_of(tensor)) for tensor in inputs} | {id(None)}
        return [tensor for tensor in found if id(storage_of(tensor)) not in old]

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks memory of another origin as device memory. Returns the tensor."""
        self._mark(self._device, tensor)
        return tensor

    def mark_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a tensor without data (FakeTensor) as a GPU tensor. Returns the tensor."""
        self._mark(self._fake, tensor)
        return tensor

    def unmark_fake(self, tensor: torch.Tensor) -> None:
        """Marks a fake tensor as a CPU tensor although its source is on the GPU."""
        if isinstance(tensor, FakeTensor):
            self._fake.pop(id(tensor.untyped_storage()), None)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a host tensor as pinned. Returns the tensor."""
        self._mark(self._pinned, tensor)
        return tensor

    def empty_cache(self) -> None:
        """Forgets the memory of deleted tensors."""
        self._freed.clear()
        self._freed_bytes = 0

    def ranges(self) -> Iterator[MemoryRange]:
        """Yields all memory that kernels may access."""
        for reference, name in (*self._device.values(), *self._pinned.values()):
            storage = reference()
            if storage is not None and storage.nbytes():
                yield name, storage.data_ptr(), storage.nbytes()
        for name, buffer in self._freed:
            yield f"{name}, freed", int(buffer.ctypes.data), buffer.size

    def _keep(self, name: str, buffer: np.ndarray) -> None:
        self._freed.append((name, buffer))
        self._freed_bytes += buffer.size
        while self._freed_bytes > self.gpu.freed_bytes or len(self._freed) > MOST_FREED:
            self._freed_bytes -= self._freed.popleft()[1].size

    @staticmethod
    def _has(table: dict, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        found = table.get(id(storage))
        return found is not None and found[0]() is storage

    @staticmethod
    def _mark(table: dict, tensor: torch.Tensor) -> str:
        # torch keeps the Python object of a storage alive as long as the storage itself.
        storage = tensor.untyped_storage()
        key = id(storage)
        name = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        table[key] = weakref.ref(storage, lambda _: table.pop(key, None)), name
        return name


def storage_of(tensor: torch.Tensor) -> Any:
    """Returns the storage of a tensor, or None if it has none (sparse, meta, wrappers)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples, and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def is_gpu(device: Any) -> bool:
    """Whether a device argument means the GPU.

    Raises:
        RuntimeError: it means a GPU other than the first one.
    """
    if device is None:
        return False
    parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if parsed.type == "cuda" and parsed.index not in (None, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal ({parsed}): there is one virtual GPU, cuda:0")
    return parsed.type == "cuda"

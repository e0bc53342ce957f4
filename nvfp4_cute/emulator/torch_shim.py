"""torch on the virtual GPU: tensors "on cuda" are CPU tensors in storages that are marked as device memory.

`emulated_cuda` holds while a script runs. Inside, `device="cuda"`, `.cuda()`, and `torch.cuda.*` work without a GPU:

- A tensor is on the GPU if its storage is marked. Results of operations on marked tensors are marked; `.cpu()` copies
  and `.device`, `.is_cuda`, and DLPack answer as a GPU build of torch does.
- Marked storages are aligned as CUDA allocations are, and are the memory that kernels may touch.
- Streams run in order, so waiting is nothing. Event times are host times, not times of a GPU.
- While a graph is captured, launches and in-place operations are kept instead of run; a replay runs them.

The mode is one of the thread that enters it: tensors that other threads or processes create stay on the CPU.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from nvfp4_cute.emulator.torch_cuda import cuda_module, nvtx_module
from nvfp4_cute.emulator.torch_scaled_mm import scaled_mm
from nvfp4_cute.emulator.virtual_gpu import (
    MemoryRange,
    VirtualGpu,
    aligned_bytes,
    replaced,
)

GPU = torch.device("cuda", 0)
DLPACK_CUDA = 2
CUDA_VERSION = "13.0"
MOST_FREED = 1024
"""Tensors that are gone whose memory stays accessible, at most."""


@contextmanager
def emulated_cuda(gpu: VirtualGpu) -> Iterator[None]:
    """Inside the block, torch's CUDA device is `gpu`."""
    memory = DeviceMemory(gpu)
    mode = DeviceMode(gpu, memory)
    gpu.memory_sources.append(memory.ranges)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **cuda_module(gpu), empty_cache=memory.empty_cache))
        stack.enter_context(replaced(torch.cuda.nvtx, **nvtx_module()))
        stack.enter_context(replaced(torch.version, cuda=CUDA_VERSION))
        stack.enter_context(
            replaced(
                torch,
                Generator=_Generator,
                set_default_device=mode.set_default_device,
                get_default_device=lambda: mode.default_device or torch.device("cpu"),
            )
        )
        stack.enter_context(mode)
        yield
    gpu.memory_sources.remove(memory.ranges)


# ---- device memory ---------------------------------------------------------------------------------


class DeviceMemory:
    """Which storages are device memory, and which host memory is pinned (kernels may touch that too).

    Memory of tensors that are gone stays accessible for a while (`VirtualGpu.freed_bytes`), as under torch's caching
    allocator: scripts that let go of a tensor before its kernel ran work on hardware.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        """Nothing yet."""
        self.gpu = gpu
        self._device: dict[int, tuple[weakref.ref, str]] = {}
        self._pinned: dict[int, tuple[weakref.ref, str]] = {}
        self._freed: deque[tuple[str, np.ndarray]] = deque()
        self._freed_bytes = 0

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return self._has(self._device, tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""
        return self._has(self._pinned, tensor)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor whose storage nobody else uses into device memory, in place; returns it."""
        storage = tensor.untyped_storage()
        buffer = aligned_bytes(storage.nbytes())
        if storage.nbytes():
            fresh = torch.from_numpy(buffer).untyped_storage()
            fresh.copy_(storage)
            moved = torch.empty(0, dtype=tensor.dtype)
            tensor.data = moved.set_(fresh, tensor.storage_offset(), tensor.shape, tensor.stride())
        name = self._mark(self._device, tensor)
        weakref.finalize(tensor.untyped_storage(), self._keep, name, buffer).atexit = False
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a host tensor is pinned; returns it."""
        self._mark(self._pinned, tensor)
        return tensor

    def empty_cache(self) -> None:
        """Forget the memory of tensors that are gone."""
        self._freed.clear()
        self._freed_bytes = 0

    def ranges(self) -> Iterator[MemoryRange]:
        """Everything that kernels may touch."""
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
        storage = _storage(tensor)
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


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # sparse, meta, and wrapper tensors have none


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples, and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def is_gpu(device: Any) -> bool:
    """Whether a device argument means the GPU.

    Raises:
        RuntimeError: it means a GPU other than the first.
    """
    if device is None:
        return False
    parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if parsed.type == "cuda" and parsed.index not in (None, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal ({parsed}): there is one virtual GPU, cuda:0")
    return parsed.type == "cuda"


# ---- the mode --------------------------------------------------------------------------------------


class DeviceMode(TorchFunctionMode):
    """Maps every torch function to CPU tensors and keeps track of which of them are on the GPU."""

    def __init__(self, gpu: VirtualGpu, memory: DeviceMemory):
        """`memory`: where marks are kept."""
        super().__init__()
        self.gpu, self.memory = gpu, memory
        self.default_device: torch.device | None = None
        self._factories = _device_constructors()
        self._handlers: dict[Any, Callable] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: self._cpu,
            _getter("device"): self._device_of,
            _getter("is_cuda"): self.memory.is_device,
            _getter("is_cpu"): lambda tensor: not self.memory.is_device(tensor),
            torch.Tensor.get_device: lambda tensor: 0 if self.memory.is_device(tensor) else -1,
            torch.Tensor.pin_memory: self._pin_memory,
            torch.Tensor.is_pinned: lambda tensor, device=None: self.memory.is_pinned(tensor),
            torch.Tensor.record_stream: lambda tensor, stream: None,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._numpy,
            torch.Tensor.__dlpack__: self._dlpack,
            torch.Tensor.__dlpack_device__: self._dlpack_device,
            torch._scaled_mm: self._scaled_mm,
        }

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one torch function. The mode is off inside, so everything here sees plain CPU tensors."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        on_gpu = any(map(self.memory.is_device, inputs))
        if kwargs.get("device") is not None:
            on_gpu = is_gpu(kwargs["device"])
            kwargs = {**kwargs, "device": "cpu"} if on_gpu else kwargs
        elif not inputs and self.default_device is not None and func in self._factories:
            on_gpu = is_gpu(self.default_device)
            kwargs = {**kwargs, "device": "cpu" if on_gpu else self.default_device}
        pinned = kwargs.get("pin_memory", False)
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if on_gpu and self.gpu.graph is not None:
            return self._capture(func, args, kwargs, inputs)
        result = func(*args, **kwargs)
        for tensor in self._fresh(result, inputs):
            if on_gpu:
                self.memory.place(tensor)
            elif pinned:
                self.memory.pin(tensor)
        return result

    def set_default_device(self, device: Any) -> None:
        """torch.set_default_device."""
        self.default_device = None if device is None else torch.device(device)

    def _fresh(self, result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of a result that share no storage with an input."""
        found = list(_tensors(result))
        if not found:
            return []
        old = {id(_storage(tensor)) for tensor in inputs} | {id(None)}
        return [tensor for tensor in found if id(_storage(tensor)) not in old]

    def _capture(self, func: Callable, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> Any:
        """Keep an operation in the graph. In-place ones wait for the replay; the others run to give their outputs."""
        assert self.gpu.graph is not None
        if _in_place(func, kwargs):
            self.gpu.graph.actions.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0] if args else None)
        result = func(*args, **kwargs)
        outputs = [self.memory.place(tensor) for tensor in self._fresh(result, inputs)]

        def again() -> None:
            for output, value in zip(outputs, self._fresh(func(*args, **kwargs), inputs), strict=True):
                _copy_bytes(output, value)

        if outputs:
            self.gpu.graph.actions.append(again)
        return result

    # ---- moves ---------------------------------------------------------------------------------
    def _move(self, tensor: torch.Tensor, device: Any, copy: bool, convert: Callable) -> torch.Tensor:
        """`convert(tensor, copy)` placed on a device (None: where the tensor is)."""
        here = self.memory.is_device(tensor)
        there = here if device is None else is_gpu(device)
        result = convert(tensor, copy or here != there)
        if there and result is not tensor:
            self.memory.place(result)
        return result

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = dict(kwargs)
        copy = kwargs.pop("copy", False)
        other = kwargs.get("other", args[0] if args else None)
        if isinstance(other, torch.Tensor):
            device: Any = GPU if self.memory.is_device(other) else torch.device("cpu")
            dtype, memory_format = other.dtype, kwargs.get("memory_format")
        else:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        memory_format = memory_format or torch.preserve_format

        def convert(source: torch.Tensor, copied: bool) -> torch.Tensor:
            return source.to(dtype=dtype or source.dtype, copy=copied, memory_format=memory_format)

        return self._recorded_move(tensor, device, copy, convert)

    def _cuda(
        self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
    ) -> torch.Tensor:
        return self._to(tensor, device=GPU if device is None else torch.device("cuda", _index(device)))

    def _cpu(self, tensor: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
        return self._to(tensor, device="cpu")

    def _recorded_move(
        self, tensor: torch.Tensor, device: Any, copy: bool, convert: Callable
    ) -> torch.Tensor:
        result = self._move(tensor, device, copy, convert)
        if self.gpu.graph is not None and result is not tensor:
            self.gpu.graph.actions.append(lambda: _copy_bytes(result, convert(tensor, True)))
        return result

    # ---- questions and bridges -----------------------------------------------------------------
    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        return GPU if self.memory.is_device(tensor) else torch.Tensor.device.__get__(tensor)

    def _pin_memory(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        return tensor if self.memory.is_pinned(tensor) else self.memory.pin(tensor.clone())

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.memory.is_device(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return torch.Tensor.numpy(tensor, *args, **kwargs) if not args else tensor.__array__(*args, **kwargs)

    def _dlpack(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        capsule = tensor.__dlpack__()
        if self.memory.is_device(tensor):
            mark_capsule(capsule)
        return capsule

    def _dlpack_device(self, tensor: torch.Tensor) -> tuple[Any, int]:
        kind, index = tensor.__dlpack_device__()
        return (type(kind)(DLPACK_CUDA) if self.memory.is_device(tensor) else kind), index

    def _scaled_mm(self, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.memory.place(scaled_mm(a, b, *args, **kwargs))


def _getter(name: str) -> Any:
    """What a mode sees as the function that reads an attribute of tensors."""
    return vars(torch._C.TensorBase)[name].__get__


IN_PLACE_DUNDERS = {"__setitem__", "__set__"}


def _in_place(func: Callable, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in IN_PLACE_DUNDERS or (name.startswith("__i") and name not in ("__int__", "__index__"))
    return name.endswith("_") or kwargs.get("out") is not None


def _copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """copy_ that needs no arithmetic for the dtype (there is none for packed fp4)."""
    if to.dtype == source.dtype and to.stride() == source.stride() and to.element_size() == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def mark_capsule(capsule: Any) -> None:
    """Write "CUDA device 0" into a DLPack capsule (unversioned: a DLTensor, whose device follows its data pointer)."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    device = (ctypes.c_int32 * 2).from_address(get(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    device[0], device[1] = DLPACK_CUDA, 0


class _Generator(torch.Generator):
    """A generator "on cuda" is one on the CPU: the numbers differ from a GPU's."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if is_gpu(device) else device)  # type: ignore[call-arg]

"""torch on the virtual GPU: tensors "on cuda" are CPU tensors in storages that are marked as device memory.

`emulated_cuda` is active while a script runs. Inside it, `device="cuda"`, `.cuda()`, and `torch.cuda.*` work without a
GPU:

- A tensor is on the GPU if its storage is marked. Results of operations on marked tensors are marked. `.cpu()` copies,
  and `.device`, `.is_cuda`, and DLPack answer like a GPU build of torch.
- Marked storages are aligned like CUDA allocations, and are the memory that kernels may access.
- torch.compile returns functions unchanged.
- Streams run in order, so waits do nothing. Event times are host times, not GPU times.
- Python functions that torch calls from inside an operator (backward functions, custom operators), and threads that the
  script starts, see the virtual GPU (torch_reentry).
- During a graph capture, launches and in-place operations are stored instead of run; a replay runs them.

Tensors created by other processes stay on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from nvfp4_cute.emulator.fronts.torch_cuda import Profile, accelerator_module, cuda_module, nvtx_module
from nvfp4_cute.emulator.fronts.torch_dlpack import Bridges
from nvfp4_cute.emulator.fronts.torch_fake import marked_fakes
from nvfp4_cute.emulator.fronts.torch_memory import DeviceMemory, is_gpu, tensors_in
from nvfp4_cute.emulator.fronts.torch_products import PRODUCTS, REFERENCES, in_float32
from nvfp4_cute.emulator.fronts.torch_reentry import Reentry
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, replaced

GPU = torch.device("cuda", 0)
CUDA_VERSION = "13.0"


@contextmanager
def emulated_cuda(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager in which torch's CUDA device is `gpu`."""
    memory = DeviceMemory(gpu)
    mode = DeviceMode(gpu, memory)
    gpu.torch_memory = memory
    gpu.memory_sources.append(memory.ranges)
    with ExitStack() as stack:
        cuda = cuda_module(gpu)
        stack.enter_context(replaced(torch.cuda, **cuda, empty_cache=memory.empty_cache))
        stack.enter_context(replaced(torch.accelerator, **accelerator_module(cuda)))
        stack.enter_context(replaced(torch.cuda.nvtx, **nvtx_module()))
        stack.enter_context(replaced(torch.profiler, profile=Profile))
        # torch's own method rejects a stream of the virtual GPU before it asks the mode.
        stack.enter_context(replaced(torch.Tensor, record_stream=lambda tensor, stream: None))
        stack.enter_context(replaced(torch.version, cuda=CUDA_VERSION))
        stack.enter_context(
            replaced(
                torch,
                Generator=_Generator,
                compile=uncompiled,
                set_default_device=mode.set_default_device,
                get_default_device=lambda: mode.default_device or torch.device("cpu"),
            )
        )
        stack.enter_context(marked_fakes(memory, GPU))
        stack.enter_context(mode.bridges.in_place())
        stack.enter_context(Reentry(mode, memory).in_place())
        stack.enter_context(mode)
        yield
    gpu.memory_sources.remove(memory.ranges)


# ---- the mode --------------------------------------------------------------------------------------


class DeviceMode(TorchFunctionMode):
    """Maps every torch function to CPU tensors and tracks which of them are on the GPU."""

    def __init__(self, gpu: VirtualGpu, memory: DeviceMemory):
        """`memory`: stores the marks."""
        super().__init__()
        self.gpu, self.memory, self.bridges = gpu, memory, Bridges(memory)
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
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._numpy,
            torch.Tensor.__dlpack__: self.bridges.capsule,
            torch.Tensor.__dlpack_device__: self.bridges.device,
            **{func: self._on_gpu(reference) for func, reference in REFERENCES.items()},
        }

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs one torch function. The mode is off inside, so the code here sees plain CPU tensors."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
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
        computed = on_gpu and not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        run = in_float32(func) if computed and func in PRODUCTS else func
        result = run(*args, **kwargs)
        fresh = self.memory.fresh(result, inputs)
        if computed and (_in_place(func, kwargs) or (fresh and "empty" not in func.__name__)):
            self.gpu.other_work()
        for tensor in fresh:
            if on_gpu:
                self.memory.place_once(tensor)
            elif pinned:
                self.memory.pin(tensor)
        return result

    def set_default_device(self, device: Any) -> None:
        """torch.set_default_device."""
        self.default_device = None if device is None else torch.device(device)

    def _capture(self, func: Callable, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> Any:
        """Stores an operation in the graph. In-place operations wait for the replay; others run to create their outputs."""
        assert self.gpu.graph is not None
        if _in_place(func, kwargs):
            self.gpu.graph.actions.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0] if args else None)
        result = func(*args, **kwargs)
        outputs = [self.memory.place(tensor) for tensor in self.memory.fresh(result, inputs)]

        def again() -> None:
            for output, value in zip(outputs, self.memory.fresh(func(*args, **kwargs), inputs), strict=True):
                _copy_bytes(output, value)

        if outputs:
            self.gpu.graph.actions.append(again)
        return result

    def _on_gpu(self, reference: Callable) -> Callable:
        """Wraps a function whose result is on the GPU, with or without `out`."""

        def run(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
            result = reference(*args, **kwargs)
            return self.memory.place(result) if out is None else out.copy_(result)

        return run

    # ---- moves ---------------------------------------------------------------------------------
    def _move(self, tensor: torch.Tensor, device: Any, copy: bool, convert: Callable) -> torch.Tensor:
        """`convert(tensor, copy)` placed on a device (None: where the tensor is)."""
        here = self.memory.is_device(tensor)
        there = here if device is None else is_gpu(device)
        result = convert(tensor, copy or here != there)
        if there and result is not tensor:
            self.memory.place(result)
        if not there:
            self.memory.unmark_fake(result)
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

    # ---- queries and bridges -------------------------------------------------------------------
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


def uncompiled(model: Any = None, **options: Any) -> Any:
    """torch.compile: returns the function unchanged, because a compiler would generate code for a GPU."""
    return model if model is not None else lambda function: function


def _getter(name: str) -> Any:
    """Returns the function that a mode sees for reading an attribute of tensors."""
    return vars(torch._C.TensorBase)[name].__get__


IN_PLACE_DUNDERS = {"__setitem__", "__set__"}


def _in_place(func: Callable, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in IN_PLACE_DUNDERS or (name.startswith("__i") and name not in ("__int__", "__index__"))
    return name.endswith("_") or kwargs.get("out") is not None


def _copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """copy_ without arithmetic on the dtype, which packed fp4 does not have."""
    if to.dtype == source.dtype and to.stride() == source.stride() and to.element_size() == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


class _Generator(torch.Generator):
    """A generator "on cuda" is a CPU generator, so its numbers differ from a GPU's."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if is_gpu(device) else device)  # type: ignore[call-arg]

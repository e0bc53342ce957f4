"""DLPack between torch on the virtual GPU and other libraries: exported tensors say that they are on a CUDA device."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nvfp4_cute.emulator.fronts.torch_memory import DeviceMemory
from nvfp4_cute.emulator.fronts.virtual_gpu import replaced, without

DLPACK_CPU, DLPACK_CUDA = 1, 2
CAPSULE_NAME = b"dltensor"

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def capsule_device(capsule: Any) -> Any:
    """Returns the (device type, index) of an unversioned DLPack capsule as a writable int32 [2].

    A capsule holds a DLTensor, in which the device follows the data pointer.
    """
    return (ctypes.c_int32 * 2).from_address(
        _get_pointer(capsule, CAPSULE_NAME) + ctypes.sizeof(ctypes.c_void_p)
    )


class Bridges:
    """Exports and imports of tensors."""

    def __init__(self, memory: DeviceMemory):
        """`memory`: knows which tensors are on the GPU."""
        self.memory = memory
        self._import = torch.utils.dlpack.from_dlpack

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that replaces torch's DLPack functions, and makes TVM-FFI use them instead of torch's C interface."""
        os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # otherwise TVM-FFI would build that interface
        with ExitStack() as stack:
            stack.enter_context(without(torch.Tensor, "__dlpack_c_exchange_api__"))
            for module in (torch, torch.utils.dlpack):
                stack.enter_context(replaced(module, to_dlpack=self.capsule, from_dlpack=self.imported))
            stack.enter_context(
                replaced(torch._C, _cuda_getCurrentRawStream=_raw_stream, _cuda_getDevice=_device)
            )
            yield

    def capsule(self, tensor: torch.Tensor, **options: Any) -> Any:
        """Tensor.__dlpack__: always returns an unversioned capsule."""
        with torch._C.DisableTorchFunction():
            capsule = torch._C._to_dlpack(tensor)
        if self.memory.is_device(tensor):
            capsule_device(capsule)[:] = DLPACK_CUDA, 0
        return capsule

    def device(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Implements Tensor.__dlpack_device__."""
        kind, index = tensor.__dlpack_device__()
        return (type(kind)(DLPACK_CUDA) if self.memory.is_device(tensor) else kind), index

    def imported(self, source: Any, **options: Any) -> torch.Tensor:
        """torch.from_dlpack: returns a tensor that shares the memory of a capsule or of an object that exports one."""
        if not _is_valid(source, CAPSULE_NAME):
            source = source.__dlpack__()
        device = capsule_device(source)
        on_gpu = device[0] == DLPACK_CUDA
        if on_gpu:
            device[:] = DLPACK_CPU, 0
        tensor = self._import(source)
        return self.memory.adopt(tensor) if on_gpu else tensor


def _raw_stream(index: int) -> int:
    """Implements torch._C._cuda_getCurrentRawStream."""
    return torch.cuda.current_stream(index).cuda_stream


def _device() -> int:
    """Implements torch._C._cuda_getDevice."""
    return torch.cuda.current_device()

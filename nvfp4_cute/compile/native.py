"""Calls host functions of kernels directly from their object files, with CuTe DSL's runtime library but without its modules."""

import ctypes
import importlib.util
import threading
from functools import cache
from pathlib import Path
from typing import Any

from nvfp4_cute.compile.object_file import LoadedObject, UnsupportedObject
from nvfp4_cute.emulator.fronts.launch_shim import active_emulators, load_shim, shim_is_built

RUNTIME = "libcute_dsl_runtime.so"
CUDA_13 = 13000
SUCCESS = 0


class NativeFunction:
    """The launch function of an object file. Takes the address of a launch table and a stream.

    Args:
        content: object file that CuTe DSL wrote.
        prefix: name with which it was written.

    Raises:
        UnsupportedObject: another machine's file, or an unknown form; CuTe DSL loads it.
    """

    def __init__(self, content: bytes, prefix: str):
        loaded = LoadedObject(content, _symbol)
        start = f"_mlir_{prefix}_"
        entries = [
            address for name, address in loaded.symbols.items() if name.startswith(f"{start}_mlir_ciface_")
        ]
        if (
            len(entries) != 1
            or not {f"{start}cuda_init", f"{start}cuda_load_to_device"} <= loaded.symbols.keys()
        ):
            raise UnsupportedObject(f"{prefix}: other functions than those that launch one kernel")
        self._loaded = loaded  # keeps the memory alive
        # Packed calls: the argument is an array with the addresses of all arguments, and of the result.
        packed = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.call = packed(entries[0])
        self._init, self._load = (
            packed(loaded.symbols[start + n]) for n in ("cuda_init", "cuda_load_to_device")
        )
        self._lock, self._is_ready = threading.Lock(), False

    def prepare(self) -> None:
        """Loads the cubin for every GPU, once. Raises RuntimeError with CUDA's message."""
        with self._lock:
            if self._is_ready:
                return
            library, device, error = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
            place = ctypes.pointer(ctypes.pointer(library))
            self._init(_packed(place, ctypes.pointer(error)))
            check(error.value)
            for device.value in range(_num_devices()):
                self._load(_packed(place, ctypes.pointer(device), ctypes.pointer(error)))
                check(error.value)
            self._is_ready = True


def check(error: int) -> None:
    """Raises RuntimeError unless a CUDA runtime call succeeded."""
    if error == SUCCESS:
        return
    import cuda.bindings.runtime as cudart

    code = cudart.cudaError_t(error)
    raise RuntimeError(f"CUDA error {error}, {code.name}: {cudart.cudaGetErrorString(code)[1].decode()}")


def _packed(*pointers: Any) -> Any:
    return (ctypes.c_void_p * len(pointers))(*(ctypes.cast(p, ctypes.c_void_p) for p in pointers))


def _num_devices() -> int:
    import torch

    return 1 if active_emulators else torch.cuda.device_count()


def _symbol(name: str) -> int:
    """Returns the address of a CUDA entry point: in the launch shim, which an emulator can answer, else in CuTe DSL's runtime."""
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    raise UnsupportedObject(f"no library has {name}")


@cache
def _libraries() -> list[Any]:
    path = runtime_library()
    if shim_is_built():
        return [load_shim(str(path))]
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)]


@cache
def runtime_library() -> Path:
    """Returns the path of CuTe DSL's runtime library for the newest CUDA that the driver supports, or the newest one.

    Raises:
        UnsupportedObject: the library is not installed in the expected place.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = {
        n: Path(f, f"cu{n}", "lib", RUNTIME)
        for f in folders
        for n in (12, 13)
        if Path(f, f"cu{n}", "lib", RUNTIME).is_file()
    }
    if not found:
        raise UnsupportedObject(f"{RUNTIME} is not where it is expected")
    version = _driver_version()
    usable = [n for n in found if version is None or n < 13 or version >= CUDA_13]
    return found[max(usable or found)]


def _driver_version() -> int | None:
    """Returns the newest CUDA that the driver supports, times 1000; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value

"""KernelKey -> CompiledKernel: compiles CuTe DSL to PTX and cubin, on a machine with or without a GPU.

Besides the backends, this is the only host module that imports cutlass; it does so when something is compiled.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_cute import private_api
from nvfp4_cute.compile.host_code import pass_maps_in_place
from nvfp4_cute.compile.native import NativeFunction, check
from nvfp4_cute.compile.object_file import UnsupportedObject
from nvfp4_cute.emulator import scratch
from nvfp4_cute.emulator.cubin import KernelResources, read_resources
from nvfp4_cute.emulator.fronts.launch_shim import active_emulators, prepare_cutlass, shim_is_built


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled launch function with its artifacts.

    Attributes:
        key: a KernelKey, or the key of a task.
        function: host function, NativeFunction or CuTe DSL's own; ``Launcher`` calls it.
        ptx: PTX text.
        cubin: machine code.
        object_code: object file of the host code, including the cubin, from which ``function`` was loaded.
    """

    key: Any
    function: Any
    ptx: str
    cubin: bytes
    object_code: bytes

    @cached_property
    def resources(self) -> KernelResources:
        """Registers, stack and code size."""
        return read_resources(self.cubin)


def compile_kernel(key: Any) -> CompiledKernel:
    """Compiles one variant of a KernelKey or a ``task.Key``. Takes seconds; ``cache.get_kernel`` caches the result."""
    import cuda.bindings.driver as cuda

    # The host code is needed once, as an object file. Compiling it for this process as well would take longer than
    # loading it.
    host, ptx, cubin = compile_jit(
        key.arch, key.make_kernel(), table_pointer(0), cuda.CUstream(0), no_jit_engine=True
    )
    pass_maps_in_place(host.ir_module)
    _load_runtime()
    with scratch.folder() as folder:
        object_file = Path(folder) / "kernel.o"
        object_file.write_bytes(host.dump_to_object(key.to_name()))
        return load_kernel(key, object_file, ptx, cubin)


def load_kernel(key: Any, object_file: Path, ptx: str, cubin: bytes) -> CompiledKernel:
    """Loads the kernel of an object file that was compiled for ``key`` (``CompiledKernel.object_code``), in milliseconds.

    Needs the DSL's runtime library but no CUDA toolkit. The file must be trusted.
    """
    for device in active_emulators:  # they execute PTX, but the object file holds only machine code
        device.learn(ptx, cubin)
    content = object_file.read_bytes()
    try:
        function: Any = NativeFunction(content, key.to_name())
    except UnsupportedObject:
        function = _load_with_dsl(object_file, key.to_name())
    return CompiledKernel(key, function, ptx, cubin, content)


def _load_with_dsl(object_file: Path, prefix: str) -> Any:
    """Returns the host function as loaded by CuTe DSL, on any machine that it supports."""
    import cutlass.cute as cute

    if shim_is_built():
        prepare_cutlass()
    return cute.runtime.load_module(str(object_file))[prefix]


def compile_jit(
    arch: str, jit_function: Any, *example_args: Any, no_jit_engine: bool = False
) -> tuple[Any, str, bytes]:
    """Compiles a CuTe DSL function for ``arch``.

    Args:
        no_jit_engine: make host code only for export.

    Returns:
        (host function, PTX text, cubin) of a function that launches one kernel.
    """
    import cutlass.cute as cute

    if shim_is_built():
        prepare_cutlass()  # the first compilation decides for the process which library resolves launches
    with scratch.folder() as folder, _device_arch(arch):
        options = (
            cute.GPUArch(arch),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            private_api.dump_folder(folder),
        )
        function = cute.compile[options](jit_function, *example_args, no_jit_engine=no_jit_engine)
        # Found by suffix, because for sm_110a the compiler names its files by the older sm_101a.
        ptx, cubin = (next(Path(folder).glob(pattern)).read_bytes() for pattern in ("*.ptx", "*.cubin"))
    return function, ptx.decode(), cubin


def _load_runtime() -> None:
    """Loads the library that host code calls. The DSL looks for it in the process when it writes an object file."""
    for library in private_api.dsl_runtime_libraries():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _device_arch(arch: str) -> Iterator[None]:
    """Context manager that makes CuTe DSL use ``arch`` as this machine's architecture while it compiles.

    For any other architecture it would make code only for export, without the host function that launches on the
    emulator.
    """
    settings = private_api.dsl_settings()
    detected, settings.arch = settings.arch, arch
    try:
        yield
    finally:
        settings.arch = detected


def table_pointer(address: int):
    """Returns the launch-table argument of a compiled function: a host address."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=8)


class Launcher:
    """A compiled function bound to one launch table. A call goes directly to the native code. For one thread at a time."""

    def __init__(self, function: Any, table: np.ndarray):
        """``function``: function of a CompiledKernel. ``table``: int64, contiguous; every call reads it again."""
        self._table = table
        # Native code takes the address of every argument: of the table's address, and of the stream's handle.
        self._values = np.array([table.ctypes.data, 0], np.int64)
        self._arguments = [self._values.ctypes.data, self._values[1:].ctypes.data]
        if isinstance(function, NativeFunction):
            function.prepare()
            self._native, self._result = function.call, ctypes.c_int32()
            self._packed = (ctypes.c_void_p * 3)(*self._arguments, ctypes.addressof(self._result))
            self._explain: Callable[[], object] = lambda: check(self._result.value)
        else:
            executor = function.to(None)
            # With the address of the result, which this launcher's own executor otherwise packs again for every call.
            self._packed = executor._get_invoke_packed_args(self._arguments)
            self._native, self._result = executor.capi_func, executor.cuda_result
            # Repeats the call by the path that explains the error.
            self._explain = lambda: executor.run_compiled_program(self._arguments)

    def __call__(self, stream: int) -> None:
        """Launches on a stream (``torch.cuda.Stream.cuda_stream``) of the current device."""
        self._values[1] = stream
        self._native(self._packed)
        if self._result.value:
            self._explain()

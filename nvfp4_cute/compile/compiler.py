"""KernelKey -> CompiledKernel: CuTe DSL to PTX and cubin, on a machine with or without a GPU.

The only host module, beside the backends, that imports cutlass; it does so when something is compiled.
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
    """A compiled launch function with the artifacts it came from.

    Attributes:
        key: what was compiled: a KernelKey, or the key of a task.
        function: host function, NativeFunction or CuTe DSL's own; ``Launcher`` calls it.
        ptx: PTX text. cubin: machine code.
        object_code: object file of the host code, with the cubin inside, which ``function`` was loaded from.
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
    """Compile one variant, of a KernelKey or a ``task.Key``. Takes seconds; ``cache.get_kernel`` remembers the result."""
    import cuda.bindings.driver as cuda

    # Its host code is wanted once, as an object file: compiling it for this process, too, would take longer than loading it.
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
    """The kernel of an object file that was compiled for ``key`` (``CompiledKernel.object_code``): milliseconds.

    Needs the DSL's runtime library and no CUDA toolkit. The file must be trusted.
    """
    for device in active_emulators:  # they execute the text, and the object file holds machine code only
        device.learn(ptx, cubin)
    content = object_file.read_bytes()
    try:
        function: Any = NativeFunction(content, key.to_name())
    except UnsupportedObject:
        function = _load_with_dsl(object_file, key.to_name())
    return CompiledKernel(key, function, ptx, cubin, content)


def _load_with_dsl(object_file: Path, prefix: str) -> Any:
    """The host function as CuTe DSL loads it, on any machine that it supports."""
    import cutlass.cute as cute

    if shim_is_built():
        prepare_cutlass()
    return cute.runtime.load_module(str(object_file))[prefix]


def compile_jit(
    arch: str, jit_function: Any, *example_args: Any, no_jit_engine: bool = False
) -> tuple[Any, str, bytes]:
    """Compile a CuTe DSL function for ``arch``.

    Args:
        no_jit_engine: make host code to export only.

    Returns:
        (host function, PTX text, cubin) of a function that launches one kernel.
    """
    import cutlass.cute as cute

    if shim_is_built():
        prepare_cutlass()  # what is compiled first decides for the whole process who resolves launches
    with scratch.folder() as folder, _device_arch(arch):
        options = (
            cute.GPUArch(arch),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            private_api.dump_folder(folder),
        )
        function = cute.compile[options](jit_function, *example_args, no_jit_engine=no_jit_engine)
        # Found by suffix: under sm_110a the compiler names its files by the older sm_101a.
        ptx, cubin = (next(Path(folder).glob(pattern)).read_bytes() for pattern in ("*.ptx", "*.cubin"))
    return function, ptx.decode(), cubin


def _load_runtime() -> None:
    """Load what host code calls: the DSL looks for it in the process when it writes an object file."""
    for library in private_api.dsl_runtime_libraries():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _device_arch(arch: str) -> Iterator[None]:
    """Have CuTe DSL take ``arch`` for the architecture of this machine while it compiles.

    For any other it would make code to export only, without the host function that launches on the emulator.
    """
    settings = private_api.dsl_settings()
    detected, settings.arch = settings.arch, arch
    try:
        yield
    finally:
        settings.arch = detected


def table_pointer(address: int):
    """The launch-table argument of a compiled function: a host address."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=8)


class Launcher:
    """A compiled function bound to one launch table: a call goes straight to the native code. One thread at a time."""

    def __init__(self, function: Any, table: np.ndarray):
        """``function``: of a CompiledKernel.  ``table``: int64, contiguous; read anew by every call."""
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
            # With the address of the result, what the executor, which is this launcher's alone, packs anew for every call.
            self._packed = executor._get_invoke_packed_args(self._arguments)
            self._native, self._result = executor.capi_func, executor.cuda_result
            # Once more, by the way that says what is wrong.
            self._explain = lambda: executor.run_compiled_program(self._arguments)

    def __call__(self, stream: int) -> None:
        """Launch on a stream (``torch.cuda.Stream.cuda_stream``) of the current device."""
        self._values[1] = stream
        self._native(self._packed)
        if self._result.value:
            self._explain()

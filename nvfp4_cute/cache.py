"""Compiled kernels, remembered for the life of the process."""

import threading

from nvfp4_cute.compile import CompiledKernel, KernelKey, compile_grouped_gemm

_lock = threading.Lock()
_kernels: dict[tuple[KernelKey, bool], CompiledKernel] = {}


def get_kernel(key: KernelKey, *, for_emulator: bool = False) -> CompiledKernel:
    """The kernel of ``key``, compiled on first use (seconds) and found afterwards.

    Args:
        key: what to compile: never sizes or data.
        for_emulator: whether its host code launches on the emulator; such a function is kept apart, since launch
            symbols are resolved when a function is compiled.
    """
    entry = (key, for_emulator)
    kernel = _kernels.get(entry)
    if kernel is None:
        with _lock:  # two threads that miss together compile once
            kernel = _kernels.get(entry)
            if kernel is None:
                kernel = _kernels[entry] = compile_grouped_gemm(key)
    return kernel

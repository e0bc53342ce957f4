"""Compiled kernels, remembered for the life of the process, and on disk where the environment does not say `off`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.compile import disk_cache
from nvfp4_cute.compile.compiler import CompiledKernel, compile_kernel

_lock = threading.Lock()
_kernels: dict[tuple[Any, bool], CompiledKernel] = {}
_watched: ContextVar[list[CompiledKernel] | None] = ContextVar("watched", default=None)


@contextmanager
def watch() -> Iterator[list[CompiledKernel]]:
    """Collect every kernel that this thread asks for inside the block, in order."""
    asked: list[CompiledKernel] = []
    token = _watched.set(asked)
    try:
        yield asked
    finally:
        _watched.reset(token)


def get_kernel(key: Any, *, for_emulator: bool = False) -> CompiledKernel:
    """The kernel of ``key``, compiled on first use ever (seconds), loaded on first use in a process, and found afterwards.

    Args:
        key: what to compile, a KernelKey or a ``task.Key``: never sizes or data.
        for_emulator: whether its host code launches on the emulator; such a function is kept apart, since launch
            symbols are resolved when a function is compiled.
    """
    entry = (key, for_emulator)
    kernel = _kernels.get(entry)
    if kernel is None:
        with _lock:  # two threads that miss together compile once
            kernel = _kernels.get(entry)
            if kernel is None:
                folder = env.cache_dir()
                kernel = disk_cache.fetch(folder, key) if folder else compile_kernel(key)
                _kernels[entry] = kernel
    watched = _watched.get()
    if watched is not None:
        watched.append(kernel)
    return kernel

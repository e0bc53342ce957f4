"""Compiled kernels, cached for the life of the process, and on disk unless the environment says `off`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from nvfp4_cute import env
from nvfp4_cute.compile import disk_cache
from nvfp4_cute.compile.compiler import CompiledKernel, compile_kernel
from nvfp4_cute.operands import planned

FORK_WAITS_S = 10.0
"""Seconds that a fork waits for a thread that compiles."""

_lock = threading.RLock()
_kernels: dict[tuple[Any, bool], CompiledKernel] = {}
_watched: ContextVar[list[CompiledKernel] | None] = ContextVar("watched", default=None)


@contextmanager
def watch() -> Iterator[list[CompiledKernel]]:
    """Collects every kernel that this thread requests inside the block, in order."""
    asked: list[CompiledKernel] = []
    token = _watched.set(asked)
    try:
        yield asked
    finally:
        _watched.reset(token)


class NotCompiled(Exception):  # noqa: N818, not an error: it is what ``planning`` requests
    """Raised inside ``planning`` when a kernel is requested: nothing is launched, whether or not this process has the kernel."""


@contextmanager
def planning() -> Iterator[dict[Any, None]]:
    """Collects the keys of kernels that this thread requests inside the block, in order.

    Nothing is compiled, loaded or launched: operations return unwritten results (``backends.run_task``).
    """
    asked: dict[Any, None] = {}
    token = planned.keys.set(asked)
    try:
        yield asked
    finally:
        planned.keys.reset(token)


def is_planning() -> bool:
    """Whether this thread is inside ``planning``."""
    return planned.keys.get() is not None


def has_kernel(key: Any, *, for_emulator: bool = False) -> bool:
    """Whether this process has the kernel of ``key``."""
    return (key, for_emulator) in _kernels


def get_kernel(key: Any, *, for_emulator: bool = False, folder: Path | None = None) -> CompiledKernel:
    """Returns the kernel of ``key``.

    It is compiled on first use ever (seconds), loaded on first use in a process, and cached afterwards.

    Args:
        key: key of the kernel, a KernelKey or a ``task.Key``: never sizes or data.
        for_emulator: whether its host code launches on the emulator. Such a function is cached separately, because
            launch symbols are resolved when a function is compiled.
        folder: folder of compiled kernels; None means the one that the environment names.
    """
    asked = planned.keys.get()
    if asked is not None:
        asked[key] = None
        raise NotCompiled(key.to_name())
    entry = (key, for_emulator)
    kernel = _kernels.get(entry)
    if kernel is None:
        with _lock:  # two threads that miss at the same time compile once
            kernel = _kernels.get(entry)
            if kernel is None:
                folder = folder or env.cache_dir()
                kernel = disk_cache.fetch(folder, key) if folder else compile_kernel(key)
                _kernels[entry] = kernel
    watched = _watched.get()
    if watched is not None:
        watched.append(kernel)
    return kernel


class _OfThread(threading.local):
    """holds_lock: whether this thread took the lock for the current fork."""

    holds_lock = False


_of_thread = _OfThread()


def _before_fork() -> None:
    # No thread of the child finishes what the compiling thread had begun; half an import would hang the next
    # compilation.
    _of_thread.holds_lock = _lock.acquire(timeout=FORK_WAITS_S)


def _after_fork_in_parent() -> None:
    if _of_thread.holds_lock:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)

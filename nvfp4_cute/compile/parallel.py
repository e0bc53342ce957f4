"""Compiles kernels into a folder in several processes: ahead of time, or while a server loads its weights.

Workers are processes that get keys through a pipe. ``multiprocessing`` does not work here: it runs the main module
again, and refuses to start children of daemons, such as the workers of engines.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvfp4_cute import child_process, env
from nvfp4_cute.compile import disk_cache
from nvfp4_cute.compile.cache import get_kernel, has_kernel
from nvfp4_cute.errors import CacheError
from nvfp4_cute.terminal import Progress

# A compiling process takes about a gigabyte.
MAX_JOBS = 8


def default_jobs() -> int:
    """Returns one process per core, at most ``MAX_JOBS``."""
    return min(len(os.sched_getaffinity(0)), MAX_JOBS)


class Compilers:
    """Processes that compile kernels into a folder. Each is started when there is a kernel for it.

    Args:
        folder: a cache (``disk_cache``).
        jobs: largest number of processes; None means ``default_jobs``.
    """

    def __init__(self, folder: Path, jobs: int | None = None):
        self.folder = folder
        self._pool = ThreadPoolExecutor(jobs or default_jobs(), "nvfp4_cute_compile")
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._submitted: dict[Any, Future[None]] = {}

    def submit(self, keys: Iterable[Any]) -> list["Future[None]"]:
        """Compiles every kernel that the folder lacks. A future raises CacheError if that fails."""
        found = []
        for key in keys:
            if key not in self._submitted:
                self._submitted[key] = self._pool.submit(self._ensure, key)
            found.append(self._submitted[key])
        return found

    def close(self, cancel: bool = False) -> None:
        """Waits for submitted work, or cancels work that has not begun, and ends the processes."""
        self._pool.shutdown(cancel_futures=cancel)
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()

    def _ensure(self, key: Any) -> None:
        if disk_cache.has(self.folder, key):
            return
        process: Any = getattr(self._of_thread, "process", None) or self._start()
        try:
            pickle.dump((self.folder, key), process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._of_thread.process = None
            raise CacheError(
                f"{key.to_name()}: the process that compiles it ended with code {process.wait()}; it may have had too little "
                "memory: pass fewer jobs"
            ) from None
        if error is not None:
            raise error

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            child_process.command("nvfp4_cute.compile.parallel"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env.with_variables({"OMP_NUM_THREADS": "1"}),
        )
        self._processes.append(process)
        self._of_thread.process = process
        return process


def work() -> None:
    """Compiles keys from stdin until it ends. Answers each with None, or the error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of compilers must not go into the pipe of answers
    while True:
        try:
            folder, key = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = None
        try:
            disk_cache.ensure(folder, key)
        except Exception as raised:
            error = _picklable(raised)
        pickle.dump(error, answers)
        answers.flush()


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CacheError(f"{type(error).__name__}: {error}")
    return error


def ensure_all(folder: Path, keys: Sequence[Any], jobs: int | None = None) -> None:
    """Ensures that ``folder`` has a valid entry of every key, and shows the progress.

    Args:
        jobs: largest number of processes; None means ``default_jobs``.

    Raises:
        CacheError: the folder cannot be written. Also raises the errors of compilation.
    """
    missing = [key for key in dict.fromkeys(keys) if not disk_cache.has(folder, key)]
    if not missing:
        return
    compilers = Compilers(folder, min(jobs or default_jobs(), len(missing)))
    try:
        for future in Progress(compilers.submit(missing), desc="compile", unit="kernel"):
            future.result()
    except BaseException:
        compilers.close(cancel=True)
        raise
    compilers.close()


def load_all(keys: Iterable[Any], *, for_emulator: bool = False, jobs: int | None = None) -> int:
    """Loads every kernel into this process. Several processes compile those that are in no cache.

    Args:
        for_emulator: see ``get_kernel``.
        jobs: see ``ensure_all``.

    Returns:
        Number of kernels that this process did not have.

    Raises the errors of ``ensure_all``.
    """
    new = [key for key in dict.fromkeys(keys) if not has_kernel(key, for_emulator=for_emulator)]
    folder = env.cache_dir()
    if len(new) <= 1:  # starting a process would take longer
        for key in new:
            get_kernel(key, for_emulator=for_emulator)
        return len(new)
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as temporary:
        folder = folder or Path(temporary)
        ensure_all(folder, new, jobs)
        for key in new:
            get_kernel(key, for_emulator=for_emulator, folder=folder)
    return len(new)


if __name__ == "__main__":
    work()

"""A lock file that one process at a time holds. The file remains unless a holder removes it.

This does not use the package filelock: on a file system without locks, its versions raise another error, or lock by a
marker file that a killed process leaves.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nvfp4_cute.compile.trusted_files import remove

_held: set[int] = set()
"""Descriptors of the locks that this process holds or waits for."""


@contextmanager
def locked(path: Path) -> Iterator[OSError | None]:
    """Holds the lock ``path`` inside the block. Yields the reason if there is no lock, for example in a read-only folder.

    The lock ends with the process that took it, in whatever way it ends. A child that is forked meanwhile does not hold
    it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _acquire(path, fcntl.LOCK_EX)
    except OSError as error:
        yield error
        return
    try:
        yield None
    finally:
        _close(descriptor)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Holds the lock ``path`` inside the block if it is free; yields whether it is held. The block may remove the file."""
    try:
        descriptor = _acquire(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        _close(descriptor)


def _acquire(path: Path, how: int) -> int:
    """Returns the descriptor of a locked file that still exists; its last holder may have removed it."""
    while True:
        descriptor = _open(path)
        _held.add(descriptor)
        try:
            fcntl.flock(descriptor, how)
            if _names(path, descriptor):
                return descriptor
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)


def _open(path: Path) -> int:
    """Opens a lock file. Anything else with its name is replaced: a FIFO would block, a link would create a file elsewhere."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(2):
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        remove(path)
    raise OSError(errno.EEXIST, "is no lock file", str(path))


def _names(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close(descriptor: int) -> None:
    if (
        descriptor in _held
    ):  # not in a child that was forked inside the block, because the lock is its parent's
        _held.remove(descriptor)
        with suppress(OSError):
            # Closing alone would leave the lock to a child that was forked earlier and has not closed its copy.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _forget_locks() -> None:
    """Closes a child's copies of its parent's descriptors, which would keep the locks of a killed parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)

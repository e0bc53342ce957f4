"""Reads files of a cache folder safely: only regular files of this user or of root, and without blocking."""

import errno
import os
import pwd
import shutil
import stat
from pathlib import Path


class Untrusted(PermissionError):
    """A file or a folder that another user may have written."""


def check_folder(path: Path) -> None:
    """Raises Untrusted unless only this user and root control the content of a folder. Follows a link.

    A folder with the sticky bit, such as /tmp, is writable for every user, but nobody else can replace a file of this
    user there.

    Raises:
        Untrusted: another user controls it.
        OSError: the folder is missing or cannot be read.
    """
    status = os.stat(path)
    _check(status, path, may_be_writable=bool(status.st_mode & stat.S_ISVTX))


def check_entry(path: Path) -> None:
    """Raises Untrusted unless an entry is a folder (not a link) of this user or of root.

    Raises:
        Untrusted: another user owns it.
        OSError: it is missing or not a folder.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
    _check(status, path)


def read_bytes(path: Path) -> bytes:
    """Returns the content of a regular file.

    Raises:
        Untrusted: another user may have written it.
        OSError: it is missing, a FIFO, a link, a folder, or cannot be read.
    """
    # Without O_NONBLOCK, a FIFO would block until a writer opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        _check(status, path)
        return file.read()


def remove(path: Path) -> None:
    """Removes what has this name, if anything: a file, a link, a FIFO, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check(status: os.stat_result, path: Path, may_be_writable: bool = False) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(errno.EPERM, f"belongs to {_user(status.st_uid)}", str(path))
    if status.st_mode & stat.S_IWOTH and not may_be_writable:
        raise Untrusted(errno.EPERM, "every user may write it", str(path))


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"

"""Temporary folders that a compiler writes to."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvfp4_cute.errors import CacheError

ROOM_BYTES = 8 << 20
"""More than the size of a kernel's files: PTX, machine code, and host code."""


@contextmanager
def folder() -> Iterator[str]:
    """Context manager for a temporary folder with room for a kernel's files.

    LLVM ends the process if it cannot write a file.

    Raises:
        CacheError: the file system of temporary files is full, or rejects files of that size.
    """
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as name:
        room = Path(name) / "room"
        try:
            with open(room, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
        except OSError as error:
            raise CacheError(
                f"compiling a kernel needs {ROOM_BYTES >> 20} MiB for temporary files in {tempfile.gettempdir()} "
                f"({error.strerror}); free some space, or set TMPDIR to another folder"
            ) from None
        room.unlink()
        yield name

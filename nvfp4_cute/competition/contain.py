"""Limits for processes that run a submission: they end with their parent, write to few folders, and reach no other process.

Linux offers these limits to unprivileged users: `prctl`, sessions, resource limits and Landlock. GUIDE.md lists the
gaps.
"""

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# Options of prctl, section 2 of the manual.
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 1, 4, 36, 37
_SET_NO_NEW_PRIVS = 38
# landlock(7): system calls, the same number on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
# Rights that change files: write, remove and make each kind, move between folders (version 2), truncate (version 3).
_WRITE_FILE = 1 << 1
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals outside the domain (version 6)
# Rights that a rule for a file, as opposed to a folder, may grant.
_FILE_RIGHTS = _WRITE_FILE | 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = (("access_fs", ctypes.c_uint64), ("access_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent`, the process that started it, ends."""
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def be_readable() -> None:
    """Lets the parent read this process's memory, even if another ancestor is not readable."""
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def confine(folders: Iterable[Path]) -> bool:
    """Lets this process and its children write only below `folders`, to /dev, and to files of /proc.

    They can also no longer signal, trace or read processes outside of their own, so of /proc they change themselves and,
    if they are root, settings of the system.

    Returns:
        Whether the kernel supports it: Linux 5.13 and later with Landlock enabled; signals from Linux 6.12 on.
    """
    version = _libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    if version < 1:
        return False
    rights = _WRITES | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    ruleset = _Ruleset(rights, 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = _libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    if rules < 0:
        return False
    try:
        # cuInit names its threads in /proc/self/task/*/comm, and fails with error 304 if it cannot. /proc/self is another
        # folder in each process, so the rule is for all of /proc.
        for folder in {Path("/dev"), Path("/proc"), *folders}:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
                only_files = folder == Path("/proc") or not folder.is_dir()
                granted = rights & _FILE_RIGHTS if only_files else rights
                rule = _Beneath(granted, descriptor)
                _libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
                os.close(descriptor)
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(_libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def limit_resources() -> None:
    """Disables core files, and makes this process the first that the kernel ends when memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def descendants_end() -> Iterator[None]:
    """Context manager that ends every process that was started inside it, by whatever descendant.

    Orphans become children of this process in the meantime, so a new session hides none of them.
    """
    adopts = ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(_children())
    try:
        yield
    finally:
        end_descendants(before)
        _libc.prctl(_SET_CHILD_SUBREAPER, adopts.value, 0, 0, 0)


def end_session(leader: int) -> None:
    """Kills the processes of a session that `leader` started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def adopt_orphans() -> None:
    """Becomes the parent of every descendant whose own parent ends."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(spared: set[int]) -> None:
    """Kills children of this process in other sessions, and the orphans of these; `spared` stay."""
    own = os.getsid(0)
    while True:
        ours = [child for child in _children() if child not in spared and _session(child) != own]
        if not ours:
            return
        for child in ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        time.sleep(0.001)


def _children() -> list[int]:
    """Returns the process ids of the children of all threads of this process."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(number) for number in path.read_text().split()]
    return found


def _session(process: int) -> int:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return -1

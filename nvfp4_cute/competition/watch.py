"""`eval --watch`: again whenever a source is saved."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

PATTERNS = ("*.py", "*.json", "*.jsonl", "*.yml")
POLL_S = 0.5


def watch(path: Path, run: Callable[[], int], *, runs: int | None = None) -> int:
    """Call ``run``, and again after every change of ``path``, a file or a folder, until interrupted; its last result.

    Args:
        runs: how often at most; None for ever.
    """
    code = 0
    try:
        for number in itertools.count(1):
            before = _state(path)
            try:
                code = run()
            except (ValueError, OSError, SyntaxError) as error:  # the next save may mend it
                print(f"{type(error).__name__}: {error}")
                code = 1
            if number == runs:
                break
            print(f"watching {path}; save a file to run it again, Ctrl-C ends", flush=True)
            _wait_for_a_save(path, before)
    except KeyboardInterrupt:
        print()
    return code


def _wait_for_a_save(path: Path, before: dict[Path, tuple[int, int]]) -> None:
    """Return once ``path`` differs from ``before`` and stood still for a poll: an editor may write a file in steps."""
    last = before
    while True:
        time.sleep(POLL_S)
        now = _state(path)
        if now != before and now == last:
            return
        last = now


def _state(path: Path) -> dict[Path, tuple[int, int]]:
    """Time and size of every source."""
    files = [path] if path.is_file() else [found for pattern in PATTERNS for found in path.glob(pattern)]
    found = {}
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:  # an editor replaces it right now
            continue
        found[file] = stat.st_mtime_ns, stat.st_size
    return found

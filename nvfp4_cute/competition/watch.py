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
            while _state(path) == before:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print()
    return code


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

"""Sources of a result: their commit and digest."""

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nvfp4_cute

ROOT = Path(__file__).parents[1]
PACKAGE = Path(nvfp4_cute.__file__).parent
RESULTS = "bench/results"


def commit() -> str | None:
    """Returns the commit of these sources, with "+" for later changes; None outside of a checkout.

    Changes of results do not count.
    """
    git = lambda *words: subprocess.run(
        ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True
    )
    try:
        head, changed = (
            git("rev-parse", "--short=12", "HEAD"),
            git("status", "--porcelain", "-uno", "--", ":/", f":!:/{RESULTS}"),
        )
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def digest(without: Sequence[str] = ()) -> str:
    """Returns the start of the SHA-256 of this package's code and kernels.

    `without`: prefixes of paths in the package to leave out.
    """
    folders = (PACKAGE, ROOT / "kernels")
    found = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    left = lambda folder, path: not str(path.relative_to(folder)).startswith(tuple(without))
    return _digest([pair for pair in found if left(*pair)])


def digest_of(patterns: Sequence[str]) -> str:
    """Returns the start of the SHA-256 of some files: patterns relative to the package, or to its parent for `bench/`."""
    folders = [ROOT if pattern.startswith("bench/") else PACKAGE for pattern in patterns]
    pairs = zip(folders, patterns, strict=True)
    return _digest([(folder, path) for folder, of in pairs for path in sorted(folder.glob(of))])


def _digest(files: Sequence[tuple[Path, Path]]) -> str:
    """Returns the digest of files, each with the folder that its name is relative to."""
    made = hashlib.sha256()
    for folder, path in files:
        made.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def read_object(path: Path, keys: Sequence[str], maker: str) -> dict[str, Any]:
    """Reads a result that was stored as a JSON object.

    Args:
        keys: keys that it must have.
        maker: command that writes such files, for the message.

    Raises:
        ValueError: the file is not such a result.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; name one that {maker} wrote") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); name a file that {maker} wrote") from None
    missing = list(keys) if not isinstance(found, dict) else [key for key in keys if key not in found]
    if missing or not isinstance(found, dict):
        raise ValueError(f"{path} has no {', '.join(missing) or 'object'}; name a file that {maker} wrote")
    return found

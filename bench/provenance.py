"""Which sources made a result: their commit, and a digest of them."""

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nvfp4_cute

ROOT = Path(__file__).parents[1]
RESULTS = "bench/results"


def commit() -> str | None:
    """The commit that these sources are at, "+" where they were changed since; None where they are not in a checkout.

    Results are no sources.
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
    """The start of the SHA-256 of this package's code and kernels.

    `without`: what paths in the package begin with that are left out.
    """
    made = hashlib.sha256()
    for folder in (Path(nvfp4_cute.__file__).parent, ROOT / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            if str(path.relative_to(folder)).startswith(tuple(without)):
                continue
            made.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            made.update(path.read_bytes())
    return made.hexdigest()[:16]


def read_object(path: Path, keys: Sequence[str], maker: str) -> dict[str, Any]:
    """A result that was kept as a JSON object.

    Args:
        keys: that it has at least. maker: what writes such files, for the message.

    Raises:
        ValueError: there is no such file. OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; name one that {maker} wrote") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); name a file that {maker} wrote") from None
    missing = list(keys) if not isinstance(found, dict) else [key for key in keys if key not in found]
    if missing or not isinstance(found, dict):
        raise ValueError(f"{path} has no {', '.join(missing) or 'object'}; name a file that {maker} wrote")
    return found

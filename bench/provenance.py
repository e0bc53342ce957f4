"""Which sources made a result: their commit, and a digest of them."""

import hashlib
import subprocess
from pathlib import Path

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


def digest() -> str:
    """The start of the SHA-256 of this package's code and kernels."""
    made = hashlib.sha256()
    for folder in (Path(nvfp4_cute.__file__).parent, ROOT / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            made.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            made.update(path.read_bytes())
    return made.hexdigest()[:16]

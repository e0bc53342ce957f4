"""`nvfp4-cute new KIND DIR`: creates a problem of your own from a template: spec, reference, kernel, test."""

import importlib
import inspect
import sys
from pathlib import Path

from nvfp4_cute.competition.trace import folder

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".template"
PLAIN = "elementwise"
"""The kind whose files are the templates. Every other kind is a problem of this project, with sources in separate files."""


def kinds() -> tuple[str, ...]:
    """Returns the kinds of problems to start from."""
    return (PLAIN, *folder.names())


def run(kind: str, target: Path) -> int:
    """Writes the folder and prints the next commands. Returns 0.

    Raises:
        ValueError: there is no such kind, or a file exists.
    """
    if kind not in kinds():
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(kinds())}")
    files = {
        path.name.removesuffix(SUFFIX): path.read_text() for path in sorted(TEMPLATES.glob(f"*{SUFFIX}"))
    }
    if kind != PLAIN:
        files |= _sources(kind)
    existing = [str(target / name) for name in files if (target / name).exists()]
    if existing:
        raise ValueError(f"{', '.join(existing)} would be overwritten; name another folder")
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    print(f"{target}: {', '.join(files)}", file=sys.stderr)
    print(f"change {target / folder.KERNEL_FILE}, then: nvfp4-cute eval {target}", file=sys.stderr)
    print(f"to submit it: nvfp4-cute export {target} -o {target.resolve().name}-trace", file=sys.stderr)
    return 0


def _sources(kind: str) -> dict[str, str]:
    """Returns the files of one of the project's problems.

    Each is self-contained: reference and kernel include the project's code that they use.
    """
    definition, _, solution = folder.load(kind)
    spec = importlib.import_module(f"{folder.traces.__name__}.{kind}.spec")
    return {
        "spec.py": inspect.getsource(spec),
        "reference.py": definition.reference,
        folder.KERNEL_FILE: solution.sources[folder.KERNEL_FILE],
    }

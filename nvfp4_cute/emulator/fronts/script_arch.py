"""The architecture that a CuTe DSL script targets, from its text and from the DSL's refusal to compile it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SIGNS = (
    (r"warpgroup|hopper_helpers|Hopper\w*|sm_?90\w*", "sm_90a"),
    (r"blackwell_geforce\w*|sm_?120\w*", "sm_120a"),
    (r"sm_?103\w*", "sm_103a"),
    (r"tcgen05|blackwell_helpers|sm_?100\w*", "sm_100a"),
)
"""Names that CuTe DSL, CUTLASS's examples and scripts use for only one architecture."""

REFUSAL = re.compile(r"expects arch to be (?P<wanted>.+?), but got (?P<given>sm_\w+|Arch\.sm_\w+)")
"""CuTe DSL's message when an instruction needs another architecture."""


def wanted_arch(script: Path) -> tuple[str, str] | None:
    """Returns the only architecture that names in a script stand for, and the first such name. None for none or several."""
    found = named_archs(script)
    return next(iter(found.items())) if len(found) == 1 else None


def named_archs(script: Path) -> dict[str, str]:
    """Returns the architectures that names in a script stand for, each with the first such name.

    Reads imports, attributes and strings without executing anything.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for name in _names(tree):
        for pattern, arch in SIGNS:
            if re.fullmatch(pattern, name):
                found.setdefault(arch, name)
                break
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from alias.name.split(".")
        elif isinstance(node, ast.Attribute):
            yield node.attr


def other_arch(said: str) -> str | None:
    """Returns the architecture that CuTe DSL's refusal asks for (``sm_90a``); None for any other text."""
    refusal = REFUSAL.search(said)
    wanted = re.search(r"sm_\d+[af]?", refusal["wanted"]) if refusal else None
    if wanted is None:
        return None
    name = wanted[0]
    return name if name[-1] in "af" or int(name[3:]) < 90 else f"{name}a"

"""Checks of options: those that other arguments decide, and patterns of names."""

from collections.abc import Collection, Mapping
from typing import Any


def refuse(options: Mapping[str, Any], decided: Collection[str], giver: str) -> None:
    """Raises TypeError for an option that ``giver`` decides."""
    for name in options:
        if name in decided:
            raise TypeError(
                f"{name}={options[name]!r} is given, and {giver} decides it: leave it out, or change {giver} before"
            )


def check_patterns(name: str, patterns: object) -> None:
    """Raises TypeError for a string, whose characters would be taken as patterns."""
    if isinstance(patterns, str):
        raise TypeError(f"{name}={patterns!r} is one string; pass a list of patterns: [{patterns!r}]")

"""Checks of options: those that what a layer is made of decides, and patterns of names."""

from collections.abc import Collection, Mapping
from typing import Any


def refuse(options: Mapping[str, Any], decided: Collection[str], giver: str) -> None:
    """Raise TypeError for an option that is given although ``giver`` decides it."""
    for name in options:
        if name in decided:
            raise TypeError(
                f"{name}={options[name]!r} is given, and {giver} decides it: leave it out, or change {giver} before"
            )


def check_patterns(name: str, patterns: object) -> None:
    """Raise TypeError for one string, whose characters would be the patterns."""
    if isinstance(patterns, str):
        raise TypeError(f"{name}={patterns!r} is one string; pass a list of patterns: [{patterns!r}]")

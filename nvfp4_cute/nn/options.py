"""Options that a layer's constructor has and that what the layer is made of decides."""

from collections.abc import Collection, Mapping
from typing import Any


def refuse(options: Mapping[str, Any], decided: Collection[str], giver: str) -> None:
    """Raise TypeError for an option that is given although ``giver`` decides it."""
    for name in options:
        if name in decided:
            raise TypeError(
                f"{name}={options[name]!r} is given, and {giver} decides it: leave it out, or change {giver} before"
            )

"""Stands in for torchvision, whose wheels break imports next to a torch for CPUs.

SGLang imports it, and uses it for images only.
"""

import sys
from unittest.mock import MagicMock

__version__ = "0.28.0"  # of torch 2.13
for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{name}"] = MagicMock()


def __getattr__(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return sys.modules.get(f"{__name__}.{name}", MagicMock())

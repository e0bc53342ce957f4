"""Lets a clone of the repository import the submodules that lie next to the package's folder.

An installation maps these folders into the package. But Python that starts in the root of a clone imports the package from
there, even if another copy is installed.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

FOLDERS = ("kernels", "problems", "bench")
"""Top-level folders of the repository that are submodules for Python (pyproject.toml)."""
_PACKAGE, _HERE = __name__.rpartition(".")[0], os.path.dirname(os.path.abspath(__file__))


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, folder = name.rpartition(".")
        is_ours = package == _PACKAGE and folder in FOLDERS
        return PathFinder.find_spec(name, [os.path.dirname(_HERE)]) if is_ours else None


def find_folders() -> None:
    """Makes Python look for ``FOLDERS`` next to the package, after all other places, if the package does not contain them."""
    if not os.path.isdir(os.path.join(_HERE, FOLDERS[0])):
        sys.meta_path.append(_Finder)

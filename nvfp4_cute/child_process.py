"""Starts Python in another process that imports the packages of this one, from any working directory."""

import os
import sys

_START = "import runpy, sys; _, module, *sys.path = sys.argv; del sys.argv[1:]; runpy.run_module(module, run_name='__main__')"


def command(module: str) -> list[str]:
    """Returns the command that runs a module as ``python -m`` does, with this process's ``sys.path``.

    ``python -m`` and ``python -c`` look into the working directory first, which in a clone of this repository has a
    ``nvfp4_cute`` without the submodules that an installation adds.
    """
    return [sys.executable, "-c", _START, module, *map(os.path.abspath, sys.path)]

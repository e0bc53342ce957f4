"""Counts Python calls, the measure of host time that does not depend on the machine."""

import cProfile
import gc
import pstats
from collections.abc import Callable
from typing import Any

import pytest

from nvfp4_cute.compile.compiler import Launcher


def python_calls(
    call: Callable[..., Any], arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Any]:
    """Returns the number of Python calls of ``call(*arguments)``, without those of launches, and its result.

    The garbage collector waits: it calls back functions of other tests, such as hypothesis's at both of its ends.
    """
    profile = cProfile.Profile(builtins=False)
    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "__call__", lambda launcher, stream: None)
        gc.disable()
        try:
            result = profile.runcall(call, *arguments)
        finally:
            gc.enable()
    return sum(count for _, count, *_ in pstats.Stats(profile).stats.values()), result

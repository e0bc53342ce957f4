"""What makes custom ops of ``torch.library``, and registers those of this package as soon as torch is imported.

Nothing here imports torch, nor may it: a module that is imported halfway when torch comes would lack what the ops need of it.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nvfp4_cute.errors import UnsupportedProblem

Operation = Callable[..., Any]  # a schema says str where an operation wants a literal
REGISTERED = ("experts.library", "formats.pickling", "nn.library", "ops.library")
"""Modules that register something with torch when they are imported."""


class _OfThread(threading.local):
    """runs_op: whether a custom op of this package runs."""

    runs_op = False


of_thread = _OfThread()


def custom_op(name: str, mutates_args: str | Iterable[str]) -> Callable[[Operation], Any]:
    """``torch.library.custom_op``, inside of whose function ``is_traced`` is False: it runs, whatever else records the call."""
    import torch

    def register(function: Operation) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, of_thread.runs_op = of_thread.runs_op, True
            try:
                return function(*args, **kwargs)
            finally:
                of_thread.runs_op = before

        return torch.library.custom_op(name, run, mutates_args=mutates_args)

    return register


def refuse_backward(context, *gradients):
    """The backward pass of operations that have none.

    Raises:
        UnsupportedProblem: always.
    """
    raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


def register_with_torch() -> None:
    """Register the custom ops: now where torch is imported already, else right after it is.

    So graphs that name them can be loaded, and the command line answers `--help` without the seconds that torch takes.
    """
    if sys.modules.get("torch") is not None:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _register() -> None:
    for name in REGISTERED:
        importlib.import_module(f"nvfp4_cute.{name}")


class _AfterTorch(MetaPathFinder):
    """Finds torch as the other finders do, and has its loader register the ops when it is done."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

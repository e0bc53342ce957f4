"""Makes custom ops of ``torch.library``, and registers those of this package as soon as torch is imported.

This module must not import torch, not even indirectly: a module that was half imported when torch arrives would lack names that
the ops need.
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

Operation = Callable[..., Any]  # schemas have str where an operation has a Literal
REGISTERED = ("experts.library", "formats.pickling", "nn.library", "ops.library")
"""Modules that register something with torch on import."""


class _OfThread(threading.local):
    """runs_op: whether this thread is inside a custom op of this package."""

    runs_op = False


of_thread = _OfThread()


_libraries: list[Any] = []  # hold the kernels of ``_call_at_once``


def custom_op(name: str, mutates_args: str | Iterable[str]) -> Callable[[Operation], Any]:
    """Wraps ``torch.library.custom_op``. Inside the op ``is_traced`` is False, whatever else records the call."""
    import torch

    def register(function: Operation) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, of_thread.runs_op = of_thread.runs_op, True
            try:
                return function(*args, **kwargs)
            finally:
                of_thread.runs_op = before

        op = torch.library.custom_op(name, run, mutates_args=mutates_args)
        _call_at_once(name, run)
        return op

    return register


def _call_at_once(name: str, run: Operation) -> None:
    """Makes ``run`` itself the op's kernel for CPU and CUDA tensors, because torch's own kernel makes seven calls around it.

    Torch's kernel keeps torch.compile from tracing into the op where a graph breaks around it. Here, torch skips the code of
    ``run`` and of everything that it calls.
    """
    import torch
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(run.__code__, eval_frame._FrameExecStrategy(skip, skip))
    namespace, _, own = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    for key in ("CPU", "CUDA"):
        library.impl(own, run, key)
    _libraries.append(library)


def refuse_backward(context, *gradients):
    """Replaces the backward pass of operations that have none.

    Raises:
        UnsupportedProblem: always.
    """
    raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


def register_with_torch() -> None:
    """Registers the custom ops, now or right after torch is imported.

    Graphs that name them can then be loaded, while the command line answers `--help` without importing torch, which takes
    seconds.
    """
    if sys.modules.get("torch") is not None:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _register() -> None:
    for name in REGISTERED:
        importlib.import_module(f"nvfp4_cute.{name}")


class _AfterTorch(MetaPathFinder):
    """Finds torch like the other finders, and makes its loader register the ops when torch is loaded."""

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

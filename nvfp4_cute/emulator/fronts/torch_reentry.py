"""Lets Python functions that torch calls from inside an operator see the virtual GPU.

A torch mode is off while it handles a call, and also in everything that the call runs: autograd's backward functions
and hooks, bodies of custom operators, checkpointed functions. These functions enter the mode again, and so do threads
that the script starts. Gradients that torch computes in C++ are marked as GPU tensors if their inputs are.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.library import Library, fallthrough_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_cute.emulator.fronts.torch_memory import DeviceMemory, tensors_in
from nvfp4_cute.emulator.fronts.virtual_gpu import replaced

BUILT_IN = "aten"
"""Namespace of torch's own operators. A script's overrides for CUDA in this namespace stay unchanged."""


class Reentry:
    """Enters a mode again wherever torch calls Python functions."""

    def __init__(self, mode: TorchFunctionMode, memory: DeviceMemory):
        """`mode`: the mode that is off inside operators. `memory`: stores the marks."""
        self.mode, self.memory = mode, memory
        self._bodies: dict[tuple[str, str], dict[str, Callable]] = {}
        self._register = Library.impl

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which autograd's engine, registered operators and new threads enter the mode."""
        with ExitStack() as stack:
            stack.enter_context(replaced(Variable, _execution_engine=_Engine(self)))
            stack.enter_context(replaced(Library, impl=self._library_impl()))
            stack.enter_context(replaced(saved_tensors_hooks, __init__=self._hooks_init()))
            stack.enter_context(replaced(Thread, start=self._start()))
            yield

    def is_on(self) -> bool:
        """Whether the mode handles calls now."""
        return self.mode in _get_current_function_mode_stack()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager that turns the mode on, at most once."""
        if self.is_on():
            yield
        else:
            with self.mode:
                yield

    def _start(self) -> Callable:
        """Thread.start whose threads enter the mode, because a mode belongs to one thread."""
        real = Thread.start

        def start(thread: Thread) -> None:
            thread.run = self._entering(thread.run)  # type: ignore[method-assign]
            real(thread)

        return start

    def _hooks_init(self) -> Callable:
        """saved_tensors_hooks.__init__, also used by checkpoints, whose hooks enter the mode: operators call them with it off."""
        real = saved_tensors_hooks.__init__

        def init(hooks: Any, pack: Callable, unpack: Callable) -> None:
            real(hooks, self._entering(pack), self._entering(unpack))

        return init

    # ---- operators that Python implements ------------------------------------------------------
    def _library_impl(self) -> Callable:
        """Library.impl whose functions enter the mode. Functions for CUDA serve marked tensors, which reach CPU kernels."""

        def impl(
            library: Library, op_name: Any, fn: Callable, dispatch_key: str = "", **options: Any
        ) -> None:
            key = dispatch_key or library.dispatch_key
            if fn is fallthrough_kernel or not callable(fn):
                self._register(library, op_name, fn, dispatch_key, **options)
                return
            body = self._entering(fn)
            if library.ns != BUILT_IN and key in ("CPU", "CUDA"):
                bodies = self._bodies.setdefault((library.ns, str(op_name)), {})
                is_second = bool(bodies) and key not in bodies
                bodies[key] = body
                if (
                    is_second
                ):  # the registered function chooses; torch before 2.13 refuses a second function per key
                    return
                key, body = "CPU", self._chosen(bodies)
            self._register(library, op_name, body, key, **options)

        return impl

    def _entering(self, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.again():
                return fn(*args, **kwargs)

        return run

    def _chosen(self, bodies: dict[str, Callable]) -> Callable:
        """Returns a function that calls the body for the device of its tensors."""

        def run(*args: Any, **kwargs: Any) -> Any:
            on_gpu = any(map(self.memory.is_device, tensors_in((args, kwargs))))
            return (bodies.get("CUDA" if on_gpu else "CPU") or next(iter(bodies.values())))(*args, **kwargs)

        return run


class _Engine:
    """Autograd's engine with the mode on."""

    def __init__(self, reentry: Reentry):
        self._reentry, self._engine = reentry, Variable._execution_engine

    def run_backward(self, tensors: Any, grad_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Variable._execution_engine.run_backward: marks gradients of GPU tensors as GPU tensors."""
        memory = self._reentry.memory
        if not any(map(memory.is_device, tensors_in(tensors))):
            with self._reentry.again():
                return self._engine.run_backward(tensors, grad_tensors, *args, **kwargs)
        for tensor, gradient in zip(tensors, grad_tensors, strict=True):
            if isinstance(gradient, torch.Tensor) and memory.is_device(tensor):
                memory.place_once(gradient)
        with self._reentry.again(), _Marking(self._reentry):
            return self._engine.run_backward(tensors, grad_tensors, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Marking(TorchDispatchMode):
    """Marks results of operators that C++ calls: results of marked tensors, and tensors created without inputs."""

    def __init__(self, reentry: Reentry):
        super().__init__()
        self._reentry = reentry

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # The mode handled a call from Python and marks its results, so this mode does nothing.
        if self._reentry.is_on():
            memory = self._reentry.memory
            inputs = list(tensors_in((args, kwargs)))
            if not inputs or any(map(memory.is_device, inputs)):
                for tensor in memory.fresh(result, inputs):
                    memory.place_once(tensor)
        return result

"""Runs an unmodified CuTe DSL script with the virtual GPU as its GPU.

The script owns the process: `__main__`, `sys.argv`, and the settings of CuTe DSL.
"""

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nvfp4_cute.emulator.fronts.cuda_shim import answered_cuda
from nvfp4_cute.emulator.fronts.dsl_shim import answered_dsl, set_environment
from nvfp4_cute.emulator.fronts.torch_shim import emulated_cuda
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu


@dataclass
class Outcome:
    """The end of a script.

    Attributes:
        exit_code: the exit code that Python would have returned.
        error: an exception of the script, or the kernel failure that caused it; None at a normal end.
        trace: the traceback of that exception without frames of the runner; empty for an exit.
    """

    exit_code: int
    error: BaseException | None = None
    trace: str = ""


def run_script(path: Path, arguments: Sequence[str], gpu: VirtualGpu) -> Outcome:
    """Runs a script like `python path arguments...`, with `gpu` as its GPU.

    A kernel failure counts even if the script caught the error that its launch returned: the outcome is that failure,
    with exit code 1. Call this once per process, before anything in it compiles with CuTe DSL.

    Raises:
        EmulatorError: the launch shim is missing, or CuTe DSL has already compiled something in this process.
    """
    arguments_before, path_before = sys.argv, sys.path[0]
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.resolve().parent)
    outcome = Outcome(0)
    try:
        with ExitStack() as stack:
            stack.enter_context(answers(gpu))
            outcome = _run(path, gpu, stack)
    finally:
        sys.argv, sys.path[0] = arguments_before, path_before
    return outcome


@contextmanager
def answers(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager in which torch, the CUDA bindings and CuTe DSL use `gpu` as this machine's GPU.

    Raises:
        EmulatorError: the launch shim is missing, or CuTe DSL has already compiled something in this process.
    """
    set_environment(gpu.device.arch, line_info=gpu.machine.checker is not None)
    with answered_cuda(gpu), answered_dsl(gpu), emulated_cuda(gpu):
        yield


@contextmanager
def emulation(gpu: VirtualGpu) -> Iterator[None]:
    """`answers`, with launches that run on `gpu`. The caller takes the failure that a launch leaves."""
    with answers(gpu):
        gpu.__enter__()
        try:
            yield
        finally:
            gpu.take_failure()
            gpu.__exit__(None, None, None)


def _run(path: Path, gpu: VirtualGpu, stack: ExitStack) -> Outcome:
    gpu.__enter__()
    try:
        outcome = _outcome_of(path)
    finally:
        # Leaving raises the failure of a launch; the script may have caught its error code.
        failure = gpu.failed
        try:
            gpu.__exit__(None, None, None)
        except BaseException as error:
            failure = error
    if failure is not None:
        return Outcome(1, failure, outcome.trace)
    return outcome


def _outcome_of(path: Path) -> Outcome:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return Outcome(_exit_code(stop.code), None)
    except BaseException as error:
        return Outcome(1, error, _script_trace(error))
    return Outcome(0)


def _exit_code(code: object) -> int:
    """Returns the exit code of a SystemExit as Python does: None is 0; a text is printed and means 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _script_trace(error: BaseException) -> str:
    """Returns the traceback from the script's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") != "__main__":
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))

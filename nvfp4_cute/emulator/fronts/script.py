"""Running somebody's CuTe DSL script, unmodified, with the virtual GPU as its GPU.

The whole process belongs to the script: `__main__`, `sys.argv`, and the settings of CuTe DSL are its own.
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
    """How a script ended.

    Attributes:
        exit_code: the one that Python would have ended with.
        error: what stopped it: an exception of the script, or the kernel failure behind it; None at a normal end.
        trace: the traceback of that exception, frames of the runner left out; empty for an exit.
    """

    exit_code: int
    error: BaseException | None = None
    trace: str = ""


def run_script(path: Path, arguments: Sequence[str], gpu: VirtualGpu) -> Outcome:
    """Run a script as `python path arguments...` would, with `gpu` as its GPU.

    A kernel failure counts even if the script caught the error that its launch returned: the outcome is that failure,
    with exit code 1. To be called once in a process, before anything in it compiled with CuTe DSL.

    Raises:
        EmulatorError: the launch shim is missing, or CuTe DSL compiled something in this process before.
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
    """Inside the block torch, the CUDA bindings and CuTe DSL take `gpu` for this machine's GPU.

    Raises:
        EmulatorError: the launch shim is missing, or CuTe DSL compiled something in this process before.
    """
    set_environment(gpu.device.arch, line_info=gpu.machine.checker is not None)
    with answered_cuda(gpu), answered_dsl(gpu), emulated_cuda(gpu):
        yield


@contextmanager
def emulation(gpu: VirtualGpu) -> Iterator[None]:
    """As `answers`, and launches run on `gpu`; what one leaves behind is for the caller to take."""
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
        # Leaving raises what a launch left behind; the script may have caught the error code that it saw of it.
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
    """Exit code of a SystemExit, as Python takes it: None is 0, a text is printed and means 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _script_trace(error: BaseException) -> str:
    """The traceback from the script's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") != "__main__":
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))

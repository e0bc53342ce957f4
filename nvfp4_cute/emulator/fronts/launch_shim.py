"""Puts launch_shim.c where CuTe DSL looks for its runtime, before anything is compiled, with or without emulation.

A separate module, because a program that only launches on a GPU needs nothing else of the emulator.
"""

import ctypes
import importlib.util
import os
from typing import Any

from nvfp4_cute.errors import EmulatorError

SHIM_MODULE = "nvfp4_cute.emulator.fronts._launch_shim"
# Emulators that answer instead of the CUDA runtime. The last one, the innermost, is the device.
active_emulators: list[Any] = []


def shim_path() -> str:
    """Returns the path of the compiled launch shim.

    Raises:
        EmulatorError: it was not built, because there was no C compiler when the package was installed, or because the
            checkout is newer than its installation.
    """
    spec = importlib.util.find_spec(SHIM_MODULE)
    if spec is None or spec.origin is None:
        raise EmulatorError(
            "the launch shim is missing: no C compiler was found when nvfp4_cute was installed, or its sources have moved "
            "since. Install a compiler (for example the packages gcc and libc6-dev) and reinstall nvfp4_cute (in a checkout: "
            "`python -m pip install --no-deps -e .`); run_ptx works without it"
        )
    return spec.origin


def shim_is_built() -> bool:
    """Whether the launch shim exists."""
    return importlib.util.find_spec(SHIM_MODULE) is not None


def load_shim(runtime: str) -> ctypes.CDLL:
    """Loads the launch shim, which calls CuTe DSL's ``runtime`` library while no Emulator is active. Idempotent."""
    # Global and first, so that programs that also load the DSL's runtime library globally still launch through the
    # shim.
    shim = ctypes.CDLL(shim_path(), mode=ctypes.RTLD_GLOBAL)
    shim.nvfp4_cute_set_runtime(runtime.encode())
    return shim


def prepare_cutlass() -> None:
    """Puts the launch shim between CuTe DSL and its runtime library, so that its functions can launch on an Emulator.

    Functions compiled after this call resolve the CUDA entry points in the shim, which calls the runtime library while
    no Emulator is active. Idempotent.

    Raises:
        EmulatorError: the shim is missing, or CuTe DSL has already loaded its runtime library. A process uses the entry
            points of the library that was loaded first.
    """
    path = shim_path()
    from cutlass import cutlass_dsl
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    settings = CuTeDSL._get_dsl().envar
    libraries = (settings.shared_libs or "").split(os.pathsep)
    if path in libraries:
        return
    if not _is_loaded(path) and any(map(_is_loaded, libraries)):
        raise EmulatorError(
            "CuTe DSL compiled a function in this process before the launch shim was in place: call "
            "nvfp4_cute.emulator.fronts.launch_shim.prepare_cutlass() before the first compilation, or use a process of its own"
        )
    load_shim(libraries[0])
    # Version 4.5 has no second DSL.
    for dsl in filter(None, (CuTeDSL, getattr(cutlass_dsl, "CuteExperimentalDSL", None))):
        dsl._get_dsl().envar.shared_libs = os.pathsep.join([path, *libraries])
    # The DSL would query the CUDA runtime; the emulator is one device.
    real = CudaDialectJitCompiledFunction.num_devices.func
    CudaDialectJitCompiledFunction.num_devices = property(lambda self: 1 if active_emulators else real(self))


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True

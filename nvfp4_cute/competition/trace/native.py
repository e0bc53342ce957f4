"""Solutions in C++ and CUDA, built as in both projects: as an extension of torch, or for tvm-ffi."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvfp4_cute.problems.trace_schema import Solution

TORCH, TVM_FFI = "torch", "tvm-ffi"
BINDINGS = (TORCH, TVM_FFI)
DEFAULTS = {
    "cpp": TVM_FFI,
    "cuda": TVM_FFI,
    "cuda_cpp": TORCH,
    "cutlass": TORCH,
    "cudnn": TORCH,
    "cublas": TORCH,
}
"""Languages, in FlashInfer-Bench's and then SOL-ExecBench's terms, with the default binding of a solution."""
CPP_FILES, CUDA_FILES = (".cpp", ".cc", ".cxx", ".c"), (".cu",)
NAME = "nvfp4_cute_solution"


def is_native(solution: Solution) -> bool:
    """Whether a solution is compiled by a C++ compiler."""
    return any(language in DEFAULTS for language in solution.languages)


def check(solution: Solution, device: str) -> None:
    """Raises ValueError if a solution cannot be built here, or would not run on the device."""
    name = f"{solution.name} is written in {', '.join(solution.languages)}"
    if device == "emulator":
        raise ValueError(
            f"{name}: its host code launches by itself, which the emulator does not see; use --device cuda, or "
            "--device cpu for a solution without kernels"
        )
    binding = binding_of(solution)
    if binding not in BINDINGS:
        raise ValueError(f"binding {binding!r} is unknown; use {' or '.join(BINDINGS)}")
    tools = ["g++", "ninja", *(["nvcc"] if _files(solution, CUDA_FILES) else [])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{name}, which needs {' and '.join(missing)} in PATH")


def binding_of(solution: Solution) -> str:
    """Returns the binding that a solution names, or its language's default."""
    return solution.binding or next(DEFAULTS[name] for name in solution.languages if name in DEFAULTS)


def build(solution: Solution, place: Path) -> Callable[..., Any]:
    """Compiles the sources in ``place``, and returns the entry point.

    Raises:
        AttributeError: the library does not have the entry point.
        RuntimeError: the compiler refused a source.
    """
    cpp, cuda = ([str(place / path) for path in _files(solution, kind)] for kind in (CPP_FILES, CUDA_FILES))
    if binding_of(solution) == TORCH:
        from torch.utils.cpp_extension import load

        module = load(
            NAME,
            [*cpp, *cuda],
            extra_include_paths=[str(place)],
            with_cuda=bool(cuda),
            build_directory=str(place),
        )
    else:
        import tvm_ffi
        import tvm_ffi.cpp

        library = tvm_ffi.cpp.build(
            NAME,
            cpp_files=cpp,
            cuda_files=cuda,
            extra_include_paths=[str(place)],
            extra_ldflags=["-lcuda"] if cuda else [],
            build_directory=str(place),
        )
        module = tvm_ffi.load_module(library)
    return getattr(module, solution.entry_name)


def _files(solution: Solution, kinds: tuple[str, ...]) -> list[str]:
    return [path for path in solution.sources if path.endswith(kinds)]

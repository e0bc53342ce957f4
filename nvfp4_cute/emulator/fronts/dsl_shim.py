"""CuTe DSL on a virtual GPU: registers compiled kernels, and makes timing helpers run a kernel once.

Supports every version from 4.3.5 on, because competition servers run versions older than the one that this project
compiles with.
"""

import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nvfp4_cute.emulator import scratch
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu, replaced

PREFIXES = ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL")
"""Prefixes of the environment variables of the package's DSLs."""


def set_environment(arch: str, *, line_info: bool = False) -> None:
    """Makes CuTe DSL compile for `arch` and reuse no file that another process compiled.

    `line_info`: the PTX names the Python lines that it came from. Call this before the DSL is imported, because it
    reads these variables then.
    """
    for prefix in PREFIXES:
        os.environ[f"{prefix}_ARCH"] = arch
        os.environ[f"{prefix}_DISABLE_FILE_CACHING"] = "1"
        if line_info:
            os.environ[f"{prefix}_LINEINFO"] = "1"


@contextmanager
def answered_dsl(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager that registers kernels compiled by CuTe DSL with `gpu`, and answers the DSL's queries about a GPU.

    `cutlass.testing.benchmark` and the tuning helpers run the kernel once and return its host time.

    Raises:
        EmulatorError: the launch shim is missing, or the DSL has already compiled something.
    """
    prepare_cutlass()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch.folder())
        stack.enter_context(kept_ptx(gpu, Path(folder)))
        stack.enter_context(kept_exports(gpu))
        stack.enter_context(ptx_beside_objects(gpu))
        stack.enter_context(answered_queries(gpu))
        stack.enter_context(single_benchmark_runs())
        yield


# ---- PTX of all compilations -----------------------------------------------------------------------


@contextmanager
def kept_ptx(gpu: VirtualGpu, folder: Path) -> Iterator[None]:
    """Context manager in which every compilation writes PTX and cubin to `folder`, registers them with `gpu`, and deletes them.

    Files that a script itself asks to keep go where the script wants them and are also registered. Kernels for another
    architecture are not registered; launching one reports that it is unknown.
    """
    from cutlass.base_dsl import compiler, dsl, jit_executor

    options_class, artifacts_class = compiler.CompileOptions, jit_executor.JitFunctionArtifacts
    apply_settings = options_class.apply_envar_settings

    kinds = {compiler.KeepPTX: "ptx", compiler.KeepCUBIN: "cubin"}
    ours: set[int] = set()  # options objects are reused, so the flags set here must not count as the script's

    def apply_and_keep(options: Any, settings: Any, function_name: str) -> None:
        for kind in kinds:
            if id(options.options[kind]) in ours:
                options.options[kind].value = False
        apply_settings(options, settings, function_name)
        arch = options.gpu_arch or settings.arch
        for kind, extension in kinds.items():
            option = options.options[kind]
            if not option.value:
                option.value = True
                ours.add(id(option))
                option.dump_path = str(folder / function_name)
                setattr(option, f"full_{extension}_path", str(folder / f"{function_name}.{arch}.{extension}"))

    def artifacts(**paths: Any) -> Any:
        made = artifacts_class(**paths)
        ptx = (made.PTX or "").rstrip("\0")  # older versions end the file with a zero byte
        if ".entry" in ptx and gpu.runs(ptx):
            gpu.register(ptx, made.CUBIN if isinstance(made.CUBIN, bytes) else None)
        for path in folder.iterdir():
            path.unlink()
        return made

    with ExitStack() as stack:
        stack.enter_context(replaced(options_class, apply_envar_settings=apply_and_keep))
        for module in (_optional("cutlass.base_dsl.compile_backend"), dsl):
            if module is not None:
                stack.enter_context(replaced(module, JitFunctionArtifacts=artifacts))
        yield


@contextmanager
def kept_exports(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager that stores the PTX of every function exported to an object in the GPU's store."""
    from cutlass.base_dsl.jit_executor import JitCompiledFunction

    classes: dict[Any, tuple[str, ...]] = {JitCompiledFunction: ("export_to_c", "dump_to_object")}
    ffi = _optional("cutlass.cutlass_dsl.tvm_ffi_provider")  # imports tvm_ffi, an optional dependency
    if ffi is not None:
        classes[ffi.TVMFFIJitCompiledFunctionBase] = ("export_to_c",)

    def keeping(export: Callable) -> Callable:
        @functools.wraps(export)
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            made = function.artifacts
            if (
                gpu.store
                and made is not None
                and isinstance(made.CUBIN, bytes)
                and ".entry" in (made.PTX or "")
            ):
                gpu.store.keep(made.PTX.rstrip("\0"), made.CUBIN)
            return export(function, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for owner, names in classes.items():
            wrapped = {name: keeping(vars(owner)[name]) for name in names if name in vars(owner)}
            stack.enter_context(replaced(owner, **wrapped))
        yield


@contextmanager
def ptx_beside_objects(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager that registers PTX files in the folder of a loaded object, unless their kernels are known."""
    external = _optional("cutlass.base_dsl.export.external_binary_module")
    if external is None:
        yield
        return
    load = external.ExternalBinaryModule.__init__

    def load_with_ptx(module: Any, file_path: Any, *args: Any, **kwargs: Any) -> None:
        load(module, str(file_path), *args, **kwargs)
        for path in sorted(Path(file_path).parent.glob("*.ptx")):
            text = path.read_text(errors="replace").rstrip("\0")
            if ".entry" in text and gpu.runs(text):
                gpu.register_new(text)

    with replaced(external.ExternalBinaryModule, __init__=load_with_ptx):
        yield


def _optional(module: str) -> Any:
    """Returns a module that only some versions of the DSL have, or None."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


# ---- queries ---------------------------------------------------------------------------------------


@contextmanager
def answered_queries(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager that answers the occupancy query from the number of SMs, without compiling a probe kernel.

    A real GPU may hold fewer clusters, because its SMs come in groups of uneven size.
    """
    from cutlass.base_dsl import compiler, env_manager
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.utils import HardwareInfo

    def max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        if not 0 < cluster_size <= 32:
            raise ValueError(f"Cluster size must be between 1 and 32, {cluster_size} is not supported")
        return max(1, gpu.product.sm_count // cluster_size)

    # The TVM-FFI path looks up the runtime libraries again; it must get the list that begins with the launch shim.
    def libraries(prefix: str) -> str | None:
        return CuTeDSL._get_dsl().envar.shared_libs

    with ExitStack() as stack:
        stack.enter_context(replaced(HardwareInfo, get_max_active_clusters=max_active_clusters))
        stack.enter_context(replaced(env_manager, get_prefix_dsl_libs=libraries))
        if hasattr(compiler.Compiler, "_check_cuda_dependencies_once"):
            nothing = {"_check_cuda_dependencies_once": lambda self, shared_libs: None}
            stack.enter_context(replaced(compiler.Compiler, **nothing))
        yield


# ---- timing ----------------------------------------------------------------------------------------


@contextmanager
def single_benchmark_runs() -> Iterator[None]:
    """Context manager in which the DSL's benchmark and tuning helpers run their function once.

    They return host microseconds: positive, so that scripts can divide by them, but unrelated to a GPU.
    """
    from cutlass.cute import testing as old_testing

    testing = _optional("cutlass.testing") or old_testing

    def benchmark(
        callable: Callable[..., Any],
        *,
        kernel_arguments: Any = None,
        workspace_generator: Callable[[], Any] | None = None,
        **options: Any,
    ) -> float:
        arguments = workspace_generator() if workspace_generator else kernel_arguments
        if arguments is None:
            raise ValueError("Please pass a kernel argument if not providing a generator")
        return _host_microseconds(lambda: callable(*arguments.args, **arguments.kwargs))

    settings = ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream")

    def benchmark_for_autotune(callable: Callable[..., Any], *args: Any, **options: Any) -> float:
        rest = {name: value for name, value in options.items() if name not in settings}
        return _host_microseconds(lambda: callable(*args, **rest))

    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                testing,
                benchmark=benchmark,
                _benchmark_for_autotune=benchmark_for_autotune,
                get_workspace_count=lambda *args, **options: 1,
            )
        )
        stack.enter_context(
            replaced(old_testing, benchmark=benchmark, get_workspace_count=testing.get_workspace_count)
        )
        yield


def _host_microseconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return 1e6 * (time.perf_counter() - started)

"""KernelKey -> CompiledKernel: CuTe DSL to PTX and cubin, on a machine with or without a GPU.

The only host module, beside the backends, that imports cutlass; it does so when something is compiled.
"""

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvfp4_cute.arch import family_of, sm90, sm100, sm120
from nvfp4_cute.arch.base import INTERLEAVE
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.cubin import KernelResources, read_resources
from nvfp4_cute.emulator.launch_shim import prepare_cutlass, shim_is_built
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.host_code import pass_maps_in_place
from nvfp4_cute.problem import NVFP4, Activation, Form, GroupedProblem, OutDtype, WeightLayout


@dataclass(frozen=True)
class KernelKey:
    """Everything that changes the generated code of a grouped GEMM, and nothing else: no sizes, no data.

    Attributes:
        arch: such as ``sm_100a``; one of ``arch.ARCHS``.
        config: resolved KernelConfig without a CTA count.
        num_groups: slots of the list form; 1 in the other forms, whose code serves any number of groups.
        out_dtype: torch.float16, bfloat16 or float32, or "nvfp4".
        has_alpha: whether a factor per group is read.
        form: how the operands arrive: list, ragged or masked.
        out_m_major: whether columns of the output are contiguous, not rows.
        activation: of a dual GEMM's first product; None where there is one product.
        weight_layout: of a dual GEMM: "separate" where there are two operands, or how one interleaves both.
        has_limit: whether a dual GEMM's products are cut to a range.
        is_chain: whether every group reads the result of the one before.
    """

    arch: str
    config: KernelConfig
    num_groups: int
    out_dtype: OutDtype
    has_alpha: bool
    form: Form = "list"
    out_m_major: bool = False
    activation: Activation | None = None
    weight_layout: WeightLayout = "separate"
    has_limit: bool = False
    is_chain: bool = False

    @classmethod
    def of(cls, arch: str, config: KernelConfig, problem: GroupedProblem) -> "KernelKey":
        """Key of the kernel that computes ``problem``. Raises as :meth:`make`."""
        num_groups = problem.num_groups if problem.form == "list" else 1
        return cls.make(
            arch,
            config,
            num_groups,
            problem.out_dtype,
            problem.has_alpha,
            problem.form,
            problem.out_m_major,
            problem.activation,
            problem.weight_layout,
            problem.limit is not None,
            problem.is_chain,
        )

    @classmethod
    def make(
        cls,
        arch: str,
        config: KernelConfig,
        num_groups: int,
        out_dtype: OutDtype,
        has_alpha: bool,
        form: Form = "list",
        out_m_major: bool = False,
        activation: Activation | None = None,
        weight_layout: WeightLayout = "separate",
        has_limit: bool = False,
        is_chain: bool = False,
    ) -> "KernelKey":
        """Validated key. Raises UnsupportedTarget for an arch without a kernel, ConfigError for a refused config,
        UnsupportedProblem for an output or a chain that the arch's kernel lacks.
        """
        family = family_of(arch)
        num_b = 1 if activation is None or weight_layout in INTERLEAVE else 2
        reason = family.interleave_reason(config, weight_layout) or family.unsupported_reason(config, num_b)
        if out_dtype == NVFP4:
            reason = reason or family.quantized_reason(config)
        if reason is None and config.cluster_size > config.num_mma_cta and is_chain:
            reason = (
                f"split_k={config.split_k}, multicast_n={config.multicast_n}: layers of a chain wait for CTAs that may not all "
                "be resident; use split_k=1, multicast_n=1"
            )
        if reason is not None:
            raise ConfigError(f"{arch}: {reason}")
        if out_m_major and not family.OUT_M_MAJOR:
            raise UnsupportedProblem(
                f"{arch}: out has contiguous columns, and this kernel writes rows; allocate it as torch.empty(m, n)"
            )
        if is_chain and arch not in sm100.ARCHS:
            raise UnsupportedProblem(
                f"{arch}: no kernel for chains of layers (there is one for {', '.join(sm100.ARCHS)}); call gemm for each"
            )
        resolved = replace(family.resolve(config, num_b), num_cta=None)
        return cls(
            arch,
            resolved,
            num_groups,
            out_dtype,
            has_alpha,
            form,
            out_m_major,
            activation,
            weight_layout,
            has_limit,
            is_chain,
        )

    def to_name(self) -> str:
        """Readable, unique; the kernel's symbol starts with it."""
        dtype = str(self.out_dtype).removeprefix("torch.")
        groups = f"g{self.num_groups}" if self.form == "list" else self.form
        suffix = "_mmajor" * self.out_m_major + "_alpha" * self.has_alpha + "_limit" * self.has_limit
        suffix += f"_{self.weight_layout}" * (self.weight_layout != "separate")
        operation = "grouped_gemm" if self.activation is None else f"grouped_dual_gemm_{self.activation}"
        operation = "gemm_chain" if self.is_chain else operation
        return f"nvfp4_{operation}_{self.arch}_{groups}_{self.config.to_name()}_{dtype}{suffix}"

    def make_kernel(self) -> Any:
        """The CuTe DSL object to compile."""
        from nvfp4_cute.kernels.common.chain import Chain
        from nvfp4_cute.kernels.sm90.grouped_gemm import GroupedGemmSm90
        from nvfp4_cute.kernels.sm100.grouped_gemm import GroupedGemmSm100
        from nvfp4_cute.kernels.sm120.grouped_gemm import GroupedGemmSm120

        out_dtype, name = cutlass_dtype(self.out_dtype), self.to_name()
        combined = (self.activation, self.weight_layout, self.has_limit)
        if self.arch in sm90.ARCHS:
            return GroupedGemmSm90(
                self.config, self.form, self.num_groups, out_dtype, self.has_alpha, name, *combined
            )
        variant = (self.config, self.form, self.num_groups, out_dtype, self.out_m_major, self.has_alpha, name)
        if self.arch in sm120.ARCHS:
            return GroupedGemmSm120(*variant, *combined)
        return GroupedGemmSm100(*variant, *combined, Chain if self.is_chain else None)


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled launch function with the artifacts it came from.

    Attributes:
        key: what was compiled: a KernelKey, or the key of a task.
        function: host function of CuTe DSL; takes a launch table and a queue.
        ptx: PTX text. cubin: machine code.
        object_code: object file of the host code, with the cubin inside, which ``function`` was loaded from.
    """

    key: Any
    function: Any
    ptx: str
    cubin: bytes
    object_code: bytes

    @cached_property
    def resources(self) -> KernelResources:
        """Registers, stack and code size."""
        return read_resources(self.cubin)


def compile_kernel(key: Any) -> CompiledKernel:
    """Compile one variant, of a KernelKey or a ``task.Key``. Takes seconds; ``cache.get_kernel`` remembers the result."""
    import cuda.bindings.driver as cuda

    # Its host code is wanted once, as an object file: compiling it for this process, too, would take longer than loading it.
    host, ptx, cubin = compile_jit(
        key.arch, key.make_kernel(), table_pointer(0), cuda.CUstream(0), no_jit_engine=True
    )
    pass_maps_in_place(host.ir_module)
    _load_runtime()
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as folder:
        object_file = Path(folder) / "kernel.o"
        object_file.write_bytes(host.dump_to_object(key.to_name()))
        return load_kernel(key, object_file, ptx, cubin)


def load_kernel(key: Any, object_file: Path, ptx: str, cubin: bytes) -> CompiledKernel:
    """The kernel of an object file that was compiled for ``key`` (``CompiledKernel.object_code``): milliseconds.

    Needs the DSL's runtime, which links the host code, and no CUDA toolkit. The file must be trusted.
    """
    import cutlass.cute as cute

    if shim_is_built():
        prepare_cutlass()
    function = cute.runtime.load_module(str(object_file))[key.to_name()]
    return CompiledKernel(key, function, ptx, cubin, object_file.read_bytes())


def compile_jit(
    arch: str, jit_function: Any, *example_args: Any, no_jit_engine: bool = False
) -> tuple[Any, str, bytes]:
    """Compile a CuTe DSL function for ``arch``.

    Args:
        no_jit_engine: make host code to export only.

    Returns:
        (host function, PTX text, cubin) of a function that launches one kernel.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    if shim_is_built():
        prepare_cutlass()  # what is compiled first decides for the whole process who resolves launches
    with tempfile.TemporaryDirectory(prefix="nvfp4_cute_") as folder, _device_arch(arch):
        options = (cute.GPUArch(arch), cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(folder))
        function = cute.compile[options](jit_function, *example_args, no_jit_engine=no_jit_engine)
        # Found by suffix: under sm_110a the compiler names its files by the older sm_101a.
        ptx, cubin = (next(Path(folder).glob(pattern)).read_bytes() for pattern in ("*.ptx", "*.cubin"))
    return function, ptx.decode(), cubin


def _load_runtime() -> None:
    """Load what host code calls: the DSL looks for it in the process when it writes an object file."""
    from cutlass.cutlass_dsl import CuTeDSL

    for library in CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _device_arch(arch: str) -> Iterator[None]:
    """Have CuTe DSL take ``arch`` for the architecture of this machine while it compiles.

    For any other it would make code to export only, without the host function that launches on the emulator.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    detected, settings.arch = settings.arch, arch
    try:
        yield
    finally:
        settings.arch = detected


def table_pointer(address: int):
    """The launch-table argument of a compiled function: a host address."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=8)


class Launcher:
    """A compiled function bound to one launch table: a call goes straight to the native code. One thread at a time."""

    def __init__(self, function: Any, table: np.ndarray):
        """``function``: of a CompiledKernel.  ``table``: int64, contiguous; read anew by every call."""
        self._table = table
        self._executor = function.to(None)
        # Native code takes the address of every argument: of the table's address, and of the queue's handle.
        self._values = np.array([table.ctypes.data, 0], np.int64)
        self._arguments = [self._values.ctypes.data, self._values[1:].ctypes.data]
        # With the address of the result, what the executor, which is this launcher's alone, packs anew for every call.
        self._packed = self._executor._get_invoke_packed_args(self._arguments)
        self._native, self._result = self._executor.capi_func, self._executor.cuda_result

    def __call__(self, queue: int) -> None:
        """Launch on a queue (``torch.cuda.Stream.cuda_stream``) of the current device."""
        self._values[1] = queue
        self._native(self._packed)
        if self._result.value:  # once more, by the way that says what is wrong
            self._executor.run_compiled_program(self._arguments)


def cutlass_dtype(dtype: OutDtype):
    """The CuTe DSL type of an output dtype."""
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        NVFP4: cutlass.Float4E2M1FN,
    }[dtype]

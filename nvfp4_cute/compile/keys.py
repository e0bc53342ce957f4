"""KernelKey: the parameters from which a grouped GEMM is compiled."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from nvfp4_cute.activation import symbol
from nvfp4_cute.errors import ConfigError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats import block_format
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.planning.arch import chain_archs, check_results, family_of, mmas_of, oldest_dsl
from nvfp4_cute.planning.arch.base import Family, check_pair
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import (
    Activation,
    Form,
    GroupedProblem,
    OutDtype,
    WeightLayout,
    dtype_name,
    num_weights,
    result_format,
)


@dataclass(frozen=True)
class KernelKey:
    """Everything that changes the generated code of a grouped GEMM, and nothing else: no sizes, no data.

    Attributes:
        arch: architecture such as ``sm_100a``; one of ``planning.arch.ARCHS``.
        config: resolved KernelConfig without a CTA count.
        num_groups: slots of the list form; 1 in the other forms, whose code serves any number of groups.
        out_dtype: torch.float16, bfloat16 or float32; a format name for quantized results; int32 for sums of integers.
        has_alpha: whether a factor per group is read.
        form: form of the operands.
        out_m_major: whether columns of the output are contiguous, not rows.
        activation: activation of a dual GEMM's first product; None for one product.
        weight_layout: layout of a dual GEMM's weights: "separate" for two operands, or the interleaving of one.
        has_limit: whether a dual GEMM's products are clamped.
        is_chain: whether every group reads the result of the previous one.
        early_weights: whether weights are loaded before the wait for the previous launch.
        a_format, b_format: formats of ``a``, and of every ``b``. For 16-bit ``a``, BFLOAT16 or FLOAT16.
        bias_dtype: dtype of the bias that is added to every column; None without a bias.
        has_row_scales: whether ``a`` has a global scale per row.
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
    early_weights: bool = False
    a_format: BlockFormat = block_format.NVFP4
    b_format: BlockFormat = block_format.NVFP4
    bias_dtype: torch.dtype | None = None
    has_row_scales: bool = False

    @classmethod
    def of(cls, arch: str, config: KernelConfig, problem: GroupedProblem) -> "KernelKey":
        """Returns the key of the kernel that computes ``problem``. Raises the errors of :meth:`validated`."""
        return cls(
            arch,
            config,
            num_groups=problem.num_groups if problem.form == "list" else 1,
            out_dtype=problem.out_dtype,
            has_alpha=problem.has_alpha,
            form=problem.form,
            out_m_major=problem.out_m_major,
            activation=problem.activation,
            weight_layout=problem.weight_layout,
            has_limit=problem.limit is not None,
            is_chain=problem.is_chain,
            early_weights=problem.early_weights,
            a_format=problem.a_format,
            b_format=problem.b_format,
            bias_dtype=problem.bias_dtype,
            has_row_scales=problem.has_row_scales,
        ).validated()

    def validated(self) -> "KernelKey":
        """Returns the key with a resolved config and without a CTA count. Drops early weights if the kernel does not have them.

        Raises UnsupportedTarget for an arch without a kernel, ConfigError for a refused config, UnsupportedProblem for
        formats, an output or a chain that the arch's kernel lacks.
        """
        formats = self.a_format, self.b_format
        family, config = self._family, self.config
        check_pair(self.arch, formats, mmas_of(self.arch, self.a_format))
        check_results(self.arch, formats, result_format(self.out_dtype))
        num_b = num_weights(self.activation is not None, self.weight_layout)
        reason = family.interleave_reason(config, self.weight_layout)
        reason = reason or family.unsupported_reason(config, num_b, formats)
        out_format = result_format(self.out_dtype)
        if out_format is not None:
            reason = reason or family.quantized_reason(config, out_format)
        if reason is None and config.cluster_size > config.num_mma_cta and self.is_chain:
            reason = (
                f"split_k={config.split_k}, multicast_n={config.multicast_n}: layers of a chain wait for CTAs that may not all "
                "be resident; use split_k=1, multicast_n=1"
            )
        if reason is not None:
            raise ConfigError(f"{self.arch}: {reason}")
        if self.out_m_major and not family.OUT_M_MAJOR:
            raise UnsupportedProblem(
                f"{self.arch}: out has contiguous columns, and this kernel writes rows; allocate it as torch.empty(m, n)"
            )
        if self.is_chain and not family.HAS_CHAINS:
            raise UnsupportedProblem(
                f"{self.arch}: no kernel for chains of layers (there is one for {', '.join(chain_archs())}); call gemm for each"
            )
        early_weights = self.early_weights and family.HAS_EARLY_WEIGHTS and not self.is_chain
        resolved = replace(family.resolve(config, num_b, formats), num_cta=None)
        return replace(self, config=resolved, early_weights=early_weights)

    @property
    def _family(self) -> Family:
        return family_of(self.arch, (self.a_format, self.b_format), self.config)

    def workspace_bytes(self, rows: np.ndarray, k: np.ndarray, num_cta: int) -> int:
        """Returns the bytes of ``Family.workspace_bytes``."""
        return self._family.workspace_bytes(self.config, rows, k, num_cta)

    def to_name(self) -> str:
        """Returns a readable, unique name; the kernel's symbol starts with this name."""
        dtype = dtype_name(self.out_dtype)
        groups = f"g{self.num_groups}" if self.form == "list" else self.form
        suffix = "_mmajor" * self.out_m_major + "_alpha" * self.has_alpha + "_limit" * self.has_limit
        suffix += "_early" * self.early_weights + bias_suffix(self.bias_dtype) + "_rows" * self.has_row_scales
        suffix += f"_{self.weight_layout}" * (self.weight_layout != "separate")
        pair = self.a_format, self.b_format
        suffix += f"_{pair[0]}_x_{pair[1]}" * (pair != (block_format.NVFP4, block_format.NVFP4))
        operation = (
            "grouped_gemm" if self.activation is None else f"grouped_dual_gemm_{symbol(self.activation)}"
        )
        operation = "gemm_chain" if self.is_chain else operation
        return f"nvfp4_{operation}_{self.arch}_{groups}_{self.config.to_name()}_{dtype}{suffix}"

    def make_kernel(self) -> Any:
        """Returns the CuTe DSL object of the grouped GEMM."""
        from nvfp4_cute.kernels.common.chain import Chain

        return kernel_class(self.arch, self._family.KERNEL)(
            config=self.config,
            form=self.form,
            num_groups=self.num_groups,
            out_dtype=cutlass_dtype(self.out_dtype),
            has_alpha=self.has_alpha,
            name=self.to_name(),
            a_format=self.a_format,
            b_format=self.b_format,
            out_m_major=self.out_m_major,
            activation=self.activation,
            weight_layout=self.weight_layout,
            has_limit=self.has_limit,
            bias_dtype=cutlass_dtype(self.bias_dtype),
            has_row_scales=self.has_row_scales,
            early_weights=self.early_weights,
            chain=Chain if self.is_chain else None,
        )


def kernel_class(arch: str, place: str) -> Any:
    """Returns the class of a kernel by its family's ``KERNEL``: module and name, below ``nvfp4_cute.kernels``.

    Raises UnsupportedTarget for an arch whose products need a newer CuTe DSL.
    """
    from nvfp4_cute.kernels.common import versions

    if versions.VERSION < oldest_dsl(arch):
        found, least = (".".join(map(str, version)) for version in (versions.VERSION, oldest_dsl(arch)))
        raise UnsupportedTarget(
            f"{arch}: products need CuTe DSL {least}, and here is {found}; pip install 'nvidia-cutlass-dsl>={least}.1'"
        )
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"nvfp4_cute.kernels.{module}"), name)


def bias_suffix(dtype: torch.dtype | None) -> str:
    """Returns the part of a kernel's name that describes its bias."""
    return "" if dtype is None else f"_bias_{dtype_name(dtype)}"


def cutlass_dtype(dtype: OutDtype | None):
    """Returns the CuTe DSL type of the dtype of an output or of a bias; the format of a quantized output; None for None."""
    import cutlass

    types: dict[Any, Any] = {
        None: None,
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
    }
    return result_format(dtype) or types[dtype]

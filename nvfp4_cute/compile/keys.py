"""KernelKey: what a grouped GEMM is compiled from."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.planning.arch import family_of, sm90, sm100, sm120
from nvfp4_cute.planning.arch.base import INTERLEAVE
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, Activation, Form, GroupedProblem, OutDtype, WeightLayout


@dataclass(frozen=True)
class KernelKey:
    """Everything that changes the generated code of a grouped GEMM, and nothing else: no sizes, no data.

    Attributes:
        arch: such as ``sm_100a``; one of ``planning.arch.ARCHS``.
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


def cutlass_dtype(dtype: OutDtype):
    """The CuTe DSL type of an output dtype."""
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        NVFP4: cutlass.Float4E2M1FN,
    }[dtype]

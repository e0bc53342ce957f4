"""Compile-time parameters that grouped GEMM kernels of all architectures share."""

from typing import Literal

from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.planning.config import KernelConfig


class GroupedGemmVariant:
    """Base of the grouped GEMM kernels: one instance per compiled variant.

    Derived classes add what they compute from these parameters. A kernel leaves the parameters that it lacks at their defaults.

    Args:
        config: resolved KernelConfig that ``unsupported_reason`` of the kernel's family accepts.
        form: form of the operands.
        num_groups: slots of a list-form launch; 1 otherwise.
        out_dtype: cutlass.Float16, BFloat16 or Float32, or the format of quantized results; INT8 also Int32, the unscaled sums.
        has_alpha: whether every group's result is multiplied by a factor.
        name: kernel name in profilers and in the emulator's reports.
        a_format, b_format: formats of ``a`` and of every ``b``.
        out_m_major: whether columns rather than rows of the output are contiguous.
        activation: activation of a dual GEMM's first product, as text of ``nvfp4_cute.activation``; None for one product.
        weight_layout: layout of a dual GEMM's weights: "separate", or a name that says how a single ``b`` holds the rows of both.
        has_limit: whether a dual GEMM's products are clamped before they are combined.
        bias_dtype: dtype of the bias of the products; None without one.
        has_row_scales: whether ``a`` has a global scale per row.
        early_weights: whether weights are loaded, and sizes on the device read, before the previous launch has ended. It must
            have written neither.
        chain: ``common.chain.Chain`` if every group's ``a`` is the result of the previous group; otherwise None. Passed in
            rather than imported, so that an exported file can omit it.
    """

    def __init__(
        self,
        config: KernelConfig,
        form: Literal["list", "ragged", "masked", "batched", "routed"],
        num_groups: int,
        out_dtype: type | BlockFormat,
        has_alpha: bool,
        name: str,
        *,
        a_format: BlockFormat = NVFP4,
        b_format: BlockFormat = NVFP4,
        out_m_major: bool = False,
        activation: str | None = None,
        weight_layout: str = "separate",
        has_limit: bool = False,
        bias_dtype: type | None = None,
        has_row_scales: bool = False,
        early_weights: bool = False,
        chain: type | None = None,
    ):
        self.config = config
        self.form = form
        self.num_groups = num_groups
        self.out_dtype = out_dtype
        self.has_alpha = has_alpha
        self.name = name
        self.formats = a_format, b_format
        self.out_m_major = out_m_major
        self.activation = activation
        self.weight_layout = weight_layout
        self.has_limit = has_limit
        self.bias_dtype = bias_dtype
        self.has_row_scales = has_row_scales
        self.early_weights = early_weights
        self.chain = chain

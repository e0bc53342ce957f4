"""Keys of the kernels in ``kernels/simt``: the parameters from which each variant is compiled."""

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar

import torch

from nvfp4_cute.compile.keys import bias_suffix, cutlass_dtype
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.block_scales import ScaleRounding
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.problem import dtype_name


@dataclass(frozen=True)
class SimtKey:
    """Base of the keys of kernels in ``kernels/simt``: an architecture, and in fields what changes the code.

    Attributes:
        KERNEL: module and class of the kernel, below ``kernels.simt``.
        CONVERTS: whether the kernel is told whether the GPU has FP4 conversions.
    """

    KERNEL: ClassVar[str]
    CONVERTS: ClassVar[bool] = False
    arch: str

    def __post_init__(self):
        """Raises UnsupportedTarget for an architecture without a kernel."""
        simt.check_arch(self.arch)

    def to_name(self) -> str:
        """Returns a readable, unique name, with which the symbol of the kernel begins."""
        return self._name()

    def _name(self) -> str:
        raise NotImplementedError

    def make_kernel(self) -> Any:
        """Makes the CuTe DSL object to compile."""
        module, name = self.KERNEL.split(".")
        return getattr(import_module(f"nvfp4_cute.kernels.simt.{module}"), name)(*self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        """Returns the kernel's arguments: the fields, of a dtype of rows whether it is bfloat16, and the name."""
        values = [getattr(self, field.name) for field in fields(self)[1:]]
        values = [x == torch.bfloat16 if isinstance(x, torch.dtype) else x for x in values]
        converts = [simt.has_fp4_convert(self.arch)] if self.CONVERTS else []
        return (*values, *converts, self.to_name())


@dataclass(frozen=True)
class QuantizedProductKey(SimtKey):
    """Common part of the keys of products of two quantized operands: an architecture with such products."""

    def __post_init__(self):
        """Raises UnsupportedTarget for an architecture without a kernel."""
        super().__post_init__()
        simt.check_quantized_products(self.arch)


@dataclass(frozen=True)
class GemvKey(QuantizedProductKey):
    """A gemv: output dtype, whether it reads a factor, and the dtype of a bias."""

    KERNEL = "gemv.GemvKernel"
    out_dtype: torch.dtype
    has_alpha: bool
    bias_dtype: torch.dtype | None = None

    def _name(self) -> str:
        options = "_alpha" * self.has_alpha + bias_suffix(self.bias_dtype)
        return f"nvfp4_gemv_{self.arch}_{dtype_name(self.out_dtype)}{options}"

    def _arguments(self) -> tuple[Any, ...]:
        convert, spread = simt.has_fp4_convert(self.arch), simt.gemv_spread(self.arch)
        dtype, bias_dtype = map(cutlass_dtype, (self.out_dtype, self.bias_dtype))
        return dtype, self.has_alpha, convert, spread, self.to_name(), bias_dtype


@dataclass(frozen=True)
class QuantizeKey(SimtKey):
    """A quantization.

    Its fields are the input dtype (float16 or bfloat16), whether there is a global scale, one group of rows or many,
    layout and inputs; format and rounding of scales; words that a lane loads at once; and factors of a computed global
    scale, None without one.
    """

    dtype: torch.dtype
    has_global_scale: bool
    is_grouped: bool
    is_blocked: bool
    has_up: bool = False
    format: BlockFormat = NVFP4
    scale_rounding: ScaleRounding = "up"
    words: int = simt.QUANTIZE_WORDS
    found_times: int | None = None

    def _name(self) -> str:
        options = ("_scaled" * self.has_global_scale) + ("_grouped" * self.is_grouped)
        options += "" if self.found_times is None else f"_found_times{self.found_times}"
        options += {simt.QUANTIZE_WORDS: "", simt.QUANTIZE_WORDS // 2: "_half"}.get(self.words, "_few")
        layout = "blocked" if self.is_blocked else "rowmajor"
        operation = "silu_quantize" if self.has_up else "quantize"
        options += "_down" * (self.scale_rounding == "down")
        return f"{self.format}_{operation}_{self.arch}_{dtype_name(self.dtype)}{options}_{layout}"

    def make_kernel(self) -> Any:
        """Returns the CuTe DSL object to compile."""
        from nvfp4_cute.kernels.simt.quantize import QuantizeKernel
        from nvfp4_cute.kernels.simt.quantize_1xk import Quantize1xKKernel
        from nvfp4_cute.kernels.simt.quantize_rows import QuantizeRowsKernel

        if self.format.scale_layout == "rowmajor":
            of_rows = Quantize1xKKernel if self.format.is_1xk else QuantizeRowsKernel
            return of_rows(self.dtype == torch.bfloat16, self.has_up, self.to_name(), self.format)
        return QuantizeKernel(
            self.dtype == torch.bfloat16,
            self.has_global_scale,
            self.is_grouped,
            self.is_blocked,
            simt.has_fp4_convert(self.arch),
            self.has_up,
            simt.has_programmatic_products(self.arch),
            self.to_name(),
            self.format,
            self.scale_rounding,
            self.words,
            self.found_times,
        )


@dataclass(frozen=True)
class QuantizeScaledRowsKey(SimtKey):
    """A quantization with a global scale per row.

    Its fields are the input dtype, one group of rows or many, layout and inputs, format, and the split of a row: warps of a CTA,
    and blocks that a thread holds.
    """

    KERNEL = "quantize_scaled_rows.QuantizeScaledRowsKernel"
    dtype: torch.dtype
    is_grouped: bool
    is_blocked: bool
    has_up: bool
    format: BlockFormat = NVFP4
    warps: int = simt.SCALED_ROWS_FEW[0]
    held: int = simt.SCALED_ROWS_FEW[1]

    def _name(self) -> str:
        operation = "silu_quantize" if self.has_up else "quantize"
        layout = f"_warps{self.warps}" * (self.warps != simt.SCALED_ROWS_FEW[0]) + f"_held{self.held}" * (
            self.held > 1
        )
        layout += ("_grouped" * self.is_grouped) + ("_blocked" if self.is_blocked else "_rowmajor")
        return f"{self.format}_{operation}_scaled_rows_{self.arch}_{dtype_name(self.dtype)}{layout}"

    def _arguments(self) -> tuple[Any, ...]:
        given = (self.dtype == torch.bfloat16, self.is_grouped, self.is_blocked, self.has_up, self.format)
        programmatic = simt.has_programmatic_products(self.arch)
        split = self.warps, self.held
        return *given, simt.has_fp4_convert(self.arch), programmatic, self.to_name(), *split


@dataclass(frozen=True)
class DequantizeKey(SimtKey):
    """A dequantization: format, output dtype (float16 or bfloat16), whether there is a global scale, layout of the scales."""

    KERNEL = "dequantize.DequantizeKernel"
    format: BlockFormat
    dtype: torch.dtype
    has_global_scale: bool
    is_blocked: bool

    def _name(self) -> str:
        option, layout = "_scaled" * self.has_global_scale, "blocked" if self.is_blocked else "rowmajor"
        return f"{self.format}_dequantize_{self.arch}_{dtype_name(self.dtype)}{option}_{layout}"


@dataclass(frozen=True)
class GlobalScaleKey(SimtKey):
    """A computed global scale: input dtype (float16 or bfloat16), whether one CTA computes it, factors."""

    KERNEL = "global_scale.GlobalScaleKernel"
    dtype: torch.dtype
    is_small: bool
    num_times: int
    format: BlockFormat = NVFP4

    def _name(self) -> str:
        size, times = "_small" * self.is_small, f"_times{self.num_times}" if self.num_times else ""
        return f"{self.format}_global_scale_{self.arch}_{dtype_name(self.dtype)}{size}{times}"


@dataclass(frozen=True)
class FewRowsKey(QuantizedProductKey):
    """A product of few rows: output dtype, whether it reads a factor, and the dtype of a bias."""

    KERNEL = "few_rows.FewRowsKernel"
    out_dtype: torch.dtype
    has_alpha: bool
    bias_dtype: torch.dtype | None = None

    def _name(self) -> str:
        options = "_alpha" * self.has_alpha + bias_suffix(self.bias_dtype)
        return f"nvfp4_few_rows_{self.arch}_{dtype_name(self.out_dtype)}{options}"

    def _arguments(self) -> tuple[Any, ...]:
        dtype, bias_dtype = map(cutlass_dtype, (self.out_dtype, self.bias_dtype))
        return dtype, self.has_alpha, self.to_name(), bias_dtype


@dataclass(frozen=True)
class W4A16Key(SimtKey):
    """A weight-only product.

    Its fields are the dtype of activations, output dtype, whether it reads a factor, rows per CTA, format of weights,
    the dtype of a bias, and warps per CTA.
    """

    KERNEL = "w4a16.W4A16Kernel"
    dtype: torch.dtype
    out_dtype: torch.dtype
    has_alpha: bool
    tokens: int
    b_format: BlockFormat = NVFP4
    bias_dtype: torch.dtype | None = None
    warps: int = simt.W4A16_WARPS

    def _name(self) -> str:
        dtypes = f"{dtype_name(self.dtype)}_{dtype_name(self.out_dtype)}"
        options = "_alpha" * self.has_alpha + bias_suffix(self.bias_dtype)
        warps = "" if self.warps == simt.W4A16_WARPS else f"_{self.warps}warps"
        return f"{self.b_format}_w4a16_{self.arch}_m{self.tokens}_{dtypes}{options}{warps}"

    @property
    def blocks_per_sm(self) -> int:
        """Number of CTAs of ``W4A16_WARPS`` that an SM should hold."""
        weights, most_tokens = self.b_format, 16
        if weights.is_int4 and weights.scale_float.quantized_dtype != dtype_name(self.dtype):
            # Products with scales are computed in float32.
            needs_all = (
                weights.has_zero_points or weights.block_k == 32 or not simt.has_bf16_products(self.arch)
            )
            most_tokens = 0 if needs_all else 8
        return simt.w4a16_blocks_per_sm(self.tokens, weights.element.bits, most_tokens)

    def _arguments(self) -> tuple[Any, ...]:
        dtype, bias_dtype = map(cutlass_dtype, (self.out_dtype, self.bias_dtype))
        blocks = self.blocks_per_sm * simt.W4A16_WARPS // self.warps
        given = (self.dtype == torch.bfloat16, dtype, self.has_alpha, self.tokens, self.warps, blocks)
        return *given, self.to_name(), self.b_format, bias_dtype

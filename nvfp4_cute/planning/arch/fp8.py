"""What kernels of 8-bit operands with fp32 scales have in common on all architectures: the pairs, and what they do not compute.

FP8 has a scale for 128 values of K: sums of a K tile are promoted. INT8 has one for a row: sums over all of K are exact in int32,
and results are scaled.
"""

from collections.abc import Callable

from nvfp4_cute.formats.block_format import FP32, INT8_PAIR, BlockFormat, Formats, FP8_1x128, FP8_128x128
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form

PAIR: Formats = (FP8_1x128, FP8_128x128)
PAIRS: tuple[Formats, ...] = (PAIR, INT8_PAIR)
# Fp32 scales of a stage begin where 16-byte units do.
SCALE_ALIGN_BYTES = 16


def promotes(formats: Formats) -> bool:
    """Whether products of a K tile are multiplied by fp32 scales and added to the sums, not by MMAs."""
    return formats[0].scale == FP32 and formats[0].block_k > 0


def has_row_scales(formats: Formats) -> bool:
    """Whether scales are fp32, one a row: sums over all of K are multiplied by them."""
    return formats[0].scale == FP32 and formats[0].block_k == 0


def aligned_scale_bytes(nbytes: int) -> int:
    """Shared memory of so many bytes of scales of a stage."""
    return -(-nbytes // SCALE_ALIGN_BYTES) * SCALE_ALIGN_BYTES


def no_dual_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Why weights of ``base.INTERLEAVE`` cannot be computed: rows of both products would share scales."""
    if weight_layout == "separate":
        return None
    return (
        f"weight_layout={weight_layout!r}: of weights with fp32 scales a dual GEMM takes two operands; pass separate or "
        "concatenated ones"
    )


def candidates_of_products(
    configs: tuple[KernelConfig, ...],
    dual_configs: tuple[KernelConfig, ...] = (),
    quantized_reason: Callable[[KernelConfig, BlockFormat], str | None] | None = None,
) -> Callable[..., tuple[KernelConfig, ...]]:
    """``Family.candidates``: these configs for products and dual GEMMs.

    quantized_reason: ``Family.quantized_reason``, by which of these quantized results are had; None: none are.
    """

    def candidates(
        num_b: int = 1,
        weight_layout: str = "separate",
        out_format: BlockFormat | None = None,
        form: Form = "list",
        formats: Formats = PAIR,
    ) -> tuple[KernelConfig, ...]:
        if weight_layout != "separate":
            return ()
        found = configs if num_b == 1 else dual_configs
        if out_format is None:
            return found
        reason = quantized_reason or no_quantized_reason
        return tuple(config for config in found if reason(config, out_format) is None)

    return candidates


def no_quantized_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Why quantized results cannot be computed."""
    return f"products of operands with fp32 scales have no {format.title} results; use out_dtype=torch.bfloat16 and quantize them"


def other_format_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Why results of a format cannot be computed where those of the rows that are multiplied can; None for these."""
    return None if format == PAIR[0] else no_quantized_reason(config, format)

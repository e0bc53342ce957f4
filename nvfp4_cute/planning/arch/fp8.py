"""8-bit operands with float32 scales on all architectures: supported pairs and common refusals.

FP8 has one scale per 128 values of K, so the sums of every K tile are promoted. INT8 has one scale per row: int32 sums over all
of K are exact, and results are scaled.
"""

from collections.abc import Callable

from nvfp4_cute.formats.block_format import FP32, INT8_PAIR, BlockFormat, Formats, FP8_1x128, FP8_128x128
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form

PAIR: Formats = (FP8_1x128, FP8_128x128)
PAIRS: tuple[Formats, ...] = (PAIR, INT8_PAIR)
# Float32 scales of a stage start at 16-byte units.
SCALE_ALIGN_BYTES = 16


def promotes(formats: Formats) -> bool:
    """Returns whether the epilogue, not the MMA, scales the products of a K tile and adds them to float32 sums."""
    return formats[0].scale == FP32 and not formats[0].is_1xk


def aligned_scale_bytes(nbytes: int) -> int:
    """Returns the shared memory of ``nbytes`` bytes of scales, with alignment."""
    return -(-nbytes // SCALE_ALIGN_BYTES) * SCALE_ALIGN_BYTES


def no_dual_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Returns why interleaved weights cannot be computed: rows of both products would share scales."""
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
    """Implements ``Family.candidates``: these configs for products and dual GEMMs.

    quantized_reason: ``Family.quantized_reason``, which filters configs for quantized results; None if there are none.
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
    """Returns why quantized results cannot be computed."""
    return f"products of operands with fp32 scales have no {format.title} results; use out_dtype=torch.bfloat16 and quantize them"


def other_format_reason(config: KernelConfig, format: BlockFormat) -> str | None:
    """Returns why quantized results of a format other than that of ``a`` cannot be computed; None for that format."""
    return None if format == PAIR[0] else no_quantized_reason(config, format)

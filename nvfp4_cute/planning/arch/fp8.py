"""What kernels of FP8 operands with fp32 scales have in common on all architectures: the pair, and what they do not compute."""

from nvfp4_cute.formats.block_format import Formats, FP8_1x128, FP8_128x128
from nvfp4_cute.planning.config import KernelConfig

PAIR: Formats = (FP8_1x128, FP8_128x128)
# Fp32 scales of a stage begin where 16-byte units do.
SCALE_ALIGN_BYTES = 16


def aligned_scale_bytes(nbytes: int) -> int:
    """Shared memory of so many bytes of scales of a stage."""
    return -(-nbytes // SCALE_ALIGN_BYTES) * SCALE_ALIGN_BYTES


def no_dual_reason(config: KernelConfig, weight_layout: str) -> str | None:
    """Why weights of ``base.INTERLEAVE`` cannot be computed: these kernels multiply by one operand."""
    return None if weight_layout == "separate" else f"weight_layout={weight_layout!r}: FP8 has no dual GEMM"


def no_quantized_reason(config: KernelConfig) -> str | None:
    """Why NVFP4 results cannot be computed."""
    return "FP8 products have no NVFP4 results; use out_dtype=torch.bfloat16 and quantize them"

"""Blocks of integers with one zero point each: ``(code - zero point) * scale``."""

import torch

from nvfp4_cute.formats.block_format import U4, BlockFormat
from nvfp4_cute.formats.codecs import encode

# GPTQ checkpoints store the zero point minus 1 in 4 bits, so zero points reach 16.
MAX_ZERO_POINT = 16
FLOATS = {"bf16_zero": torch.bfloat16, "fp16_zero": torch.float16}


def scale_words(scale: torch.Tensor, zero_points: torch.Tensor) -> torch.Tensor:
    """Packs scales and zero points into the words that the format stores.

    Args:
        scale: float16 or bfloat16.
        zero_points: integers, 0 to 16, in the same shape.

    Returns:
        int32: the bits of the scale in the low half, the zero point in the high half.

    Raises:
        ValueError: a zero point is out of range (reading them waits for a GPU).
    """
    is_read = zero_points.numel() and not zero_points.is_meta
    if is_read and not 0 <= int(zero_points.min()) <= int(zero_points.max()) <= MAX_ZERO_POINT:
        raise ValueError(
            f"zero points are {int(zero_points.min())} to {int(zero_points.max())}; expected 0 to {MAX_ZERO_POINT}: of "
            "signed values add 8"
        )
    return _words(scale, zero_points)


def quantize_with_zero_points(blocks: torch.Tensor, format: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes blocks by their smallest and largest values, extended to include zero::

        scale = (largest - least) / 15      rounded to the scales' dtype
        zero  = -least / scale              rounded to nearest even, 0 to 15
        code  = value / scale + zero        the quotient rounded to nearest even, the sum clamped to 0 to 15

    A block of zeros has scale 0, and so has a block whose scale rounds to zero. A NaN makes its block NaN.

    Args:
        blocks: float32 [..., blocks, block_k].
        format: an int4 format with zero points.

    Returns:
        uint8 data [..., K/2] and int32 scale words [..., blocks].
    """
    dtype = FLOATS[format.scale.name]
    least, largest = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    # Divides by a tensor on the same device: on CUDA torch multiplies by the inverse of a host number.
    steps = torch.full((), U4.max, dtype=torch.float32, device=blocks.device)
    scale = (largest / steps - least / steps).clamp(max=format.scale.max).to(dtype)
    divisor = scale.float().masked_fill(scale == 0, torch.inf)
    zero = (-least / divisor).nan_to_num(0.0).round().clamp(0, U4.max)
    codes = (blocks / divisor.unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return encode(codes.flatten(-2), format.element), _words(scale, zero)


def _words(scale: torch.Tensor, zero_points: torch.Tensor) -> torch.Tensor:
    bits = scale.contiguous().view(torch.int16).int() & 0xFFFF
    return bits | zero_points.int() << 16

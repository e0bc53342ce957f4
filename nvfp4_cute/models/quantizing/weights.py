"""Rounding weights: to nearest with the scale of the largest value, or with the scale of least squared error."""

import torch

from nvfp4_cute.formats.block_format import FORMATS, NVFP4
from nvfp4_cute.formats.block_scaled import dequantize, quantize
from nvfp4_cute.formats.codecs import (
    decode_e2m1,
    decode_ue4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
)
from nvfp4_cute.formats.global_scale import GLOBAL_SCALE_DIVISOR
from nvfp4_cute.models.checkpoints.stored import StoredWeight

# Of amax / 6: what a block's scale may be. 1.5 is "four over six", where the largest value becomes 4; under 1 it is cut.
FACTORS = (1.0, 1.5, 1.25, 0.9375, 0.875, 0.8125, 0.75)


def quantized(
    weight: torch.Tensor, format: str, amax: torch.Tensor | None = None, search: bool = False
) -> StoredWeight:
    """Weights as a checkpoint stores them, row-major scales.

    Args:
        weight: float [N, K]. format: "nvfp4", "mxfp4" or "mxfp8_e4m3".
        amax: of nvfp4: the largest magnitude that the global scale, amax / 2688, is for; None: that of ``weight``.
        search: try several scales for each block, and keep that of least squared error.

    Raises:
        ValueError: weights that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weights have values that are not finite; they cannot be quantized")
    values = weight.float()
    if format == "nvfp4":
        amax = values.abs().amax() if amax is None else amax
        factor = global_scale(amax)
        if search:
            return _searched_nvfp4(values, factor)
        t = quantize(values, global_scale=factor, scale_layout="rowmajor")
        return StoredWeight(format, t.data, t.scale, factor, tuple(weight.shape))
    ways = [
        quantize(values, format=FORMATS[format], scale_layout="rowmajor", scale_rounding=way)
        for way in (("up", "down") if search else ("down",))
    ]
    best = ways[0]
    data, scale = best.data.view(torch.uint8), best.scale.view(torch.uint8)
    if search:
        first, second = (_errors(values, dequantize(w), FORMATS[format].block_k) for w in ways)
        other = second < first
        scale = torch.where(other, ways[1].scale.view(torch.uint8), scale)
        width = FORMATS[format].row_bytes(FORMATS[format].block_k)
        data = torch.where(other.repeat_interleave(width, -1), ways[1].data.view(torch.uint8), data)
    data = data if format == "mxfp4" else data.view(torch.float8_e4m3fn)
    return StoredWeight(format, data, scale, None, tuple(weight.shape))


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """amax / 2688 as float32 without dimensions; 1 for weights that are all zero."""
    amax = amax.float().reshape(())
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, GLOBAL_SCALE_DIVISOR)).clamp(min=tiny))


def _errors(values: torch.Tensor, got: torch.Tensor, block: int) -> torch.Tensor:
    """Squared error of every block, [N, K / block]."""
    return (values - got).square().unflatten(-1, (-1, block)).sum(-1)


def _searched_nvfp4(values: torch.Tensor, factor: torch.Tensor) -> StoredWeight:
    block = NVFP4.block_k
    blocks = values.unflatten(-1, (-1, block))
    base = blocks.abs().amax(-1) / NVFP4.element.max / factor
    best: list[torch.Tensor] = []  # errors, scales and codes
    for trial in FACTORS:
        scale = encode_e4m3(base * trial)
        step = (decode_ue4m3(scale) * factor).unsqueeze(-1)
        codes = encode_e2m1(torch.where(step == 0, 0.0, blocks / step))
        error = (decode_e2m1(codes) * step - blocks).square().sum(-1)
        found = [error, scale, codes]
        if best:
            better = error < best[0]
            kept = zip(found, best, (better, better, better.unsqueeze(-1)), strict=True)
            found = [torch.where(where, new, old) for new, old, where in kept]
        best = found
    _, scale, codes = best
    data = pack_e2m1(codes.flatten(-2))
    return StoredWeight("nvfp4", data, scale.view(torch.float8_e4m3fn), factor, tuple(values.shape))

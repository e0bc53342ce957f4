"""Rounds weights to nearest, with scales from each block's largest value or with scales of least squared error."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import FOUR_OVER_SIX, BlockFormat, format_named
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, quantize
from nvfp4_cute.formats.block_scales import nearest_rounding, scale_codes
from nvfp4_cute.formats.codecs import (
    E4M3_MAX,
    decode,
    decode_e2m1,
    decode_e4m3,
    decode_int4,
    encode_e2m1,
    encode_e4m3,
    encode_int4,
    pack_e2m1,
)
from nvfp4_cute.formats.global_scale import GLOBAL_SCALE_DIVISOR
from nvfp4_cute.models.checkpoints.stored import FP8, stored_weight

# Trial factors of a block's largest value, by the kind of its scale. 1.5 is "four over six": the largest value becomes 4
# instead of 6. A factor under 1 clamps it.
NEAREST = (1.0,)
SEARCHED = {
    "ue4m3": (1.0, 1.5, 1.25, 0.9375, 0.875, 0.8125, 0.75),
    "bf16": (1.0, 0.9375, 0.875, 0.8125, 0.75),
}
# Trial factors for power-of-two scales, by their rounding: the other rounding is tried as well. A scale one step below "up"
# clamps the largest value unless that rounds to the same code.
SEARCHED_POWERS: dict[str, tuple[float, ...]] = {"down": (1.0, 2.0), "up": (1.0, 0.5)}
# By element: functions from values divided by their step to uint8 codes, and back.
CODECS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "e2m1": (encode_e2m1, decode_e2m1),
    "e4m3": (encode_e4m3, decode_e4m3),
    "int4": (encode_int4, decode_int4),
}


@dataclass(frozen=True)
class Rounding:
    """How values of a tensor are rounded, given the scales of their blocks.

    Attributes:
        format: nvfp4, mxfp4, mxfp8_e4m3, or int4 with bfloat16 scales.
        factor: the global scale, float32 without dimensions; None if there is none.
        trials: factors of a block's largest value for which scales are tried.
    """

    format: BlockFormat
    factor: torch.Tensor | None
    trials: tuple[float, ...]

    @classmethod
    def of(cls, weight: torch.Tensor, format: str, amax: torch.Tensor | None, search: bool) -> "Rounding":
        """Makes a rounding; arguments are those of ``quantized``."""
        kind = format_named(format)
        factor = (
            global_scale(weight.abs().amax() if amax is None else amax) if kind.has_global_scale else None
        )
        searched = SEARCHED.get(kind.scale.name) or SEARCHED_POWERS[nearest_rounding(kind)]
        return cls(kind, factor, searched if search else NEAREST)

    def scales(self, amax: torch.Tensor, trial: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scale codes, uint8 (int4: bfloat16 scales), and float32 steps of blocks with these largest magnitudes."""
        codes = scale_codes(amax * trial, self.format, self.factor, nearest_rounding(self.format))
        step = decode(codes, self.format.scale)
        return codes, step if self.factor is None else step * self.factor

    def encode(self, values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Rounds ``values / step`` to nearest and returns uint8 codes, one per element; signed zeros where ``step`` is 0."""
        # Dividing by infinity gives zeros with the signs of the values; 0 / 0 would give NaN.
        return CODECS[self.format.element.name][0](values / step.masked_fill(step == 0, math.inf))

    def decode(self, codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Returns the float32 values of elements."""
        return CODECS[self.format.element.name][1](codes) * step

    def stored(self, codes: torch.Tensor, scales: torch.Tensor) -> BlockScaledTensor:
        """Packs codes of elements, uint8 [N, K], and scales of :meth:`scales`, [N, K / block], as files store them."""
        data = pack_e2m1(codes) if self.format.element.bits == 4 else codes.view(torch.float8_e4m3fn)
        scale = scales.view(torch.float8_e4m3fn) if self.format.has_global_scale else scales
        return stored_weight(self.format.name, data, scale, self.factor)


def quantized(
    weight: torch.Tensor,
    format: str,
    amax: torch.Tensor | None = None,
    search: bool = False,
    importance: torch.Tensor | None = None,
) -> BlockScaledTensor:
    """Quantizes weights as a checkpoint stores them, with row-major scales.

    Args:
        weight: float [N, K].
        format: name of a format that ``Rounding`` supports.
        amax: for nvfp4, the largest magnitude, for which the global scale is amax / 2688; None for that of ``weight``.
        search: try several scales per block, and keep the one with least squared error.
        importance: float [K], factors of squared errors in the search, such as mean squares of inputs; None for 1.

    Raises:
        ValueError: weights are not finite.
    """
    check_finite(weight)
    if format == FP8:
        return fp8_rows(weight)
    rounding = Rounding.of(weight, format, amax, search)
    blocks = weight.float().unflatten(-1, (-1, rounding.format.block_k))
    best: list[torch.Tensor] = []  # errors, scales and codes
    factors = torch.ones((), device=weight.device)
    if importance is not None:
        factors = importance.to(blocks).unflatten(0, (-1, rounding.format.block_k))
    for trial in rounding.trials:
        scale, step = rounding.scales(blocks.abs().amax(-1), trial)
        codes = rounding.encode(blocks, step.unsqueeze(-1))
        error = (rounding.decode(codes, step.unsqueeze(-1)) - blocks).square().mul(factors).sum(-1)
        found = [error, scale, codes]
        if best:
            better = error < best[0]
            kept = zip(found, best, (better, better, better.unsqueeze(-1)), strict=True)
            found = [torch.where(where, new, old) for new, old, where in kept]
        best = found
    _, scale, codes = best
    return rounding.stored(codes.flatten(-2), scale)


def fp8_rows(weight: torch.Tensor) -> BlockScaledTensor:
    """Rounds weights [N, K] to e4m3 with one float32 scale per row, its amax / 448."""
    values = weight.float()
    amax = values.abs().amax(-1, keepdim=True)
    # Divides by a tensor on the same device: on CUDA torch multiplies by the inverse of a host number.
    scale = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3_MAX))
    codes = encode_e4m3(values / scale).view(torch.float8_e4m3fn)
    return stored_weight(FP8, codes, scale)


def four_over_six(weight: torch.Tensor, amax: torch.Tensor | None = None) -> BlockScaledTensor:
    """NVFP4 weights by ``quantize(..., method="four_over_six")``, row-major scales; takes the arguments of :func:`quantized`.

    The global scale is amax / 1536.
    """
    check_finite(weight)
    amax = weight.abs().amax() if amax is None else amax
    factor = global_scale(amax, FOUR_OVER_SIX.global_scale_divisor)
    return quantize(weight.float(), format=FOUR_OVER_SIX, global_scale=factor, scale_layout="rowmajor")


def check_finite(weight: torch.Tensor) -> None:
    """Raises ValueError for weights that are not finite."""
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weights have values that are not finite; they cannot be quantized")


def global_scale(amax: torch.Tensor, divisor: float = GLOBAL_SCALE_DIVISOR) -> torch.Tensor:
    """Returns amax / ``divisor`` as float32 without dimensions; 1 for weights that are all zero."""
    amax = amax.float().reshape(())
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, divisor)).clamp(min=tiny))

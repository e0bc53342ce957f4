"""Rounds activations to a block-scaled format and back, and wraps layers so that their input is rounded."""

from typing import Any

import torch

from nvfp4_cute.experts.checks import PER_ROW_ACTIVATIONS, PER_ROW_SUFFIX, has_row_scales
from nvfp4_cute.formats.block_format import format_named
from nvfp4_cute.formats.block_scaled import dequantize, quantize
from nvfp4_cute.formats.block_scales import nearest_rounding
from nvfp4_cute.formats.codecs import E4M3_MAX, decode_e4m3, encode_e4m3
from nvfp4_cute.formats.global_scale import PER_ROW

FP8 = "fp8"  # e4m3 with one float32 scale per row
ROUNDED_FORMATS = (
    "nvfp4",
    "nvfp4_four_over_six",
    *PER_ROW_ACTIVATIONS,
    "mxfp4",
    "mxfp8_e4m3",
    "fp8_1x128",
    "int8",
    FP8,
)


def rounded(x: torch.Tensor, format: str, global_scale: Any = None) -> torch.Tensor:
    """Quantizes and dequantizes ``x``: the values that a product with quantized activations multiplies, in the dtype of ``x``.

    mxfp4 and mxfp8_e4m3 elements times their scales are exact in bfloat16. Scales are rounded as ``nearest_rounding`` says:
    down for mxfp4, as the OCP specification converts, and up for mxfp8_e4m3, as engines do (vLLM 0.32, mxfp8_utils.py). fp8 is
    e4m3 with one float32 scale per row, its amax / 448.

    Args:
        x: float [..., K].
        format: one of ROUNDED_FORMATS.
        global_scale: for NVFP4, as in ``quantize``; ignored for rows that find their own.

    Raises:
        ValueError: the format is unknown, or K is not a whole number of blocks.
    """
    if format not in ROUNDED_FORMATS:
        raise ValueError(f"format={format!r} is none of {', '.join(ROUNDED_FORMATS)}")
    if format != FP8:
        kind = format_named(format.removesuffix(PER_ROW_SUFFIX))
        if kind.has_global_scale:
            given = PER_ROW if has_row_scales(format) else global_scale
            stored = quantize(x, format=kind, global_scale=given, scale_layout="rowmajor")
            return dequantize(stored, x.dtype)
        stored = quantize(x, format=kind, scale_layout="rowmajor", scale_rounding=nearest_rounding(kind))
        return dequantize(stored, x.dtype)
    values = x.float()
    amax = values.abs().amax(-1, keepdim=True)
    # Divides by a tensor on the same device: on CUDA torch multiplies by the inverse of a host number.
    scale = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3_MAX))
    return (decode_e4m3(encode_e4m3(values / scale)) * scale).to(x.dtype)


class RoundedInput(torch.nn.Module):
    """Computes ``layer(rounded(x, format))``, a layer with quantized activations in a format that no kernel multiplies.

    Args:
        layer: the wrapped layer.
        format: format of the activations, a name of ROUNDED_FORMATS.
        global_scale: for nvfp4, float32 with one element; None computes it from every input.
    """

    input_global_scale: torch.Tensor | None

    def __init__(self, layer: torch.nn.Module, format: str, global_scale: torch.Tensor | None = None):
        super().__init__()
        self.layer, self.format = layer, format
        self.register_buffer("input_global_scale", global_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls the layer with rounded ``x``, [..., K]."""
        given = self.input_global_scale
        return self.layer(rounded(x, self.format, "auto" if given is None else given))

    def extra_repr(self) -> str:
        """Shows the format."""
        return f"activations={self.format!r}"


class PreparedInput(torch.nn.Module):
    """Computes ``layer(x[..., order] * scale)``.

    It serves weights whose blocks group reordered values of K, and weights that were divided by factors of activations (AWQ,
    SmoothQuant).

    Args:
        layer: the wrapped layer.
        order: int64 [K], or None.
        scale: float [K], or None; rounded to the dtype of ``x``.
    """

    order: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self, layer: torch.nn.Module, order: torch.Tensor | None, scale: torch.Tensor | None):
        super().__init__()
        self.layer = layer
        self.register_buffer("order", order)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls the layer with reordered and scaled ``x``, [..., K]."""
        x = x if self.order is None else x[..., self.order]
        return self.layer(x if self.scale is None else x * self.scale.to(x.dtype))


class PreparedRows(torch.nn.Module):
    """Reorders and scales rows of experts: each row in its expert's order, times its expert's factors.

    Args:
        order: int64 [E, K], or None.
        scale: float [E, K], or None; rounded to the dtype of the rows.
    """

    order: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self, order: torch.Tensor | None, scale: torch.Tensor | None):
        super().__init__()
        self.register_buffer("order", order)
        self.register_buffer("scale", scale)

    def forward(self, rows: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
        """Maps ``rows`` [T, K] to [T, K]; ``expert_of_row`` is integers [T]."""
        rows = rows if self.order is None else rows.gather(1, self.order[expert_of_row])
        return rows if self.scale is None else rows * self.scale[expert_of_row].to(rows.dtype)

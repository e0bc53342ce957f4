"""What a checkpoint stores, in the same types for every tool: weights, and how each layer is computed."""

import math
from dataclasses import dataclass

import torch

from nvfp4_cute.formats.block_format import MXFP4, UE8M0, FP8_1xK, format_named
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, quantized_tensor

# Names of formats in schemes: those of formats.block_format, "int4" for all formats of int4_format, and "fp8" for e4m3 with
# one float32 scale per tensor or per row. Weights in "fp8" are tensors of FP8_1xK.
FP8, INT8, INT4 = "fp8", "int8", "int4"
# Exponents of the powers of two in e4m3: 2^-9, its smallest subnormal, to 2^8.
E4M3_EXPONENTS = (-9, 8)


@dataclass(frozen=True)
class Scheme:
    """How one layer is quantized.

    Attributes:
        name: the tool's name for it.
        weights: format of the weights.
        activations: format of the activations; None for 16 bits.
        has_zero_points: whether zero points of blocks of weights are stored.
        has_order: whether an order of K is stored.
    """

    name: str
    weights: str
    activations: str | None
    has_zero_points: bool = False
    has_order: bool = False

    def __str__(self) -> str:
        """Returns a description such as "W nvfp4, A 16 bit"."""
        return f"W {self.weights}, A {self.activations or '16 bit'}"


def stored_weight(
    format: str, data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None = None
) -> BlockScaledTensor:
    """Wraps K-major weights [..., N, K] with row-major scales, as files store them, without a copy.

    Args:
        format: format of the weights in a scheme; int4 has its exact name.
        data: of a dtype of the format.
        scale: [..., N, K / block], rounded up; "fp8", "int8": [..., N, 1].
        global_scale: float32 that multiplies, without dimensions or one per batch; or None.
    """
    kind = FP8_1xK if format == FP8 else format_named(format)
    scale = scale.view(torch.uint8) if kind.scale == UE8M0 else scale  # torch stacks no float8_e8m0fnu
    shape = (*data.shape[:-1], kind.elements(data.shape[-1]))
    return quantized_tensor(data, scale, global_scale, shape, kind, "rowmajor")


def as_nvfp4(weight: BlockScaledTensor) -> NVFP4Tensor | None:
    """Converts the weights to an NVFP4 tensor with row-major scales; None if NVFP4 cannot represent all values.

    MXFP4 scales are powers of two per 32 values. With a power of two as global scale, e4m3 has 18 powers of two, for 16 values
    each, and the data is unchanged. The conversion is exact if the scales of nonzero blocks span at most 2^17.

    Args:
        weight: weights in any format; only nvfp4 and mxfp4 can succeed.
    """
    if isinstance(weight, NVFP4Tensor):
        return weight.with_scale_layout("rowmajor")
    if weight.format != MXFP4:
        return None
    blocks = weight.data.unflatten(-1, (-1, MXFP4.row_bytes(MXFP4.block_k)))
    used = ((blocks & 0x77) != 0).any(-1)
    exponents = weight.scale.view(torch.uint8).int() - 127
    if not bool(used.any()):
        top = 0
    else:
        top, bottom = int(exponents[used].max()), int(exponents[used].min())
        if top - bottom > E4M3_EXPONENTS[1] - E4M3_EXPONENTS[0] or top - E4M3_EXPONENTS[1] < -126:
            return None
    exponents = (exponents - top + E4M3_EXPONENTS[1]).clamp(*E4M3_EXPONENTS)
    normal, subnormal = (exponents + 7) << 3, 1 << (exponents + 9).clamp(max=2)
    codes = torch.where(exponents >= -6, normal, subnormal).to(torch.uint8)
    scale = codes.masked_fill(~used, 0).repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    factor = torch.tensor(math.ldexp(1.0, top - E4M3_EXPONENTS[1]), dtype=torch.float32, device=scale.device)
    return NVFP4Tensor(weight.data, scale, factor, weight.shape, "rowmajor")


@dataclass(frozen=True, eq=False)
class StoredLinear:
    """One quantized layer.

    Attributes:
        name: its prefix in the checkpoint.
        scheme: how it is quantized.
        weight: [N, K], with row-major scales, like all weights here.
        input_scale: calibrated float32 global scale of activations, which multiplies; None if none is stored.
        order: int64 [K]: the weights multiply ``x[..., order]`` (desc_act, actorder); None: they multiply ``x``.
        pre_scale: float [K], multiplied into activations before they are quantized (AWQ, SmoothQuant); None for 1.
    """

    name: str
    scheme: Scheme
    weight: BlockScaledTensor
    input_scale: torch.Tensor | None
    order: torch.Tensor | None = None
    pre_scale: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns weights for unmodified ``x``, [N, K]: in the order of ``x``, with ``pre_scale`` applied."""
        values = self.weight.dequantize(torch.float32)
        if self.order is not None:
            values = values[:, self.order.argsort()]
        if self.pre_scale is not None:
            values = values * self.pre_scale.float()
        return values.to(dtype)


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """The experts of one layer, stacked: E experts of width I on H features.

    Attributes:
        name: prefix, up to "experts".
        scheme: how they are quantized.
        w13: [E, 2 I, H], [gate; up] of every expert, or [E, I, H] without a gate; without global scale.
        w13_global: float32 [E, 2], for gate and up, which may differ; [E, 1] without a gate; None if the format has none.
        w2: [E, H, I].
        w2_global: float32 [E].
        w13_input, w2_input: float32 [E], global scales of activations, which multiply; None if none are stored.
        w13_bias, w2_bias: [E, 2 I] in the order of w13's rows, and [E, H]; or None.
        has_gate: whether there is a gate.
        w13_order, w2_order: int64 [E, H] and [E, I]; see ``order`` of StoredLinear; None: weights are in the order of rows.
        w13_pre_scale, w2_pre_scale: float32 [E, H] and [E, I]; see ``pre_scale`` of StoredLinear; None for 1.
    """

    name: str
    scheme: Scheme
    w13: BlockScaledTensor
    w13_global: torch.Tensor | None
    w2: BlockScaledTensor
    w2_global: torch.Tensor | None
    w13_input: torch.Tensor | None
    w2_input: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    has_gate: bool
    w13_order: torch.Tensor | None = None
    w2_order: torch.Tensor | None = None
    w13_pre_scale: torch.Tensor | None = None
    w2_pre_scale: torch.Tensor | None = None

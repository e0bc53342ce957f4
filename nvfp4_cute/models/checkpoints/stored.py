"""What a checkpoint stores, in the same types for every tool: weights, and how each layer is computed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nvfp4_cute.formats.block_format import FORMATS, INT4_FORMATS, NVFP4, FP8_128x128
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, dequantize
from nvfp4_cute.formats.codecs import decode_e4m3, decode_s8

# Names of formats: those of formats.block_format, and "fp8": e4m3 with one float32 scale per tensor or per row.
# Schemes call all formats of int4_format "int4"; weights have the exact name.
FP8, INT8, INT4 = "fp8", "int8", "int4"
BLOCK_K = {"nvfp4": 16, "mxfp4": 32, "mxfp8_e4m3": 32, "fp8_128x128": 128}
PACKED = ("nvfp4", "mxfp4")  # two values per byte
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


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Quantized weights as a file stores them, K-major: ``value * scale * global_scale``.

    Attributes:
        format: a name of ``formats.block_format``, or "fp8".
        data: uint8 [..., N, K/2] (e2m1 or int4, the even k in the low nibble), float8_e4m3fn or int8 [..., N, K].
        scale: row-major. nvfp4: float8_e4m3fn [..., N, K/16]. mxfp4, mxfp8_e4m3: uint8 [..., N, K/32] (ue8m0). fp8_128x128:
            float32 [..., N/128, K/128], both rounded up. fp8, int8: float32 [..., N, 1]. int4: scales of its format.
        global_scale: float32 without dimensions that multiplies, or None.
        shape: shape of the values, (..., N, K).
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns values [..., N, K]: products in float32, exact except for a final float32 factor, rounded to ``dtype``."""
        tensor = as_tensor(self)
        if tensor is not None:
            return dequantize(tensor, dtype)
        # Formats without a tensor class: FP8 with one scale per row, and rows that end within a block.
        n, k = self.shape[-2:]
        values = decode_s8(self.data) if self.format == INT8 else decode_e4m3(self.data)
        factors = self.scale
        if self.format == FP8_128x128.name:
            factors = factors.repeat_interleave(128, -1)[..., :k].repeat_interleave(128, -2)[..., :n, :]
        return (values * factors).to(dtype)

    def split(self, rows: Sequence[int]) -> list["StoredWeight"]:
        """Splits weights [N, K] into views with the given numbers of rows, for formats whose blocks lie within a row."""
        parts = zip(rows, self.data.split(list(rows)), self.scale.split(list(rows)), strict=True)
        return [StoredWeight(self.format, d, s, self.global_scale, (n, self.shape[-1])) for n, d, s in parts]

    def nvfp4(self) -> NVFP4Tensor:
        """Wraps the weights as an NVFP4 tensor with row-major scales, without a copy. Raises ValueError for another format."""
        if self.format != "nvfp4":
            raise ValueError(f"these weights are {self.format}, not nvfp4; as_nvfp4 converts what can be")
        return NVFP4Tensor(self.data, self.scale, self.global_scale, self.shape, "rowmajor")


def as_tensor(weight: StoredWeight) -> BlockScaledTensor | None:
    """Wraps the weights as a tensor, without a copy; None for FP8 with a scale per row, and for rows with partial blocks."""
    format = FORMATS.get(weight.format) or INT4_FORMATS.get(weight.format)
    if format is None or weight.shape[-1] % format.k_multiple:
        return None
    kind = NVFP4Tensor if format == NVFP4 else partial(BlockScaledTensor, format=format)
    return kind(weight.data, weight.scale, weight.global_scale, tuple(weight.shape), "rowmajor")


def as_nvfp4(weight: StoredWeight) -> NVFP4Tensor | None:
    """Converts the weights to an NVFP4 tensor with row-major scales; None if NVFP4 cannot represent all values.

    MXFP4 scales are powers of two per 32 values. With a power of two as global scale, e4m3 has 18 powers of two, for 16 values
    each, and the data is unchanged. The conversion is exact if the scales of nonzero blocks span at most 2^17.

    Args:
        weight: weights in any format; only nvfp4 and mxfp4 can succeed.
    """
    if weight.format == "nvfp4":
        return weight.nvfp4()
    if weight.format != "mxfp4":
        return None
    blocks = weight.data.unflatten(-1, (-1, BLOCK_K["mxfp4"] // 2))
    used = ((blocks & 0x77) != 0).any(-1)
    exponents = weight.scale.int() - 127
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
        weight: [N, K].
        input_scale: calibrated float32 global scale of activations, which multiplies; None if none is stored.
        order: int64 [K]: the weights multiply ``x[..., order]`` (desc_act, actorder); None: they multiply ``x``.
        pre_scale: float [K], multiplied into activations before they are quantized (AWQ, SmoothQuant); None for 1.
    """

    name: str
    scheme: Scheme
    weight: StoredWeight
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
    w13: StoredWeight
    w13_global: torch.Tensor | None
    w2: StoredWeight
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

"""Quantized tensors: NVFP4Tensor, quantization and its inverse, on any device, without a kernel."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from nvfp4_cute.formats.codecs import (
    E2M1_MAX,
    E4M3_MAX,
    FLOAT32_MIN_NORMAL,
    INPUT_DTYPES,
    at_least_float32,
    decode_e4m3,
    decode_packed_e2m1,
    decode_ue4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
)
from nvfp4_cute.formats.scale_layout import SF_VEC_SIZE, atom_counts, from_blocked, num_k_blocks, to_blocked

# |x| <= GLOBAL_SCALE_DIVISOR * global_scale is representable: the largest value times the largest block scale.
GLOBAL_SCALE_DIVISOR = E2M1_MAX * E4M3_MAX
DATA_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)

ScaleLayout = Literal["blocked", "rowmajor"]
SCALE_LAYOUTS = ("blocked", "rowmajor")


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A quantized tensor of logical ``shape`` ``(..., K)``: ``value * scale * global_scale``.

    ``...`` is any number of dimensions; the last of them are the rows (none: one row), those before are batches.

    Attributes:
        data: uint8 or float4_e2m1fn_x2, ``[..., K/2]``.
        scale: float8_e4m3fn or uint8; "rowmajor": ``[..., K/16]``; "blocked": ``[batches..., rm, rk, 32, 4, 4]``
            (see :mod:`nvfp4_cute.formats.scale_layout`).
        global_scale: float32 tensor without dimensions, the factor one multiplies by to dequantize; None means 1.
        shape: of the unpacked values.
        scale_layout: "blocked" or "rowmajor".

    Raises:
        TypeError, ValueError: on construction, where the parts do not fit each other.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    shape: tuple[int, ...]
    scale_layout: ScaleLayout = "blocked"

    def __post_init__(self):
        """Check dtypes, shapes and devices against ``shape``. Reads no values, so it never synchronizes."""
        _check_scale_layout(self.scale_layout)
        if self.data.dtype not in DATA_DTYPES:
            raise TypeError(f"data is torch.uint8 or torch.float4_e2m1fn_x2; got {self.data.dtype}; view it")
        if self.scale.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise TypeError(f"scale is torch.uint8 or torch.float8_e4m3fn; got {self.scale.dtype}; view it")
        if not self.shape:
            raise ValueError("shape=() has no K; an NVFP4 tensor has at least one dimension")
        *lead, k = self.shape
        k_blocks = num_k_blocks(k)
        _check_shape("data", self.data, (*lead, k // 2))
        if self.scale_layout == "rowmajor":
            _check_shape("scale", self.scale, (*lead, k_blocks))
        else:
            batches, rows = _rows(self.shape)
            _check_shape("scale", self.scale, (*batches, *atom_counts(rows, k_blocks), 32, 4, 4))
        tensors = {"data": self.data, "scale": self.scale}
        if self.global_scale is not None:
            _check_shape("global_scale", self.global_scale, ())
            if self.global_scale.dtype != torch.float32:
                raise TypeError(
                    f"global_scale is torch.float32; got {self.global_scale.dtype}; call .float()"
                )
            tensors["global_scale"] = self.global_scale
        if len({tensor.device for tensor in tensors.values()}) > 1:
            devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise ValueError(f"parts of one tensor lie on different devices: {devices}; move them to one")

    def __repr__(self) -> str:
        """Sizes and layout, no values but the global scale (reading which waits for a GPU)."""
        global_scale = None if self.global_scale is None else f"{self.global_scale.item():.6g}"
        size = self.data.numel() + self.scale.numel()
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, scale_layout={self.scale_layout!r}, "
            f"global_scale={global_scale}, scale={list(self.scale.shape)}, {size} bytes on {self.data.device})"
        )


def check_is_tensor(name: str, value: object) -> None:
    """Raise TypeError for what is no tensor: ``name``, what it is, and what to pass instead."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, NVFP4Tensor):
        raise TypeError(f"{name} is an NVFP4Tensor; pass its .data, and its .scale with the scales")
    raise TypeError(
        f"{name} is {'None' if value is None else f'a {type(value).__name__}'}; pass a torch.Tensor"
    )


def quantize(
    x: torch.Tensor,
    *,
    global_scale: float | torch.Tensor | Literal["auto"] | None = None,
    global_scale_inv: float | torch.Tensor | None = None,
    scale_layout: ScaleLayout = "blocked",
) -> NVFP4Tensor:
    """Quantize to NVFP4 in blocks of 16 along the last dimension.

    For a block with the largest magnitude ``amax``, every line below is one float32 operation of IEEE 754, rounded to
    nearest even, subnormals kept (``g`` is the global scale; without one, lines 2 and 4 do not take place)::

        1  q = amax / 6
        2  q = q / g
        3  scale = e4m3(q)                 nearest even, at most 448
        4  d = scale * g
        5  data = e2m1(x / d)              the quotient is rounded to float32, then to e2m1; at most 6

    float64 input is first rounded to float32; float16 and bfloat16 are widened, exactly. The result is the same, bit
    for bit, on every device (CPU and H200 were compared). Small tables are copied to the device, so a CUDA graph cannot
    capture it.

    - Zeros keep their sign. A block whose scale rounds to zero (``q <= 2^-10``, all-zero blocks among them) has scale
      0 and zeros for values. Without a global scale that is every block with ``amax <= 0.0058``.
    - Scales under 2^-6 are rounded to multiples of 2^-9 and may be off by up to a factor of two: a global scale keeps
      blocks away from there.
    - What dequantize gives differs from ``x`` by at most amax / 6 * (1 + 2^-4) + 6 * 2^-10 * g where nothing saturates:
      half the distance between 4 and 6, the scale's rounding, and its rounding where it is small.
    - Magnitudes over 2688 * g saturate. Infinity saturates too: its block has scale 448, infinities become 6 and the
      other values are divided by 448 * g.
    - A NaN makes its whole block NaN: scale 0x7F, values 0x7. e2m1 has no NaN and would turn it into +6, a plausible
      number; the scale is the only place in which it survives, and dequantize and GEMM then show it.

    Args:
        x: float32, float16, bfloat16 or float64, ``[..., K]``, any strides, K a multiple of 16.
        global_scale: the factor one multiplies by to dequantize; 2688 * global_scale should be the largest magnitude
            of ``x``. A positive, normal float32 number, or a tensor of one element. "auto" takes the finite amax of
            ``x`` / 2688 (1 if that amax is 0; never less than 2^-126), computed on the device.
        global_scale_inv: the inverse convention (2688 / amax), accepted by this name only; 1 / it, rounded to
            float32, is the global scale.
        scale_layout: "blocked" or "rowmajor", the layout of the result's scales.

    Returns:
        NVFP4Tensor with uint8 data, float8_e4m3fn scales, contiguous, on the device of ``x``.

    Raises:
        TypeError: ``x`` is no float tensor.
        ValueError: K is not a multiple of 16, or the global scale is given twice or not positive and normal (a tensor
            on a GPU is not read, and not checked).
    """
    check_is_tensor("x", x)
    _check_scale_layout(scale_layout)
    if x.ndim == 0:
        raise ValueError("x has no dimensions, hence no K; reshape it to [..., K], K a multiple of 16")
    k_blocks = num_k_blocks(x.shape[-1])
    values = at_least_float32(x.detach()).float()
    g = resolve_global_scale(values, global_scale, global_scale_inv)
    blocks = values.reshape(*values.shape[:-1], k_blocks, SF_VEC_SIZE)
    # A tensor on the same device: on CUDA torch turns division by a host number into multiplication by its inverse.
    q = blocks.abs().amax(dim=-1) / torch.full((), E2M1_MAX, device=x.device)
    if g is not None:
        q = q / g
    codes = encode_e4m3(q)
    divisor = decode_e4m3(codes)
    if g is not None:
        divisor = divisor * g
    # Dividing by infinity gives zeros with the signs of the values; 0 / 0 would not.
    divisor = divisor.masked_fill(codes == 0, math.inf)
    data = pack_e2m1(encode_e2m1((blocks / divisor.unsqueeze(-1)).flatten(-2)))
    scale = codes.view(torch.float8_e4m3fn)
    if scale_layout == "blocked":
        scale = to_blocked(scale if scale.ndim > 1 else scale.unsqueeze(0))
    return NVFP4Tensor(data, scale, g, tuple(x.shape), scale_layout)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Expand to ``dtype``, ``t.shape``.

    ``value * scale`` is exact. In float64 so is the product with the global scale; otherwise that product is rounded
    to float32, and the result to ``dtype`` (nearest even; beyond the range of float16, infinity). A block with a NaN
    scale is NaN throughout, and the sign bit of a scale is ignored, as in a GEMM.

    Raises:
        TypeError: ``t`` is no NVFP4Tensor, or ``dtype`` not float32, float16, bfloat16 or float64.
    """
    if not isinstance(t, NVFP4Tensor):
        raise TypeError(f"t is a {type(t).__name__}; pass an NVFP4Tensor, which quantize returns")
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype={dtype}: dequantize to float32, float16, bfloat16 or float64")
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode_packed_e2m1(t.data, compute)
    scale = decode_ue4m3(_rowmajor_scale(t), compute)
    expanded = (values.unflatten(-1, (-1, SF_VEC_SIZE)) * scale.unsqueeze(-1)).flatten(-2)
    if t.global_scale is not None:
        expanded = expanded * t.global_scale.to(compute)
    return expanded.to(dtype)


def _rowmajor_scale(t: NVFP4Tensor) -> torch.Tensor:
    *lead, k = t.shape
    if t.scale_layout == "rowmajor":
        return t.scale
    return from_blocked(t.scale, _rows(t.shape)[1], k // SF_VEC_SIZE).reshape(*lead, k // SF_VEC_SIZE)


def _rows(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Batches and rows of a logical shape; one dimension alone is one row."""
    return (tuple(shape[:-2]), shape[-2]) if len(shape) > 1 else ((), 1)


def resolve_global_scale(values: torch.Tensor, given, inverse) -> torch.Tensor | None:
    """The global scale as a float32 tensor without dimensions on the device of ``values``, or None.

    Args:
        values: what is to be quantized, float; only "auto" reads it.
        given: ``global_scale`` of :func:`quantize`. inverse: ``global_scale_inv`` of it.

    Raises:
        ValueError: both are given, or one is not positive and normal.
    """
    if inverse is not None:
        if given is not None:
            raise ValueError("global_scale and global_scale_inv are both given; pass the one that you have")
        inverse = _scalar(inverse, "global_scale_inv", values.device)
        return _check_factor(torch.ones_like(inverse) / inverse, "1 / global_scale_inv")
    if given is None:
        return None
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f'global_scale={given!r} is not a number, a tensor, "auto" or None')
        return _auto_global_scale(values)
    return _check_factor(_scalar(given, "global_scale", values.device), "global_scale")


def _auto_global_scale(values: torch.Tensor) -> torch.Tensor:
    magnitudes = values.abs().float()
    finite = torch.where(torch.isfinite(magnitudes), magnitudes, 0)
    amax = finite.amax() if finite.numel() else torch.zeros((), device=values.device)
    scale = amax / torch.full((), GLOBAL_SCALE_DIVISOR, device=values.device)
    return torch.where(amax == 0, 1.0, scale.clamp(min=FLOAT32_MIN_NORMAL))


def _scalar(number, name: str, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(number, dtype=torch.float32).detach()
    if tensor.numel() != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; pass one number, and quantize groups one by one"
        )
    tensor = tensor.reshape(())
    if tensor.device.type == "cpu" and device.type == "cuda" and not torch.compiler.is_compiling():
        # Filled there: a copy from the host would wait, and fail while a CUDA graph is captured.
        return torch.full((), _check_factor(tensor, name).item(), device=device)
    return tensor.to(device)


def _check_factor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Refuse what would make divisors vanish or overflow. On a GPU nothing is checked: reading would wait."""
    # While torch.compile traces, there is nothing to read.
    if torch.compiler.is_compiling():
        return tensor
    if tensor.device.type == "cpu" and not FLOAT32_MIN_NORMAL <= tensor.item() < math.inf:
        raise ValueError(
            f"{name}={tensor.item():g} is not a positive, normal float32 number; "
            'pass amax / 2688 (or its inverse as global_scale_inv), or global_scale="auto"'
        )
    return tensor


def _check_scale_layout(scale_layout: str) -> None:
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f'scale_layout={scale_layout!r} is neither "blocked" nor "rowmajor"')


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected)}; reshape it")

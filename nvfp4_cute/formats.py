"""NVFP4 numbers: the e2m1, e4m3 and ue8m0 codecs, and quantized tensors. Any device; nothing here needs a GPU.

An NVFP4 tensor holds e2m1 values in blocks of 16 along its last dimension K, one e4m3 scale a block, and optionally
one float32 ``global_scale``: ``x ~ value * scale * global_scale``. Two values share a byte, the even k in the low
nibble.

=======  ====================================  =======================================  =========================
format   code                                  finite values                            rounding of ``encode_*``
=======  ====================================  =======================================  =========================
e2m1     sign, 2 exponent, 1 mantissa bit      0, .5, 1, 1.5, 2, 3, 4, 6, both signs    nearest, ties to even code
e4m3     sign, 4 exponent, 3 mantissa bits     0, 2^-9 ... 448, both signs; 0x7F NaN    nearest, ties to even code
ue8m0    8 exponent bits                       2^-127 ... 2^127; 0xFF NaN               up, or toward zero
=======  ====================================  =======================================  =========================

``encode_e2m1`` and ``encode_e4m3`` give the bits of PTX ``cvt.rn.satfinite`` (PTX ISA 9.7.9.21): out-of-range
values and infinities become the largest finite value, -0 and values that round to it keep their sign, NaN becomes
0x7F in e4m3 and, since e2m1 has no NaN, +6 in e2m1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from nvfp4_cute.scale_layout import SF_VEC_SIZE, atom_counts, from_blocked, num_k_blocks, to_blocked

E2M1_MAX = 6.0
E4M3_MAX = 448.0
# |x| <= GLOBAL_SCALE_DIVISOR * global_scale is representable: the largest value times the largest block scale.
GLOBAL_SCALE_DIVISOR = E2M1_MAX * E4M3_MAX
FLOAT32_MIN_NORMAL = 2.0**-126
DATA_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

ScaleLayout = Literal["blocked", "rowmajor"]
SCALE_LAYOUTS = ("blocked", "rowmajor")


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> tuple[float, ...]:
    """Values of all codes with sign 0, by the IEEE rule (exponent field 0 is subnormal), exponents all finite."""
    steps = 1 << mantissa_bits
    fields = [divmod(code, steps) for code in range(1 << (exponent_bits + mantissa_bits))]
    return tuple(
        math.ldexp(mantissa if exponent == 0 else steps + mantissa, max(exponent, 1) - bias - mantissa_bits)
        for exponent, mantissa in fields
    )


_E2M1_MAGNITUDES = _magnitudes(2, 1, bias=1)
# The largest code of e4m3 is NaN instead of a value.
_E4M3_MAGNITUDES = _magnitudes(4, 3, bias=7)[:-1]

E2M1_VALUES: tuple[float, ...] = _E2M1_MAGNITUDES + tuple(-v for v in _E2M1_MAGNITUDES)
E4M3_VALUES: tuple[float, ...] = (
    *_E4M3_MAGNITUDES,
    math.nan,
    *(-v for v in _E4M3_MAGNITUDES),
    math.nan,
)
UE8M0_VALUES: tuple[float, ...] = (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)


# ---- codecs ----------------------------------------------------------------------------------------------------


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1: nearest, ties to even, saturating at 6, sign of zero kept, NaN to +6.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype.

    Returns:
        uint8 codes 0 to 15 of the same shape, one a byte (see :func:`pack_e2m1`).
    """
    # Comparisons with NaN are false in the sign and beyond every boundary in the search: code 7, which is +6.
    return _encode_minifloat(x, _E2M1_MAGNITUDES, sign_bit=0x8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values of unpacked e2m1 codes (uint8, 0 to 15) as float32, exactly. The inverse of :func:`encode_e2m1`."""
    return _lookup(E2M1_VALUES, codes, torch.float32)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3: nearest, ties to even, saturating at 448, sign of zero kept, NaN to 0x7F.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype
            (``.to(torch.float8_e4m3fn)`` rounds float64 twice, and whether it saturates depends on the release).

    Returns:
        uint8 codes of the same shape; ``.view(torch.float8_e4m3fn)`` is free.
    """
    codes = _encode_minifloat(x, _E4M3_MAGNITUDES, sign_bit=0x80)
    return codes.masked_fill_(torch.isnan(x), 0x7F)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values of e4m3 codes (uint8 or float8_e4m3fn) as float32, exactly; 0x7F and 0xFF give NaN."""
    return _lookup(E4M3_VALUES, codes.view(torch.uint8), torch.float32)


def decode_ue4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of block scales as the tensor cores read them: e4m3 with the sign bit ignored, 0x7F and 0xFF NaN.

    Args:
        codes: uint8 or float8_e4m3fn, any shape.
        dtype: float32 or float64; exact in both.
    """
    return _lookup(E4M3_VALUES[:128] * 2, codes.view(torch.uint8), dtype)


def encode_ue8m0(x: torch.Tensor, *, rounding: Literal["up", "zero"] = "up") -> torch.Tensor:
    """Round the magnitude to a power of two, as PTX ``cvt.rp`` ("up") or ``cvt.rz`` ("zero") ``.satfinite.ue8m0x2``.

    The sign is dropped. Magnitudes below 2^-127, zero included, give 2^-127 (code 0); above 2^127, infinity
    included, 2^127 (code 254). NaN gives 255.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        rounding: "up" for a scale that no value of the block exceeds, "zero" for the exponent of ``x`` itself.

    Returns:
        uint8 codes of the same shape.
    """
    if rounding not in ("up", "zero"):
        raise ValueError(f'rounding={rounding!r} is neither "up" nor "zero"')
    magnitude = _at_least_float32(x).abs()
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = exponent - 1
    if rounding == "up":
        power = power + (mantissa > 0.5)
    code = (power + 127).clamp(0, 254)
    code = torch.where(magnitude == 0, 0, torch.where(torch.isinf(magnitude), 254, code))
    return torch.where(torch.isnan(magnitude), 255, code).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Values of ue8m0 codes (uint8) as float32, exactly (code 0 is the subnormal 2^-127); 255 gives NaN."""
    return _lookup(UE8M0_VALUES, codes, torch.float32)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack e2m1 codes two a byte along the last dimension, the even index in the low nibble.

    Args:
        codes: uint8, 0 to 15, ``[..., K]`` with K even.

    Returns:
        uint8 ``[..., K/2]``; ``.view(torch.float4_e2m1fn_x2)`` is free.

    Raises:
        ValueError: K is odd.
    """
    k = codes.shape[-1]
    if k % 2:
        raise ValueError(f"K={k} is odd, and two values share a byte; pad K to {k + 1}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_e2m1`: uint8 or float4_e2m1fn_x2 ``[..., K/2]`` to uint8 codes ``[..., K]``."""
    data = packed.view(torch.uint8)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``decode_e2m1(unpack_e2m1(packed))`` without the codes in between.

    Args:
        packed: uint8 or float4_e2m1fn_x2, ``[..., K/2]``.
        dtype: float32 or float64; exact in both.

    Returns:
        ``dtype``, ``[..., K]``.
    """
    pairs = [(E2M1_VALUES[byte & 0xF], E2M1_VALUES[byte >> 4]) for byte in range(256)]
    return _lookup(pairs, packed.view(torch.uint8), dtype).flatten(-2)


def _encode_minifloat(x: torch.Tensor, magnitudes: tuple[float, ...], sign_bit: int) -> torch.Tensor:
    """Nearest code by search among the boundaries between neighbours; NaN gets sign 0 and the largest magnitude.

    The boundary between codes i and i + 1 is their mean, exact in float32. It belongs to the even one of the two:
    where that is i + 1, the boundary moves one representable step down, since the search takes equality as below.
    """
    x = _at_least_float32(x)
    means = [(low + high) / 2 for low, high in zip(magnitudes, magnitudes[1:], strict=False)]
    boundaries = torch.tensor(means, dtype=x.dtype, device=x.device)
    below = torch.nextafter(boundaries, torch.zeros_like(boundaries))
    boundaries[1::2] = below[1::2]
    codes = torch.bucketize(x.abs().contiguous(), boundaries, out_int32=True).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return codes | (negative.to(torch.uint8) * sign_bit)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen 16-bit floats, exactly; refuse what is no float."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"expected float16, bfloat16, float32 or float64; got {x.dtype}; convert with .float()"
        )
    return x if x.dtype == torch.float64 else x.float()


def _lookup(values, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values[code]`` for every code; entries that are tuples become a last dimension."""
    return torch.tensor(values, dtype=dtype, device=codes.device)[codes.int()]


# ---- quantized tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A quantized tensor of logical ``shape`` ``(..., K)``: ``value * scale * global_scale``.

    ``...`` is any number of dimensions; the last of them are the rows (none: one row), those before are batches.

    Attributes:
        data: uint8 or float4_e2m1fn_x2, ``[..., K/2]``.
        scale: float8_e4m3fn or uint8; "rowmajor": ``[..., K/16]``; "blocked": ``[batches..., rm, rk, 32, 4, 4]``
            (see :mod:`nvfp4_cute.scale_layout`).
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
    values = _at_least_float32(x.detach()).float()
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

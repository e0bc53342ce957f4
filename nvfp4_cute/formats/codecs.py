"""Encoders and decoders of e2m1, e4m3, e5m2, s8, ue8m0, int4 and uint4 numbers, on any device, without a GPU.

The record of a format (``block_format``) names its types. Two e2m1 values share a byte, with the even k in the low nibble.

| type | code | finite values | rounding of ``encode_*`` |
|---|---|---|---|
| e2m1 | sign, 2 exponent, 1 mantissa bit | 0, .5, 1, 1.5, 2, 3, 4, 6, both signs | nearest, ties to even code |
| e4m3 | sign, 4 exponent, 3 mantissa bits | 0, 2^-9 ... 448, both signs; 0x7F NaN | nearest, ties to even code |
| e5m2 | sign, 5 exponent, 2 mantissa bits | 0, 2^-16 ... 57344, both; 0x7C infinity | nearest, ties to even code |
| s8 | two's complement | -127 ... 127; -128 can be decoded | nearest, ties to even integer |
| ue8m0 | 8 exponent bits | 2^-127 ... 2^127; 0xFF NaN | up, or toward zero |
| int4 | value + 8, 4 bits | -8, -7 ... 7 | nearest, ties to even value |
| uint4 | 4 bits | 0, 1 ... 15 | nearest, ties to even value |

``encode_e2m1``, ``encode_e4m3`` and ``encode_e5m2`` give the bits of PTX ``cvt.rn.satfinite`` (PTX ISA 9.7.9.21). Out-of-range
values and infinities become the largest finite value. -0 and values that round to it keep their sign. NaN becomes 0x7F in e4m3
and e5m2. e2m1 has no NaN, so there it becomes +6.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nvfp4_cute.formats.block_format import E4M3_POWERS, INT4_ZERO_POINT, BlockFormat, NumberType

E4M3_MAX = 448.0
FLOAT32_MIN_NORMAL = 2.0**-126
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> tuple[float, ...]:
    """Lists the values of all codes with sign 0 by the IEEE rule: exponent field 0 is subnormal, and all exponents are finite."""
    steps = 1 << mantissa_bits
    fields = [divmod(code, steps) for code in range(1 << (exponent_bits + mantissa_bits))]
    return tuple(
        math.ldexp(mantissa if exponent == 0 else steps + mantissa, max(exponent, 1) - bias - mantissa_bits)
        for exponent, mantissa in fields
    )


_E2M1_MAGNITUDES = _magnitudes(2, 1, bias=1)
# In e4m3 the largest code is NaN.
_E4M3_MAGNITUDES = _magnitudes(4, 3, bias=7)[:-1]
# In e5m2 the largest exponent means infinity or NaN.
_E5M2_MAGNITUDES = _magnitudes(5, 2, bias=15)[:-4]

E2M1_VALUES: tuple[float, ...] = _E2M1_MAGNITUDES + tuple(-v for v in _E2M1_MAGNITUDES)
E4M3_VALUES: tuple[float, ...] = (
    *_E4M3_MAGNITUDES,
    math.nan,
    *(-v for v in _E4M3_MAGNITUDES),
    math.nan,
)
E5M2_VALUES: tuple[float, ...] = tuple(
    sign * magnitude
    for sign in (1.0, -1.0)
    for magnitude in (*_E5M2_MAGNITUDES, math.inf, math.nan, math.nan, math.nan)
)
UE8M0_VALUES: tuple[float, ...] = (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)


def _bits(values: Sequence[float]) -> tuple[int, ...]:
    """Returns the bits of float64 values as integers."""
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


# Bits of the value of every code, by type. The tables are integers because torch.compile turns floats into variables where
# sizes are dynamic, and treats -0.0 and 0.0 as equal.
_TABLES: dict[str, tuple[Any, ...]] = {
    "e2m1": _bits(E2M1_VALUES),
    "pairs of e2m1": tuple(_bits((E2M1_VALUES[byte & 0xF], E2M1_VALUES[byte >> 4])) for byte in range(256)),
    "e4m3": _bits(E4M3_VALUES),
    "e5m2": _bits(E5M2_VALUES),
    "ue4m3": _bits(E4M3_VALUES[:128] * 2),
    "ue8m0": _bits(UE8M0_VALUES),
    **{
        name: tuple(_bits((float((byte & 0xF) - zero), float((byte >> 4) - zero))) for byte in range(256))
        for name, zero in (("int4", INT4_ZERO_POINT), ("uint4", 0))
    },
}


# ---- codecs ----------------------------------------------------------------------------------------------------


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounds to e2m1: nearest, ties to even, saturating at 6, keeping the sign of zero, NaN to +6.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype.

    Returns:
        uint8 codes 0 to 15 in the same shape, one per byte (see :func:`pack_e2m1`).
    """
    # NaN gives code 7, which is +6: it compares false for the sign, and the search puts it after every boundary.
    return _encode_minifloat(x, _E2M1_MAGNITUDES, sign_bit=0x8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Decodes unpacked e2m1 codes (uint8, 0 to 15) to float32, exactly; the inverse of :func:`encode_e2m1`."""
    return _lookup("e2m1", codes, torch.float32)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to e4m3: nearest, ties to even, saturating at 448, keeping the sign of zero, NaN to 0x7F.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype
            (``.to(torch.float8_e4m3fn)`` rounds float64 twice, and its saturation depends on the release).

    Returns:
        uint8 codes in the same shape; ``.view(torch.float8_e4m3fn)`` is free.
    """
    codes = _encode_minifloat(x, _E4M3_MAGNITUDES, sign_bit=0x80)
    return codes.masked_fill_(torch.isnan(x), 0x7F)


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes e4m3 codes (uint8 or float8_e4m3fn) to float32 or float64, exactly; 0x7F and 0xFF give NaN."""
    return _lookup("e4m3", codes.view(torch.uint8), dtype)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Rounds to e5m2: nearest, ties to even, saturating at 57344 (also infinity), keeping the sign of zero, NaN to 0x7F.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype.

    Returns:
        uint8 codes in the same shape; ``.view(torch.float8_e5m2)`` is free.
    """
    codes = _encode_minifloat(x, _E5M2_MAGNITUDES, sign_bit=0x80)
    return codes.masked_fill_(torch.isnan(x), 0x7F)


def decode_e5m2(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes e5m2 codes (uint8 or float8_e5m2) to float32 or float64, exactly; 0x7C is infinity, 0x7D to 0x7F are NaN."""
    return _lookup("e5m2", codes.view(torch.uint8), dtype)


def encode_s8(x: torch.Tensor) -> torch.Tensor:
    """Rounds to integers: nearest, ties to even, saturating at -127 and 127, NaN to 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.

    Returns:
        uint8 in the same shape, two's complement; ``.view(torch.int8)`` is free.
    """
    whole = at_least_float32(x).round().clamp(-127, 127)
    return whole.masked_fill(torch.isnan(whole), 0).to(torch.int8).view(torch.uint8)


def decode_s8(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes integers (int8, or uint8 in two's complement) to float32 or float64, exactly."""
    return codes.view(torch.int8).to(dtype)


def decode_ue4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes block scales as tensor cores read them: e4m3 without the sign bit; 0x7F and 0xFF give NaN.

    Args:
        codes: uint8 or float8_e4m3fn, any shape.
        dtype: float32 or float64; exact in both.
    """
    return _lookup("ue4m3", codes.view(torch.uint8), dtype)


def encode_ue8m0(x: torch.Tensor, *, rounding: Literal["up", "zero"] = "up") -> torch.Tensor:
    """Rounds magnitudes to powers of two, like PTX ``cvt.rp`` ("up") or ``cvt.rz`` ("zero") ``.satfinite.ue8m0x2``.

    The sign is dropped. Magnitudes below 2^-127, including zero, give 2^-127 (code 0). Magnitudes above 2^127, including
    infinity, give 2^127 (code 254). NaN gives 255.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        rounding: "up" for a scale that no value of the block exceeds, "zero" for the exponent of ``x`` itself.

    Returns:
        uint8 codes in the same shape.
    """
    if rounding not in ("up", "zero"):
        raise ValueError(f'rounding={rounding!r} is neither "up" nor "zero"')
    magnitude = at_least_float32(x).abs()
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = exponent - 1
    if rounding == "up":
        power = power + (mantissa > 0.5)
    code = (power + 127).clamp(0, 254)
    code = torch.where(magnitude == 0, 0, torch.where(torch.isinf(magnitude), 254, code))
    return torch.where(torch.isnan(magnitude), 255, code).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes ue8m0 codes (uint8 or float8_e8m0fnu) to float32 or float64, exactly; 255 gives NaN.

    Code 0 is 2^-127, which is subnormal in float32.
    """
    return _lookup("ue8m0", codes.view(torch.uint8), dtype)


def decode_relative(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes scales of MXFP4_FP8 (``fp8_order``), uint8 [..., K/32], to float32 or float64, exactly."""
    part = 2 * torch.arange(4, device=codes.device)
    largest = ((codes[..., :4].int() & 3) << part).sum(-1, keepdim=True)
    power = (codes >> 3).int() + largest - (126 + E4M3_POWERS)
    return torch.ldexp(torch.ones_like(power, dtype=dtype), power)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Packs e2m1 codes, two per byte along the last dimension, the even index in the low nibble.

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
    """Unpacks uint8 or float4_e2m1fn_x2 ``[..., K/2]`` to uint8 codes ``[..., K]``; the inverse of :func:`pack_e2m1`."""
    data = packed.view(torch.uint8)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Computes ``decode_e2m1(unpack_e2m1(packed))`` without storing the codes.

    Args:
        packed: uint8 or float4_e2m1fn_x2, ``[..., K/2]``.
        dtype: float32 or float64; exact in both.

    Returns:
        ``dtype``, ``[..., K]``.
    """
    return _lookup("pairs of e2m1", packed.view(torch.uint8), dtype).flatten(-2)


def encode_int4(x: torch.Tensor) -> torch.Tensor:
    """Rounds to integers, to nearest even, and clamps to -8 to 7; NaN gives 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.

    Returns:
        uint8 codes in the same shape: value + 8.
    """
    return (_rounded(x, -8, 7) + INT4_ZERO_POINT).to(torch.uint8)


def decode_int4(codes: torch.Tensor) -> torch.Tensor:
    """Decodes unpacked codes of :func:`encode_int4` to float32."""
    return codes.float() - INT4_ZERO_POINT


def encode_uint4(x: torch.Tensor) -> torch.Tensor:
    """Rounds to integers, to nearest even, and clamps to 0 to 15; the integers are their codes."""
    return _rounded(x, 0, 15).to(torch.uint8)


def _rounded(x: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return at_least_float32(x).nan_to_num(nan=0.0).round().clamp(least, most)


# By name of a NumberType. ENCODERS map values to bytes, DECODERS map bytes and a dtype (float32, float64) to values.
ENCODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e2m1": lambda x: pack_e2m1(encode_e2m1(x)),
    "e4m3": encode_e4m3,
    "e5m2": encode_e5m2,
    "s8": encode_s8,
    "int4": lambda x: pack_e2m1(encode_int4(x)),
    "uint4": lambda x: pack_e2m1(encode_uint4(x)),
}
DECODERS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "e2m1": decode_packed_e2m1,
    "e4m3": decode_e4m3,
    "e5m2": decode_e5m2,
    "s8": decode_s8,
    "ue4m3": decode_ue4m3,
    "ue8m0": decode_ue8m0,
    "relative": lambda scale, dtype: decode_relative(scale, dtype),
    "int4": lambda packed, dtype: _lookup("int4", packed, dtype).flatten(-2),
    "uint4": lambda packed, dtype: _lookup("uint4", packed, dtype).flatten(-2),
    **{name: lambda scale, dtype: scale.to(dtype) for name in ("fp32", "bf16", "fp16")},
    # The low half of a word is the scale.
    "bf16_zero": lambda words, dtype: words.contiguous().view(torch.bfloat16)[..., ::2].to(dtype),
    "fp16_zero": lambda words, dtype: words.contiguous().view(torch.float16)[..., ::2].to(dtype),
}


def encode(x: torch.Tensor, number: NumberType) -> torch.Tensor:
    """Encodes elements ``[..., K]`` as stored: uint8 ``[..., K * bits / 8]``, rounded to nearest even, saturating.

    Args:
        x: float16, bfloat16, float32 or float64.
        number: type of the elements: e2m1, e4m3, e5m2 or s8.
    """
    return ENCODERS[number.name](x)


def decode(stored: torch.Tensor, number: NumberType, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes stored elements or scales exactly: ``[..., bytes]`` to ``[..., numbers]``.

    Args:
        stored: tensor in one of the dtypes of ``number``. The sign of a ue4m3 is ignored.
        number: type of the stored numbers.
        dtype: float32 or float64.
    """
    return DECODERS[number.name](stored, dtype)


def decode_blocks(
    data: torch.Tensor, scale: torch.Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Computes ``(element - zero point) * scale`` for stored rows, each operation rounded to ``dtype``.

    Args:
        data: ``[..., bytes of K]``, in a dtype of the format.
        scale: row-major ``[..., K / block_k]``, rounded up, with scales for every row.
        format: format of the rows.
        dtype: float32 or float64.

    Returns:
        ``dtype``, ``[..., K]``.
    """
    decoded = decode(data, format.element, dtype)
    block_k = format.block_of(decoded.shape[-1])
    if decoded.shape[-1] % block_k:  # the last block is partial
        factors = decode(scale, format.scale, dtype).repeat_interleave(block_k, -1)
        return decoded.mul_(factors[..., : decoded.shape[-1]])
    values = decoded.unflatten(-1, (-1, block_k))
    if format.has_zero_points:
        values = values.sub_((scale >> 16).to(dtype).unsqueeze(-1))
    return values.mul_(decode(scale, format.scale, dtype).unsqueeze(-1)).flatten(-2)


def _encode_minifloat(x: torch.Tensor, magnitudes: tuple[float, ...], sign_bit: int) -> torch.Tensor:
    """Finds the nearest code by a search among the boundaries between neighbors; NaN gets sign 0 and the largest magnitude.

    The boundary between codes i and i + 1 is their mean, which is exact in float32. A tie goes to the even code of the two. The
    search puts equality below, so where i + 1 is even the boundary moves down by one representable step.
    """
    x = at_least_float32(x)
    boundaries = _constant(_boundaries, magnitudes, x.dtype, like=x)
    codes = torch.bucketize(x.abs().contiguous(), boundaries, out_int32=True).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return codes | (negative.to(torch.uint8) * sign_bit)


def _boundaries(magnitudes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    means = [(low + high) / 2 for low, high in zip(magnitudes, magnitudes[1:], strict=False)]
    boundaries = torch.tensor(means, dtype=dtype, device=device)
    below = torch.nextafter(boundaries, torch.zeros_like(boundaries))
    boundaries[1::2] = below[1::2]
    return boundaries


def check_is_float(x: torch.Tensor) -> None:
    """Raises TypeError for a dtype that cannot be quantized."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"expected float16, bfloat16, float32 or float64; got {x.dtype}; convert with .float()"
        )


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widens 16-bit floats exactly. Raises TypeError for other types than floats."""
    check_is_float(x)
    return x if x.dtype == torch.float64 else x.float()


def _lookup(name: str, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Looks up the value of every code; entries that are tuples become a last dimension."""
    return _constant(_values, name, dtype, like=codes)[codes.int()]


def _values(name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    bits = torch.tensor(_TABLES[name], dtype=torch.int64, device=device)
    return bits.view(torch.float64).to(dtype)


_constants: dict[tuple[Any, ...], torch.Tensor] = {}


def _constant(
    make: Callable[..., torch.Tensor], of: Any, dtype: torch.dtype, *, like: torch.Tensor
) -> torch.Tensor:
    """Returns ``make(of, dtype, device)``, made once for each device, because a GPU waits for a copy from the host.

    Tensors without values, and those of a function that torch records, get a constant of their own.
    """
    if type(like) is not torch.Tensor or like.is_meta or torch.compiler.is_compiling():
        return make(of, dtype, like.device)
    key = make, of, dtype, like.device
    if key not in _constants:
        with torch.inference_mode(False):
            _constants[key] = make(of, dtype, like.device)
    return _constants[key]

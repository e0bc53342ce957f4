"""Numbers of block-scaled formats: the codecs of e2m1, e4m3, e5m2, s8, ue8m0, int4 and uint4. Any device; no GPU is needed.

Which of them a format has is said by its record (``block_format``). Of e2m1, two values share a byte, the even k in the low
nibble.

| format | code | finite values | rounding of ``encode_*`` |
|---|---|---|---|
| e2m1 | sign, 2 exponent, 1 mantissa bit | 0, .5, 1, 1.5, 2, 3, 4, 6, both signs | nearest, ties to even code |
| e4m3 | sign, 4 exponent, 3 mantissa bits | 0, 2^-9 ... 448, both signs; 0x7F NaN | nearest, ties to even code |
| e5m2 | sign, 5 exponent, 2 mantissa bits | 0, 2^-16 ... 57344, both; 0x7C infinity | nearest, ties to even code |
| s8 | two's complement | -127 ... 127; -128 is decoded, too | nearest, ties to even integer |
| ue8m0 | 8 exponent bits | 2^-127 ... 2^127; 0xFF NaN | up, or toward zero |
| int4 | value + 8, 4 bits | -8, -7 ... 7 | nearest, ties to even value |
| uint4 | 4 bits | 0, 1 ... 15 | nearest, ties to even value |

``encode_e2m1``, ``encode_e4m3`` and ``encode_e5m2`` give the bits of PTX ``cvt.rn.satfinite`` (PTX ISA 9.7.9.21):
out-of-range values and infinities become the largest finite value, -0 and values that round to it keep their sign, NaN
becomes 0x7F in e4m3 and e5m2 and, since e2m1 has no NaN, +6 in e2m1.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nvfp4_cute.formats.block_format import INT4_ZERO_POINT, BlockFormat, NumberType

E4M3_MAX = 448.0
FLOAT32_MIN_NORMAL = 2.0**-126
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
# The largest exponent of e5m2 is that of infinity and of NaN.
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
    """float64 values as integers."""
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


# Bits of the values of every code, by what the code is. Of floats torch.compile makes variables where sizes are dynamic, and
# takes -0.0 and 0.0 for the same one.
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
    return _lookup("e2m1", codes, torch.float32)


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


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of e4m3 codes (uint8 or float8_e4m3fn) as float32 or float64, exactly; 0x7F and 0xFF give NaN."""
    return _lookup("e4m3", codes.view(torch.uint8), dtype)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Round to e5m2: nearest, ties to even, saturating at 57344, infinity too, sign of zero kept, NaN to 0x7F.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Rounded once, from the exact value of its own dtype.

    Returns:
        uint8 codes of the same shape; ``.view(torch.float8_e5m2)`` is free.
    """
    codes = _encode_minifloat(x, _E5M2_MAGNITUDES, sign_bit=0x80)
    return codes.masked_fill_(torch.isnan(x), 0x7F)


def decode_e5m2(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of e5m2 codes (uint8 or float8_e5m2) as float32 or float64, exactly; 0x7C is infinity, 0x7D to 0x7F NaN."""
    return _lookup("e5m2", codes.view(torch.uint8), dtype)


def encode_s8(x: torch.Tensor) -> torch.Tensor:
    """Round to integers: nearest, ties to even, saturating at 127 on both sides, NaN to 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.

    Returns:
        uint8 of the same shape, two's complement; ``.view(torch.int8)`` is free.
    """
    whole = at_least_float32(x).round().clamp(-127, 127)
    return whole.masked_fill(torch.isnan(whole), 0).to(torch.int8).view(torch.uint8)


def decode_s8(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of integers (int8, or uint8 in two's complement) as float32 or float64, exactly."""
    return codes.view(torch.int8).to(dtype)


def decode_ue4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of block scales as the tensor cores read them: e4m3 with the sign bit ignored, 0x7F and 0xFF NaN.

    Args:
        codes: uint8 or float8_e4m3fn, any shape.
        dtype: float32 or float64; exact in both.
    """
    return _lookup("ue4m3", codes.view(torch.uint8), dtype)


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
    magnitude = at_least_float32(x).abs()
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = exponent - 1
    if rounding == "up":
        power = power + (mantissa > 0.5)
    code = (power + 127).clamp(0, 254)
    code = torch.where(magnitude == 0, 0, torch.where(torch.isinf(magnitude), 254, code))
    return torch.where(torch.isnan(magnitude), 255, code).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of ue8m0 codes (uint8 or float8_e8m0fnu) as float32 or float64, exactly; 255 gives NaN.

    Code 0 is 2^-127, which is subnormal in float32.
    """
    return _lookup("ue8m0", codes.view(torch.uint8), dtype)


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
    return _lookup("pairs of e2m1", packed.view(torch.uint8), dtype).flatten(-2)


def encode_int4(x: torch.Tensor) -> torch.Tensor:
    """Round to integers, to nearest even, cut to -8 to 7; NaN gives 0.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.

    Returns:
        uint8 codes of the same shape, value + 8.
    """
    return (_rounded(x, -8, 7) + INT4_ZERO_POINT).to(torch.uint8)


def decode_int4(codes: torch.Tensor) -> torch.Tensor:
    """Values of unpacked codes of :func:`encode_int4` as float32."""
    return codes.float() - INT4_ZERO_POINT


def encode_uint4(x: torch.Tensor) -> torch.Tensor:
    """The same of integers 0 to 15, which are their codes."""
    return _rounded(x, 0, 15).to(torch.uint8)


def _rounded(x: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return at_least_float32(x).nan_to_num(nan=0.0).round().clamp(least, most)


# By name of a NumberType: values to bytes; bytes and float32 or float64 to values of that dtype.
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
    "int4": lambda packed, dtype: _lookup("int4", packed, dtype).flatten(-2),
    "uint4": lambda packed, dtype: _lookup("uint4", packed, dtype).flatten(-2),
    **{name: lambda scale, dtype: scale.to(dtype) for name in ("fp32", "bf16", "fp16")},
    # The low halves of words.
    "bf16_zero": lambda words, dtype: words.contiguous().view(torch.bfloat16)[..., ::2].to(dtype),
    "fp16_zero": lambda words, dtype: words.contiguous().view(torch.float16)[..., ::2].to(dtype),
}


def encode(x: torch.Tensor, number: NumberType) -> torch.Tensor:
    """Elements ``[..., K]`` as stored: uint8 ``[..., K * bits / 8]``, rounded to nearest even, saturating.

    Args:
        x: float16, bfloat16, float32 or float64.
        number: e2m1, e4m3, e5m2 or s8.
    """
    return ENCODERS[number.name](x)


def decode(stored: torch.Tensor, number: NumberType, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of stored elements or scales, exactly: ``[..., bytes]`` to ``[..., numbers]``.

    Args:
        stored: one of the dtypes of ``number``. The sign of a ue4m3 is ignored.
        dtype: float32 or float64.
    """
    return DECODERS[number.name](stored, dtype)


def decode_blocks(
    data: torch.Tensor, scale: torch.Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``(element - zero point) * scale`` of stored rows, each operation rounded to ``dtype``.

    Args:
        data: ``[..., bytes of K]``, of a dtype of the format. scale: row-major, ``[..., K / block_k]``, one for each row.
        dtype: float32 or float64.

    Returns:
        ``dtype``, ``[..., K]``.
    """
    decoded = decode(data, format.element, dtype)
    values = decoded.unflatten(-1, (-1, format.block_of(decoded.shape[-1])))
    if format.has_zero_points:
        values = values.sub_((scale >> 16).to(dtype).unsqueeze(-1))
    return values.mul_(decode(scale, format.scale, dtype).unsqueeze(-1)).flatten(-2)


def _encode_minifloat(x: torch.Tensor, magnitudes: tuple[float, ...], sign_bit: int) -> torch.Tensor:
    """Nearest code by search among the boundaries between neighbours; NaN gets sign 0 and the largest magnitude.

    The boundary between codes i and i + 1 is their mean, exact in float32. It belongs to the even one of the two:
    where that is i + 1, the boundary moves one representable step down, since the search takes equality as below.
    """
    x = at_least_float32(x)
    means = [(low + high) / 2 for low, high in zip(magnitudes, magnitudes[1:], strict=False)]
    boundaries = torch.tensor(means, dtype=x.dtype, device=x.device)
    below = torch.nextafter(boundaries, torch.zeros_like(boundaries))
    boundaries[1::2] = below[1::2]
    codes = torch.bucketize(x.abs().contiguous(), boundaries, out_int32=True).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return codes | (negative.to(torch.uint8) * sign_bit)


def check_is_float(x: torch.Tensor) -> None:
    """Raise TypeError for a dtype that is not quantized."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"expected float16, bfloat16, float32 or float64; got {x.dtype}; convert with .float()"
        )


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen 16-bit floats, exactly; refuse what is no float."""
    check_is_float(x)
    return x if x.dtype == torch.float64 else x.float()


def _lookup(name: str, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of every code; entries that are tuples become a last dimension."""
    bits = torch.tensor(_TABLES[name], dtype=torch.int64, device=codes.device)
    return bits.view(torch.float64).to(dtype)[codes.int()]

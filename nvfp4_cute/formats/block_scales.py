"""Computes block scales of every type from the blocks' largest magnitudes."""

from typing import Literal, get_args

import torch

from nvfp4_cute.formats.block_format import FOUR_OVER_SIX, NVFP4, BlockFormat
from nvfp4_cute.formats.codecs import decode_ue8m0, encode_e4m3, encode_ue8m0

ScaleRounding = Literal["up", "down"]
Method = Literal["amax", "four_over_six"]


def with_method(format: BlockFormat, method: str) -> BlockFormat:
    """Returns the format with this method of finding block scales. Raises ValueError if there is no such method."""
    if method == "amax":
        return format
    if method not in get_args(Method):
        raise ValueError(f'method={method!r} is neither "amax" nor "four_over_six"')
    if format.stored != NVFP4:
        raise ValueError(
            f'method="four_over_six" chooses scales of NVFP4, not of {format.title}; leave it out'
        )
    return FOUR_OVER_SIX


def scale_codes(
    amax: torch.Tensor, format: BlockFormat, global_scale: torch.Tensor | None, rounding: ScaleRounding = "up"
) -> torch.Tensor:
    """Computes scales, as stored, from the largest magnitudes of their blocks. ``max`` is the format's largest element.

    - ue4m3: e4m3(amax / max), after dividing by the global scale where there is one; nearest even, at most 448.
    - fp32: amax / max, rounded to float32; an infinite amax counts as the largest float32 number.
    - bf16, fp16: amax / max rounded to float32 and then to the type, at most its largest number.
    - ue8m0 "up": the smallest power of two that is at least amax / max, so that nothing saturates (except where the quotient
      rounds to a power of two). It is what ``cvt.rp.satfinite.ue8m0x2`` makes of the quotient, and NVIDIA's recipe for MXFP8
      (arXiv 2506.08027, section 3.1).
    - ue8m0 "down": 2^(floor(log2(amax)) - emax), with emax the exponent of the format's largest power of two, as section 6.3 of
      the OCP Microscaling Formats specification v1.0 converts. Elements over max saturate: in MXFP4 the largest of a block may
      lose a quarter of its value (8 becomes 6).

    "up" is the default. The root-mean-square error for normally distributed values is 2.66 % in MXFP8 E4M3 ("down": 2.93 %) and
    11.56 % in MXFP4 ("down": 11.50 %).

    The smallest ue8m0 scale is 2^-127, also for a block of zeros. Infinity gives 2^127, and NaN gives NaN.

    Args:
        amax: float32, not negative.
        format: the format, which says the type of the scales.
        global_scale: float32 without dimensions, or one that broadcasts over ``amax``; or None.
        rounding: rounding of ue8m0 scales.

    Returns:
        Scales in the shape of ``amax``: uint8, or torch's dtype where torch has the type.

    Raises:
        ValueError: ``rounding`` is neither "up" nor "down", or is "down" for other scales than ue8m0.
    """
    check_scale_rounding(rounding, format)
    if format.scale.name == "ue8m0" and rounding == "down":
        # In float64, because a tiny amax must not round up to the next power of two.
        return encode_ue8m0(amax.double() * 2.0**-format.element.max_exponent, rounding="zero")
    if format.scale.name == "fp32":
        amax = amax.clamp(max=torch.finfo(torch.float32).max)
    q = scale_quotient(amax, format, global_scale)
    if format.scale.name == "ue8m0":
        return encode_ue8m0(q, rounding="up")
    if format.scale.bits == 16:
        (dtype,) = format.scale_dtypes
        return q.clamp(max=format.scale.max).to(dtype)
    return encode_e4m3(q) if format.scale.name == "ue4m3" else q


def scale_quotient(
    amax: torch.Tensor, format: BlockFormat, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """Computes scales before rounding, float32: ``amax / max``, divided by the global scale if there is one."""
    # Divides by a tensor on the same device: on CUDA torch multiplies by the inverse of a host number.
    q = amax / torch.full((), format.element.max, dtype=torch.float32, device=amax.device)
    return q if global_scale is None else q / global_scale


def nearest_rounding(format: BlockFormat) -> ScaleRounding:
    """Returns the rounding with the smaller error by the figures of :func:`scale_codes`: "down" for MXFP4, otherwise "up"."""
    return "down" if (format.scale.name, format.element.name) == ("ue8m0", "e2m1") else "up"


def check_scale_rounding(rounding: str, format: BlockFormat) -> None:
    """Raises ValueError if the rounding does not exist or the format's scales do not have it."""
    if rounding not in ("up", "down"):
        raise ValueError(f'scale_rounding={rounding!r} is neither "up" nor "down"')
    if rounding == "down" and format.scale.name != "ue8m0":
        raise ValueError(
            f'scale_rounding="down" of {format.title}, whose scales are not powers of two; leave it out'
        )


def from_packed_ue8m0(packed: torch.Tensor, k: int, block_k: int = 128) -> torch.Tensor:
    """Converts packed powers of two, as DeepGEMM passes them to its kernels for Blackwell, to row-major float32 scales.

    Args:
        packed: int32 [..., rows, ceil(k / (4 * block_k))] of any strides (in DeepGEMM rows are adjacent). Byte j of word p is
            the ue8m0 code of block 4 p + j, the lowest byte first.
        k: values per row, a multiple of ``block_k``.
        block_k: values per scale.

    Returns:
        [..., rows, k / block_k], contiguous: ``a_scale`` of FP8_1x128.

    Raises:
        TypeError, ValueError: ``packed`` has another dtype, or a number of words that does not fit ``k``.
    """
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"packed is {packed!r}; pass an int32 torch.Tensor")
    if not isinstance(k, int):
        raise TypeError(f"k={k!r} is not an int; pass the values per row")
    if packed.dtype != torch.int32:
        raise TypeError(f"packed has dtype {packed.dtype}; expected torch.int32, four ue8m0 codes a word")
    if k <= 0 or k % block_k:
        raise ValueError(f"k={k} is not a positive multiple of {block_k}; pad K")
    words = -(-k // (4 * block_k))
    if packed.ndim < 2 or packed.shape[-1] != words:
        raise ValueError(f"packed has shape {list(packed.shape)}; expected [..., rows, {words}] of K={k}")
    # A dimension of extent 1 may have any stride in torch.
    flat = packed.contiguous().as_strided((packed.numel(),), (1,)).view(torch.uint8)
    codes = flat.view(*packed.shape[:-1], 4 * words)[..., : k // block_k]
    return decode_ue8m0(codes).contiguous()

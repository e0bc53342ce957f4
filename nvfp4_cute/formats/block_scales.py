"""Scales of blocks from their largest magnitudes: what every kind of scale makes of them."""

from typing import Literal

import torch

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.codecs import decode_ue8m0, encode_e4m3, encode_ue8m0

ScaleRounding = Literal["up", "down"]


def scale_codes(
    amax: torch.Tensor, format: BlockFormat, global_scale: torch.Tensor | None, rounding: ScaleRounding = "up"
) -> torch.Tensor:
    """Scales as stored, from the largest magnitudes of their blocks. ``max`` is the format's largest element.

    - ue4m3: e4m3(amax / max), after a division by the global scale where there is one: nearest even, at most 448.
    - fp32: amax / max, rounded to float32; of an infinite amax as of the largest float32 number.
    - bf16, fp16: the same rounded once more, at most the largest number of the type.
    - ue8m0, a power of two, "up": the least that is not under amax / max, so that nothing saturates, but where the quotient
      rounds to a power of two. It is what ``cvt.rp.satfinite.ue8m0x2`` makes of the quotient, and NVIDIA's recipe for MXFP8
      (arXiv 2506.08027, section 3.1).
    - ue8m0, "down": 2^(floor(log2(amax)) - emax), emax the exponent of the format's largest power of two, as the OCP
      Microscaling Formats specification v1.0 converts, section 6.3. Elements over max saturate: in MXFP4 the largest of a
      block may lose a quarter of itself (8 becomes 6).

    "up" is the default: of normally distributed values it loses 2.66 % (root mean square) in MXFP8 E4M3, "down" 2.93 %; in
    MXFP4 11.56 % and 11.50 %.

    ue8m0 goes from 2^-127 on; a block of zeros has that. Infinity has 2^127. A NaN gives a NaN.

    Args:
        amax: float32, not negative.
        global_scale: float32 without dimensions, or None.
        rounding: of ue8m0.

    Returns:
        uint8, or of scales that are floats of torch their dtype, of the shape of ``amax``.

    Raises:
        ValueError: ``rounding`` is neither, or "down" of other scales.
    """
    check_scale_rounding(rounding, format)
    if format.scale.name == "ue8m0" and rounding == "down":
        # In float64: a tiny amax must not round up to the next power of two.
        return encode_ue8m0(amax.double() * 2.0**-format.element.max_exponent, rounding="zero")
    if format.scale.name == "fp32":
        amax = amax.clamp(max=torch.finfo(torch.float32).max)
    # A tensor on the same device: on CUDA torch turns division by a host number into multiplication by its inverse.
    q = amax / torch.full((), format.element.max, dtype=torch.float32, device=amax.device)
    if global_scale is not None:
        q = q / global_scale
    if format.scale.name == "ue8m0":
        return encode_ue8m0(q, rounding="up")
    if format.scale.bits == 16:
        (dtype,) = format.scale_dtypes
        return q.clamp(max=format.scale.max).to(dtype)
    return encode_e4m3(q) if format.scale.name == "ue4m3" else q


def nearest_rounding(format: BlockFormat) -> ScaleRounding:
    """The rounding that loses less: of ue8m0 with e2m1 elements "down", else "up", by the figures of :func:`scale_codes`."""
    return "down" if (format.scale.name, format.element.name) == ("ue8m0", "e2m1") else "up"


def check_scale_rounding(rounding: str, format: BlockFormat) -> None:
    """Raises ValueError where it is no rounding of a format's scales."""
    if rounding not in ("up", "down"):
        raise ValueError(f'scale_rounding={rounding!r} is neither "up" nor "down"')
    if rounding == "down" and format.scale.name != "ue8m0":
        raise ValueError(
            f'scale_rounding="down" of {format.title}, whose scales are no powers of two; leave it out'
        )


def from_packed_ue8m0(packed: torch.Tensor, k: int, block_k: int = 128) -> torch.Tensor:
    """Float32 scales in rows, from the packed powers of two that DeepGEMM passes to its kernels for Blackwell.

    Args:
        packed: int32 [..., rows, ceil(k / (4 * block_k))] of any strides (DeepGEMM has rows next to each other). Byte j of word p
            is the ue8m0 code of block 4 p + j, the lowest byte first.
        k: values of a row, a multiple of ``block_k``.

    Returns:
        [..., rows, k / block_k], contiguous: ``a_scale`` of FP8_1x128.

    Raises:
        TypeError, ValueError: ``packed`` has another dtype, or words for another ``k``.
    """
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"packed is {packed!r}; pass an int32 torch.Tensor")
    if not isinstance(k, int):
        raise TypeError(f"k={k!r} is no int; pass the values of a row")
    if packed.dtype != torch.int32:
        raise TypeError(f"packed has dtype {packed.dtype}; expected torch.int32, four ue8m0 codes a word")
    if k <= 0 or k % block_k:
        raise ValueError(f"k={k} is not a positive multiple of {block_k}; pad K")
    words = -(-k // (4 * block_k))
    if packed.ndim < 2 or packed.shape[-1] != words:
        raise ValueError(f"packed has shape {list(packed.shape)}; expected [..., rows, {words}] of K={k}")
    # Of an extent of 1 torch leaves any stride.
    flat = packed.contiguous().as_strided((packed.numel(),), (1,)).view(torch.uint8)
    codes = flat.view(*packed.shape[:-1], 4 * words)[..., : k // block_k]
    return decode_ue8m0(codes).contiguous()

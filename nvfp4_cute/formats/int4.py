"""Converts int4 weights (``block_format.int4_format``) between the layouts of checkpoints and of kernels."""

import torch

from nvfp4_cute.formats.block_format import INT4_ZERO_POINT, int4_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, check_is_tensor
from nvfp4_cute.formats.codecs import decode, pack_e2m1
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.formats.zero_points import FLOATS, scale_words


def int4_tensor(
    codes: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None = None
) -> BlockScaledTensor:
    """Makes int4 weights from codes, scales and zero points: ``(code - zero point) * scale``.

    Args:
        codes: integers 0 to 15, [..., N, K].
        scale: float16, bfloat16 or float32, [..., N, K / block] with a block of 32, 64 or 128; or [..., N, 1], one per row,
            which is repeated for blocks of 128 (or the largest block that divides K).
        zero_points: integers 0 to 16 in the shape of ``scale``. None means 8, as float32 scales require. If all are 8, the
            result has a format without zero points; finding out reads them, which waits for a GPU. On the meta device nothing
            is read.

    Returns:
        A contiguous tensor with blocked scales, of format ``int4_format(block, scale.dtype, zero_points=...)``.

    Raises:
        TypeError: an argument is not a tensor, or codes or zero points are not integers.
        ValueError: shapes do not fit each other, codes or zero points are out of range, or the format does not exist.
    """
    of_blocks = {"scale": scale} if zero_points is None else {"scale": scale, "zero_points": zero_points}
    for name, part in {"codes": codes, **of_blocks}.items():
        check_is_tensor(name, part)
        if name != "scale" and (part.is_floating_point() or part.is_complex()):
            raise TypeError(f"{name} is {part.dtype}; expected integers: round it, and pass {name}.int()")
    if codes.ndim < 2:
        raise ValueError(f"codes has shape {list(codes.shape)}; expected [..., N, K]")
    *lead, k = codes.shape
    for name, part in of_blocks.items():
        if list(part.shape[:-1]) != lead or part.shape != scale.shape or k % max(part.shape[-1], 1):
            raise ValueError(
                f"{name} has shape {list(part.shape)}; expected {lead} and K / block of codes {list(codes.shape)}"
            )
    if codes.numel() and not codes.is_meta and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise ValueError(
            f"codes are {int(codes.min())} to {int(codes.max())}; expected 0 to 15: add 8 to signed values"
        )
    if zero_points is not None and not zero_points.is_meta and bool((zero_points == INT4_ZERO_POINT).all()):
        zero_points = None
    blocks = scale.shape[-1]
    if blocks == 1:
        blocks = next((k // block for block in (128, 64, 32) if k % block == 0), 1)
        scale = scale.expand(*lead, blocks)
        zero_points = None if zero_points is None else zero_points.expand(*lead, blocks)
    format = int4_format(k // blocks, scale.dtype, zero_points=zero_points is not None)
    stored = scale if zero_points is None else scale_words(scale, zero_points)
    data = pack_e2m1(codes.to(torch.uint8))
    return BlockScaledTensor(data, to_blocked(stored), None, tuple(codes.shape), format=format)


def int4_scale(t: BlockScaledTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row-major scales, in their own dtype, and uint8 zero points of int4 weights, [..., N, K / block] each.

    Raises:
        ValueError: the weights have another format.
    """
    if not t.format.is_int4:
        raise ValueError(
            f"t is {t.format.title}; expected int4 weights: quantize(weight, format=int4_format(128))"
        )
    stored = t.with_scale_layout("rowmajor").scale
    if not t.format.has_zero_points:
        return stored, torch.full_like(stored, INT4_ZERO_POINT, dtype=torch.uint8)
    return decode(stored, t.format.scale).to(FLOATS[t.format.scale.name]), (stored >> 16).to(torch.uint8)

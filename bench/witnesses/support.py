"""Shared by the files of this folder: operands, references in float64, and the choice of a kernel by name."""

import sys
from collections.abc import Callable

import torch

from nvfp4_cute.formats.codecs import decode_packed_e2m1

Run = Callable[[], None]


def main(runs: dict[str, Run]) -> None:
    """Runs the kernel whose name is the first argument, with a fixed seed."""
    torch.manual_seed(0)
    runs[sys.argv[1]]()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares a result with its reference. Raises AssertionError if the relative error of the norm is above `tolerance`."""
    a, b = found.detach().cpu().double(), expected.detach().cpu().double()
    assert a.shape == b.shape, f"shape {tuple(a.shape)}, not {tuple(b.shape)}"
    size = b.norm()
    error = float((a - b).norm() / size) if size else float(a.norm())
    print(f"relative error {error:.2g}")
    assert error <= tolerance, f"relative error {error:.3g} is above {tolerance}"


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns normally distributed values on the virtual GPU."""
    return (torch.randn(*shape) * scale).to(dtype).cuda()


def int32(values: list[int] | torch.Tensor) -> torch.Tensor:
    """Returns integers on the virtual GPU."""
    return torch.as_tensor(values).to(torch.int32).cuda()


def blocked(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns FP8 scales ``[rows / 128, K / 64, 32, 4, 4]`` as row-major float64 ``[rows, K / 16]``."""
    bits = scale.cpu().contiguous().view(torch.float8_e4m3fn).double()
    tiles, columns = bits.shape[:2]
    return bits.permute(0, 3, 2, 1, 4).reshape(tiles * 128, columns * 4)[:rows]


def nvfp4(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns values of packed E2M1 data ``[rows, K / 2]`` and row-major float64 scales ``[rows, K / 16]``."""
    packed = data.cpu().contiguous().view(torch.uint8)
    return decode_packed_e2m1(packed, torch.float64) * scale.repeat_interleave(16, -1)


def rounded(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Returns ``x`` rounded to NVFP4, in float64: blocks of 16 along the last axis with the FP8 scale ``amax / 6``."""
    blocks = (x.cpu().double() / global_scale).unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448).float().to(torch.float8_e4m3fn).double()
    y = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks)).clamp(-6, 6)
    size = y.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step * y.sign() * scale).flatten(-2) * global_scale


def ragged(sizes: list[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns ``a[rows of g] @ b[g].T`` of all groups ``g`` in float64, concatenated. sizes: rows per group."""
    rows = a.cpu().double().split(sizes)
    return torch.cat([x @ w.T for x, w in zip(rows, b.cpu().double(), strict=True)])

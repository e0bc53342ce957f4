"""Random operands in the layouts of the competition's generators: shapes, dtypes, strides, value ranges.

The bits come from our own generator, so they differ from those of the official ones for the same seed. Equal seeds give equal
bits on every device.
"""

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked

Device = str | torch.device
# Bits of a byte with e2m1 values: all, or all except bit 2 of each value, which leaves 0, 0.5, 1, 1.5 of either sign.
ALL_VALUES = 0b1111_1111
SMALL_VALUES = 0b1011_1011
# Only the two low bits of the low nibble: 0, 0.5, 1 or 1.5 at even k, 0 at odd k.
EVEN_SMALL_VALUES = 0b0000_0011


def packed_values(
    rows: int, k: int, l: int, mask: int, generator: torch.Generator, device: Device
) -> torch.Tensor:
    """Draws e2m1 values [rows, K/2, L] float4_e2m1fn_x2, strides (K/2, 1, rows * K/2); ``mask`` selects bits of every byte."""
    packed = torch.randint(0, 256, (l, rows, NVFP4.row_bytes(k)), dtype=torch.uint8, generator=generator)
    return (packed & mask).to(device).view(torch.float4_e2m1fn_x2).permute(1, 2, 0)


def random_output(m: int, n: int, l: int, generator: torch.Generator, device: Device) -> torch.Tensor:
    """Draws C [M, N, L] float16, strides (N, 1, M * N), with random contents."""
    return torch.randn((l, m, n), generator=generator).to(torch.float16).to(device).permute(1, 2, 0)


def integer_scales(low: int, high: int):
    """Returns a function for :func:`scales` that draws whole numbers from ``low`` to ``high``."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    return draw


def fraction_scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draws scales from 0 to 1."""
    return torch.rand(shape, generator=generator)


def scales(
    rows: int, k: int, l: int, draw, generator: torch.Generator, device: Device, plain_device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws block scales, float8_e4m3fn, in two layouts: row-major [rows, K/16, L] on ``plain_device``, permuted on ``device``.

    Permuted: [32, 4, ceil(rows / 128), 4, ceil(K / 64), L], a view of contiguous [L, rm, rk, 32, 4, 4]. Padding rows and blocks
    also hold random scales.
    """
    k_blocks = NVFP4.num_k_blocks(k)
    numbers = draw((l, *NVFP4.padded_scale_shape(rows, k)), generator)
    padded = encode_e4m3(numbers).view(torch.float8_e4m3fn)
    plain = (
        padded[:, :rows, :k_blocks]
        .clone(memory_format=torch.contiguous_format)
        .to(plain_device)
        .permute(1, 2, 0)
    )
    permuted = torch.stack([to_blocked(matrix) for matrix in padded]).to(device).permute(3, 4, 1, 5, 2, 0)
    return plain, permuted

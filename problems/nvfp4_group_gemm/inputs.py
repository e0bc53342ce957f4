"""Inputs of a case, in the structure, dtypes, strides and value ranges that the problem prescribes.

The four entries of the input tuple:

1. ``(a, b, c)`` a group: A [M, K/2, 1] and B [N, K/2, 1] float4_e2m1fn_x2, strides (K/2, 1, rows * K/2), every
   value one of 0, 0.5, 1, 1.5 with either sign; C [M, N, 1] float16, strides (N, 1, M * N), random contents.
2. ``(sfa, sfb)`` a group: scales 1 or 2 as float8_e4m3fn, [rows, K/16, 1], always on the CPU.
3. The same scales permuted: [32, 4, ceil(rows / 128), 4, ceil(K / 64), 1], a view of contiguous
   [1, ceil(rows / 128), ceil(K / 64), 32, 4, 4]; rows beyond the operand's hold random scales, too.
4. ``(m, n, k, 1)`` a group.

The bits come from a generator of our own, so they differ from those that the official generator draws for a seed.
"""

import torch

from nvfp4_cute.formats import encode_e4m3
from nvfp4_cute.scale_layout import SF_VEC_SIZE, padded_shape, to_blocked

from .spec import GroupCase

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
InputTuple = tuple[list[Operands], list[Scales], list[Scales], list[tuple[int, int, int, int]]]

# Clearing bit 2 of an e2m1 code leaves 0, 0.5, 1 and 1.5 with either sign, here in both nibbles.
SMALL_VALUES_MASK = 0b1011_1011


def make_inputs(case: GroupCase, device: str | torch.device = "cpu", seed: int | None = None) -> InputTuple:
    """The 4-tuple of ``case``; row-major scales stay on the CPU, all else is on ``device``.

    Args:
        seed: instead of the case's own. Equal seeds give equal bits on every device.
    """
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    abc, plain, permuted = [], [], []
    for m, n, k in case.sizes:
        a, b = (_values(rows, k, generator, device) for rows in (m, n))
        c = torch.randn((1, m, n), generator=generator).to(torch.float16).to(device).permute(1, 2, 0)
        (sfa, sfa_permuted), (sfb, sfb_permuted) = (_scales(rows, k, generator, device) for rows in (m, n))
        abc.append((a, b, c))
        plain.append((sfa, sfb))
        permuted.append((sfa_permuted, sfb_permuted))
    return abc, plain, permuted, case.problem_sizes


def _values(rows: int, k: int, generator: torch.Generator, device) -> torch.Tensor:
    """Packed e2m1 [rows, K/2, 1]."""
    packed = torch.randint(0, 256, (1, rows, k // 2), dtype=torch.uint8, generator=generator)
    return (packed & SMALL_VALUES_MASK).to(device).view(torch.float4_e2m1fn_x2).permute(1, 2, 0)


def _scales(rows: int, k: int, generator: torch.Generator, device) -> Scales:
    """Row-major [rows, K/16, 1] on the CPU and permuted [32, 4, rm, 4, rk, 1] on ``device``."""
    k_blocks = k // SF_VEC_SIZE
    numbers = torch.randint(1, 3, padded_shape(rows, k_blocks), generator=generator)
    padded = encode_e4m3(numbers.float()).view(torch.float8_e4m3fn)
    plain = padded[:rows, :k_blocks].contiguous().unsqueeze(0).permute(1, 2, 0)
    permuted = to_blocked(padded).to(device).unsqueeze(0).permute(3, 4, 1, 5, 2, 0)
    return plain, permuted

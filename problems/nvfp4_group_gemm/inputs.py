"""Inputs of a case with the structure, dtypes, strides and value ranges that the problem prescribes.

The input tuple has four entries:

1. ``(a, b, c)`` per group: A [M, K/2, 1] and B [N, K/2, 1] float4_e2m1fn_x2, strides (K/2, 1, rows * K/2), every value one of
  0, 0.5, 1, 1.5 with either sign; C [M, N, 1] float16, strides (N, 1, M * N), random contents.
2. ``(sfa, sfb)`` per group: scales 1 or 2 as float8_e4m3fn, [rows, K/16, 1], always on the CPU.
3. The scales of entry 2, permuted: [32, 4, ceil(rows / 128), 4, ceil(K / 64), 1], a view of contiguous [1, ceil(rows / 128),
  ceil(K / 64), 32, 4, 4]; padding rows also hold random scales.
4. ``(m, n, k, 1)`` per group.

The bits come from our own generator, so they differ from those of the official generator for the same seed.
"""

import torch

from nvfp4_cute.problems.operands import SMALL_VALUES, integer_scales, packed_values, random_output, scales

from .spec import GroupCase

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
InputTuple = tuple[list[Operands], list[Scales], list[Scales], list[tuple[int, int, int, int]]]

# Indices of the tuple's entries that are on the CPU.
CPU_ENTRIES = (1,)


def make_inputs(case: GroupCase, device: str | torch.device = "cpu", seed: int | None = None) -> InputTuple:
    """Returns the 4-tuple of ``case``. Row-major scales are on the CPU, everything else is on ``device``.

    Args:
        seed: replaces the case's own. Equal seeds give equal bits on every device.
    """
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    abc, plain, permuted = [], [], []
    for m, n, k in case.sizes:
        a, b = (packed_values(rows, k, 1, SMALL_VALUES, generator, device) for rows in (m, n))
        c = random_output(m, n, 1, generator, device)
        (sfa, sfa_permuted), (sfb, sfb_permuted) = (
            scales(rows, k, 1, integer_scales(1, 2), generator, device, "cpu") for rows in (m, n)
        )
        abc.append((a, b, c))
        plain.append((sfa, sfb))
        permuted.append((sfa_permuted, sfb_permuted))
    return abc, plain, permuted, case.problem_sizes


def outputs(data: InputTuple) -> list[torch.Tensor]:
    """Returns C of every group."""
    return [c for _, _, c in data[0]]

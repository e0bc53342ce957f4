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

from nvfp4_cute.problems.operands import SMALL_VALUES, integer_scales, packed_values, random_output, scales

from .spec import GroupCase

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
InputTuple = tuple[list[Operands], list[Scales], list[Scales], list[tuple[int, int, int, int]]]

# Entries of the tuple that lie on the CPU.
CPU_ENTRIES = (1,)


def make_inputs(case: GroupCase, device: str | torch.device = "cpu", seed: int | None = None) -> InputTuple:
    """The 4-tuple of ``case``; row-major scales stay on the CPU, all else is on ``device``.

    Args:
        seed: instead of the case's own. Equal seeds give equal bits on every device.
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
    """C of every group."""
    return [c for _, _, c in data[0]]

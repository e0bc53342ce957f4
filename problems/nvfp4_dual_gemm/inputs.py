"""Inputs of a case with the structure, dtypes, strides and value ranges that the problem prescribes.

``(a, b1, b2, sfa, sfb1, sfb2, sfa_permuted, sfb1_permuted, sfb2_permuted, c)``: A [M, K/2, 1], B1 and B2 [N, K/2, 1]
float4_e2m1fn_x2, 0 to 1.5 of either sign; scales from 0 to 1 as float8_e4m3fn, row-major [rows, K/16, 1] and permuted [32, 4,
rm, 4, rk, 1]; C [M, N, 1] float16.

The bits come from our own generator, so they differ from those of the official generator for the same seed.
"""

import torch

from nvfp4_cute.problems.operands import SMALL_VALUES, fraction_scales, packed_values, random_output, scales

from .spec import DualGemmCase

# Indices of the tuple's entries that are on the CPU.
CPU_ENTRIES: tuple[int, ...] = ()


def make_inputs(
    case: DualGemmCase, device: str | torch.device = "cpu", seed: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns the tuple of ``case`` on ``device``. ``seed`` replaces the case's own; equal seeds give equal bits everywhere."""
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    sides = (case.m, case.n, case.n)
    values = [packed_values(rows, case.k, 1, SMALL_VALUES, generator, device) for rows in sides]
    both = [scales(rows, case.k, 1, fraction_scales, generator, device, device) for rows in sides]
    c = random_output(case.m, case.n, 1, generator, device)
    return (*values, *(plain for plain, _ in both), *(permuted for _, permuted in both), c)


def outputs(data: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Returns C."""
    return [data[-1]]

"""Inputs of a case with the structure, dtypes, strides and value ranges that the problem prescribes.

``(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c)``: A [M, K/2, 1] and B [N, K/2, 1] float4_e2m1fn_x2 with every value; scales 0
to 3 as float8_e4m3fn, row-major [rows, K/16, 1] and permuted [32, 4, rm, 4, rk, 1]; C [M, N, 1] float16.

The bits come from our own generator, so they differ from those of the official generator for the same seed.
"""

import torch

from nvfp4_cute.problems.operands import ALL_VALUES, integer_scales, packed_values, random_output, scales

from .spec import GemmCase

# Indices of the tuple's entries that are on the CPU.
CPU_ENTRIES: tuple[int, ...] = ()


def make_inputs(
    case: GemmCase, device: str | torch.device = "cpu", seed: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns the tuple of ``case`` on ``device``. ``seed`` replaces the case's own; equal seeds give equal bits everywhere."""
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    a, b = (packed_values(rows, case.k, 1, ALL_VALUES, generator, device) for rows in (case.m, case.n))
    (sfa, sfa_permuted), (sfb, sfb_permuted) = (
        scales(rows, case.k, 1, integer_scales(0, 3), generator, device, device) for rows in (case.m, case.n)
    )
    c = random_output(case.m, case.n, 1, generator, device)
    return a, b, sfa, sfb, sfa_permuted, sfb_permuted, c


def outputs(data: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Returns C."""
    return [data[-1]]

"""Inputs of a case with the structure, dtypes, strides and value ranges that the problem prescribes.

``(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c)``: A [M, K/2, L] and B [128, K/2, L] float4_e2m1fn_x2, 0 to 1.5 at even k and
0 at odd k; only row 0 of B counts. Scales 0 to 2 as float8_e4m3fn, row-major [rows, K/16, L] and permuted [32, 4, rm, 4, rk,
L]; C [M, 1, L] float16.

The bits come from our own generator, so they differ from those of the official generator for the same seed.
"""

import torch

from nvfp4_cute.problems.operands import (
    EVEN_SMALL_VALUES,
    integer_scales,
    packed_values,
    random_output,
    scales,
)

from .spec import PADDED_N, GemvCase

InputTuple = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
# Indices of the tuple's entries that are on the CPU.
CPU_ENTRIES: tuple[int, ...] = ()


def make_inputs(case: GemvCase, device: str | torch.device = "cpu", seed: int | None = None) -> InputTuple:
    """Returns the tuple of ``case`` on ``device``. ``seed`` replaces the case's own; equal seeds give equal bits everywhere."""
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    sides = (case.m, PADDED_N)
    a, b = (packed_values(rows, case.k, case.l, EVEN_SMALL_VALUES, generator, device) for rows in sides)
    (sfa, sfa_permuted), (sfb, sfb_permuted) = (
        scales(rows, case.k, case.l, integer_scales(0, 2), generator, device, device) for rows in sides
    )
    c = random_output(case.m, 1, case.l, generator, device)
    return a, b, sfa, sfb, sfa_permuted, sfb_permuted, c


def outputs(data: InputTuple) -> list[torch.Tensor]:
    """Returns C."""
    return [data[-1]]

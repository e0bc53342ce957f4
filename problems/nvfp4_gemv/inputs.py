"""Inputs of a case, in the structure, dtypes, strides and value ranges that the problem prescribes.

``(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c)``: A [M, K/2, L] and B [128, K/2, L] float4_e2m1fn_x2, 0 to 1.5 at even
k and 0 at odd k; only row 0 of B counts. Scales 0 to 2 as float8_e4m3fn, row-major [rows, K/16, L] and permuted
[32, 4, rm, 4, rk, L]; C [M, 1, L] float16.

The bits come from a generator of our own, so they differ from those that the official generator draws for a seed.
"""

import torch

InputTuple = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
# Entries of the tuple that lie on the CPU.
CPU_ENTRIES: tuple[int, ...] = ()

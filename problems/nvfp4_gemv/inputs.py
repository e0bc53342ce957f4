"""Inputs of a case, in the structure, dtypes, strides and value ranges that the problem prescribes.

The seven entries of the input tuple, with rest = ceil(rows / 128) and rest_k = ceil(K / 64):

1. a [M, K/2, L] and 2. b [128, K/2, L], float4_e2m1fn_x2, strides (K/2, 1, rows * K/2). Bytes are 0 to 3, so every odd
   k is 0 and every even one 0, 0.5, 1 or 1.5. Only row 0 of b counts.
3. sfa [M, K/16, L] and 4. sfb [128, K/16, L], scales 0, 1 or 2 as float8_e4m3fn, strides (K/16, 1, rows * K/16).
5. and 6. The same scales permuted: [32, 4, rest, 4, rest_k, L], a view of contiguous [L, rest, rest_k, 32, 4, 4].
7. c [M, 1, L] float16, strides (1, 1, M), random contents.

The bits come from a generator of our own, so they differ from those that the official generator draws for a seed.
"""

import torch

from nvfp4_cute.formats import encode_e4m3
from nvfp4_cute.scale_layout import SF_VEC_SIZE, to_blocked

from .spec import PADDED_N, GemvCase

InputTuple = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def make_inputs(case: GemvCase, device: str | torch.device = "cpu", seed: int | None = None) -> InputTuple:
    """The 7-tuple of ``case`` on ``device``.

    Args:
        seed: instead of the case's own. Equal seeds give equal bits on every device.
    """
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    a, b = (_values(rows, case, generator, device) for rows in (case.m, PADDED_N))
    (sfa, sfa_permuted), (sfb, sfb_permuted) = (
        _scales(rows, case, generator, device) for rows in (case.m, PADDED_N)
    )
    c = torch.randn((case.l, case.m, 1), generator=generator).to(torch.float16).to(device).permute(1, 2, 0)
    return a, b, sfa, sfb, sfa_permuted, sfb_permuted, c


def _values(rows: int, case: GemvCase, generator: torch.Generator, device) -> torch.Tensor:
    """Packed e2m1 [rows, K/2, L]."""
    packed = torch.randint(0, 4, (case.l, rows, case.k // 2), dtype=torch.uint8, generator=generator)
    return packed.to(device).view(torch.float4_e2m1fn_x2).permute(1, 2, 0)


def _scales(
    rows: int, case: GemvCase, generator: torch.Generator, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-major [rows, K/16, L] and permuted [32, 4, rest, 4, rest_k, L]."""
    numbers = torch.randint(0, 3, (case.l, rows, case.k // SF_VEC_SIZE), generator=generator)
    plain = encode_e4m3(numbers.float()).view(torch.float8_e4m3fn).to(device)
    return plain.permute(1, 2, 0), to_blocked(plain).permute(3, 4, 1, 5, 2, 0)

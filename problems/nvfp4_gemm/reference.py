"""The right answer of a case, and the problem's rule for accepting an answer."""

from typing import Any

import torch

from nvfp4_cute.problems.matching import match
from nvfp4_cute.reference import grouped_gemm_reference

from .spec import ATOL, RTOL


def reference(data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns C, float16 [M, N, 1]: computed in float64, rounded once. Does not touch C in ``data``."""
    a, b, _, _, sfa, sfb, _ = data
    (c,) = grouped_gemm_reference([a[:, :, 0]], [b[:, :, 0]], [sfa], [sfb], out_dtype=torch.float16)
    return c.unsqueeze(-1)


def check(
    received: Any, expected: torch.Tensor, *, rtol: float = RTOL, atol: float = ATOL
) -> tuple[bool, str]:
    """Judges an answer like the official harness: (True, ""), or False and the harness's message."""
    return match(received, expected, rtol=rtol, atol=atol)

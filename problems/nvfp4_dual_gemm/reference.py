"""The right answer of a case, and the problem's rule for accepting an answer."""

from typing import Any

import torch

from nvfp4_cute.problems.matching import match
from nvfp4_cute.reference import grouped_gemm_reference

from .spec import ATOL, RTOL


def reference(data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns C, float16 [M, N, 1]: products in float64, rounded to float32; silu and product in float32; rounded once more.

    Does not touch C in ``data``.
    """
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, _ = data
    gate, up = grouped_gemm_reference(
        [a[:, :, 0]] * 2, [b1[:, :, 0], b2[:, :, 0]], [sfa] * 2, [sfb1, sfb2], out_dtype=torch.float32
    )
    return (torch.nn.functional.silu(gate) * up).to(torch.float16).unsqueeze(-1)


def check(
    received: Any, expected: torch.Tensor, *, rtol: float = RTOL, atol: float = ATOL
) -> tuple[bool, str]:
    """Judges an answer like the official harness: (True, ""), or False and the harness's message."""
    return match(received, expected, rtol=rtol, atol=atol)

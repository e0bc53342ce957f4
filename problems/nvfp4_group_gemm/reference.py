"""The right answer of a case, and the problem's rule for accepting an answer."""

from collections.abc import Sequence

import torch

from nvfp4_cute.problems.matching import match_list
from nvfp4_cute.reference import grouped_gemm_reference

from .inputs import InputTuple
from .spec import ATOL, RTOL


def reference(data: InputTuple) -> list[torch.Tensor]:
    """Returns C of every group, float16 [M, N, 1]: computed in float64, rounded once. Does not touch C in ``data``."""
    abc, _, permuted_scales, _ = data
    a, b = [a[:, :, 0] for a, _, _ in abc], [b[:, :, 0] for _, b, _ in abc]
    a_scale, b_scale = zip(*permuted_scales, strict=True)
    return [c.unsqueeze(-1) for c in grouped_gemm_reference(a, b, a_scale, b_scale, out_dtype=torch.float16)]


def check(
    received: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    rtol: float = RTOL,
    atol: float = ATOL,
) -> tuple[bool, str]:
    """Judges an answer like the official harness.

    Every group needs the expected shape, NaN and infinities where the reference has them, and elsewhere ``|received - expected|
    <= atol + rtol * |expected|``, computed in the tensors' dtype. ``received`` may have any dtype and strides.

    Returns:
        (True, ""), or False and the harness's message: the first faults of the first wrong group.
    """
    return match_list(received, list(expected), rtol=rtol, atol=atol)

"""The right answer of a case, and the problem's rule for accepting an answer."""

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.scale_layout import as_blocked_batches
from nvfp4_cute.problems.matching import match
from nvfp4_cute.reference import gemv_reference

from .inputs import InputTuple
from .spec import ATOL, RTOL


def reference(data: InputTuple) -> torch.Tensor:
    """Returns C, float16 [M, 1, L]: computed in float64, rounded once. Does not touch C in ``data``."""
    a, b, _, _, sfa, sfb, c = data
    m, row_bytes, batches = a.shape
    scales = [
        as_blocked_batches(sf, rows, NVFP4.elements(row_bytes), batches) for sf, rows in ((sfa, m), (sfb, 1))
    ]
    columns = [
        gemv_reference(a[:, :, i], b[0, :, i], scales[0][i], scales[1][i], out_dtype=c.dtype)
        for i in range(batches)
    ]
    return torch.stack(columns, dim=-1).unsqueeze(1)


def check(
    received: torch.Tensor, expected: torch.Tensor, *, rtol: float = RTOL, atol: float = ATOL
) -> tuple[bool, str]:
    """Judges an answer like the official harness: (True, ""), or False and the harness's message."""
    return match(received, expected, rtol=rtol, atol=atol)

"""The right answer of a case, and the problem's rule for accepting an answer."""

from collections.abc import Sequence

import torch

from nvfp4_cute.reference import grouped_gemm_reference

from .inputs import InputTuple
from .spec import ATOL, RTOL

MAX_PRINTED_ERRORS = 5


def reference(data: InputTuple) -> list[torch.Tensor]:
    """C of every group, float16 [M, N, 1]: computed in float64, rounded once. C in ``data`` is not touched."""
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
    """Judge an answer as the official harness does.

    Every group needs the expected shape, NaN and infinities where the reference has them, and elsewhere
    ``|received - expected| <= atol + rtol * |expected|``, computed in the tensors' dtype. The dtype and the strides
    of ``received`` are free.

    Returns:
        (True, ""), or False and a message with the first faults of the first wrong group.
    """
    if not isinstance(received, list | tuple):
        return False, f"received a {type(received).__name__}; expected a list of {len(expected)} tensors"
    if len(received) != len(expected):
        return (
            False,
            f"LENGTH MISMATCH: received {len(received)} outputs, expected {len(expected)} (one a group)",
        )
    for group, (got, want) in enumerate(zip(received, expected, strict=True)):
        message = fault(got, want, rtol, atol)
        if message:
            return False, f"mismatch in group {group}: {message}"
    return True, ""


def fault(received: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> str:
    """Why one tensor is not accepted, or the empty string."""
    if received.shape != expected.shape:
        return f"SIZE MISMATCH: received {list(received.shape)}, expected {list(expected.shape)}"
    for kind, is_kind in (("NaN", torch.isnan), ("+INF", torch.isposinf), ("-INF", torch.isneginf)):
        wrong = is_kind(received) != is_kind(expected)
        if wrong.any():
            return _describe(f"{kind} MISMATCH", wrong, received, expected)
    # Equal infinities differ by NaN, which exceeds nothing.
    wrong = (received - expected).abs() > atol + rtol * expected.abs()
    if wrong.any():
        return _describe(f"beyond atol={atol}, rtol={rtol}", wrong, received, expected)
    return ""


def _describe(rule: str, wrong: torch.Tensor, received: torch.Tensor, expected: torch.Tensor) -> str:
    places = wrong.nonzero()
    lines = [f"{rule} in {len(places)} of {wrong.numel()} elements"]
    for place in places[:MAX_PRINTED_ERRORS].tolist():
        at = tuple(place)
        lines.append(f"ERROR AT {at}: received {received[at].item()}, expected {expected[at].item()}")
    return "\n".join(lines)

"""The competition servers' rule for accepting an answer, with their messages."""

from typing import Any

import torch

MAX_PRINTED_ERRORS = 5
PREFIX = "mismatch found! custom implementation doesn't match reference: "


def match(received: Any, expected: torch.Tensor, *, rtol: float, atol: float) -> tuple[bool, str]:
    """Judges one tensor: shape, NaN and infinities, and ``|received - expected| <= atol + rtol * |expected|`` elsewhere.

    ``received`` may have any dtype and strides; differences are computed in the tensors' dtype.
    """
    faults = _faults(received, expected, rtol, atol)
    return (False, PREFIX + " ".join(faults)) if faults else (True, "")


def match_list(received: Any, expected: list[torch.Tensor], *, rtol: float, atol: float) -> tuple[bool, str]:
    """Judges one tensor per group; the message describes the first wrong one."""
    if not isinstance(received, list | tuple):
        return False, f"output is a {type(received).__name__}: expected a list of {len(expected)} tensors"
    if len(received) != len(expected):
        return False, f"output length mismatch: got {len(received)}, expected {len(expected)}"
    for index, (got, want) in enumerate(zip(received, expected, strict=True)):
        faults = _faults(got, want, rtol, atol)
        if faults:
            return False, f"{PREFIX}{index} {faults}"
    return True, ""


def _faults(received: Any, expected: torch.Tensor, rtol: float, atol: float) -> list[str]:
    if not isinstance(received, torch.Tensor):
        return [f"output is a {type(received).__name__}: expected a tensor"]
    if received.shape != expected.shape:
        return ["SIZE MISMATCH"]
    # The difference of equal infinities is NaN, which exceeds nothing.
    wrong = (received - expected).abs() > atol + rtol * expected.abs()
    for is_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong |= is_kind(received) != is_kind(expected)
    count = int(wrong.count_nonzero())
    if not count:
        return []
    places = [tuple(place) for place in wrong.nonzero()[:MAX_PRINTED_ERRORS].tolist()]
    lines = [f"ERROR AT {place}: {received[place]} {expected[place]}" for place in places]
    if count > MAX_PRINTED_ERRORS:
        lines.append(f"... and {count - MAX_PRINTED_ERRORS} more mismatched elements.")
    return [f"Number of mismatched elements: {count}", *lines]

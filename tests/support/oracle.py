"""Comparisons for tests: bit for bit, or by largest and RMS error; poisoned outputs; a line that repeats a failure."""

import os

import torch

_INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A quiet NaN with a payload that no arithmetic produces: unwritten elements stand out in a dump of bits.
_POISON = {2: 0x7FDB, 4: 0x7FDBADBA, 8: 0x7FFDBADBADBADBAD, 1: 0x7F}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of every element as an integer of its size."""
    return tensor.detach().contiguous().view(_INT_OF_BYTES[tensor.element_size()])


def poisoned(*shape: int, dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """A contiguous output buffer in which every element is a recognizable NaN (0x7F in formats of one byte)."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full(shape, _POISON[size], dtype=_INT_OF_BYTES[size], device=device).view(dtype)


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Where ``tensor`` still holds the pattern of :func:`poisoned`, as bool."""
    return bits(tensor) == _POISON[tensor.element_size()]


def repro_line(**facts) -> str:
    """The pytest command that runs the current test alone, and the facts (seed, config name) that it ran with."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    notes = ", ".join(f"{name}={value}" for name, value in facts.items())
    return f"repro: python -m pytest '{test}'" + (f"  # {notes}" if notes else "")


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, **facts) -> None:
    """Checks for equal shape, dtype and bits: -0 differs from 0, and NaNs are equal only with the same payload.

    Args:
        actual: the result under test, any device.
        expected: the oracle's.
        facts: printed in the repro line.
    """
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}\n{repro_line(**facts)}"
    )
    assert actual.dtype == expected.dtype, (
        f"dtype {actual.dtype}, expected {expected.dtype}\n{repro_line(**facts)}"
    )
    got, want = bits(actual).cpu(), bits(expected).cpu()
    wrong = got != want
    if not wrong.any():
        return
    digits = 2 * actual.element_size()
    mask = (1 << 4 * digits) - 1
    lines = [f"{int(wrong.sum())} of {wrong.numel()} elements differ; first:"]
    for index in wrong.nonzero()[:5].tolist():
        at = tuple(index)
        values = f"{actual[at].float().item()!r}, expected {expected[at].float().item()!r}"
        patterns = f"0x{int(got[at]) & mask:0{digits}x} vs 0x{int(want[at]) & mask:0{digits}x}"
        lines.append(f"  {list(at)}: {values}  ({patterns})")
    poison = int(unwritten(actual).sum()) if actual.is_floating_point() else 0
    if poison:
        lines.append(f"  {poison} elements were never written (still poisoned)")
    raise AssertionError("\n".join([*lines, repro_line(**facts)]))


def error_norms(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest and RMS error, both in units of the RMS of ``expected`` (absolute where that is 0)."""
    want = expected.detach().double().cpu()
    error = actual.detach().double().cpu() - want
    if not error.numel():
        return 0.0, 0.0
    scale = want.square().mean().sqrt().item() or 1.0
    return error.abs().max().item() / scale, error.square().mean().sqrt().item() / scale


def assert_error_within(
    actual: torch.Tensor, expected: torch.Tensor, *, max_tol: float, rms_tol: float, **facts
) -> None:
    """Checks that largest and RMS error (:func:`error_norms`) are within bounds, and that non-finite elements agree.

    Args:
        actual: the result under test, any float dtype and device.
        expected: the oracle's, preferably float64.
        max_tol: bound of the largest error, in units of the RMS of the finite part of ``expected``.
        rms_tol: bound of the RMS error, in the same unit.
        facts: printed in the repro line.
    """
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}\n{repro_line(**facts)}"
    )
    got, want = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = torch.isfinite(want)
    same_special = torch.isnan(got) == torch.isnan(want)
    same_special &= torch.where(torch.isinf(want), got == want, ~torch.isinf(got))
    assert bool(same_special.all()), (
        f"NaN or infinity differs first at {(~same_special).nonzero()[0].tolist()}\n{repro_line(**facts)}"
    )
    largest, rms = error_norms(got[finite], want[finite])
    assert largest <= max_tol and rms <= rms_tol, (
        f"largest error {largest:.3g} (at most {max_tol:.3g}), RMS error {rms:.3g} (at most {rms_tol:.3g}), "
        f"in units of the expected RMS\n{repro_line(**facts)}"
    )

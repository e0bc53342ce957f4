"""Rules of the two projects for correct answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvfp4_cute.problems.trace_schema import Tolerance

LOW_BIT, LOW_BIT_RATIO = "moe_fp8_block_scale", 0.95
"""Part of the names of definitions that FlashInfer-Bench judges more loosely, and the share that must match."""


@dataclass(frozen=True)
class Errors:
    """Errors of an output relative to the reference.

    Attributes:
        message: what is wrong; empty for a right answer.
        max_absolute, max_relative: largest errors; None if they were not computed.
        matched: share of the elements within tolerance.
    """

    message: str = ""
    max_absolute: float | None = None
    max_relative: float | None = None
    matched: float | None = None


@dataclass(frozen=True)
class Rules:
    """Rules by which a project judges.

    Attributes:
        rounds: inputs per workload.
        judge: (output, reference, tolerance of the workload, name of the definition) -> errors.
        run_timeout_s: time limit of the complete run.
    """

    name: str
    rounds: int
    judge: Callable[[torch.Tensor, torch.Tensor, Tolerance, str], Errors]
    run_timeout_s: int


def sol_execbench(output: torch.Tensor, right: torch.Tensor, tolerance: Tolerance, name: str) -> Errors:
    """Requires |x - y| <= atol + rtol * |y| for enough elements, no infinity or NaN in either, and not only zeros.

    core/bench/correctness.py of NVIDIA/SOL-ExecBench.
    """
    x, y = output.float(), right.float()
    if tolerance.allow_negative_inf:
        both = (x == -torch.inf) & (y == -torch.inf)
        x, y = x[~both], y[~both]
    if not bool((torch.isfinite(x) & torch.isfinite(y)).all()):
        return Errors("infinities or NaN in the output or the reference")
    if x.numel() == 0:
        return Errors(max_absolute=0.0, max_relative=0.0, matched=1.0)
    if bool(y.any()) and not bool(x.any()):
        return Errors("every element is 0")
    difference = (x - y).abs()
    within = difference <= tolerance.atol + tolerance.rtol * y.abs()
    relative = difference / y.abs().clamp(min=tolerance.atol)
    errors = Errors("", float(difference.max()), float(relative.max()), float(within.double().mean()))
    return _judged(errors, tolerance.matched_ratio, tolerance.error_cap)


def flashinfer_bench(output: torch.Tensor, right: torch.Tensor, tolerance: Tolerance, name: str) -> Errors:
    """Counts an element as wrong if |x - y| > atol and |x - y| / |y| > rtol; allows none, or 5 % in some mixtures of experts.

    bench/utils.py and bench/evaluators/ of flashinfer-ai/flashinfer-bench; atol and rtol are 0.01 there.
    """
    x, y = output.float(), right.float()
    if not bool(torch.isfinite(x).all()):
        return Errors("infinities or NaN in the output")
    if x.numel() == 0:
        return Errors(max_absolute=0.0, max_relative=0.0, matched=1.0)
    difference = (x - y).abs()
    relative = difference / (y.abs() + 1e-8)
    wrong = (difference > tolerance.atol) & (relative > tolerance.rtol)
    errors = Errors("", float(difference.max()), float(relative.max()), 1 - float(wrong.double().mean()))
    return _judged(errors, LOW_BIT_RATIO if LOW_BIT in name else 1.0, None)


def _judged(errors: Errors, required: float, cap: float | None) -> Errors:
    message = ""
    assert errors.matched is not None and errors.max_absolute is not None
    if errors.matched < required:
        message = f"{errors.matched:.2%} of the elements match, {required:.2%} must; "
        message += f"the largest error is {errors.max_absolute:.4g}"
    elif cap is not None and errors.max_absolute > cap:
        message = f"the largest error is {errors.max_absolute:.4g}, more than {cap:.4g}"
    return Errors(message, errors.max_absolute, errors.max_relative, errors.matched)


SOL_EXECBENCH = Rules("sol-execbench", 10, sol_execbench, 600)
FLASHINFER_BENCH = Rules("flashinfer-bench", 3, flashinfer_bench, 300)
RULES = {rules.name: rules for rules in (SOL_EXECBENCH, FLASHINFER_BENCH)}

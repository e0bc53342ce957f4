"""Times of cases on the GPU of this machine, ours and the peers' in one run."""

from collections.abc import Callable, Sequence

import torch

import nvfp4_cute
from nvfp4_cute.bench import stopwatch
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import Operands, make_operands, make_sets
from nvfp4_cute.bench.peers import PEERS
from nvfp4_cute.bench.report import MEASURED, Time
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget

OURS = "ours"
WRONG = 1e-2
"""Norm of the difference from bf16 torch over the norm of its result: fp16 and bf16 rounding stay below half of it."""


def run_ours(case: Case, operands: Operands) -> None:
    """Enqueue our kernel on one input set.

    Raises:
        UnsupportedProblem: there is no such operation yet.
    """
    if case.operation not in ("grouped_gemm", "gemm"):
        raise UnsupportedProblem(f"no kernel for {case.operation}")
    a, b, a_scale, b_scale, out = map(list, vars_of(operands))
    nvfp4_cute.grouped_gemm(a, b, a_scale, b_scale, out=out, out_dtype=torch.float16, backend="cuda")


def vars_of(operands: Operands) -> tuple[Sequence[torch.Tensor], ...]:
    """The five lists of a set."""
    return operands.a, operands.b, operands.a_scale, operands.b_scale, operands.out


def time_case(case: Case) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """Time of our kernel, times of the peers, and why any of them is missing.

    Raises:
        ValueError: our result is not what torch computes.
    """
    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability(device)
    sets = make_sets(case, device)
    calls: dict[str, stopwatch.Call] = {}
    remarks: dict[str, str] = {}
    try:
        run_ours(case, sets[0])
        check(case, sets[0])
        calls[OURS] = lambda index: run_ours(case, sets[index])
    except (UnsupportedProblem, UnsupportedTarget) as error:
        remarks[OURS] = str(error)
    for peer in PEERS:
        reason = peer.unsupported_reason(case, capability)
        if reason is None:
            calls[peer.name] = _in_turn([peer.prepare(case, operands) for operands in sets])
        else:
            remarks[peer.name] = reason
    samples = stopwatch.measure(calls, len(sets)) if calls else {}
    times = {name: Time(s.median, MEASURED, s.low, s.high) for name, s in samples.items() if name in calls}
    return times.pop(OURS, None), times, remarks


def time_like_harness(case: Case) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """Time of our call as the competition's harness takes it: eager, many inputs back to back."""
    device = torch.device("cuda")
    count = stopwatch.HARNESS_INPUTS[case.operation]
    sets = [make_operands(case, device, seed) for seed in range(count)]
    try:
        run_ours(case, sets[0])
    except (UnsupportedProblem, UnsupportedTarget) as error:
        return None, {}, {OURS: str(error)}
    check(case, sets[0])
    sample = stopwatch.measure_like_harness(lambda index: run_ours(case, sets[index]), count)
    return Time(sample.median, MEASURED, sample.low, sample.high), {}, {}


def _in_turn(runs: Sequence[Callable[[], None]]) -> stopwatch.Call:
    return lambda index: runs[index]()


def check(case: Case, operands: Operands) -> None:
    """Compare what our kernel wrote with torch in bf16.

    Raises:
        ValueError: a NaN, or a difference that rounding does not explain.
    """
    for group, (a, b, out) in enumerate(zip(*operands.bf16, operands.out, strict=True)):
        expected = (a @ b.T).float()
        error = (out.float() - expected).norm() / expected.norm() if out.numel() else torch.zeros(())
        if not error < WRONG:
            raise ValueError(
                f"{case}, group {group}: our result differs from torch's by {error:.3g} of its norm"
            )

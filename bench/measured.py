"""Times of cases on this machine's GPU, ours and the peers' in one run."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import silu

from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import Operands, make_operands, make_sets
from nvfp4_cute.bench.peers import PEERS
from nvfp4_cute.bench.report import MEASURED, Time
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, quantize
from nvfp4_cute.tuning import stopwatch

WRONG, WRONG_QUANTIZED = 1e-2, 5e-2
"""Norm of the difference from bf16 torch over the norm of its result. fp16 and bf16 rounding stay below half of it.

Quantized results are compared with torch's quantized result; values midway between two may become either.
"""


def time_case(case: Case, clean: bool = False) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """Returns the time of our kernel, times of the peers, and why any of them is missing. clean: see ``stopwatch.cold_l2``.

    Raises:
        ValueError: our result differs from torch's.
    """
    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability(device)
    sets = make_sets(case, device)
    calls: dict[str, stopwatch.Call] = {}
    remarks: dict[str, str] = {}
    try:
        calls[ours.NAME] = in_turn([_checked(case, operands) for operands in sets])
    except (UnsupportedProblem, UnsupportedTarget) as error:
        remarks[ours.NAME] = str(error)
    for peer in PEERS:
        reason = "writes 16 bits" if case.out_format is not None else None
        reason = reason or peer.unsupported_reason(case, capability)
        if reason is None:
            calls[peer.name] = in_turn([peer.prepare(case, operands) for operands in sets])
        else:
            remarks[peer.name] = reason
    samples = stopwatch.measure(calls, len(sets), clean=clean) if calls else {}
    times = {name: Time(s.median, MEASURED, s.low, s.high) for name, s in samples.items() if name in calls}
    return times.pop(ours.NAME, None), times, remarks


def time_like_harness(case: Case) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """Times our call like the competition's harness: eager, many inputs back to back."""
    device = torch.device("cuda")
    count = stopwatch.HARNESS_INPUTS[case.operation]
    try:
        runs = [_checked(case, make_operands(case, device, seed)) for seed in range(count)]
    except (UnsupportedProblem, UnsupportedTarget) as error:
        return None, {}, {ours.NAME: str(error)}
    sample = stopwatch.measure_like_harness(in_turn(runs), count)
    return Time(sample.median, MEASURED, sample.low, sample.high), {}, {}


def _checked(case: Case, operands: Operands) -> Callable[[], object]:
    """Returns our call on an input set, after one call with a right result."""
    prepared = ours.prepare(case, operands, "cuda")
    prepared.run()
    check(case, operands, prepared.out)
    return prepared.run


def in_turn(runs: Sequence[Callable[[], object]]) -> stopwatch.Call:
    """Returns a call that takes the number of an input set."""

    def call(index: int) -> None:
        runs[index]()

    return call


def check(case: Case, operands: Operands, outputs: Sequence[torch.Tensor | BlockScaledTensor]) -> None:
    """Compares our kernel's output, [M, N] per group, with torch in bf16.

    Raises:
        ValueError: a NaN, or a difference that rounding does not explain.
    """
    for group, (a, b, out) in enumerate(zip(*operands.bf16, outputs, strict=True)):
        expected = (a @ b.T).float()
        if operands.b2:
            second = (a @ operands.bf16_b2[group].T).float()
            expected = silu(ours.DUAL_ALPHA * expected) * (ours.DUAL_ALPHA * second)
        wrong = WRONG
        if isinstance(out, BlockScaledTensor):
            expected = quantize(expected, format=out.format).dequantize()
            out, wrong = out.dequantize(), WRONG_QUANTIZED
        error = (out.float() - expected).norm() / expected.norm() if out.numel() else torch.zeros(())
        if not error < wrong:
            raise ValueError(
                f"{case}, group {group}: our result differs from torch's by {error:.3g} of its norm"
            )

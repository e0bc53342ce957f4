"""The rules of the two projects on outputs whose verdict is known, and the score."""

import pytest
import torch

from nvfp4_cute.competition.trace import matching
from nvfp4_cute.competition.trace.score import floor, score
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.problems.trace_schema import Axis, Definition, TensorSpec, Tolerance

RIGHT = torch.full((1000,), 10.0)


def changed(count, by):
    output = RIGHT.clone()
    output[:count] += by
    return output


# Output -> whether SOL-ExecBench and FlashInfer-Bench take it.
VERDICTS = {
    "equal": (RIGHT, True, True),
    "half": (RIGHT.half(), True, True),
    "within": (changed(1000, 0.09), True, True),
    "1 % beyond": (changed(10, 5.0), True, False),
    "1.1 % beyond": (changed(11, 5.0), False, False),
    "just beyond both": (changed(1000, 0.12), False, False),
    "NaN": (changed(1, float("nan")), False, False),
    "infinity": (changed(1, float("inf")), False, False),
    "zeros": (RIGHT * 0, False, False),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    output, *accepted = VERDICTS[name]
    rules = (matching.sol_execbench, matching.flashinfer_bench)
    assert [not judge(output, RIGHT, Tolerance(), "gemm").message for judge in rules] == accepted


def test_one_error_must_be_both_for_flashinfer_and_the_sum_for_sol():
    """0.105 off 10: more than 1 % and than 0.01, less than 0.01 + 1 %."""
    output = changed(1000, 0.105)
    assert not matching.sol_execbench(output, RIGHT, Tolerance(), "").message
    assert matching.flashinfer_bench(output, RIGHT, Tolerance(), "").message
    small = torch.full((10,), 1e-3)
    assert not matching.flashinfer_bench(small * 5, small, Tolerance(), "").message  # 400 %, but 0.004


def test_tolerances_of_a_workload():
    few = changed(40, 5.0)
    loose = Tolerance(matched_ratio=0.95)
    assert not matching.sol_execbench(few, RIGHT, loose, "").message
    assert (
        "more than 1"
        in matching.sol_execbench(few, RIGHT, Tolerance(matched_ratio=0.95, error_cap=1.0), "").message
    )
    assert not matching.flashinfer_bench(few, RIGHT, Tolerance(), "moe_fp8_block_scale_x").message


def test_matching_negative_infinities():
    output = torch.tensor([1.0, -torch.inf])
    allowed = Tolerance(allow_negative_inf=True)
    assert matching.sol_execbench(output, output, Tolerance(), "").message
    assert not matching.sol_execbench(output, output, allowed, "").message
    assert matching.sol_execbench(output, torch.tensor([1.0, 2.0]), allowed, "").message


def test_what_is_reported():
    errors = matching.sol_execbench(changed(100, 1.0), RIGHT, Tolerance(), "")
    assert (errors.max_absolute, errors.matched) == (1.0, pytest.approx(0.9))
    assert errors.max_relative == pytest.approx(0.1)
    assert "90.00% of the elements match, 99.00% must" in errors.message


@pytest.mark.parametrize(
    ("us", "value"), [(10, 1.0), (30, 0.5), (20, 2 / 3), (110, 1 / 6), (5, 1 / (1 - 5 / 20))]
)
def test_score(us, value):
    assert score(us, 30, 10) == pytest.approx(value)


def test_score_of_a_baseline_at_the_speed_of_light():
    assert (score(9, 10, 10), score(10, 10, 10), score(11, 10, 10)) == (1, 1, 0)


def test_floor_counts_bytes_once_and_products_at_the_narrowest_rate():
    tensors = {"a": TensorSpec("float4_e2m1", ("M", "K")), "s": TensorSpec("float32", None)}
    outputs = {"c": TensorSpec("float16", ("M", "M"))}
    definition = Definition("d", "gemm", {"M": Axis(), "K": Axis()}, tensors, outputs, "")
    found = floor(definition, {"M": 4096, "K": 2048}, 10**12, B200)
    (memory, math, _) = found.terms
    assert memory.us == pytest.approx(
        (4096 * 2048 + 2 * 4096 * 4096) / B200.floor_bandwidth_bytes_per_s * 1e6
    )
    assert math.us == pytest.approx(1e18 / B200.math_flops_per_s("nvfp4"))

"""speed_of_light: published times follow from the formula, sums of bytes are right, and floors are lower bounds."""

import dataclasses
from types import MappingProxyType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvfp4_cute.cli import sol
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import TARGETS
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.roofline import speed_of_light as light

# The time of an example depends on other processes.
AT_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PUBLISHED = [
    (name, case, 4e-3 if name == "nvfp4_gemv" else 5e-4)
    for name, cases in sol.PROBLEMS.items()
    for case in cases
]
FORMATS = st.sampled_from(sorted(light.STORAGE))
SIZES = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 512), st.integers(1, 64).map(lambda blocks: 16 * blocks)),
    min_size=1,
    max_size=5,
)
WORKS = st.builds(
    lambda sizes, a, b, out, num_b: light.grouped_gemm(sizes, a=a, b=b, out=out, num_b=num_b),
    SIZES, FORMATS, FORMATS, FORMATS, st.sampled_from((1, 2)),
)  # fmt: skip
EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


# ---- the competition's formula ---------------------------------------------------------------------------------


def test_all_published_rows_are_here():
    assert len(PUBLISHED) == 14
    assert all(case.sol_us is not None for _, case, _ in PUBLISHED)


@pytest.mark.parametrize(
    "case, tolerance",
    [row[1:] for row in PUBLISHED],
    ids=[f"{row[0]}-{row[1].name}" for row in PUBLISHED],
)
def test_published_time(case, tolerance):
    """Also detects a typing error in a size."""
    assert light.competition_us(case.work) == pytest.approx(case.sol_us, rel=tolerance)


def test_the_longer_of_memory_and_math_counts():
    def work(num_bytes, flops):
        return light.Work((light.Traffic("a", num_bytes),), (light.Product("p", flops),))

    assert light.competition_us(work(int(light.COMPETITION_HBM_BYTES_PER_S), 0)) == 1e6
    assert light.competition_us(work(1, int(light.COMPETITION_FP4_FLOPS_PER_S))) == 1e6


def test_dual_gemm_with_many_rows_is_bound_by_math():
    work = light.dual_gemm(512, 4096, 7168)
    assert light.competition_us(work) == 1e6 * 4 * 512 * 4096 * 7168 / light.COMPETITION_FP4_FLOPS_PER_S


def test_the_competition_has_no_formula_for_other_math():
    with pytest.raises(ValueError, match="math='fp16': the competition's formula is for nvfp4 alone"):
        light.competition_us(light.grouped_gemm([(1, 128, 128)], a="fp16"))


# ---- bytes and operations --------------------------------------------------------------------------------------


def test_a_batch_is_as_many_groups():
    assert light.gemm(128, 256, 512, l=3) == light.grouped_gemm([(128, 256, 512)] * 3)


@pytest.mark.parametrize(
    "out, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_bytes_and_operations_are_those_of_the_problem(out, dtype):
    sizes = ((128, 256, 512), (7, 384, 256), (1, 128, 16))
    problem, work = GroupedProblem(sizes, out_dtype=dtype), light.grouped_gemm(sizes, out=out)
    assert (work.bytes, work.flops) == (problem.bytes, problem.flops)
    assert light.grouped_gemm_us(sizes) == light.competition_us(light.grouped_gemm(sizes))


def test_operands_by_hand():
    work = light.grouped_gemm([(3, 5, 32), (2, 4, 64)], num_b=2, out="nvfp4")
    assert {o.name: o.bytes for o in work.operands} == {
        "a": 3 * 16 + 2 * 32,
        "a_scale": 3 * 2 + 2 * 4,
        "b1": 5 * 16 + 4 * 32,
        "b1_scale": 5 * 2 + 4 * 4,
        "b2": 5 * 16 + 4 * 32,
        "b2_scale": 5 * 2 + 4 * 4,
        "c": 3 * 3 + 2 * 2,  # five values of a row take three bytes
        "c_scale": 3 + 2,
    }
    assert [o.name for o in work.operands if o.written] == ["c", "c_scale"]
    assert {p.name: p.flops for p in work.products} == dict.fromkeys(
        ("a @ b1^T", "a @ b2^T"), 2 * (3 * 5 * 32 + 2 * 4 * 64)
    )


def test_counted_bytes_are_those_of_real_tensors():
    m, k = 48, 256
    tensor = quantize(torch.ones(m, k), scale_layout="rowmajor")
    assert light.tensor_bytes("nvfp4", m, k) == (tensor.data.nbytes, tensor.scale.nbytes)
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert light.tensor_bytes(name, m, k) == (torch.empty(m, k, dtype=dtype).nbytes, 0)
    assert light.tensor_bytes("mxfp8", m, k) == (m * k, m * k // 32)


def test_a_scale_may_serve_many_rows():
    work = light.grouped_gemm([(3, 300, 256)], a="fp8_1x128", b="fp8_128x128")
    sizes = {operand.name: operand.bytes for operand in work.operands}
    assert sizes["a_scale"] == 3 * 2 * 4 and sizes["b_scale"] == 3 * 2 * 4 and sizes["b"] == 300 * 256
    assert work.math == "fp8"


def test_w4a16_moves_wide_activations_and_multiplies_as_fp16():
    work = light.grouped_gemm([(8, 4096, 4096)], a="fp16")
    assert {o.name: o.bytes for o in work.operands} == {
        "a": 8 * 4096 * 2, "b": 4096 * 2048, "b_scale": 4096 * 256, "c": 8 * 4096 * 2
    }  # fmt: skip
    assert work.math == "fp16"


def test_an_empty_group_moves_nothing():
    assert light.grouped_gemm([(0, 4096, 4096), (16, 128, 256), (8, 0, 64)]) == light.gemm(16, 128, 256)
    nothing = light.gemm(0, 128, 256)
    assert (nothing.bytes, nothing.flops, nothing.intensity) == (0, 0, 0.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: light.grouped_gemm([(1, 2, 16)], a="int4"),
            "format 'int4' is unknown; use one of nvfp4, mxfp4, mxfp8_e4m3",
        ),
        (lambda: light.grouped_gemm([(1, -2, 16)]), r"\(1, -2, 16\) has a negative extent"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@AT_ANY_SPEED
@given(SIZES, FORMATS, FORMATS, FORMATS, st.sampled_from((1, 2)))
def test_groups_add_up(sizes, a, b, out, num_b):
    options = {"a": a, "b": b, "out": out, "num_b": num_b}
    work, alone = light.grouped_gemm(sizes, **options), [light.grouped_gemm([x], **options) for x in sizes]
    for number, operand in enumerate(work.operands):
        assert operand.bytes == sum(group.operands[number].bytes for group in alone) >= 0
    assert work.bytes == sum(group.bytes for group in alone)
    assert (
        work.flops == sum(group.flops for group in alone) == sum(2 * num_b * m * n * k for m, n, k in sizes)
    )


@AT_ANY_SPEED
@given(SIZES, st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8)))
def test_more_work_is_never_less(sizes, growth):
    """Checks growth along every extent, and with one more group."""
    small = light.grouped_gemm(sizes)
    for more in (
        [(m + growth[0], n + growth[1], k + 16 * growth[2]) for m, n, k in sizes],
        [*sizes, (growth[0], growth[1], 16 * growth[2])],
    ):
        large = light.grouped_gemm(more)
        assert large.bytes >= small.bytes and large.flops >= small.flops
        assert light.competition_us(large) >= light.competition_us(small)


# ---- physical floors -------------------------------------------------------------------------------------------


def faster(target, **factors):
    return dataclasses.replace(
        target, **{name: getattr(target, name) and getattr(target, name) * by for name, by in factors.items()}
    )


@AT_ANY_SPEED
@given(work=WORKS, target=st.sampled_from(TARGETS))
def test_a_floor_is_no_lower_than_any_term(work, target):
    floor = light.physical_floor(work, target)
    assert [t.name for t in floor.terms] == ["memory", "math", "launch"]
    assert floor.us >= 1e6 * work.bytes / target.bandwidth_bytes_per_s * (1 - 1e-12)
    assert all(t.us <= floor.us for t in floor.terms if t.us is not None)
    assert {t.name: t.us for t in floor.terms}[floor.bound] == floor.us


@AT_ANY_SPEED
@given(work=WORKS, target=st.sampled_from(TARGETS))
def test_a_faster_gpu_is_never_slower(work, target):
    before = light.physical_floor(work, target).us
    twice = faster(target, bandwidth_bytes_per_s=2, reached_bandwidth_bytes_per_s=2)
    assert light.physical_floor(work, twice).us <= before
    assert light.physical_floor(work, faster(target, num_sms=2)).us <= before
    assert light.physical_floor(work, faster(target, boost_clock_hz=2)).us <= before
    all_twice = faster(twice, boost_clock_hz=2, load_clock_hz=2, launch_s=0.5)
    assert light.physical_floor(work, all_twice).us == pytest.approx(before / 2)


@EACH_TARGET
def test_each_term_can_bind(target):
    memory = light.physical_floor(light.gemm(1, 65536, 65536), target)
    math = light.physical_floor(light.gemm(16384, 16384, 16384), target)
    assert (memory.bound, math.bound) == ("memory", "math")
    if target.launch_s is not None:
        launch = light.physical_floor(light.gemm(1, 128, 128), target)
        assert (launch.bound, launch.us) == ("launch", 1e6 * target.launch_s)


def test_terms_by_hand_and_their_bases():
    floor = light.physical_floor(light.gemm(128, 4096, 7168), targets.B200)
    memory, math, launch = floor.terms
    assert memory.us == pytest.approx(18_079_744 / 7.5e6)
    assert math.us == pytest.approx(2 * 128 * 4096 * 7168 / (148 * 32768 * 1.965e9) * 1e6)
    assert launch.us == 2.0
    assert (floor.us, floor.bound) == (memory.us, "memory")
    assert memory.basis == "18.08 MB / 7.5 TB/s (reached)"
    assert math.basis == "7.516 GFLOP / 9529.6 TFLOP/s (nvfp4 at 1.965 GHz)"


def test_unknown_figures_are_named_not_invented():
    memory, math, launch = light.physical_floor(light.gemm(128, 4096, 7168), targets.GB200).terms
    assert memory.basis.endswith("(theoretical, none measured)")
    assert (launch.us, launch.basis) == (None, "the time of an empty launch on GB200 is not known")
    unknown = light.physical_floor(light.grouped_gemm([(1, 16384, 16384)], a="int8", b="int8"), targets.B300)
    assert (unknown.terms[1].us, unknown.terms[1].basis) == (None, "the int8 rate of B300 is not known")
    assert unknown.bound == "memory"


def test_without_fp4_tensor_cores_the_fp16_rate_counts():
    floor = light.physical_floor(light.gemm(16384, 16384, 16384), targets.H200)
    assert "(fp16 at 1.98 GHz, no FP4 tensor cores)" in floor.terms[1].basis
    lame = dataclasses.replace(targets.B200, rates=MappingProxyType({"fp16": 8192}))
    assert light.physical_floor(light.gemm(16384, 16384, 16384), lame).us == pytest.approx(
        4 * light.physical_floor(light.gemm(16384, 16384, 16384), targets.B200).us
    )


@pytest.mark.parametrize(
    "problem, case_index, best_us",
    [("nvfp4_group_gemm", 0, 27.9), ("nvfp4_group_gemm", 1, 18.8), ("nvfp4_group_gemm", 2, 8.48),
     ("nvfp4_group_gemm", 3, 6.43), ("nvfp4_gemm", 0, 18.2), ("nvfp4_gemm", 1, 8.29), ("nvfp4_gemm", 2, 6.54),
     ("nvfp4_dual_gemm", 0, 12.4), ("nvfp4_dual_gemm", 1, 15.3), ("nvfp4_dual_gemm", 2, 9.43),
     ("nvfp4_dual_gemm", 3, 14.4)],
)  # fmt: skip
def test_no_published_result_on_a_b200_is_below_the_floor(problem, case_index, best_us):
    """Best times of honest public entries."""
    row = sol.competition_rows(targets.B200, problem)[case_index]
    assert row.floor.us <= best_us

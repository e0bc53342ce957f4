"""cases: the operands have the properties that the kernel tests rely on."""

import math

import pytest
import torch
from cases import (
    ALL,
    ALL_SCALES,
    EXACT_MAX_K,
    FINITE_E4M3_CODES,
    K_PITCHED,
    NAN_PADDING,
    Case,
    error_bound,
    make_operands,
)
from list_checks import check_list_operands

from nvfp4_cute.formats.scale_layout import from_blocked
from nvfp4_cute.reference import expand_operand, grouped_gemm_reference

BY_NAME = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


def k_tiles(case):
    return sum(math.ceil(m / 128) * math.ceil(n / 128) * math.ceil(k / 256) for m, n, k in case.sizes)


def test_names_are_unique():
    assert len({case.name for case in ALL}) == len(ALL)


@BY_NAME
def test_cases_are_small_and_valid(case):
    assert k_tiles(case) <= (40 if case.name == "k_long" else 30)
    problem, _ = check_list_operands(*make_operands(case), out_dtype=case.out_dtype)
    assert problem.sizes == case.sizes and problem.has_alpha == case.has_alpha


@pytest.mark.parametrize("case", [case for case in ALL if case.kind == "exact"], ids=lambda case: case.name)
def test_exact_cases_are_exact_in_fp32(case):
    """Sums of magnitudes stay on a grid that fp32 represents, so every partial sum in every order does."""
    operands = make_operands(case)
    for g in range(len(case.sizes)):
        a = expand_operand(operands.a[g], operands.a_scale[g], "blocked")
        b = expand_operand(operands.b[g], operands.b_scale[g], "blocked")
        magnitudes = a.abs() @ b.abs().T
        assert (magnitudes * 4 == (magnitudes * 4).round()).all()
        assert magnitudes.numel() == 0 or magnitudes.max() * 4 <= 2**24
    if operands.alpha is not None:
        assert (operands.alpha.frexp().mantissa.abs() == 0.5).all()


def test_operands_follow_from_the_seed():
    first, again, other = (make_operands(Case("x", ((40, 72, 96),), seed)) for seed in (1, 1, 2))
    assert torch.equal(first.a[0], again.a[0]) and torch.equal(first.b_scale[0], again.b_scale[0])
    assert not torch.equal(first.a[0], other.a[0]) and not torch.equal(first.b_scale[0], other.b_scale[0])


@pytest.mark.parametrize("case", ALL_SCALES, ids=lambda case: case.name)
def test_wide_scales_are_all_finite_codes(case):
    operands = make_operands(case)
    for scale, (m, _, k) in zip(operands.a_scale, case.sizes, strict=True):
        assert set(from_blocked(scale, m, k // 16).flatten().tolist()) == set(FINITE_E4M3_CODES)
    assert len(FINITE_E4M3_CODES) == 254


@pytest.mark.parametrize("case", NAN_PADDING, ids=lambda case: case.name)
def test_nan_is_in_padding_rows_only(case):
    operands = make_operands(case)
    for scale, (_, n, k) in zip(operands.b_scale, case.sizes, strict=True):
        padded = from_blocked(scale, math.ceil(n / 128) * 128, k // 16)
        assert (padded[n:] == 0x7F).all() and not (padded[:n] & 0x7F == 0x7F).any()
    assert all(out.isfinite().all() for out in grouped_gemm_reference(*operands, out_dtype=torch.float32))


def test_pitched_rows_have_a_gap():
    operands = make_operands(K_PITCHED[0])
    assert all(t.stride(0) > t.shape[1] and t.stride(0) % 16 == 0 for t in operands.a + operands.b)


def test_too_long_k_is_refused():
    with pytest.raises(AssertionError, match=f"K={EXACT_MAX_K + 16} is not exact"):
        make_operands(Case("x", ((1, 1, EXACT_MAX_K + 16),)))


@pytest.mark.parametrize("case", ALL_SCALES, ids=lambda case: case.name)
def test_error_bound_holds_for_fp32_sums_and_catches_a_missing_block(case):
    operands = make_operands(case)
    expected = grouped_gemm_reference(*operands, out_dtype=case.out_dtype)
    bounds = error_bound(case, operands, expected)
    for g, bound in enumerate(bounds):
        a, b = (
            expand_operand(x[g], s[g], "blocked").float()
            for x, s in ((operands.a, operands.a_scale), (operands.b, operands.b_scale))
        )
        alpha = 1.0 if operands.alpha is None else operands.alpha[g]
        sums = ((a @ b.T) * alpha).to(case.out_dtype)
        assert ((sums.double() - expected[g].double()).abs() <= bound).all()
        blocks = a.unflatten(1, (-1, 16))
        blocks[torch.arange(len(a)), blocks.abs().sum(2).argmax(1)] = 0
        wrong = ((a @ b.T) * alpha).to(case.out_dtype)
        missed = ((wrong.double() - expected[g].double()).abs() <= bound).float().mean()
        assert missed < 0.5, "the bound is too wide to notice that the largest block of every row is missing"

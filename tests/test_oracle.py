"""The comparisons fail when they should."""

import math

import pytest
import torch
from oracle import assert_bitwise_equal, assert_error_within, error_norms, poisoned, unwritten

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
def test_poison_is_nan_everywhere_and_seen_until_written(dtype):
    out = poisoned(3, 5, dtype=dtype)
    assert out.shape == (3, 5) and out.dtype == dtype
    assert torch.isnan(out.float()).all() and unwritten(out).all()
    out[1] = torch.ones(5).to(dtype)
    assert unwritten(out).sum() == 10


@pytest.mark.parametrize("dtype", FLOATS)
def test_bitwise_equal_passes_on_copies(dtype):
    x = torch.tensor([0.0, -0.0, 1.5, math.inf, math.nan], dtype=dtype)
    assert_bitwise_equal(x.clone(), x)
    assert_bitwise_equal(x.expand(3, 5).t(), x.expand(3, 5).clone().t())


@pytest.mark.parametrize(
    "actual",
    [torch.tensor([0.0, -0.0]), torch.tensor([0.0, 1e-45]), torch.zeros(3), torch.zeros(2).double()],
    ids=["minus zero", "one bit", "shape", "dtype"],
)
def test_bitwise_equal_catches(actual):
    with pytest.raises(AssertionError, match=r"repro: python -m pytest 'tests/test_oracle.py::.*seed=7"):
        assert_bitwise_equal(actual, torch.zeros(2), seed=7)


def test_bitwise_equal_names_elements_bits_and_poison():
    out = poisoned(2, 2, dtype=torch.float16)
    out[0] = 1
    with pytest.raises(AssertionError) as failure:
        assert_bitwise_equal(out, torch.ones(2, 2, dtype=torch.float16))
    message = str(failure.value)
    assert "2 of 4 elements differ" in message and "[1, 0]" in message
    assert "0x7fdb vs 0x3c00" in message and "2 elements were never written" in message


def test_error_norms_are_relative_to_the_rms():
    largest, rms = error_norms(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert largest == pytest.approx(0.5 / math.sqrt(12.5))
    assert rms == pytest.approx(0.5 / 5)


def test_error_within_catches_size_shape_and_specials():
    want = torch.tensor([3.0, 4.0, math.inf, math.nan])
    assert_error_within(want + 1e-3, want, max_tol=1e-3, rms_tol=1e-3)
    for got in (want * 1.1, want[:3], want.nan_to_num(nan=0.0), want.nan_to_num(posinf=1.0), -want):
        with pytest.raises(AssertionError, match="repro:"):
            assert_error_within(got, want, max_tol=1e-3, rms_tol=1e-3)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_error_within(want + 1e-2, want, max_tol=1, rms_tol=1e-4)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        assert_error_within(torch.full((4,), math.inf), want, max_tol=1, rms_tol=1)

"""GPTQ's compensation by later columns: exact invariants, and the gain on correlated inputs."""

import itertools

import pytest
import torch

from nvfp4_cute.formats.block_format import FORMATS
from nvfp4_cute.models.quantizing.gptq import column_order, gptq, inverse_factor
from nvfp4_cute.models.quantizing.weights import Rounding, quantized

NAMES = ("nvfp4", "mxfp4", "mxfp8_e4m3")


def weights(n=24, k=128, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def inputs(rows=512, k=128, rank=24, seed=1):
    """Draws rows of few directions plus noise, with channels of different size, like activations."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, rank, generator=g) @ torch.randn(rank, k, generator=g)
    return (mixed + 0.5 * torch.randn(rows, k, generator=g)) * torch.linspace(0.2, 3, k)[
        torch.randperm(k, generator=g)
    ]


def error(weight, stored, x):
    """Relative error of the layer's results."""
    exact = x @ weight.T
    return float((x @ stored.dequantize().T - exact).norm() / exact.norm())


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("search", [False, True])
def test_of_a_diagonal_hessian_are_the_codes_without_compensation(format, search):
    """No column can compensate another, and all columns of a block count equally: codes minimize the weights' own error."""
    weight = weights()
    weight[0, :32] = 0
    block = FORMATS[format].block_k
    each = torch.rand(128 // block, generator=torch.Generator().manual_seed(2)).repeat_interleave(block)
    got = gptq(weight, Rounding.of(weight, format, None, search), torch.diag(each))
    expected = quantized(weight, format, search=search)
    for part in ("data", "scale"):
        assert torch.equal(getattr(got, part).view(torch.uint8), getattr(expected, part).view(torch.uint8))
    assert got.global_scale is None or torch.equal(got.global_scale, expected.global_scale)


@pytest.mark.parametrize("format", NAMES)
def test_results_err_less(format, part=0.75):
    """The error falls by at least a quarter, and also falls on rows that GPTQ did not see."""
    weight = weights()
    x, fresh = inputs(2048).split(1024)
    errors = {
        search: error(weight, gptq(weight, Rounding.of(weight, format, None, search), x.T @ x), x)
        for search in (False, True)
    }
    nearest = error(weight, quantized(weight, format), x)
    assert errors[False] < part * nearest and errors[True] < part * nearest
    searched = gptq(weight, Rounding.of(weight, format, None, True), x.T @ x)
    assert error(weight, searched, fresh) < error(weight, quantized(weight, format, search=True), fresh)


def test_two_columns_by_hand():
    """With 64 inputs that are equal in two columns, the second column compensates the first.

    Both weights are 1.2, between the codes 1 and 1.5. To nearest, both become 1, and the sum has an error of 0.4.
    """
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([1.2, 1.2, 6.0])
    hessian = torch.eye(16)
    hessian[0, 1] = hessian[1, 0] = 0.999
    rounding = Rounding(FORMATS["nvfp4"], torch.tensor(1.0), (1.0,))
    assert gptq(weight, rounding, torch.eye(16)).dequantize()[0, :3].tolist() == [1, 1, 6]
    assert gptq(weight, rounding, hessian).dequantize()[0, :3].tolist() == [1, 1.5, 6]


def test_order_keeps_blocks_together():
    order = column_order(torch.tensor([1.0, 2, 9, 8, 3, 3, 5, 4]), 2)
    assert order.tolist() == [2, 3, 6, 7, 4, 5, 1, 0]


def test_factor_of_the_inverse():
    x = inputs(64, 16, 4).double()
    hessian = x.T @ x + torch.eye(16)
    upper = inverse_factor(hessian).double()
    torch.testing.assert_close(upper.T @ upper @ hessian, torch.eye(16).double(), rtol=0, atol=1e-4)
    assert not upper.tril(-1).any()


def test_columns_without_inputs():
    """Channels that are always zero get finite weights, to nearest; so does a layer that saw only zeros."""
    weight, x = weights(), inputs()
    x[:, 32:64] = 0
    got = gptq(weight, Rounding.of(weight, "nvfp4", None, False), x.T @ x).dequantize()
    assert got.isfinite().all()
    expected = quantized(weight, "nvfp4").dequantize()
    assert torch.equal(got[:, 32:64], expected[:, 32:64])
    nothing = gptq(weight, Rounding.of(weight, "nvfp4", None, False), torch.zeros(128, 128))
    assert torch.equal(nothing.dequantize(), expected)


def test_refused():
    for bad in (torch.nan, torch.inf):
        weight = weights()
        weight[3, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            gptq(weight, Rounding.of(weights(), "nvfp4", None, False), torch.eye(128))


def test_what_tests_compare_differs():
    """The cases above have different results."""
    ways = [
        (f, s) for f in NAMES for s in (False, True) if not (f == "mxfp8_e4m3" and s)
    ]  # both methods find the same scales
    found = [quantized(weights(), f, search=s).dequantize() for f, s in ways]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))

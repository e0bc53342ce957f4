"""Layers of experts with FP8 rows and MXFP4 weights that were prepared for them."""

import pytest
import torch
from expert_layers import moe as moe_of_parts

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.weights import ExpertWeights

EMULATED = "emulator:sm_90a"
EXPERTS, HIDDEN, WIDTH = 3, 192, 128


def some(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def choices(tokens):
    """Two of three experts per token, in places none."""
    ids = torch.tensor([[0, 2], [2, 1], [-1, 0], [2, 0], [0, 1]]).repeat(-(-tokens // 5), 1)[:tokens]
    return ids.contiguous(), torch.rand(tokens, 2, generator=torch.Generator().manual_seed(1))


def weights():
    made = (some(EXPERTS, n, k) / 8 for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    return [nv.quantize(w, format=nv.MXFP4) for w in made]


@pytest.mark.parametrize("tokens", [5, 40])
def test_rows_are_quantized_once_for_all_choices(tokens):
    x, (ids, _) = some(tokens, HIDDEN).bfloat16(), choices(tokens)
    with observe(check=True):
        got, _ = gather(x, ids, EXPERTS, format=nv.FP8_1xK, backend=EMULATED)
    want, order = gather(x, ids, EXPERTS, format=nv.FP8_1xK, backend="reference")
    end = int(order.offs[-1])
    for part, other in zip(got[:2], want[:2], strict=True):
        assert torch.equal(part[:end].view(torch.uint8), other[:end].view(torch.uint8))


@pytest.mark.parametrize("has_bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layer(has_bias):
    x, (ids, factors), (w13, w2) = some(5, HIDDEN).bfloat16(), choices(5), weights()
    bias = some(EXPERTS, 2 * WIDTH).bfloat16() if has_bias else None
    activation = nv.Activation("swiglu_oai", 7.0)
    layer = nv.MoE.from_quantized(
        w13,
        w2,
        activations="fp8",
        activation=nv.Activation("swiglu_oai", limit=7.0),
        bias13=bias,
        backend=EMULATED,
    )
    assert layer.formats == (nv.MXFP4_FP8,) * 2 and "activations='fp8_1xk'" in repr(layer)
    got = layer(x, ids, factors)
    first = nv.Experts(nv.mxfp4_for_fp8(w13), bias=bias)
    want = nv.moe(x, ids, factors, first, nv.mxfp4_for_fp8(w2), activation=activation, activations="fp8")
    assert (got - want).norm() < 0.01 * want.norm()
    exact = nv.moe(
        x, ids, factors, nv.Experts(w13, bias=bias), w2, activation=activation, activations="16bit"
    )
    assert 0.002 * exact.norm() < (got - exact).norm() < 0.06 * exact.norm()


def test_refusals():
    x, (ids, factors), (w13, w2) = some(5, HIDDEN).bfloat16(), choices(5), weights()
    for format in (nv.MXFP4, nv.NVFP4):
        with pytest.raises(ValueError, match="activations='fp8_1xk' with"):
            nv.MoE(3, HIDDEN, WIDTH, format=format, activations="fp8_1xk")
    with pytest.raises(ValueError, match="input_scale with rows of FP8_1XK"):
        moe_of_parts(x, ids, factors, w13, w2, activations="fp8_1xk", input_scale=torch.ones(1))
    with pytest.raises(
        ValueError,
        match='activations="fp8" with MXFP4 weights; pass weights in FP8_128x128, or MXFP4 weights',
    ):
        nv.moe(x, ids, factors, w13, w2, activations="fp8")
    with pytest.raises(TypeError, match="pass an MXFP4"):
        ExpertWeights.quantize(some(3, 128, 128)).for_fp8()

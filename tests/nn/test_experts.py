"""Experts against one float64 product per token and expert; rounding of activations against arithmetic by hand."""

import math

import pytest
import torch

from nvfp4_cute.activation import Activation
from nvfp4_cute.formats.block_scaled import NVFP4Tensor, dequantize, quantize
from nvfp4_cute.nn.experts import EqualGroups, Projection, SortedExperts
from nvfp4_cute.nn.rounded import RoundedInput, rounded

E, I, H = 5, 96, 64


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(n, k, seed, with_bias=False):
    """Quantized weights with one factor per expert, and their values."""
    g = generator(seed)
    each = [
        quantize(
            torch.randn(n, k, generator=g) * (1 + e) * seed / 16, global_scale="auto", scale_layout="rowmajor"
        )
        for e in range(E)
    ]
    bias = torch.randn(E, n, generator=g).bfloat16() if with_bias else None
    data, scale, factor = (
        torch.stack([getattr(w, part) for w in each]) for part in ("data", "scale", "global_scale")
    )
    return Projection(NVFP4Tensor(data, scale, factor, (E, n, k), "rowmajor"), bias), torch.stack(
        [dequantize(w, torch.float64) for w in each]
    )


def expected(x, ids, topk, sides, biases, activation, scales=None):
    """Computes in float64, one token and expert after the other."""
    y = torch.zeros(len(x), sides[-1].shape[1], dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), topk[t].tolist(), strict=True):
            if not 0 <= e < E:
                continue
            row = x[t : t + 1]
            row = row if scales is None else rounded(row, "nvfp4", scales[0][e])
            wide = [
                row.double() @ w[e].T + (0 if b is None else b[e].double())
                for w, b in zip(sides[:-1], biases, strict=False)
            ]
            h = activation(*wide)
            h = (
                h.bfloat16().double()
                if scales is None
                else rounded(h.float(), "nvfp4", scales[1][e]).double()
            )
            y[t] += weight * (h @ sides[-1][e].T + (0 if biases[-1] is None else biases[-1][e].double()))[0]
    return y


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


silu = lambda gate, up: gate * torch.sigmoid(gate) * up
SITU = Activation("situ", beta=4.0, linear_beta=2.0)
situ = lambda gate, up: 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 2 * torch.tanh(up / 2)
OAI = Activation("swiglu_oai", 7.0)


def swiglu_oai(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ROUTES = torch.tensor(
    [[0, 2], [2, 4], [4, -1], [0, 3], [3, 3], [E, 7]]
)  # expert 1 gets no token; some ids belong to no expert


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
@pytest.mark.parametrize("kind", ["silu", OAI, "relu2", SITU], ids=str)
def test_experts(activations, kind):
    """Gate, up and every expert have different factors; ids outside 0 to E - 1 add nothing."""
    has_bias, has_gate = kind is OAI, kind != "relu2"
    gate, up, down = weights(I, H, 1, has_bias), weights(I, H, 2, has_bias), weights(H, I, 3, has_bias)
    x = torch.randn(len(ROUTES), H, generator=generator(4)).bfloat16()
    topk = torch.rand(ROUTES.shape, generator=generator(5))
    scales = (
        [torch.linspace(0.001, 0.002, E), torch.linspace(0.002, 0.02, E) * 2]
        if activations == "nvfp4"
        else None
    )
    functions = {"silu": silu, OAI: swiglu_oai, "relu2": lambda up: up.clamp(min=0) ** 2, SITU: situ}
    parts = [gate, up, down] if has_gate else [up, down]
    given = {} if scales is None else {"inputs": scales}
    layer = SortedExperts([p[0] for p in parts], kind, activations=activations, **given)
    exact = expected(
        x, ROUTES, topk, [p[1] for p in parts], [p[0].bias for p in parts], functions[kind], scales
    )
    y = layer(x, ROUTES, topk)
    assert y.dtype == torch.bfloat16 and not y[5].any()
    # Hidden values near the midpoint of two codes may round either way.
    assert relative(y, exact) < (0.01 if scales is None else 0.06)


def test_float32_rows_are_rounded():
    sides = [weights(n, k, i)[0] for i, (n, k) in enumerate(((I, H), (I, H), (H, I)), 1)]
    layer = SortedExperts(sides, activations="nvfp4")
    x = torch.randn(len(ROUTES), H, generator=generator(4))
    topk = torch.rand(ROUTES.shape, generator=generator(5))
    y = layer(x, ROUTES, topk)
    assert y.dtype == torch.float32
    assert torch.equal(y.bfloat16(), layer(x.bfloat16(), ROUTES, topk))


def test_scales_of_every_call():
    """Without calibrated scales the largest magnitude decides; rows of no expert do not count."""
    gate, up, down = weights(I, H, 1), weights(I, H, 2), weights(H, I, 3)
    x = torch.randn(len(ROUTES), H, generator=generator(4)).bfloat16()
    x[5] = 1e4
    topk = torch.ones(ROUTES.shape)
    layer = SortedExperts([gate[0], up[0], down[0]], activations="nvfp4")
    scale = (x[:5].float().abs().max() / 2688).expand(E)
    wide = torch.stack(
        [silu(x[:5].double() @ gate[1][e].T, x[:5].double() @ up[1][e].T).abs().max() for e in range(E)]
    ).max()
    exact = expected(
        x, ROUTES, topk, [gate[1], up[1], down[1]], [None] * 3, silu, [scale, (wide.float() / 2688).expand(E)]
    )
    assert relative(layer(x, ROUTES, topk), exact) < 0.2


def test_no_tokens_and_equal_groups():
    gate, up, down = weights(I, H, 1), weights(I, H, 2), weights(H, I, 3)
    layer = SortedExperts([gate[0], up[0], down[0]])
    assert layer(torch.zeros(0, H).bfloat16(), torch.zeros(0, 2).long(), torch.zeros(0, 2)).shape == (0, H)
    x = torch.randn(2 * E, H, generator=generator(4)).bfloat16()
    ids = torch.arange(E).repeat_interleave(2).unsqueeze(1)
    exact = expected(x, ids, torch.ones(2 * E, 1), [gate[1], up[1], down[1]], [None] * 3, silu)
    assert relative(EqualGroups(layer)(x), exact) < 0.01


def test_decoded_experts():
    sides = [
        torch.randn(E, *s, generator=generator(i)).bfloat16() for i, s in enumerate(((I, H), (I, H), (H, I)))
    ]
    x = torch.randn(len(ROUTES), H, generator=generator(4)).bfloat16()
    topk = torch.rand(ROUTES.shape, generator=generator(5))
    layer = SortedExperts([Projection(side) for side in sides])
    exact = expected(x, ROUTES, topk, [s.double() for s in sides], [None] * 3, silu)
    assert relative(layer(x, ROUTES, topk), exact) < 0.01


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_mx_rounding_by_hand(format):
    """mxfp4: exponent floor(log2 amax) - 2, and multiples saturate; mxfp8: the least exponent without saturation."""
    for amax in (1.0, 1.9, 3.0, 7.9, 448.0, 500.0):
        x = torch.zeros(2, 64)
        x[0, 0], x[0, 1], x[1, 32] = amax, -amax / 8, amax / 4
        exponent = math.floor(math.log2(amax)) - 2 if format == "mxfp4" else math.ceil(math.log2(amax / 448))
        scale = 2.0**exponent
        grid = (0, 0.5, 1, 1.5, 2, 3, 4, 6) if format == "mxfp4" else [float(v) for v in E4M3]
        near = min(grid, key=lambda v: (abs(v - min(amax / scale, grid[-1])), v))
        assert rounded(x, format)[0, 0] == near * scale
    assert not rounded(torch.zeros(1, 32), format).any()


E4M3 = sorted(
    {m * 2.0**e for e in range(-9, 6) for m in range(8)}
    | {(8 + m) * 2.0**e for e in range(-9, 6) for m in range(8) if (8 + m) * 2.0**e <= 448}
)


def test_other_roundings():
    x = torch.randn(3, 256, generator=generator())
    for format, size in (("fp8_1x128", 128), ("fp8", 256)):
        blocks = x.unflatten(-1, (-1, size))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        exact = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
        assert torch.equal(rounded(x, format), exact)
    assert torch.equal(rounded(x, "nvfp4", 0.01), dequantize(quantize(x, global_scale=0.01)))
    with pytest.raises(ValueError, match="K=100 is not a positive multiple of 32"):
        rounded(x[:, :100], "mxfp4")
    with pytest.raises(ValueError, match="'fp6' is none of"):
        rounded(x, "fp6")
    layer = RoundedInput(torch.nn.Identity(), "mxfp4")
    assert torch.equal(layer(x), rounded(x, "mxfp4"))

"""route: the bits of the reference's float32 operations, and the choices of models in torch's float64."""

import math

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts.routing import route
from nvfp4_cute.formats.softplus import sqrt_softplus

ARCHS = ["sm_80", "sm_90a", "sm_100a", pytest.param("sm_120a", marks=pytest.mark.slow)]


def check(logits, top_k, arch="sm_90a", mode="eager", **options):
    """Checks that one launch gives the bits of the reference."""
    with observe(check=True, mode=mode) as observer:
        got = route(logits, top_k, backend=f"emulator:{arch}", **options)
    want = route(logits, top_k, backend="reference", **options)
    assert len(observer.stats) == (1 if len(logits) else 0)
    assert_bitwise_equal(got[0], want[0])
    assert_bitwise_equal(got[1], want[1])
    return got


def some(tokens, experts, seed=0, dtype=torch.float32, ties=False):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, experts, generator=generator)
    return (x.round() if ties else x).to(dtype)


VARIANTS = {
    "qwen3": (128, 8, {}),
    "mixtral": (8, 2, {"dtype": torch.bfloat16}),
    "not renormalized": (64, 6, {"renormalize": False}),
    "gpt-oss": (32, 4, {"bias": True, "dtype": torch.bfloat16}),
    "llama-4": (16, 1, {"scoring": "sigmoid", "renormalize": False, "dtype": torch.float16}),
    "deepseek-v3": (256, 8, {"scoring": "sigmoid", "correction_bias": True, "groups": (8, 4), "scale": 2.5}),
    "deepseek-v4": (160, 6, {"scoring": "sqrtsoftplus", "correction_bias": True, "scale": 1.5}),
    "hash layer": (160, 6, {"scoring": "sqrtsoftplus", "ids": True, "scale": 1.5}),
    "given, softmax": (72, 5, {"ids": True, "renormalize": False, "bias": True}),
    "odd groups": (30, 3, {"scoring": "softmax", "groups": (10, 2)}),
    "softmax, corrected": (72, 6, {"correction_bias": True, "renormalize": False}),
    "many": (1000, 16, {"scale": 0.5}),
    "one": (1, 1, {}),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, arch):
    experts, top_k, options = VARIANTS[name]
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    for key in ("bias", "correction_bias"):
        if key in options:
            options[key] = torch.randn(experts, generator=torch.Generator().manual_seed(9)) / 4
    if "ids" in options:  # some are of no expert
        generator = torch.Generator().manual_seed(3)
        options["ids"] = torch.randint(-1, experts + 2, (5, top_k), generator=generator, dtype=torch.int32)
    for ties in (False, True):
        check(some(5, experts, 1, dtype, ties), top_k, arch, **options)


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_modes(mode):
    check(some(9, 40, 2, ties=True), 5, mode=mode, groups=(4, 2))


def test_the_most_experts_and_choices():
    """1,024 experts and 32 per token, which are all that the largest scores can be."""
    x = some(3, 1024)
    ids, _ = check(x, 32)
    assert torch.equal(ids.long(), x.topk(32).indices)


def test_equal_scores_go_to_the_lowest_ids():
    ids, weights = check(torch.zeros(3, 70), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3 and weights.tolist() == [[0.25] * 4] * 3
    ids, _ = check(torch.tensor([[0.0, -0.0, 0.0]]), 3)
    assert ids.tolist() == [[0, 1, 2]]


def test_nan_and_infinity():
    """NaN is never chosen, infinities count as numbers, and a token of NaN has no experts."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan] * 4, [nan, 1, nan, 2], [inf, inf, 0, nan], [-inf] * 4, [-inf, nan, -nan, 3e38]]
    )
    for options in (
        {},
        {"renormalize": False},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "groups": (2, 1)},
        {"correction_bias": torch.tensor([0.0, nan, 1.0, -1.0])},
    ):
        ids, weights = check(logits, 3, **options)
        assert ids[0].tolist() == [-1] * 3 and weights[0].tolist() == [0.0] * 3
        assert weights.isfinite().all()
    ids, weights = check(logits, 3)
    assert ids.tolist()[1:] == [[3, 1, -1], [0, 1, 2], [0, 1, 2], [3, 0, -1]]
    assert weights[2].tolist() == [0.5, 0.5, 0.0]


def test_rows_apart_and_no_tokens():
    x = some(7, 96)
    check(x[::2, :50], 3)
    check(x.t()[:20], 3)
    assert route(x[:0], 3)[0].shape == (0, 3)


# ---- against what models compute, in float64 -------------------------------------------------------------------


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)


def test_softmax_then_top_k():
    x = some(50, 128, 5)
    p = x.double().softmax(1)
    values, indices = p.topk(8)
    ids, weights = route(x, 8, renormalize=False)
    assert torch.equal(ids.long(), indices)
    close(weights, values)
    close(route(x, 8)[1], values / values.sum(1, keepdim=True))
    close(route(x, 8)[1], x.double().topk(8).values.softmax(1))


def test_deepseek_v3():
    x, bias = some(50, 256, 6), torch.randn(256, generator=torch.Generator().manual_seed(1)) / 8
    s = x.double().sigmoid()
    choice = s + bias.double()
    groups = choice.view(50, 8, 32).topk(2).values.sum(2).topk(4).indices
    mask = torch.zeros(50, 8, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(32, 1)
    indices = choice.masked_fill(~mask, -math.inf).topk(8).indices
    w = s.gather(1, indices)
    ids, weights = route(x, 8, scoring="sigmoid", correction_bias=bias, groups=(8, 4), scale=2.5)
    assert torch.equal(ids.long(), indices)
    close(weights, 2.5 * w / w.sum(1, keepdim=True))


def test_deepseek_v4():
    """DeepSeek-V4's router, and its hash layers, where a table gives the experts of a token id."""
    x, bias = some(50, 160, 6), torch.randn(160, generator=torch.Generator().manual_seed(1)) / 8
    s = torch.nn.functional.softplus(x.double()).sqrt()
    table = torch.stack(
        [torch.randperm(160, generator=torch.Generator().manual_seed(i))[:6] for i in range(9)]
    )
    given = table[torch.arange(50) % 9]
    for options, indices in (
        ({"correction_bias": bias}, (s + bias.double()).topk(6).indices),
        ({"ids": given}, given),
    ):
        ids, weights = route(x, 6, scoring="sqrtsoftplus", scale=1.5, **options)
        assert torch.equal(ids.long(), indices)
        w = s.gather(1, indices)
        close(weights, 1.5 * w / w.sum(1, keepdim=True))


def test_the_error_of_sqrt_softplus():
    x = torch.cat([torch.linspace(-86, 90, 200001), torch.tensor([0.0, -0.0, 3e38])])
    want = torch.nn.functional.softplus(x.double(), threshold=700).sqrt()
    bound = 2**-24 * torch.where(x > 0, 4.0, 8 + x.double().abs() / 2)
    assert ((sqrt_softplus(x).double() - want).abs() <= bound * want).all()
    assert (
        sqrt_softplus(torch.tensor([-88.0])).item() == 0
        and sqrt_softplus(torch.tensor([math.nan])).isnan().all()
    )


def test_refusals():
    x = torch.zeros(2, 8)
    for arguments, options, error, text in (
        ((x[0], 2), {}, ValueError, r"expected \[T, E\]"),
        ((x.long(), 2), {}, TypeError, "dtype of router_logits"),
        ((x, 9), {}, UnsupportedProblem, "top_k=9"),
        ((torch.zeros(1, 1025), 2), {}, UnsupportedProblem, "E=1025"),
        ((x, 2), {"groups": 2}, TypeError, "groups=2 is not a pair"),
        ((x, 2), {"groups": (3, 1)}, UnsupportedProblem, "a divisor of E=8"),
        ((x, 2), {"groups": (2, 3)}, ValueError, "the second is not from 1 to 2"),
        (
            (x, 2),
            {"ids": torch.zeros(2, 3, dtype=torch.int32)},
            ValueError,
            r"expected \[T, top_k\] = \[2, 2\]",
        ),
        (
            (x, 2),
            {"ids": torch.zeros(2, 2, dtype=torch.int32), "correction_bias": torch.zeros(8)},
            ValueError,
            "leave out ids, or both of these",
        ),
        ((x, 2), {"ids": torch.zeros(2, 2)}, TypeError, "expected whole numbers"),
        ((x, 2), {"scoring": "tanh"}, ValueError, "scoring='tanh'"),
        ((x, 2), {"bias": torch.zeros(7)}, ValueError, r"torch.float32 \[8\], one per expert"),
        ((x.clone().requires_grad_(), 2), {}, UnsupportedProblem, "no backward pass"),
    ):
        with pytest.raises(error, match=text):
            route(*arguments, **options)

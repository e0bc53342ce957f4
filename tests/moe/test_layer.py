"""moe: random layers have the bits of token-by-token layers, on every backend and in every mode of the emulator."""

import random

import pytest
import torch
from expert_layers import moe, mx_weights, naive, some_layer
from oracle import assert_bitwise_equal, assert_error_within

from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts.checks import format_of_rows
from nvfp4_cute.experts.products import ROWS
from nvfp4_cute.experts.routing import route
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import MXFP4, MXFP8
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.planning.arch import mmas_of, simt, sm80
from nvfp4_cute.roofline.modelled import recorded_chain

ARCHS = ["sm_90a", "sm_100a", "sm_120a"]


def check(layer, arch="sm_90a", mode="eager", most=6, **facts):
    with observe(check=True, mode=mode) as observer:
        got = moe(*layer.arguments(), **layer.options, backend=f"emulator:{arch}")
    assert len(observer.stats) <= most, f"{len(observer.stats)} launches"
    want = naive(layer)
    assert_bitwise_equal(got, want, **facts)
    assert_bitwise_equal(moe(*layer.arguments(), **layer.options, backend="reference"), want, **facts)
    return got


@pytest.mark.slow
def test_one_small_layer():
    check(some_layer(5, 2, 4, 64, 128))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "rows"),
    [
        ("sm_80", "16bit"),
        ("sm_90a", "nvfp4"),
        ("sm_90a", "16bit"),
        ("sm_100a", "nvfp4"),
        ("sm_120a", "nvfp4"),
    ],
)
def test_the_most_experts_and_choices(arch, rows):
    """1,024 experts and 32 per token, in the order of rows, products and sum."""
    layer = some_layer(3, 32, 1024, 32, 32, used=3, activations=rows)
    got, want = (
        moe(*layer.arguments(), **layer.options, backend=b) for b in (f"emulator:{arch}", "reference")
    )
    assert_bitwise_equal(got, want)


def drawn(seed, layouts=("concatenated", "concatenated", "interleaved", "none")):
    """Draws a random layer that is small enough for the emulator: few experts have rows, whatever the number of experts is."""
    dice = random.Random(seed)
    experts = dice.choice([1, 2, 3, 8, 60, 128, 512])
    top_k = dice.randint(1, 16)
    tokens = dice.choice([0, 1, 1, 2, 5, 16, 33, dice.randint(0, 600)])
    width = dice.choice([32, 64, 96, 128, 256])
    layout = dice.choice(layouts)
    used = min(experts, dice.choice([1, 2, 3, 5]))
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = dice.choice([32, 64, 160]), dice.choice([torch.bfloat16, torch.float16])
    options = {"activation": "relu2", "weight_layout": layout}
    rows = width if layout == "none" else 2 * width
    fused = layout == "concatenated" and rows % 256 == 0
    if not fused:
        options["activation"] = dice.choice(["silu", "gelu_tanh", "relu2", "swiglu_oai"])
    if dice.random() < 0.4 and layout != "none":
        options["bias13"] = torch.randint(-2, 3, (experts, rows), generator=generator).to(dtype)
    if dice.random() < 0.4:
        options["bias2"] = torch.randn(experts, hidden, generator=generator).to(dtype)
    if dice.random() < 0.4:
        options["shared"] = torch.randn(tokens, hidden, generator=generator).to(dtype)
    if dice.random() < 0.4:
        options["input_scale"] = torch.tensor(dice.choice([0.5, 2.0]))
    elif dice.random() < 0.5:
        options["input_scale"] = torch.exp2(torch.randint(-2, 2, (experts,), generator=generator).float())
    if dice.random() < 0.5:
        options["hidden_scale"] = torch.exp2(torch.randint(-2, 2, (experts,), generator=generator).float())
    if dice.random() < 0.3:
        options["first_expert"] = dice.choice([1, 64])
    gated = layout != "none"
    return some_layer(
        tokens, top_k, experts, hidden, width, seed=seed, dtype=dtype, gated=gated, used=used,
        foreign=dice.random() < 0.5, **{key: value for key, value in options.items() if gated or key != "weight_layout"},
    )  # fmt: skip


def seeds(count, *few):
    """Marks all seeds slow but a few small ones, which cover the modes."""
    return [pytest.param(seed, marks=() if seed in few else pytest.mark.slow) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(330, 11, 13, 51))  # each architecture and each layout is among them
def test_random_layers(seed):
    mode = ("eager", "lazy", f"random:{seed}")[seed % 3]
    check(drawn(seed), ARCHS[seed // 3 % 3], mode, seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", seeds(60, 9, 11, 13))
def test_random_layers_of_16_bit_rows(seed):
    """Hidden activations are integers, so that sums are exact in any order."""
    layer = drawn(seed, layouts=("concatenated", "interleaved"))
    layer.options = {k: v for k, v in layer.options.items() if k not in ("input_scale", "hidden_scale")}
    layer.options |= {"activations": "16bit", "activation": "relu2"}
    layer.w13 = ExpertWeights(layer.w13.data, layer.w13.scale, torch.ones(len(layer.w13.data)))
    check(layer, "sm_90a", ("eager", "lazy", f"random:{seed}")[seed % 3], seed=seed)


@pytest.mark.parametrize(
    ("format", "seed"),
    [pytest.param(MXFP4, seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(6)]
    + [pytest.param(MXFP8[seed % 2], seed, marks=pytest.mark.slow) for seed in range(2)],
    ids=str,
)
def test_mx_weights(format, seed):
    """Weights with 16-bit rows; with biases and alternating gates, as in gpt-oss, or activated in the epilogue."""
    layouts = ("interleaved",) if seed % 2 else ("concatenated",)
    layer, generator = drawn(seed, layouts=layouts), torch.Generator().manual_seed(seed)
    layer.x = layer.x.bfloat16()
    experts, rows, hidden = layer.w13.shape
    layer.w13 = mx_weights(experts, rows, hidden, generator, format=format)
    layer.w2 = mx_weights(experts, hidden, layer.w2.shape[2], generator, format=format)
    dropped = ("input_scale", "hidden_scale", "bias13", "bias2", "shared")
    layer.options = {k: v for k, v in layer.options.items() if k not in dropped}
    layer.options |= {"activations": "16bit", "activation": "relu2"}
    if seed % 2:
        for name, columns in (("bias13", rows), ("bias2", hidden)):
            layer.options[name] = torch.randint(-2, 3, (experts, columns), generator=generator).bfloat16()
    check(layer, "sm_90a", ("eager", "lazy", f"random:{seed}")[seed % 3], seed=seed)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("sm_100a", marks=()),
        *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_120a", "sm_90a")),
    ],
)
@pytest.mark.parametrize(("rows", "format", "has_bias"), [
    ("mxfp8_e4m3", MXFP4, False),
    pytest.param("mxfp4", MXFP4, False, marks=pytest.mark.slow),
    pytest.param("mxfp8_e4m3", MXFP8[0], True, marks=pytest.mark.slow),
    pytest.param("mxfp4", MXFP4, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_mx_rows(rows, format, has_bias, arch):
    """Both products take rows in MX formats; hidden activations are quantized only by the launch of a product or an activation."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (11, 128), generator=generator).bfloat16()
    w13, w2 = (mx_weights(5, n, k, generator, format=format) for n, k in ((256, 128), (128, 128)))
    ids, weights = route(torch.randn(11, 5, generator=generator), 2)
    bias = torch.randint(-3, 4, (5, 256), generator=generator).bfloat16() if has_bias else None
    options = {"activations": rows, "activation": "relu2", "bias13": bias}
    with observe(check=True) as observer:
        got = moe(x, ids, weights, w13, w2, backend=f"emulator:{arch}", **options)
    decodes = 2 if arch == "sm_90a" else 0  # at most, in launches of their own
    assert len(observer.stats) - decodes <= 4 + has_bias
    assert_bitwise_equal(got, moe(x, ids, weights, w13, w2, backend="reference", **options))


def test_rows_without_a_global_scale_are_given_none():
    generator = torch.Generator().manual_seed(3)
    w13, w2 = (mx_weights(2, n, k, generator) for n, k in ((256, 128), (128, 128)))
    x, (ids, weights) = torch.zeros(3, 128).bfloat16(), route(torch.randn(3, 2, generator=generator), 1)
    with pytest.raises(ValueError, match="hidden_scale with rows of MXFP4, which have no global scale"):
        moe(x, ids, weights, w13, w2, activations="mxfp4", hidden_scale=torch.ones(1))


@pytest.mark.slow
def test_equal_scores_of_permuted_tokens_have_the_same_bits():
    """Tokens in another order, and a token's choices in another order with equal scores, give the same rows."""
    layer = some_layer(40, 3, 6, 64, 128, seed=7)
    got = moe(*layer.arguments(), **layer.options, backend="emulator:sm_90a")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    layer.x, layer.ids, layer.weights = layer.x[order], layer.ids[order], layer.weights[order]
    assert_bitwise_equal(moe(*layer.arguments(), **layer.options, backend="emulator:sm_90a"), got[order])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_silu_in_the_epilogue(arch):
    """The epilogue uses the GPU's exponential, so a hidden value may round to a neighbor."""
    layer = some_layer(24, 2, 3, 64, 128, seed=3, activation="silu", limit=None)
    layer.w13 = ExpertWeights(layer.w13.data, layer.w13.scale, layer.w13.global_scale / 16)
    got = moe(*layer.arguments(), **layer.options, backend=f"emulator:{arch}")
    assert_error_within(got, naive(layer).double(), max_tol=0.02, rms_tol=0.004)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [64, 128])  # 128: gate, up and activation in one launch
@pytest.mark.parametrize("rows", ["nvfp4", "nvfp4_four_over_six"])
def test_a_global_scale_for_each_row(arch, width, rows):
    x, (ids, weights) = torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None], route(torch.randn(9, 4), 2)
    x = x.bfloat16()
    w13, w2 = (ExpertWeights.quantize(torch.randn(4, n, k) / 8) for n, k in ((2 * width, 64), (64, width)))
    how = {"activations": f"{rows}_per_row"}
    with observe(check=True) as observer:
        got = moe(x, ids, weights, w13, w2, **how, backend=f"emulator:{arch}")
    assert len(observer.stats) <= (5 if width == 64 else 6)
    want = moe(x, ids, weights, w13, w2, **how, backend="reference")
    exact = moe(x, ids, weights, w13, w2, activations="16bit", backend="reference").float()
    error = lambda y: ((y.float() - exact).norm(dim=1) / exact.norm(dim=1)).max()
    assert error(want) < 0.3 < error(moe(x, ids, weights, w13, w2, backend="reference"))
    if width == 64:
        assert_bitwise_equal(got, want)
    else:  # the epilogue's silu is approximate, and rounding to 4 bits magnifies it
        assert error(got) < 0.3 and ((got - want).abs() <= 0.05 * want.abs().amax(1, keepdim=True)).all()
    alone = moe(x[3:4], ids[3:4], weights[3:4], w13, w2, **how, backend="reference")
    assert_bitwise_equal(alone, want[3:4])


def test_interleaved_weights_and_factors_of_their_own():
    """Two factors per expert reach gate and up; weights in the order of other libraries are not copied."""
    layer = some_layer(9, 2, 4, 64, 128, seed=5)
    halves = torch.exp2(torch.randint(-7, -4, (4, 2), generator=torch.Generator().manual_seed(1)).float())
    layer.w13 = ExpertWeights(layer.w13.data, layer.w13.scale, halves)
    got = check_alpha_pair(layer)
    swapped = ExpertWeights(layer.w13.data, layer.w13.scale, halves.flip(1))
    assert not torch.equal(got, moe(*layer.arguments()[:3], swapped, layer.w2, **layer.options))


def check_alpha_pair(layer):
    got = moe(*layer.arguments(), **layer.options, backend="emulator:sm_90a")
    assert_bitwise_equal(got, moe(*layer.arguments(), **layer.options, backend="reference"))
    return got


def test_refusals():
    layer = some_layer(4, 2, 3, 64, 128)
    x, ids, weights, w13, w2 = layer.arguments()
    pair = ExpertWeights(w13.data, w13.scale, torch.ones(3, 2))
    for call, error, text in (
        (lambda: moe(x, ids, weights, w13.data, w2), TypeError, "w13 is a Tensor"),
        (lambda: moe(x, ids, weights, w2, w2), ValueError, r"expected \[T, H\]"),
        (lambda: moe(x, ids, weights, w13, w2, activation="tanh"), ValueError, "activation='tanh'"),
        (lambda: moe(x, ids, weights, w13, w2, weight_layout="x"), ValueError, "weight_layout='x'"),
        (lambda: moe(x, ids, weights, w13, w2, activations="8bit"), ValueError, "activations='8bit'"),
        (
            lambda: moe(x, ids, weights, w13, w2, activations="16bit", input_scale=torch.ones(1)),
            ValueError,
            "input_scale with activations='16bit', whose rows have no global scale; leave it out",
        ),
        (
            lambda: moe(x, ids, weights, pair, w2, weight_layout="interleaved"),
            UnsupportedProblem,
            "one global scale",
        ),
        (lambda: moe(x.float(), ids, weights, w13, w2), TypeError, "dtype of x"),
        (lambda: moe(x.requires_grad_(), ids, weights, w13, w2), UnsupportedProblem, "no backward pass"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_rows_are_those_that_a_gpu_multiplies_by_the_weights():
    """The reference computes the same pairs of rows and weights as all GPUs together, and refuses others."""
    archs = [arch for arch in simt.ARCHS if arch not in sm80.ARCHS]
    of_gpus = {pair for arch in archs for pair in mmas_of(arch)}
    pairs = {(format_of_rows(name), weights) for weights, names in ROWS.items() for name in names}
    assert {(rows.stored, weights) for rows, weights in pairs if rows is not None} == of_gpus
    layer = some_layer(4, 2, 3, 64, 128)
    for rows in ("fp8_1xk", "mxfp4"):
        text = (
            f"activations='{rows}' with NVFP4 weights w13; use 'nvfp4' or 'nvfp4_four_over_six' or '16bit'$"
        )
        with pytest.raises(UnsupportedProblem, match=text):
            moe(*layer.arguments(), activations=rows, backend="reference")


WRONG = {
    "of another dtype": lambda t: t.double(),
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a column less": lambda t: t[:, :-1].contiguous(),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "a dimension more": lambda t: t.unsqueeze(0),
    "on meta": lambda t: t.to("meta"),
    "numpy": lambda t: t.float().numpy(),
    "a number": lambda t: 3.0,
}


@pytest.mark.parametrize("name", ["ids", "weights", "bias13", "bias2", "shared"])
def test_what_any_launch_would_refuse_is_refused_before_the_first_one(name):
    """The error names the operand. A bias with one row fewer would be read beyond its end."""
    layer = some_layer(4, 2, 3, 64, 128)
    given = dict(zip(("x", "ids", "weights", "w13", "w2"), layer.arguments(), strict=True)) | layer.options
    given |= {
        "bias13": torch.zeros(3, 256).bfloat16(),
        "bias2": torch.zeros(3, 64).bfloat16(),
        "shared": torch.zeros(4, 64).bfloat16(),
    }
    for what, wrong in WRONG.items():
        if name == "shared" and what == "strided":
            wrong = lambda t: torch.zeros(64, 4).bfloat16().T
        if name == "ids" and what == "a column less":
            continue  # then weights are wrong
        if name in ("ids", "weights") and what == "unaligned":
            continue  # these are read one by one
        for backend in ("reference", "emulator:sm_90a"):
            with observe() as observer, pytest.raises((TypeError, ValueError), match=name):
                moe(**given | {name: wrong(given[name])}, backend=backend)
            assert observer.stats == [], what


def check_on_gpu(seed):
    """Checks the bits of the token-by-token layer, a captured graph with changing ids and weights, and that nothing waits."""
    layer = drawn(seed)
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in layer.options.items()}
    tensors = [t.cuda() for t in layer.arguments()[:3]]
    w13, w2 = (
        ExpertWeights(w.data.cuda(), w.scale.cuda(), w.global_scale.cuda()) for w in (layer.w13, layer.w2)
    )
    assert_bitwise_equal(moe(*tensors, w13, w2, **options).cpu(), naive(layer), seed=seed)
    if not len(layer.x):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(*tensors, w13, w2, **options)
    order = torch.randperm(len(layer.x), generator=torch.Generator().manual_seed(seed))
    tensors[1].copy_(layer.ids[order])
    tensors[2].copy_(layer.weights[order])
    graph.replay()
    layer.ids, layer.weights = layer.ids[order], layer.weights[order]
    assert_bitwise_equal(y.cpu(), naive(layer), seed=seed)


@pytest.mark.gpu("sm_90a")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, 1000, 10))
def test_gpu_random_layers(first):
    for seed in range(first, first + 10):
        check_on_gpu(seed)


@pytest.mark.parametrize(("target", "early"), [("H200", []), ("B200", ["activate", "finalize"])])
def test_activation_and_sum_start_before_their_products_end_on_blackwell(target, early):
    layer = some_layer(1, 2, 4, 64, 96, gated=False)
    call = lambda backend: moe(*layer.arguments(), **layer.options, backend=backend)
    names = [trace.kernel for trace in recorded_chain(call, lookup(target)) if trace.programmatic]
    assert [name.split("_")[1] for name in names if name.startswith("moe_")] == early


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["A100 80GB", "B200", "RTX 5090"])
def test_16_bit_rows_of_every_gpu(target):
    """Weight-only layers take four launches on every GPU."""
    generator = torch.Generator().manual_seed(7)
    w13, w2 = (
        ExpertWeights.quantize(torch.randn(4, n, k, generator=generator).bfloat16() / 16)
        for n, k in ((256, 128), (128, 128))
    )
    x, logits = torch.randn(3, 128, generator=generator).bfloat16(), torch.randn(3, 4, generator=generator)
    ids, weights = route(logits.bfloat16(), 2)
    options = {"activations": "16bit", "backend": f"emulator:{target}"}
    with observe(check=True) as observer:
        got = moe(x, ids, weights, w13, w2, **options)
    assert len(observer.stats) == 4
    torch.testing.assert_close(got, moe(x, ids, weights, w13, w2, activations="16bit"), rtol=0.02, atol=1e-3)

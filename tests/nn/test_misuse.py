"""Mistaken calls of layers: refused by name, or computed as torch's layers would."""

import pytest
import torch
from expert_layers import moe

from nvfp4_cute import (
    INT8,
    FP8_128x128,
    MoE,
    QuantizedLinear,
    UnsupportedProblem,
    int4_format,
    quantize,
)
from nvfp4_cute.nn.embedding import QuantizedEmbedding
from nvfp4_cute.nn.experts import ModelExperts, Projection, SortedExperts

REFUSALS = (TypeError, ValueError, UnsupportedProblem)
X = torch.linspace(-2, 2, 4 * 128).view(4, 128).bfloat16()
IDS, WEIGHTS = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]), torch.full((4, 2), 0.5)


def int8_experts(gate_up, down, **options):
    """Returns an MoE with INT8 weights and rows, for rows and weights of models."""
    options = {"format": INT8, "activations": "int8", "dtype": torch.bfloat16} | options
    return ModelExperts(MoE.from_experts(gate_up, down, **options))


def int4_experts(gate_up, down, **options):
    """Returns an MoE with int4 weights, for rows and weights of models."""
    options = {"format": int4_format(32), "dtype": torch.bfloat16} | options
    return ModelExperts(MoE.from_experts(gate_up, down, **options))


WRONG = {
    "x": {
        "None": lambda: None,
        "numpy": lambda: X.float().numpy(),
        "float64": X.double,
        "one row": lambda: X[0],
        "of another batch": lambda: X[None],
        "half of K": lambda: X[:, :64],
        "on meta": lambda: X.to("meta"),
        "with a gradient": lambda: X.float().requires_grad_(),
    },
    "ids": {
        "None": lambda: None,
        "numpy": IDS.numpy,
        "float": IDS.float,
        "bool": IDS.bool,
        "flat": lambda: IDS[:, 0],
        "of fewer tokens": lambda: IDS[:3],
        "of fewer choices": lambda: IDS[:, :1],
        "on meta": lambda: IDS.to("meta"),
    },
    "weights": {
        "None": lambda: None,
        "numpy": WEIGHTS.numpy,
        "flat": lambda: WEIGHTS[:, 0],
        "of fewer tokens": lambda: WEIGHTS[:3],
        "on meta": lambda: WEIGHTS.to("meta"),
    },
}


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8


def sorted_experts():
    """Returns experts whose rows torch sorts, with FP8 weights and rows."""
    sides = (quantize(some(2, 128, 128), format=FP8_128x128) for _ in range(3))
    return SortedExperts([Projection(side) for side in sides], activations="fp8_1x128")


@pytest.fixture(scope="module", params=["SortedExperts", "MoE"])
def experts(request):
    if request.param == "MoE":
        return MoE.from_experts(some(2, 256, 128), some(2, 128, 128))
    return sorted_experts()


@pytest.mark.parametrize("name, what", [(name, what) for name, cases in WRONG.items() for what in cases])
def test_experts_refuse(experts, name, what):
    if isinstance(experts, MoE) and (name, what) == ("x", "of another batch"):
        pytest.skip("any leading dimensions are rows")
    given = {"x": X, "ids": IDS, "weights": WEIGHTS} | {name: WRONG[name][what]()}
    with pytest.raises(REFUSALS, match="x|ids|weights|K="):
        experts(*given.values())


def test_experts_without_a_choice_give_zeros():
    experts = sorted_experts()
    assert torch.equal(experts(X, IDS[:, :0], WEIGHTS[:, :0]), torch.zeros_like(X))


@pytest.mark.parametrize("kind", [int8_experts, int4_experts])
def test_choices_as_routers_give_them(kind):
    """Ids may be of narrow types that cannot hold the number of experts, or not contiguous; factors may be expanded or 16-bit."""
    experts = kind(some(128, 64, 32), some(128, 32, 32))
    x, ids = X[:, :32].contiguous(), torch.tensor([[0, 127], [-1, 3], [127, -1], [5, 5]])
    expected = experts(x, ids, WEIGHTS)
    for dtype in (torch.int8, torch.int16, torch.int32):
        assert torch.equal(experts(x, ids.to(dtype), WEIGHTS), expected), dtype
    for weights in (WEIGHTS[:1, :1].expand(4, 2), WEIGHTS.bfloat16(), WEIGHTS.double()):
        assert torch.equal(experts(x, ids.t().contiguous().t(), weights), expected)
    assert not experts(x, ids[:, :0], WEIGHTS[:, :0]).any()


@pytest.mark.parametrize("kind", [int8_experts, int4_experts])
def test_biases_of_experts(kind):
    """All floats and strides are accepted, without a gradient; a bias that does not fit is refused by the constructor."""
    make = lambda bias: kind(some(2, 64, 32), some(2, 32, 32), bias13=bias)
    bias, x = some(2, 64).bfloat16(), X[:, :32].contiguous()
    expected = make(bias)(x, IDS, WEIGHTS)
    for other in (bias.double(), torch.nn.Parameter(bias.clone()), bias.t().contiguous().t()):
        got = make(other)(x, IDS, WEIGHTS)
        assert torch.equal(got, expected) and not got.requires_grad
    for wrong in (bias.int(), bias.bool(), bias.to(torch.complex64), bias.tolist(), bias[0], bias.to("meta")):
        with pytest.raises((TypeError, ValueError), match="bias13"):
            make(wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"process_group": "world"},
        {"process_group": 3},
        {"placement": "even"},
        {"parallel": "pipeline"},
        {"first_expert": -1},
        {"num_experts": 0},
        {"num_experts": -2},
        {"activation": "tanh"},
        {"activations": "8bit"},
        {"weight_layout": "woven"},
        {"limit": -1.0},
        {"backend": None},
        {"backend": "gpu"},
        {"input_scale": float("nan")},
        {"hidden_scale": 0.0},
    ],
    ids=str,
)
def test_a_layer_of_experts_is_not_made_of(options):
    """The constructor refuses them, not the first call."""
    (name,) = options
    sizes = {"num_experts": 2, "hidden_size": 64, "intermediate_size": 64}
    with pytest.raises(REFUSALS, match=name):
        MoE(**sizes | options)


@pytest.mark.parametrize(
    "options",
    [
        {"in_features": 128.0},
        {"in_features": "128"},
        {"in_features": True},
        {"out_features": -1},
        {"dtype": torch.int8},
        {"dtype": "bfloat16"},
        {"input_scale": -1.0},
        {"input_scale": float("nan")},
        {"input_scale": 0},
        {"backend": 3},
        {"backend": "gpu"},
    ],
    ids=str,
)
def test_a_linear_layer_is_not_made_of(options):
    """The constructor raises before any call."""
    (name,) = options
    with pytest.raises(REFUSALS, match=name):
        QuantizedLinear(**{"in_features": 64, "out_features": 64} | options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"input_scale": 0.5}, "input_scale is a float; pass a torch.Tensor"),
        ({"alpha13": (torch.ones(2),)}, "w13.alpha has 1 entries; pass one tensor, or two"),
        ({"alpha13": torch.ones(3)}, "w13.alpha has shape .3., .*one per expert"),
        ({"alpha2": torch.ones(2).double()}, "w2.alpha has dtype float64; expected float32"),
        ({"limit": 1e39}, "limit=1e.39 is not a positive number of float32"),
        ({"limit": 10**400}, "limit=10* is not a positive number of float32"),
    ],
    ids=str,
)
def test_a_layer_of_experts_is_not_computed_with(options, words):
    weights = quantize(some(2, 128, 64)), quantize(some(2, 64, 64))
    with pytest.raises(REFUSALS, match=words):
        moe(some(4, 64).bfloat16(), IDS, WEIGHTS, *weights, **options)


LINEARS = {
    "nvfp4": lambda: QuantizedLinear.from_linear(torch.nn.Linear(128, 64).bfloat16()),
    "nvfp4 16bit": lambda: QuantizedLinear.from_linear(
        torch.nn.Linear(128, 64).bfloat16(), activations="16bit"
    ),
    "fp8": lambda: QuantizedLinear.from_quantized(quantize(some(128, 128), format=FP8_128x128)),
    "fp8 16bit": lambda: QuantizedLinear.from_quantized(
        quantize(some(128, 128), format=FP8_128x128), activations="16bit"
    ),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_layer_takes_views_and_refuses_what_is_elsewhere(name):
    layer = LINEARS[name]()
    with torch.no_grad():
        row = layer(X[:1])
        assert torch.equal(layer(X[:1].expand(4, 128)), row.expand(4, -1))
        assert torch.equal(layer(X.t().contiguous().t()), layer(X))
        for wrong in ("None", "numpy", "half of K", "on meta"):
            with pytest.raises(REFUSALS):
                layer(WRONG["x"][wrong]())
        for given, words in (
            (X.to_sparse(), "has layout torch.sparse_coo"),
            (torch.nested.as_nested_tensor([X, X[:2]]), "has layout nested"),
            (quantize(X), "x is quantized already, to NVFP4; pass values"),
        ):
            with pytest.raises(TypeError, match=words):
                layer(given)


@pytest.mark.parametrize(
    "ids",
    [None, [1, 2], IDS.float(), IDS.bool(), IDS.to_sparse()],
    ids=["None", "list", "float", "bool", "sparse"],
)
def test_an_embedding_refuses(ids):
    with pytest.raises(TypeError, match="ids"):
        QuantizedEmbedding(quantize(some(5, 64)))(ids)

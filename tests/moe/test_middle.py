"""activate: the bits of experts.activation's float32 operations, then one rounding."""

import math
from itertools import product

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute.activation import NAMES, activation_of
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.experts.middle import activate
from nvfp4_cute.experts.permutation import permute
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.reference import activated

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


def rowmajor(scale):
    atoms, atoms_k = scale.shape[:2]
    return scale.view(torch.uint8).permute(0, 3, 2, 1, 4).reshape(atoms * 128, atoms_k * 4)


def check(h, ids, experts, arch="sm_90a", mode="eager", **options):
    order = permute(ids, experts, first_expert=options.get("first_expert", 0))
    with observe(check=True, mode=mode) as observer:
        data, scale, _ = activate(h, ids, order, format=NVFP4, backend=f"emulator:{arch}", **options)
    want_data, want_scale, _ = activate(h, ids, order, format=NVFP4, backend="reference", **options)
    assert len(observer.stats) == 1
    rows, places = int(order.offs[-1]), order.places[order.places >= 0].long()
    assert_bitwise_equal(data[:rows], want_data[:rows])
    assert_bitwise_equal(rowmajor(scale)[places], rowmajor(want_scale)[places])


def assert_same_but_nan(got, want):
    """Compares bits except those of NaN, which an instruction and torch encode differently."""
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(got.masked_fill(got.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0))


def check_plain(h, ids, experts, arch, **options):
    order = permute(ids, experts)
    with observe(check=True) as observer:
        got = activate(h, ids, order, backend=f"emulator:{arch}", **options).data
    assert len(observer.stats) == 1 and got.dtype == h.dtype
    rows, start = int(order.offs[-1]), 0
    want = activate(h, ids, order, backend="reference", **options).data
    record = options["activation"]
    assert_same_but_nan(got[:rows], want[:rows])
    for expert, end in enumerate(order.offs.tolist()):
        values = h[start:end].float()
        if options.get("bias") is not None:
            values = values + options["bias"][expert].float()
        layout = options.get("gate_layout", "concatenated")
        values = activate_rows(values, record.function, layout, record.limit)
        assert_same_but_nan(want[start:end], values.to(h.dtype))
        start = end


def some(rows, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = 4 * torch.randn(rows, columns, generator=generator)
    h[::3, ::5] *= 30
    h[0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30])
    return h.to(dtype)


BOUNDED = "situ(beta=4.0,linear_beta=25.0)"
TEXTS = (*NAMES, BOUNDED, "swiglu_oai(alpha=1.5)")
FAST = (
    ("relu2", "none", "sm_90a"),
    ("gelu_tanh", "interleaved", "sm_100a"),
    ("swiglu_oai", "concatenated", "sm_90a"),
    (BOUNDED, "concatenated", "sm_120a"),
)
VARIANTS = [
    pytest.param(
        n,
        dtype,
        *kind,
        id="-".join((str(n), *kind)),
        marks=() if n == 96 and kind in FAST else pytest.mark.slow,
    )
    for n, dtype in ((96, torch.bfloat16), (544, torch.float16))
    for kind in product(TEXTS, ("concatenated", "interleaved", "none"), ARCHS)
]


@pytest.mark.parametrize(("n", "dtype", "activation", "layout", "arch"), VARIANTS)
def test_every_activation(n, dtype, activation, layout, arch):
    ids = torch.randint(-1, 5, (11, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    columns = n if layout == "none" else 2 * n
    h, bias = some(33, columns, dtype), some(5, columns, dtype, 2)
    limited = activation_of(activation, 7.0)
    check(h, ids, 5, arch, activation=activation, gate_layout=layout)
    check(
        h, ids.long() + 2, 5, arch, activation=limited, gate_layout=layout, bias=bias,
        global_scale=torch.rand(5) + 0.01, first_expert=2,
    )  # fmt: skip
    check_plain(h, ids, 5, arch, activation=limited, gate_layout=layout, bias=bias)


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_modes(mode):
    ids = torch.randint(0, 3, (70, 2), generator=torch.Generator().manual_seed(1))
    check(some(140, 64, torch.bfloat16), ids, 3, mode=mode)


def test_the_operations_are_the_formulas():
    """The float64 formulas of torch, to a few float32 roundings; both arrangements of the columns; limits."""
    x, up = 5 * torch.randn(2, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, up = x.float().double(), up.float().double()
    functional = torch.nn.functional
    want = {
        "silu": functional.silu(x) * up,
        "gelu": functional.gelu(x) * up,
        "gelu_tanh": functional.gelu(x, approximate="tanh") * up,
        "relu": x.relu() * up,
        "relu2": x.relu().square() * up,
        "swiglu_oai": (up + 1) * x * torch.sigmoid(1.702 * x),
        "swiglu_oai(alpha=1.5)": (up + 1) * x * torch.sigmoid(1.5 * x),
        "situ": torch.tanh(x) * torch.sigmoid(x) * up,
        BOUNDED: 4 * torch.tanh(x / 4) * torch.sigmoid(x) * (25 * torch.tanh(up / 25)),
    }
    assert set(want) == set(TEXTS)
    for activation, value in want.items():
        h = torch.cat([x, up]).view(1, -1).float()
        got = activate_rows(h, activation, "concatenated", None)[0]
        torch.testing.assert_close(got.double(), value, rtol=3e-6, atol=1e-6)
        pairs = torch.stack([x, up], 1).view(1, -1).float()
        assert torch.equal(activate_rows(pairs, activation, "interleaved", None)[0], got)
        cut = activate_rows(h, activation, "concatenated", 2.0)[0].double()
        of_reference = activated(x, up, activation_of(activation, 2.0))
        torch.testing.assert_close(cut, of_reference, rtol=3e-6, atol=1e-6)
        torch.testing.assert_close(activated(x, up, activation_of(activation)), value, rtol=1e-12, atol=1e-12)


def test_small_and_large_arguments_keep_their_relative_accuracy():
    """Where 1 + erf and 1 - exp would cancel, and on both sides of the point where tanh changes its formula."""
    x = torch.cat([-torch.logspace(-6, 1, 400), torch.logspace(-6, 1, 400), torch.linspace(0.55, 0.65, 200)])
    for activation in ("gelu", "situ"):
        got = activate_rows(x.view(1, -1), activation, "none", None)[0].double()
        want = activated(x.double(), None, activation_of(activation))
        units = (4 * x.double() ** 2 if activation == "gelu" else 3 * x.abs().double()) + 16
        assert bool(((got - want).abs() <= units * 2.0**-24 * want.abs()).all()), activation


def test_refusals():
    ids = torch.zeros(4, 2, dtype=torch.int32)
    order, h = permute(ids, 2), torch.zeros(8, 64).half()
    for call, error, text in (
        (lambda: activate(h.float(), ids, order), TypeError, "dtype of h"),
        (lambda: activate(h[:, :40], ids, order), ValueError, "N=20 is not a multiple of 32"),
        (lambda: activate(h.repeat(2, 1), ids, order), ValueError, "h has 16 rows"),
        (lambda: activate(h, ids, order, activation="tanh"), ValueError, "activation='tanh'"),
        (lambda: activate(h, ids, order, bias=h[:2, :32]), ValueError, "bias is"),
        (
            lambda: activate(h, ids, order, bias=h.flatten()[1:129].view(2, 64)),
            ValueError,
            "bias starts at",
        ),
    ):
        with pytest.raises(error, match=text):
            call()

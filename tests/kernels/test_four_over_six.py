"""4over6 in every launch that quantizes: the bits of the reference on the emulator."""

import pytest
import torch
from oracle import assert_bitwise_equal
from quantize_inputs import assert_same, hostile, spread

from nvfp4_cute import (
    ActivationFormat,
    GateUp,
    QuantizedLinear,
    dual_gemm,
    gemm,
    grouped_quantize,
    moe,
    quantize,
    route,
)
from nvfp4_cute.formats import block_scaled

FOUR_OVER_SIX = "nvfp4_four_over_six"
DTYPES = (torch.bfloat16, torch.float16)
SLOW = [pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_90a", "sm_120a", "sm_80")]
EVERY_ARCH = pytest.mark.parametrize("arch", ["sm_100a", *SLOW])
FAMILIES = pytest.mark.parametrize("arch", ["sm_100a", *SLOW[:2]])
FEW = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        *(pytest.param(f"emulator:{arch}", marks=pytest.mark.slow) for arch in ("sm_90a", "sm_100a")),
    ],
)
LARGEST = torch.finfo(torch.float32).max


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", *SLOW[1:]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("global_scale", (None, "auto", 0.37, 3e-38, 7e37, LARGEST))
def test_hostile_blocks(arch, dtype, global_scale):
    x = torch.cat([hostile(dtype), spread((1, 272), dtype)])
    options = {"method": "four_over_six", "global_scale": global_scale}
    assert_same(quantize(x, backend=f"emulator:{arch}", **options), block_scaled.quantize(x, **options))


@EVERY_ARCH
def test_groups_and_silu(arch):
    x, up = randn(2, 40, 128)
    offs = torch.tensor([13, 13, 40], dtype=torch.int32)
    calls = (
        lambda backend: grouped_quantize(x, offs, method="four_over_six", backend=backend),
        lambda backend: quantize(x, up=up, method="four_over_six", backend=backend),
        lambda backend: quantize(
            torch.stack([x, up]), global_scale="per_batch", format=FOUR_OVER_SIX, backend=backend
        ),
    )
    for call in calls:
        assert_same(call(f"emulator:{arch}"), call("reference"))


@FAMILIES
def test_epilogues(arch):
    """Products quantize their float32 results alike, gated ones too."""
    a, b = quantize(randn(40, 256)), quantize(randn(256, 256))
    options = {"out_dtype": FOUR_OVER_SIX, "out_global_scale": 0.013}
    for call in (
        lambda backend, **how: gemm(a, b, backend=backend, **how),
        lambda backend, **how: dual_gemm(a, GateUp(b[:128], b[128:]), backend=backend, **how),
    ):
        got, sums = call(f"emulator:{arch}", **options), call("reference", out_dtype=torch.float32)
        want = block_scaled.quantize(sums, format=FOUR_OVER_SIX, global_scale=0.013, scale_layout="rowmajor")
        assert_same(got.with_scale_layout("rowmajor"), want)


@FEW
def test_layers(backend):
    """A linear layer and one of experts take it as ``activations`` and as the format of rows, and lose less."""
    x = randn(20, 128)
    linear = torch.nn.Linear(128, 64).bfloat16()
    choices = (
        (FOUR_OVER_SIX, backend),
        (FOUR_OVER_SIX, "reference"),
        ("nvfp4", "reference"),
        ("16bit", "reference"),
    )
    got, want, plain, exact = (
        QuantizedLinear.from_linear(linear, activations=activations, backend=where)(x)
        for activations, where in choices
    )
    assert_bitwise_equal(got, want)
    assert (want - exact).float().norm() < (plain - exact).float().norm()
    w13, w2 = quantize(randn(4, 256, 128) / 16), quantize(randn(4, 128, 128) / 16)
    ids, weights = route(randn(20, 4).float(), 2)
    rows = ActivationFormat(FOUR_OVER_SIX, torch.tensor(0.002), torch.tensor(0.004))
    got, want = (moe(x, ids, weights, w13, w2, activations=rows, backend=b) for b in (backend, "reference"))
    assert_bitwise_equal(got, want)
    six = ActivationFormat("nvfp4", rows.input_scale, rows.hidden_scale)
    assert not torch.equal(want, moe(x, ids, weights, w13, w2, activations=six, backend="reference"))

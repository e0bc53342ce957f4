"""Products of ``a`` with a global scale per row: the bits of the reference on every architecture, in every form."""

import pytest
import torch
from oracle import assert_bitwise_equal

from nvfp4_cute import (
    Activation,
    BlockScaledTensor,
    GateUp,
    Options,
    dual_gemm,
    gemm,
    gemv,
    grouped_dual_gemm,
    grouped_gemm,
    grouped_quantize,
    quantize,
)
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.planning.choose import candidates

K, N = 256, 160
ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a", pytest.param("sm_110a", marks=pytest.mark.slow))
OFFS = torch.tensor([5, 5, 60], dtype=torch.int32)
SIZES = torch.tensor([3, 0, 20], dtype=torch.int32)
F32 = {"out_dtype": torch.float32}
RELU2 = {"activation": Activation("relu2"), **F32}


def small(*shape, seed=0):
    """Rows of different magnitudes whose products have exact sums: whole numbers times one scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=generator).float()
    x[..., ::16] = 6
    return (x * 2.0 ** torch.randint(-3, 4, shape[:-1], generator=generator)[..., None]).bfloat16()


def rows(*shape, seed=0):
    return quantize(small(*shape, seed=seed), global_scale="per_row")


def weights(*shape, seed=1):
    word = "auto" if len(shape) == 2 else "per_batch"
    return quantize(small(*shape, seed=seed), global_scale=word)


W, EACH = weights(N, K), weights(3, 96, K)
GATE, UP = (weights(128, K, seed=seed) for seed in (2, 3))
EACH_GATE, EACH_UP = (weights(3, 96, K, seed=seed) for seed in (4, 5))
RAGGED = grouped_quantize(small(60, K), OFFS, global_scale="per_row")
CALLS = {
    "gemm": lambda **how: gemm(rows(70, K), W, alpha=0.5, bias=torch.arange(N).bfloat16(), **how),
    "one row": lambda **how: gemm(rows(1, K), W, **F32, **how),
    "batched": lambda **how: gemm(rows(2, 9, K), EACH[:2], **F32, **how),
    "quantized": lambda **how: gemm(rows(40, K), W, out_dtype="nvfp4", out_global_scale=0.25, **how),
    "list": lambda **how: grouped_gemm([rows(40, K), rows(3, K)], [W, W], **F32, **how),
    "ragged": lambda **how: grouped_gemm(RAGGED, EACH, OFFS, **how),
    "masked": lambda **how: grouped_gemm(
        rows(3, 20, K), EACH, masked_m=SIZES, out=torch.zeros(3, 20, 96), **F32, **how
    ),
    "dual": lambda **how: dual_gemm(rows(70, K), GateUp(GATE, UP), **RELU2, **how),
    "batched dual": lambda **how: dual_gemm(
        rows(2, 9, K), GateUp(EACH_GATE[:2], EACH_UP[:2]), **RELU2, **how
    ),
    "interleaved dual": lambda **how: dual_gemm(
        rows(30, K), GateUp(GATE, layout="interleaved_32_gate_first"), **RELU2, **how
    ),
    "ragged dual": lambda **how: grouped_dual_gemm(RAGGED, GateUp(EACH_GATE, EACH_UP), OFFS, **RELU2, **how),
}  # fmt: skip


def parts(result):
    if isinstance(result, list | tuple):
        return [part for one in result for part in parts(one)]
    return [result.data, result.scale] if isinstance(result, BlockScaledTensor) else [result]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("call", CALLS)
def test_products(arch, call):
    with observe(check=True) as observer:
        got = CALLS[call](backend=f"emulator:{arch}")
    assert len(observer.stats) <= 2  # sm_90a may dequantize tokens in a launch of its own
    for one, other in zip(parts(got), parts(CALLS[call](backend="reference")), strict=True):
        if "dual" in call:  # the reference rounds the result of a gated layer once, a kernel each factor
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
        else:
            assert_bitwise_equal(one, other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("number", range(60))
def test_configs(arch, number):
    tried = candidates(arch, "list")
    config = tried[number % len(tried)]
    a, b = rows(150, 1024), weights(256, 1024)
    want = gemm(a, b, **F32, backend="reference")
    assert_bitwise_equal(gemm(a, b, **F32, backend=f"emulator:{arch}", options=Options(config=config)), want)


def test_refusals():
    vector = quantize(small(1, K)[0], global_scale="per_row")
    assert not vector.has_row_scales  # one row: a number
    gemv(W, vector)
    with pytest.raises(UnsupportedProblem, match="call gemm"):
        gemv(rows(4, K), vector)
    for call in (
        lambda w: gemm(rows(4, K), w),
        lambda w: gemm(small(4, K), w),
        lambda w: grouped_gemm([rows(4, K)], [w]),
    ):
        with pytest.raises(UnsupportedProblem, match="only a may have"):
            call(rows(N, K))
    with pytest.raises(UnsupportedProblem, match="only a may have"):
        dual_gemm(rows(4, K), GateUp(GATE, rows(128, K)))
    with pytest.raises(ValueError, match="group 1 has no global scale per row"):
        grouped_gemm([rows(4, K), quantize(small(4, K))], [W, W])
    quantized = {"out_dtype": "nvfp4", "out_global_scale": "per_row"}
    for call in (
        lambda: gemm(rows(4, K), W, **quantized),
        lambda: grouped_gemm(RAGGED, EACH, OFFS, **quantized),
    ):
        with pytest.raises(UnsupportedProblem, match="then quantize"):
            call()

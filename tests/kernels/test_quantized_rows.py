"""NVFP4 results of 1 to 600 rows in every form: primes, edges of tiles and scale atoms and their neighbours, random numbers."""

import random

import cases
import device_groups_check
import pytest
import torch
from flat_parts import gemm, grouped_dual_gemm, grouped_gemm
from quantized_check import assert_quantized

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe

pytestmark = pytest.mark.slow

N, K, FACTOR = 80, 64, 0.37
PRIMES = (2, 3, 7, 13, 61, 97, 131, 199, 283, 397, 499, 593)
EDGES = {edge + i for edge in (16, 32, 64, 128, 192, 256, 384, 512) for i in (-1, 0, 1)}
ROWS = sorted({1, 600, *PRIMES, *EDGES, *random.Random(1).sample(range(1, 601), 8)})
CONFIGS = (
    "t128x128x256_s0a2_p2",
    "t128x64x256_s2a3_swap_p2",
    "t128x256x256_s0a2_2cta_p2",
    "t128x64x256_s0a4_swap_p3",
    "t128x192x256_s0a2_2cta_swap_p4",
)
DUAL_CONFIGS = ("t128x64x256_s0a3", "t128x64x256_s0a3_swap", "t128x64x256_s0a3_2cta_swap")


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_gemm(number):
    """One call per number of rows, with alternating configs: the bits of ``quantize`` of the exact results."""
    options = {"config": KernelConfig.from_name(CONFIGS[number]), "backend": "emulator"}
    for m in ROWS[number :: len(CONFIGS)]:
        case = cases.Case("rows", ((m, N, K),), m, torch.float32)
        (a,), (b,), (a_scale,), (b_scale,), _ = cases.make_operands(case)
        exact = gemm(a, b, a_scale, b_scale, out_dtype=torch.float32)
        with observe(check=True) as observer:
            got = gemm(a, b, a_scale, b_scale, out_dtype="nvfp4", out_global_scale=FACTOR, **options)
        assert len(observer.stats) == 1
        assert_quantized(got.data, got.scale, exact, torch.tensor(FACTOR))


@pytest.mark.parametrize("name", CONFIGS)
def test_list(name):
    """Launches of few groups, with different rows and factors."""
    size = 12
    for first in range(0, len(ROWS), 2 * size):
        rows = ROWS[first : first + size]
        case = cases.Case("rows", tuple((m, N, K) for m in rows), first, torch.float32, has_alpha=True)
        a, b, a_scale, b_scale, alpha = cases.make_operands(case)
        exact = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
        factors = torch.linspace(0.5, 3, len(rows))
        got = grouped_gemm(
            a, b, a_scale, b_scale, alpha=alpha, out_dtype="nvfp4", out_global_scale=factors,
            config=KernelConfig.from_name(name), backend="emulator",
        )  # fmt: skip
        for g, result in enumerate(got):
            assert_quantized(result.data, result.scale, exact[g], factors[g])


def results(form, data, scale, exact):
    """Data, scales and exact results of each group."""
    start = block = 0
    for g, m in enumerate(ROWS):
        blocks = -(-m // 128)
        if form == "ragged":
            yield data[start : start + m], scale[block : block + blocks], exact[start : start + m]
        else:
            yield data[g, :m], scale[g, :blocks], exact[g, :m]
        start, block = start + m, block + blocks


@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize("name", CONFIGS)
def test_groups_on_the_device(form, name):
    """All numbers of rows as groups of one launch, which reads their sizes on the device."""
    arguments = device_groups_check.operands(form, ROWS, n=N, k=K, out_dtype=torch.float32)
    exact = device_groups_check.run(arguments, "reference")
    del arguments["out"], arguments["out_dtype"]
    factors = torch.linspace(0.5, 3, len(ROWS))
    data, scale = grouped_gemm(
        **arguments, out_dtype="nvfp4", out_global_scale=factors,
        config=KernelConfig.from_name(name), backend="emulator",
    )  # fmt: skip
    for g, (values, scales, x) in enumerate(results(form, data, scale, exact)):
        assert_quantized(values, scales, x, factors[g])


@pytest.mark.parametrize("name", DUAL_CONFIGS)
def test_dual(name):
    """The result is that of quantize for the same kernel's float32 results, because the activation is not exact."""
    first, second = (
        device_groups_check.operands("ragged", ROWS, n=N, k=K, seed=seed, has_alpha=False) for seed in (0, 1)
    )
    weights = (first["b"], second["b"], first["a_scale"], first["b_scale"], second["b_scale"])
    alphas = torch.full((len(ROWS),), 2.0**-7), torch.full((len(ROWS),), -(2.0**-6))
    options = {
        "offs": first["offs"], "config": KernelConfig.from_name(name), "backend": "emulator",
    }  # fmt: skip
    sums = grouped_dual_gemm(first["a"], *weights, *alphas, out_dtype=torch.float32, **options)
    factors = torch.linspace(0.5, 3, len(ROWS))
    data, scale = grouped_dual_gemm(
        first["a"], *weights, *alphas, out_dtype="nvfp4", out_global_scale=factors, **options
    )
    for g, (values, scales, x) in enumerate(results("ragged", data, scale, sums)):
        assert_quantized(values, scales, x, factors[g])

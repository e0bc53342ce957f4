"""Split-K of the SM100 kernels: CTAs of a cluster share a tile's K tiles and add up their sums, bit for bit."""

import random

import cases
import device_groups_check
import grouped_gemm_check
import pytest
import torch
from oracle import bits

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe

EMULATED = "emulator:sm_100a"
# Fewer K tiles than CTAs, tiles that a cluster takes one after the other, columns that no CTA of the cluster has to add up.
SIZES = ((5, 300, 640), (8, 136, 128), (70, 264, 1056), (0, 128, 256))


def config(tokens, split, **more):
    return KernelConfig((128, tokens, 256), split_k=split, swap_ab=True, **more)


@pytest.mark.parametrize(
    ("chosen", "mode", "out_dtype"),
    [
        (config(32, 2, num_cta=4), "random:1", torch.bfloat16),
        (config(64, 4, num_cta=8), "lazy", torch.float32),
        pytest.param(config(96, 8, num_cta=8), "eager", torch.float16, marks=pytest.mark.slow),
        pytest.param(
            KernelConfig((128, 256, 256), split_k=2, num_cta=4), "lazy", torch.float16, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_list(chosen, mode, out_dtype):
    case = cases.Case("split", SIZES, 3, out_dtype, has_alpha=True, padding="nan")
    with observe(mode=mode, check=True):
        grouped_gemm_check.check(case, chosen, EMULATED)


@pytest.mark.parametrize(
    ("form", "chosen", "mode"),
    [
        ("ragged", config(64, 8, num_cta=16), "random:1"),
        pytest.param("masked", config(32, 4, num_cta=16), "lazy", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sizes_on_the_device(form, chosen, mode):
    arguments = device_groups_check.operands(form, (0, 40, 96, 1, 130, 0), n=200, k=1056, slack=9)
    expected = device_groups_check.run(arguments, "reference")
    with observe(mode=mode, check=True):
        actual = device_groups_check.run(arguments, EMULATED, config=chosen)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "lazy", "random"])
@pytest.mark.parametrize("seed", range(8))
def test_random_problem(seed, mode):
    rng = random.Random(seed)
    split, n = 2 << seed % 3, rng.choice((32, 64, 96, 128))
    chosen = KernelConfig(
        (128, n, 256), split_k=split, swap_ab=rng.random() < 0.7, num_cta=rng.choice((split, 2 * split, None))
    )
    sizes = tuple(
        (rng.randint(0, 140), rng.randint(1, 300), 16 * rng.randint(1, 150)) for _ in range(rng.randint(1, 4))
    )
    out_dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32))
    case = cases.Case("split", sizes, seed, out_dtype, rng.random() < 0.5, padding="nan")
    with observe(mode=f"random:{seed}" if mode == "random" else mode, check=True):
        grouped_gemm_check.check(case, chosen, EMULATED)

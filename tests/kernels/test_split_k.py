"""Split-K of the SM100 and SM120 kernels: CTAs of a cluster share a tile's K tiles and add their sums, bit for bit."""

import random

import cases
import device_groups_check
import grouped_gemm_check
import pytest
import torch
from oracle import bits

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.planning.choose import choose_config, problem_of_mean

# Fewer K tiles than CTAs, several tiles per cluster, and columns whose sums no CTA of the cluster has to add.
SIZES = {
    "sm_100a": ((5, 300, 640), (8, 136, 128), (70, 264, 1056), (0, 128, 256)),
    "sm_120a": ((5, 264, 640), (8, 136, 128), (20, 72, 1056), (0, 128, 256)),
}


def config(tokens, split, **more):
    return KernelConfig((128, tokens, 256), split_k=split, swap_ab=True, **more)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "chosen", "mode", "out_dtype"),
    [
        ("sm_100a", config(64, 2, num_cta=4), "random:1", torch.bfloat16),
        ("sm_100a", config(64, 4, num_cta=8), "lazy", torch.float32),
        slow("sm_100a", config(192, 8, num_cta=8), "eager", torch.float16),
        slow("sm_100a", KernelConfig((128, 256, 256), split_k=2, num_cta=4), "lazy", torch.float16),
        ("sm_120a", config(8, 4, num_acc_stage=2, num_cta=8), "random:1", torch.bfloat16),
        slow("sm_120a", config(16, 8, num_acc_stage=1, num_cta=8), "lazy", torch.float32),
        slow("sm_120a", config(32, 2, num_acc_stage=1, num_cta=4), "eager", torch.float16),
        slow(
            "sm_120a",
            KernelConfig((128, 64, 128), num_acc_stage=2, split_k=2, num_cta=4),
            "lazy",
            torch.float16,
        ),
    ],
    ids=str,
)
def test_list(arch, chosen, mode, out_dtype):
    case = cases.Case("split", SIZES[arch], 3, out_dtype, has_alpha=True, padding="nan")
    with observe(mode=mode, check=True):
        grouped_gemm_check.check(case, chosen, f"emulator:{arch}")


@pytest.mark.parametrize(
    ("arch", "form", "chosen", "mode"),
    [
        slow("sm_100a", "ragged", config(64, 8, num_cta=16), "random:1"),
        ("sm_100a", "masked", config(64, 4, num_cta=16), "lazy"),
        slow("sm_120a", "masked", config(16, 4, num_acc_stage=2, num_cta=16), "random:1"),
        slow("sm_120a", "ragged", config(32, 8, num_acc_stage=1, num_cta=16), "lazy"),
    ],
    ids=str,
)
def test_sizes_on_the_device(arch, form, chosen, mode):
    arguments = device_groups_check.operands(form, (0, 96, 1, 130, 0), n=136, k=1056, slack=9)
    expected = device_groups_check.run(arguments, "reference")
    with observe(mode=mode, check=True):
        actual = device_groups_check.run(arguments, f"emulator:{arch}", config=chosen)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ragged", slow("masked")])
def test_few_tiles_are_split_unasked_where_the_device_knows_the_sizes(form):
    rows, n, k = (5, 0, 9), 136, 4096
    mean = -(-sum(rows) // len(rows)) if form == "ragged" else max(rows)
    assert choose_config(problem_of_mean(len(rows), (mean, n, k)), B200.arch, B200.num_sms).split_k > 1
    arguments = device_groups_check.operands(form, rows, n=n, k=k, slack=0)
    expected = device_groups_check.run(arguments, "reference")
    with observe(mode="random:2", check=True):
        actual = device_groups_check.run(arguments, "emulator:sm_100a")
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "lazy", "random"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_random_problem(arch, seed, mode):
    rng = random.Random(seed)
    split, is_small = 2 << seed % 3, arch == "sm_120a"
    n = rng.choice((8, 16, 32, 64) if is_small else (64, 128, 192))
    chosen = KernelConfig(
        (128, n, 128 if n >= 32 and is_small else 256),
        num_acc_stage=rng.choice((1, 2)) if is_small else 2,
        split_k=split,
        swap_ab=rng.random() < 0.7,
        num_cta=rng.choice((split, 2 * split, None)),
    )
    sizes = tuple(
        (rng.randint(0, 140), rng.randint(1, 300), 16 * rng.randint(1, 150)) for _ in range(rng.randint(1, 4))
    )
    out_dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32))
    case = cases.Case("split", sizes, seed, out_dtype, rng.random() < 0.5, padding="nan")
    with observe(mode=f"random:{seed}" if mode == "random" else mode, check=True):
        grouped_gemm_check.check(case, chosen, f"emulator:{arch}")

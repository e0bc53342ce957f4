"""Random problems compared bit for bit, with every candidate config, form, output and mode of the emulator."""

import math
import random
from dataclasses import dataclass, replace
from itertools import cycle

import cases
import device_groups_check
import grouped_gemm_check
import pytest
import torch
from flat_parts import gemm
from oracle import assert_bitwise_equal, poisoned

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.planning.arch import base, sm100, sm120
from nvfp4_cute.planning.config import KernelConfig

FORMS = ("list", "ragged", "masked", "batched")


def split_in_turn(tried):
    """For every config that may share K tiles, one variant that does, with 2, 4 and 8 CTAs in turn."""
    found = [
        replace(config, split_k=split, num_ab_stage=None)
        for config, split in zip((c for c in tried if c.cluster_size == 1), cycle((2, 4, 8)), strict=False)
    ]
    return [config for config in found if sm100.unsupported_reason(config) is None]


# Every config is drawn in every form. A variant is compiled once and runs one problem in each mode.
CONFIGS = {
    "sm_100a": tuple(dict.fromkeys((*sm100.CANDIDATES, *split_in_turn(sm100.CANDIDATES)))),
    "sm_120a": sm120.CANDIDATES,
}
NUM_VARIANTS = {
    arch: max(least, len(FORMS) * len(CONFIGS[arch])) for arch, least in (("sm_100a", 100), ("sm_120a", 67))
}
# Cheap ones, which run by default.
QUICK = {("sm_120a", number, mode) for number, mode in ((7, "random"), (22, "lazy"), (39, "eager"))}
MODES = ("eager", "lazy", "random")
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Limit of K tiles times MMA tiles, which keeps a problem to seconds.
MAX_WORK = 60
# Additional group counts for the first variants of the forms whose code supports any number.
MANY_GROUPS = {"ragged": 512, "masked": 200}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel, drawn from its number."""

    arch: str
    number: int
    config: KernelConfig
    form: str
    num_groups: int
    is_first: bool
    out_dtype: torch.dtype
    has_alpha: bool
    m_major: bool

    @classmethod
    def draw(cls, arch, number):
        rng, configs = random.Random(number), CONFIGS[arch]
        row, column = divmod(number, len(configs))
        return cls(
            arch,
            number,
            configs[column],
            FORMS[row % len(FORMS)],
            log_uniform(rng, base.MAX_LIST_GROUPS),
            row < len(FORMS) and column == 0,
            rng.choice(OUT_DTYPES),
            rng.random() < 0.5,
            rng.random() < 0.5,
        )

    def __str__(self):
        return f"{self.arch}-{self.number}-{self.form}-{self.config.to_name()}"


def log_uniform(rng, most):
    """1 to ``most``, with a uniform logarithm."""
    return min(int(math.exp(rng.uniform(0, math.log(most + 1)))), most)


VARIANTS = tuple(Variant.draw(arch, i) for arch, count in NUM_VARIANTS.items() for i in range(count))


def draw_rows(rng, num_groups, work_of):
    """Rows of every group, 0 to 600, in random order. Groups past the work limit of a problem are empty."""
    rows, work, most = [], 0, 600 if num_groups <= 64 else 40
    for _ in range(num_groups):
        m = 0 if rng.random() < 0.15 else log_uniform(rng, most)
        work += work_of(m)
        rows.append(m if work <= MAX_WORK else 0)
    rng.shuffle(rows)
    return rows


def work(config, m, n, k):
    tile_m, tile_n, tile_k = config.work_tile_mnk
    return -(-m // tile_m) * -(-n // tile_n) * -(-k // tile_k) * config.cluster_size


def check_list(variant, config, rng, seed, observed):
    """Groups with different N and K."""
    blocks = 40 * config.split_k
    extents = [(log_uniform(rng, 300), 16 * log_uniform(rng, blocks)) for _ in range(variant.num_groups)]
    widest, deepest = (max(values) for values in zip(*extents, strict=True))
    rows = draw_rows(rng, variant.num_groups, lambda m: work(config, m, widest, deepest))
    sizes = tuple((m, n, k) for m, (n, k) in zip(rows, extents, strict=True))
    padding = rng.choice(("random", "nan"))
    case = cases.Case("random", sizes, seed, variant.out_dtype, variant.has_alpha, padding=padding)
    operands = cases.make_operands(case)
    expected = grouped_gemm_check.run(case, operands, "reference", m_major=variant.m_major)
    with observed:
        actual = grouped_gemm_check.run(case, operands, f"emulator:{variant.arch}", config, variant.m_major)
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want, seed=seed, config=config.to_name())


def check_device_groups(variant, config, rng, seed, observed):
    """Rows of no group follow the last group, or every group."""
    num_groups = MANY_GROUPS[variant.form] if variant.is_first else log_uniform(rng, 64)
    n, k = log_uniform(rng, 300), 32 * log_uniform(rng, 20 * config.split_k)
    arguments = device_groups_check.operands(
        variant.form,
        draw_rows(rng, num_groups, lambda m: work(config, m, n, k)),
        n=n,
        k=k,
        seed=seed,
        slack=rng.randint(0, 9),
        out_dtype=variant.out_dtype,
        has_alpha=variant.has_alpha,
        m_major=variant.m_major,
    )
    expected = device_groups_check.run(arguments, "reference")
    with observed:
        actual = device_groups_check.run(arguments, f"emulator:{variant.arch}", config=config)
    assert_bitwise_equal(actual, expected, seed=seed, config=config.to_name())


def check_batched(variant, config, rng, seed, observed):
    """Batches of one size, contiguous in memory."""
    m = 0 if rng.random() < 0.05 else log_uniform(rng, 600)
    n, k = log_uniform(rng, 300), 32 * log_uniform(rng, 20 * config.split_k)
    batches = log_uniform(rng, max(1, min(64, MAX_WORK // max(work(config, m, n, k), 1))))
    case = cases.Case("random", ((m, n, k),) * batches, seed, variant.out_dtype, variant.has_alpha)
    a, b, a_scale, b_scale, alpha = cases.make_operands(case)
    scales = [
        torch.stack(side).view(batches, -(-rows // 128), -(-k // 64), 32, 4, 4)
        for side, rows in ((a_scale, m), (b_scale, n))
    ]
    operands = [torch.stack(a).permute(1, 2, 0), torch.stack(b).permute(1, 2, 0), *scales, alpha]

    def run(backend, **options):
        shape = (batches, n, m) if variant.m_major else (batches, m, n)
        out = poisoned(*shape, dtype=variant.out_dtype).permute((2, 1, 0) if variant.m_major else (1, 2, 0))
        return gemm(*operands, out=out, out_dtype=variant.out_dtype, backend=backend, **options)

    expected = run("reference")
    with observed:
        actual = run(f"emulator:{variant.arch}", config=config)
    assert_bitwise_equal(actual.contiguous(), expected.contiguous(), seed=seed, config=config.to_name())


CHECKS = {
    "list": check_list,
    "ragged": check_device_groups,
    "masked": check_device_groups,
    "batched": check_batched,
}


def marked(variant, mode):
    marks = () if (variant.arch, variant.number, mode) in QUICK else pytest.mark.slow
    return pytest.param(variant, mode, marks=marks, id=f"{variant}-{mode}")


@pytest.mark.parametrize(("variant", "mode"), [marked(v, mode) for v in VARIANTS for mode in MODES])
def test_random_problem(variant, mode):
    """Bit-equal, with no other writes. Every other problem is also checked for hazards."""
    seed = variant.number * len(MODES) + MODES.index(mode)
    rng = random.Random(seed)
    width = rng.choice((None, 2, 4, 7))
    config = replace(variant.config, num_cta=width and max(width, variant.config.cluster_size))
    observed = observe(mode=f"random:{seed}" if mode == "random" else mode, check=seed % 2 == 0)
    CHECKS[variant.form](variant, config, rng, seed, observed)


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_matrix_covers_what_it_says(arch):
    drawn = [v for v in VARIANTS if v.arch == arch]
    assert {(v.config, v.form) for v in drawn} == {(c, f) for c in CONFIGS[arch] for f in FORMS}
    assert arch != "sm_100a" or {v.config.split_k for v in drawn} >= {1, 2, 4}
    outputs = {(v.form, v.out_dtype, v.has_alpha, v.m_major) for v in drawn}
    assert {x[:2] for x in outputs} == {(f, d) for f in FORMS for d in OUT_DTYPES}
    assert {x[0::2] for x in outputs} == {(f, a) for f in FORMS for a in (False, True)}
    assert {x[0::3] for x in outputs} == {(f, m) for f in FORMS for m in (False, True)}
    assert {v.form for v in drawn if v.is_first} == set(FORMS)
    assert len(drawn) * len(MODES) >= (300 if arch == "sm_100a" else 200)

"""The grouped GEMM of sm_100a, and stores of sm_120a, on the emulator, compared with the float64 reference."""

from dataclasses import replace

import cases
import pytest
import torch
from flat_parts import grouped_gemm
from grouped_gemm_check import SHAPES, check, run
from list_checks import check_list_operands
from oracle import assert_bitwise_equal, bits, poisoned

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.planning.arch import sm100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.name)
def test_case(case):
    check(case)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_cta", "num_ab_stage", "num_acc_stage"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (7, 5, 1), (148, 6, 2)]
)
def test_same_bits_for_every_number_of_ctas_and_stages(num_cta, num_ab_stage, num_acc_stage):
    """Scheduling moves work but never changes rounding, because K is accumulated in one order."""
    operands = cases.make_operands(SHAPES)
    config = KernelConfig(num_ab_stage=num_ab_stage, num_acc_stage=num_acc_stage, num_cta=num_cta)
    expected = run(SHAPES, operands, "emulator", KernelConfig())
    for got, want in zip(run(SHAPES, operands, "emulator", config), expected, strict=True):
        assert_bitwise_equal(got, want)


CONFIGS = (
    "t128x64x256_s0a3_swap",
    "t128x64x256_s2a4_2cta_swap_p4",
    "t128x128x256_s0a2_2cta",
    "t128x192x256_s3a2_swap_p3",
    "t128x192x256_s2a2_2cta_p4",
    "t128x256x256_s2a2_2cta_swap_p4",
    "t128x256x256_s3a2_p2",
    "t128x64x256_s2a3_2cta_swap_m2_p8",
    "t128x128x256_s3a2_2cta_m4_p8",
    "t128x64x256_s1a2_swap_m4_p8",
)
SM120_CONFIGS = (
    "t128x128x128_s0a1_p2",
    "t128x64x128_s0a1_swap_p3",
    "t128x64x128_s2a2_p2",
    "t128x32x256_s0a2_swap_p3",
    "t128x16x256_s0a1_swap",
    "t128x8x256_s0a2_swap_p5",
)
# Tiles that are partial on both sides, one row, an empty group, and several tiles per CTA, so that every accumulator is
# reused.
TILES = cases.Case("tiles", ((270, 264, 512), (1, 40, 768), (0, 50, 256)), 11, has_alpha=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mode", "m_major"),
    [
        ("eager", False),
        pytest.param("random:1", False, marks=pytest.mark.slow),
        pytest.param("lazy", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("sm_100a", name) for name in CONFIGS),
        *(pytest.param("sm_120a", name, marks=pytest.mark.slow) for name in SM120_CONFIGS),
    ],
)
def test_every_tile_shape_is_right_and_clean(arch, name, mode, m_major):
    """Bit-equal and without hazards in every mode of the emulator and both layouts of the output."""
    operands = cases.make_operands(TILES)
    with observe(mode=mode, check=True) as observer:
        actual = run(TILES, operands, f"emulator:{arch}", KernelConfig.from_name(name), m_major)
    assert len(observer.stats) == 1
    for got, want in zip(actual, run(TILES, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want, config=name, mode=mode, m_major=m_major)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m_major", [False, True])
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_100a", "t128x128x256_s0a2"),
        ("sm_100a", "t128x128x256_s0a2_swap"),
        ("sm_120a", "t128x32x256_s0a2_swap"),
        pytest.param("sm_120a", "t128x128x128_s0a1", marks=pytest.mark.slow),
        pytest.param("sm_120a", "t128x16x128_s0a1_swap", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_written_beyond_either_layout(arch, name, m_major):
    """Outputs are windows of poisoned buffers, with pitches that allow or prevent vector stores."""
    case = cases.Case("windows", ((70, 100, 256), (129, 72, 256)), seed=3)
    operands, config = cases.make_operands(case), KernelConfig.from_name(name)
    backend = f"emulator:{arch}"
    expected = run(case, operands, "reference")
    for margin in (8, 3):
        lines = [(n, m) if m_major else (m, n) for m, n, _ in case.sizes]
        buffers = [poisoned(rows + 2, cols + 2 * margin, dtype=case.out_dtype) for rows, cols in lines]
        windows = [b[1:-1, margin:-margin].T if m_major else b[1:-1, margin:-margin] for b in buffers]
        grouped_gemm(
            *list(operands)[:4], out=windows, out_dtype=case.out_dtype, backend=backend, config=config
        )
        for buffer, window, want in zip(buffers, windows, expected, strict=True):
            assert_bitwise_equal(window, want, margin=margin)
            window.copy_(poisoned(*window.shape, dtype=case.out_dtype))
            assert torch.equal(bits(buffer), bits(poisoned(*buffer.shape, dtype=case.out_dtype)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize("config", [None, KernelConfig(num_ab_stage=2, num_acc_stage=1, num_cta=3)], ids=str)
def test_same_bits_whenever_asynchronous_operations_happen(mode, config):
    operands = cases.make_operands(SHAPES)
    expected = run(SHAPES, operands, "emulator", config)
    with observe(mode=mode) as observer:
        actual = run(SHAPES, operands, "emulator", config)
    assert len(observer.stats) == 1
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want, mode=mode)


def test_runs_are_deterministic():
    operands = cases.make_operands(SHAPES)
    first, second = (run(SHAPES, operands, "emulator") for _ in range(2))
    for got, want in zip(second, first, strict=True):
        assert_bitwise_equal(got, want)


def test_alpha_follows_its_group_through_the_reordering():
    """Groups run in order of descending M; factors are given in the caller's order."""
    case = cases.Case("alpha", ((5, 64, 256), (200, 64, 256), (60, 64, 256)), has_alpha=True)
    operands = cases.make_operands(case)
    plain = run(replace(case, has_alpha=False), replace(operands, alpha=None), "emulator")
    scaled = run(case, operands, "emulator")
    for got, want, factor in zip(scaled, plain, operands.alpha.tolist(), strict=True):
        assert_bitwise_equal(got, want * factor)


@pytest.mark.parametrize("arch", sm100.ARCHS)
def test_every_architecture_gives_the_same_bits(arch):
    case = cases.Case("arch", ((130, 72, 512), (40, 128, 288)), seed=5, out_dtype=torch.bfloat16)
    operands = cases.make_operands(case)
    out = [poisoned(m, n, dtype=case.out_dtype) for m, n, _ in case.sizes]
    problem, checked = check_list_operands(*operands, out, out_dtype=case.out_dtype)
    plan = make_plan(problem, arch, 148, for_emulator=True)
    with Emulator(arch) as emulator:
        emulator.register(plan.kernel.ptx)
        plan.launch(checked)
    for got, want in zip(out, run(case, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_problem(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    sizes = tuple((draw(0, 300), draw(1, 300), 32 * draw(1, 40)) for _ in range(draw(1, 8)))
    check(cases.Case(f"random_{seed}", sizes, seed, padding="nan", has_alpha=bool(draw(0, 1))))

"""MMAs of 96 elements of K on sm_103a return the bits of the reference and of MMAs of 64, and need a third fewer instructions."""

from dataclasses import replace

import flat_parts as parts
import pytest
import torch
from format_cases import Groups, operand
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.planning.arch import sm100, sm103
from nvfp4_cute.planning.choose import choose_config
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_103a"
NVFP4, MXFP4 = (nv.NVFP4, nv.NVFP4), (nv.MXFP4, nv.MXFP4)
# One, two, three and more K tiles, including partial ones; an empty group; tails of rows and columns.
SIZES = ((300, 200, 1312), (0, 64, 96), (33, 264, 640), (130, 130, 768))
CONFIGS = (
    # Stages that the MMAs of two consecutive K tiles share: two, three, and as many as fit.
    ("t128x128x256_s2a3_2cta_ultra_p2", "lazy"),
    ("t128x256x256_s3a2_2cta_ultra_swap_p4", "random:1"),
    # The second tile of 192 rows starts in the middle of a scale block.
    ("t128x192x256_s0a2_2cta_ultra_swap_p2", "lazy"),
    ("t128x192x256_s4a2_ultra_p3", "random:2"),
    ("t128x256x256_s0a2_2cta_ultra_m2_p8", "lazy"),
    ("t128x128x256_s2a2_ultra_swap_m2_p4", "random:3"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", [NVFP4, MXFP4], ids=lambda pair: str(pair[0]))
@pytest.mark.parametrize(("name", "mode"), CONFIGS)
def test_every_tile_shape_is_right_and_clean(name, mode, pair):
    with observe(mode=mode, check=True) as observer:
        Groups.of(pair, SIZES, seed=1).check("list", EMULATED, KernelConfig.from_name(name))
    assert len(observer.stats) == 1 and not observer.hazards
    assert observer.plans[0].kernel.resources.stack_bytes == 0


@pytest.mark.parametrize("pair", [NVFP4, pytest.param(MXFP4, marks=SLOW)], ids=lambda pair: str(pair[0]))
@pytest.mark.parametrize(
    "form", [pytest.param("list", marks=SLOW), "ragged", pytest.param("masked", marks=SLOW)]
)
@pytest.mark.parametrize("dual", [False, pytest.param(True, marks=SLOW)])
def test_every_form(form, dual, pair):
    sizes = SIZES if form == "list" else ((40, 136, 416), (0, 136, 416), (300, 136, 416))
    chosen = KernelConfig.from_name("t128x128x256_s0a2_2cta_ultra_swap")
    with observe(mode="random:4", check=True):
        Groups.of(pair, sizes, seed=2).check(form, EMULATED, chosen, dual=dual)


@pytest.mark.slow
@pytest.mark.parametrize("early_weights", [False, True])
@pytest.mark.parametrize(("name", "mode"), CONFIGS)
def test_batches_and_early_weights(name, mode, early_weights):
    """Stages are filled with zeros past K, also if weights come before their tokens."""
    generator = torch.Generator().manual_seed(3)
    operands = [[operand(nv.NVFP4, rows, 736, generator) for _ in range(3)] for rows in (150, 200)]
    data = [torch.stack([x.data for x in side]).permute(1, 2, 0) for side in operands]
    scales = [torch.stack([x.scale for x in side]) for side in operands]
    options = {"out_dtype": torch.float32, "early_weights": early_weights}
    with observe(mode=mode, check=True):
        got = parts.gemm(*data, *scales, config=KernelConfig.from_name(name), backend=EMULATED, **options)
    assert_bitwise_equal(got, parts.gemm(*data, *scales, **options))


@pytest.mark.parametrize("k", [256, 512, 768])
def test_a_third_fewer_mmas(k):
    """The minimum that reads all of K: eight for three K tiles, six for two, three for one."""
    a, b = (nv.quantize(torch.full((rows, k), 6.0)) for rows in (256, 128))
    chosen = KernelConfig.from_name("t128x128x256_s0a2_2cta_ultra")
    with observe() as observer:
        for config in (chosen, replace(chosen, use_k96_instrs=False)):
            result = parts.gemm(a, b, out_dtype=torch.float32, config=config, backend=EMULATED)
            assert bool((result == 36 * k).all())
    assert [stats.mmas for stats in observer.stats] == [-(-k // 96), k // 64]


def test_rows_of_other_tiles_do_not_leak_into_the_end_of_k():
    """The last MMA reads past K. A NaN left in the stage would appear in every row."""
    a, b = (torch.full((rows, 128), 0x21, dtype=torch.uint8) for rows in (512, 128))
    a_scale, b_scale = (torch.ones(len(x), 16).to(torch.float8_e4m3fn) for x in (a, b))
    a_scale[:256] = torch.nan
    scales = to_blocked(a_scale), to_blocked(b_scale)
    config = KernelConfig.from_name("t128x128x256_s2a2_2cta_ultra_p2")
    got, want = (
        parts.gemm(a, b, *scales, out_dtype=torch.float32, backend=backend, config=chosen)
        for backend, chosen in ((EMULATED, config), ("reference", None))
    )
    assert want[:256].isnan().all() and not want[256:].isnan().any()
    assert_bitwise_equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("name", "pair", "fix"),
    [
        ("t128x64x256_s0a2_ultra", NVFP4, "have (128, 192, 256) columns"),
        ("t128x128x256_s0a2_ultra_k2", NVFP4, "use split_k=1"),
        ("t128x128x256_s1a2_ultra", MXFP4, "use num_ab_stage=2"),
        ("t128x128x128_s0a2_ultra", (nv.MXFP8_E4M3, nv.MXFP4), "use use_k96_instrs=False"),
    ],
)
def test_a_refusal_names_the_nearest_legal_value(name, pair, fix):
    assert fix in sm103.unsupported_reason(KernelConfig.from_name(name), formats=pair)


def test_other_architectures_refuse_it():
    config = KernelConfig.from_name("t128x128x256_s0a2_ultra")
    assert "use use_k96_instrs=False" in sm100.unsupported_reason(config)
    x = nv.quantize(torch.ones(16, 256))
    with pytest.raises(ConfigError, match="use_k96_instrs"):
        parts.gemm(x, x, config=config, backend="emulator:sm_100a")


def test_it_is_chosen_where_tensor_cores_bound():
    choice = lambda *sizes, **more: (
        choose_config(GroupedProblem(sizes, **more), "sm_103a", 148).use_k96_instrs
    )
    assert choice((4096, 4096, 4096)) and choice(*((1024, 4096, 2048),) * 2)
    assert not choice((8, 7168, 2048)) and not choice(*((1024, 128, 256),) * 2)
    assert choice(*((512, 4096, 4096),) * 8, form="ragged") and not choice(
        *((8, 4096, 4096),) * 8, form="ragged"
    )
    assert not choose_config(GroupedProblem(((4096, 4096, 4096),)), "sm_100a", 148).use_k96_instrs

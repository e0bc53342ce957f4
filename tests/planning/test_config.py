"""KernelConfig names, and the configs that sm_100 can build."""

from dataclasses import fields, replace
from itertools import product

import pytest

from nvfp4_cute.formats.block_format import format_named
from nvfp4_cute.planning.arch import FAMILIES, sm90, sm120
from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.config import SHARED_FIELDS, KernelConfig

CONFIGS = [
    KernelConfig(),
    KernelConfig(num_ab_stage=3, num_acc_stage=3),
    KernelConfig(num_ab_stage=6, num_cta=148),
    KernelConfig(cta_tile_shape_mnk=(256, 64, 128), num_ab_stage=2, num_acc_stage=1, num_cta=1),
    KernelConfig(use_2cta_instrs=True),
    KernelConfig(swap_ab=True, num_cta=64),
    KernelConfig(swap_ab=True, decode_first=True, num_cta=64),
    KernelConfig(swap_ab=True, decode_first=True, stream_k=True),
    KernelConfig(cta_tile_shape_mnk=(128, 256, 256), use_2cta_instrs=True, swap_ab=True, num_cta=128),
    KernelConfig(use_2cta_instrs=True, multicast_n=2, num_cta=128),
    KernelConfig(swap_ab=True, split_k=4),
    KernelConfig(swap_ab=True, stream_k=True),
    KernelConfig(swap_ab=True, stream_k=True, use_warp_mma=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=KernelConfig.to_name)
def test_name_round_trip(config):
    assert KernelConfig.from_name(config.to_name()) == config


def test_names_do_not_collide():
    assert len({config.to_name() for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("name", ["", "t128x128_s6a2", "t128x128x256_s6a2_q3", "x128x128x256_s6a2"])
def test_a_malformed_name_is_refused(name):
    with pytest.raises(ValueError, match="is not of the form"):
        KernelConfig.from_name(name)


def test_default_fills_shared_memory():
    config = sm100.resolve(KernelConfig())
    plan = sm100.smem_plan(config)
    assert sm100.unsupported_reason(config) is None
    # 128 rows x 128 bytes for A and for B, 128 x 16 scales for each.
    assert (plan.a_stage_bytes, plan.b_stage_bytes, plan.sfa_stage_bytes, plan.sfb_stage_bytes) == (
        16384,
        16384,
        2048,
        2048,
    )
    assert plan.total_bytes <= sm100.SMEM_CAPACITY_BYTES < plan.total_bytes + plan.stage_bytes


def test_tensor_memory_regions_do_not_overlap():
    tmem = sm100.tmem_map(KernelConfig(num_acc_stage=3))
    assert 3 * tmem.acc_cols <= tmem.sfa_col < tmem.sfb_col < tmem.used_cols <= tmem.alloc_cols == 512


@pytest.mark.parametrize("tile_n", sm100.TILES_N)
@pytest.mark.parametrize("pair", [False, True])
def test_two_accumulators_always_fit(tile_n, pair):
    """Accumulators are side by side or share columns. Then few are shared, and these are read first."""
    config = KernelConfig(cta_tile_shape_mnk=(128, tile_n, 256), use_2cta_instrs=pair)
    tmem = sm100.tmem_map(config)
    assert sm100.unsupported_reason(config) is None
    assert 0 <= tmem.overlap_cols <= 64
    assert (tmem.overlap_cols > 0) == (tile_n == 256)
    assert tmem.sfa_col == tmem.acc_stride + tmem.acc_cols <= tmem.sfb_col < tmem.used_cols <= sm100.TMEM_COLS


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_accumulators_of_a_dual_gemm_share_one_slice(pair, swap):
    """The MMA waits only for the first slice that the epilogue reads; scales of a K tile take turns in the columns."""
    config = KernelConfig(cta_tile_shape_mnk=(128, 128, 256), use_2cta_instrs=pair, swap_ab=swap)
    tmem = sm100.tmem_map(config, num_b=2)
    assert (tmem.overlap_cols, tmem.acc_stride % 32, tmem.sf_atoms) == (32, 0, 2)
    assert tmem.sfa_col == tmem.acc_stride + tmem.acc_cols <= tmem.sfb_col < tmem.used_cols <= sm100.TMEM_COLS
    assert sm100.tmem_map(config).sf_atoms == 4


@pytest.mark.parametrize("num_b", sm100.SPLIT_TILES_N)
def test_ctas_that_share_an_sm_and_a_tile_have_room_in_tensor_memory(num_b):
    """A CTA that waits for tensor memory never sends the partial sums that the owner of that memory waits for."""
    for tile_n, split in product(sm100.SPLIT_TILES_N[num_b], sm100.SPLITS[1:]):
        config = KernelConfig((128, tile_n, 256), num_acc_stage=1, swap_ab=True, split_k=split)
        for stages in range(1, sm100.smem_plan(config, num_b).num_ab_stage + 1):
            config = replace(config, num_ab_stage=stages)
            # An SM has 228 KB, and every CTA reserves 1 KB (CUDA programming guide).
            ctas = (228 << 10) // (sm100.smem_plan(config, num_b).total_bytes + 1024)
            assert ctas * sm100.tmem_map(config, num_b).alloc_cols <= sm100.TMEM_COLS


@pytest.mark.parametrize(("tile_n", "blocks"), [(64, 1), (128, 1), (192, 2), (256, 2)])
def test_scale_blocks_that_a_tile_touches(tile_n, blocks):
    """A tile starts anywhere on its own grid, and scale blocks start at multiples of 128."""
    assert sm100.sf_blocks_n(tile_n) == blocks
    for start in range(0, 3 * 128 * tile_n, tile_n):
        assert (start + tile_n - 1) // 128 - start // 128 < blocks


@pytest.mark.parametrize(
    ("config", "work_tile"),
    [
        (KernelConfig(), (128, 128, 256)),
        (KernelConfig(use_2cta_instrs=True), (256, 128, 256)),
        (KernelConfig((128, 64, 256), swap_ab=True), (64, 128, 256)),
        (KernelConfig((128, 64, 256), use_2cta_instrs=True, swap_ab=True), (64, 256, 256)),
        (KernelConfig((128, 64, 256), use_2cta_instrs=True, multicast_n=2), (512, 64, 256)),
    ],
    ids=str,
)
def test_work_tile_is_in_the_problems_terms(config, work_tile):
    assert config.work_tile_mnk == work_tile


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (KernelConfig(cta_tile_shape_mnk=(64, 128, 256)), "use M tile 128"),
        (KernelConfig(cta_tile_shape_mnk=(128, 160, 256)), "use one of (64, 128, 192, 256)"),
        (KernelConfig(cta_tile_shape_mnk=(128, 128, 64)), "use K tile 256"),
        (KernelConfig(num_ab_stage=7), "use 1 to 6"),
        (KernelConfig(num_ab_stage=0), "use 1 to 6"),
        (KernelConfig(num_acc_stage=0), "at least 1 accumulator stage"),
        (KernelConfig(num_acc_stage=4), "use at most 3"),
        (KernelConfig(num_cta=0), "at least 1 CTA"),
        (KernelConfig(num_cta=1, use_2cta_instrs=True), "at least 2 CTAs"),
        (KernelConfig(num_cta=3, use_2cta_instrs=True, multicast_n=2), "at least 4 CTAs"),
        (KernelConfig(multicast_n=3), "use multicast_n=2"),
        (KernelConfig(multicast_n=2, split_k=2), "or multicast_n=1"),
    ],
    ids=lambda value: value.to_name() if isinstance(value, KernelConfig) else "",
)
def test_a_refusal_names_the_nearest_legal_value(config, fix):
    assert fix in sm100.unsupported_reason(config)


@pytest.mark.parametrize("family", [sm90, sm120], ids=lambda family: family.ARCHS[0])
def test_families_whose_ctas_load_for_themselves_say_so(family):
    assert "use multicast_n=1" in family.unsupported_reason(replace(family.DEFAULT_CONFIG, multicast_n=2))


def test_a_field_is_shared_by_all_families_or_an_option_that_one_names():
    options = {name for family in FAMILIES for name in family.OPTIONS}
    assert sorted((*SHARED_FIELDS, *options)) == sorted(field.name for field in fields(KernelConfig))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.rpartition(".")[2])
def test_a_k_tile_is_a_whole_number_of_mmas(family):
    for (a, b), mma in family.MMA.items():
        assert b == format_named(b.name) and (not a.has_scales or a == format_named(a.name))
        # Several MMAs may share a scale of decoded operands. With one scale per row, K has no atoms.
        step = a.atom_k or mma.k
        assert not a.block_k or mma.k % a.block_k == 0 or a.block_k % mma.k == 0
        assert step % mma.k == 0
        for num_b in (1, 2):
            for config in family.candidates(num_b, formats=(a, b)):
                assert config.cta_tile_shape_mnk[2] % step == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.rpartition(".")[2])
@pytest.mark.parametrize(
    "options",
    [
        {"use_2cta_instrs": True},
        {"multicast_n": 2},
        {"decode_first": True},
        {"decode_first": True, "stream_k": True},
    ],
    ids=str,
)
def test_options_of_another_family_are_refused_by_name(family, options):
    config = replace(family.DEFAULT_CONFIG, **options)
    reason = family.unsupported_reason(config)
    if set(options) <= set(family.OPTIONS):
        assert reason is None
        return
    for name in set(options) - set(family.OPTIONS):
        value = options[name]
        assert f"{name}={value}" in reason and f"{name}={getattr(family.DEFAULT_CONFIG, name)}" in reason

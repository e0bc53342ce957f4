"""KernelConfig names, and what sm_100 can build."""

import pytest

from nvfp4_cute.arch import sm100
from nvfp4_cute.config import KernelConfig

CONFIGS = [
    KernelConfig(),
    KernelConfig(num_ab_stage=3, num_acc_stage=3),
    KernelConfig(num_ab_stage=6, num_cta=148),
    KernelConfig(cta_tile_shape_mnk=(256, 64, 128), num_ab_stage=2, num_acc_stage=1, num_cta=1),
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


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (KernelConfig(cta_tile_shape_mnk=(64, 128, 256)), "use M tile 128"),
        (KernelConfig(cta_tile_shape_mnk=(128, 96, 256)), "use N tile 128"),
        (KernelConfig(cta_tile_shape_mnk=(128, 128, 64)), "use K tile 256"),
        (KernelConfig(num_ab_stage=7), "use 1 to 6"),
        (KernelConfig(num_ab_stage=0), "use 1 to 6"),
        (KernelConfig(num_acc_stage=0), "at least 1 accumulator stage"),
        (KernelConfig(num_acc_stage=4), "use at most 3"),
        (KernelConfig(num_cta=0), "at least one CTA"),
    ],
    ids=lambda value: value.to_name() if isinstance(value, KernelConfig) else "",
)
def test_a_refusal_names_the_nearest_legal_value(config, fix):
    assert fix in sm100.unsupported_reason(config)

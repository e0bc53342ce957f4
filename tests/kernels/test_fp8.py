"""FP8 with fp32 scales on every family of GPUs: where sums are exact, every bit is the reference's."""

import pytest
import torch
from fp8_check import (
    check_activations,
    check_any_scales,
    check_dual_list_and_masked,
    check_dual_ragged,
    check_list_masked_and_batched,
    check_not_a_number,
    check_ragged,
    check_rounding_and_pitch,
    on_sm90,
    on_sm100,
    on_sm120,
    rows_on_sm90,
    tokens_of,
    weights_of,
)
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.ops import parts as on_parts

SLOW = pytest.mark.slow
# Other members of a family, with the same source.
OTHERS = ("sm_103a", "sm_110a", "sm_121a")
# The first config of a family is fast.
CONFIGS = {
    "sm_90a": [
        (on_sm90(16, num_cta=3), "random:1"),
        (on_sm90(64, 256, num_cta=2), "lazy"),
        (on_sm90(128, 256), "eager"),
        (on_sm90(96, multicast_n=2, num_cta=4), "lazy"),
        (on_sm90(192), "random:2"),
        (on_sm90(128, 256, multicast_n=2, num_ab_stage=2), "random:3"),
        (on_sm90(32, split_k=2, num_cta=4), "lazy"),
        (on_sm90(8, split_k=8), "random:4"),
        (None, "eager"),
        (rows_on_sm90(128, num_cta=2), "lazy"),
        (rows_on_sm90(256, num_cta=1), "random:5"),
        (rows_on_sm90(256, multicast_n=2, num_cta=2), "eager"),
        (rows_on_sm90(128, multicast_n=2, num_ab_stage=2, num_cta=2), "lazy"),
    ],
    "sm_100a": [
        (on_sm100(64, swap_ab=True, num_cta=3), "random:1"),
        (on_sm100(128, num_acc_stage=4, use_2cta_instrs=True), "lazy"),
        (on_sm100(128, use_2cta_instrs=True, num_ab_stage=2, num_cta=2), "random:2"),
        (on_sm100(64, num_acc_stage=4), "lazy"),
        (on_sm100(128, swap_ab=True, use_2cta_instrs=True, num_cta=4), "random:3"),
        (on_sm100(128, swap_ab=True, split_k=2, num_cta=2), "lazy"),
        (on_sm100(128, split_k=2), "eager"),
        # Fewer K tiles than CTAs.
        (on_sm100(64, swap_ab=True, split_k=8), "random:4"),
        (on_sm100(128, multicast_n=2), "random:5"),
        (on_sm100(64, swap_ab=True, multicast_n=2, use_2cta_instrs=True), "lazy"),
        (None, "eager"),
    ],
    "sm_120a": [
        (on_sm120(16, 2, num_cta=3), "random:1"),
        (on_sm120(96, num_cta=2), "lazy"),
        (on_sm120(64), "eager"),
        (on_sm120(32, 2, num_ab_stage=2, num_cta=3), "random:2"),
        (on_sm120(8, 2), "lazy"),
        (on_sm120(32, num_cta=2), "lazy"),
        (on_sm120(64, split_k=2, num_cta=4), "random:3"),
        # Fewer K tiles than CTAs.
        (on_sm120(8, split_k=8), "lazy"),
        (None, "eager"),
    ],
}
DUAL_CONFIGS = {
    "sm_90a": [
        (on_sm90(16, num_cta=3), "random:1"),
        (rows_on_sm90(num_cta=2), "lazy"),
        (on_sm90(128, num_cta=2), "lazy"),
        (on_sm90(64, multicast_n=2, num_cta=4), "eager"),
        (on_sm90(32), "random:2"),
        (on_sm90(64, split_k=2, num_cta=4), "lazy"),
        (on_sm90(8, split_k=4), "random:3"),
        (rows_on_sm90(multicast_n=2, num_cta=2), "random:4"),
        (None, "eager"),
    ],
    "sm_100a": [
        (on_sm100(64, swap_ab=True, num_cta=3), "random:1"),
        (on_sm100(64, num_acc_stage=4, num_cta=2), "lazy"),
        (on_sm100(64, num_acc_stage=4, use_2cta_instrs=True), "random:2"),
        (on_sm100(64, swap_ab=True, use_2cta_instrs=True, num_ab_stage=2), "eager"),
        (on_sm100(64, swap_ab=True, split_k=4, num_cta=4), "random:3"),
        (None, "lazy"),
    ],
    "sm_120a": [
        (on_sm120(16, 2, rows=64, num_cta=3), "random:1"),
        (on_sm120(64, rows=64, num_cta=2), "lazy"),
        (on_sm120(32, num_cta=2), "lazy"),
        (on_sm120(8, 2), "eager"),
        (on_sm120(16, rows=64, split_k=4, num_cta=8), "random:2"),
        (None, "lazy"),
    ],
}


def variants(table, *, on_gpu=False, all_slow=()):
    """Parameters (arch, config, mode), of which the first of each family is fast unless the family is in ``all_slow``."""
    for arch, found in table.items():
        for i, (chosen, mode) in enumerate(found):
            marks = pytest.mark.gpu(arch) if on_gpu else SLOW if i or arch in all_slow else ()
            yield pytest.param(arch, chosen, mode, marks=marks, id=f"{arch}-{chosen}-{mode}")


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(CONFIGS))
def test_ragged(arch, chosen, mode):
    check_ragged(200, 384, chosen, f"emulator:{arch}", mode)


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(DUAL_CONFIGS))
def test_dual_ragged(arch, chosen, mode):
    check_dual_ragged(200, 384 if arch == "sm_90a" else 256, chosen, f"emulator:{arch}", mode)


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(CONFIGS, on_gpu=True))
def test_gpu_ragged(arch, chosen, mode):
    check_ragged(200, 384, chosen, "cuda", device="cuda")


@pytest.mark.parametrize(("arch", "chosen", "mode"), variants(DUAL_CONFIGS, on_gpu=True))
def test_gpu_dual_ragged(arch, chosen, mode):
    check_dual_ragged(200, 384 if arch == "sm_90a" else 256, chosen, "cuda", device="cuda")


@SLOW
@pytest.mark.parametrize("arch", OTHERS)
def test_on_the_rest_of_a_family(arch):
    check_ragged(200, 256, None, f"emulator:{arch}")
    check_dual_ragged(128, 128, None, f"emulator:{arch}", out_dtype=torch.float16)


@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", on_sm90(64, num_cta=2)),
        pytest.param("sm_90a", on_sm90(32, 256, multicast_n=2), marks=SLOW),
        pytest.param("sm_90a", rows_on_sm90(256, multicast_n=2, num_cta=4), marks=SLOW),
        pytest.param("sm_100a", on_sm100(64, swap_ab=True, num_cta=2), marks=SLOW),
        pytest.param("sm_100a", on_sm100(128, use_2cta_instrs=True), marks=SLOW),
        pytest.param("sm_120a", on_sm120(64, num_cta=2), marks=SLOW),
        pytest.param("sm_120a", on_sm120(32, 2), marks=SLOW),
    ],
    ids=str,
)
def test_list_masked_and_batched(arch, chosen):
    check_list_masked_and_batched(chosen, f"emulator:{arch}")


@SLOW
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", on_sm90(64, num_cta=2)),
        ("sm_90a", rows_on_sm90(multicast_n=2, num_cta=2)),
        ("sm_100a", on_sm100(64, swap_ab=True, num_cta=2)),
        ("sm_100a", on_sm100(64, num_acc_stage=4)),
        ("sm_120a", on_sm120(32, rows=64, num_cta=2)),
        ("sm_120a", on_sm120(16, 2)),
    ],
    ids=str,
)
def test_dual_list_and_masked(arch, chosen):
    check_dual_list_and_masked(chosen, f"emulator:{arch}")


@pytest.mark.parametrize("out_dtype", [torch.float16, pytest.param(torch.bfloat16, marks=SLOW)], ids=str)
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", None),
        pytest.param("sm_90a", rows_on_sm90(256), marks=SLOW),
        pytest.param("sm_100a", None, marks=SLOW),
        pytest.param("sm_120a", None, marks=SLOW),
    ],
    ids=str,
)
def test_results_are_rounded_once_and_rows_may_lie_apart(arch, chosen, out_dtype):
    check_rounding_and_pitch(out_dtype, f"emulator:{arch}", chosen)


@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", on_sm90(32)),
        pytest.param("sm_90a", rows_on_sm90(256), marks=SLOW),
        ("sm_100a", on_sm100(64)),
        pytest.param("sm_100a", on_sm100(64, True), marks=SLOW),
        pytest.param("sm_120a", on_sm120(32), marks=SLOW),
    ],
    ids=str,
)
def test_any_scales(arch, chosen):
    check_any_scales(chosen, f"emulator:{arch}")


@pytest.mark.parametrize(
    "arch", ["sm_90a", pytest.param("sm_100a", marks=SLOW), pytest.param("sm_120a", marks=SLOW)]
)
def test_not_a_number_stays_in_its_row_or_column(arch):
    check_not_a_number(f"emulator:{arch}")


@SLOW
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("sm_90a", on_sm90(32)),
        ("sm_90a", rows_on_sm90()),
        ("sm_100a", on_sm100(64, swap_ab=True)),
        ("sm_120a", on_sm120(32)),
    ],
    ids=str,
)
def test_dual_activations(arch, chosen):
    check_activations(chosen, f"emulator:{arch}")


@SLOW
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_100a", lambda split: on_sm100(64, swap_ab=True, split_k=split)),
        ("sm_120a", lambda split: on_sm120(16, split_k=split)),
    ],
)
def test_an_infinite_scale_where_ctas_have_no_k_tile(arch, config):
    """CTAs without a K tile add zeros, whatever the scales are."""
    x, w = tokens_of(9, 256), weights_of(128, 256)
    x.scale[3, 1] = torch.inf
    options = {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    got, want = (on_parts.gemm(x, w, config=config(split), **options) for split in (4, 1))
    assert want[3].isinf().any()
    assert_bitwise_equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


SAME_BITS = [
    *(
        ("sm_90a", [on_sm90(16, split_k=n), on_sm90(64, split_k=n, num_ab_stage=2, num_cta=n), *more])
        for n, more in ((1, [rows_on_sm90(128)]), (2, []), (4, []))
    ),
    *(
        (
            "sm_100a",
            [
                on_sm100(64, swap_ab=True, split_k=n),
                on_sm100(128, num_acc_stage=4, num_ab_stage=2, split_k=n, num_cta=n),
            ],
        )
        for n in (1, 2)
    ),
    # The CTA that adds the parts of K first differs between tiles.
    *(
        ("sm_120a", [on_sm120(16, split_k=n), on_sm120(tokens, split_k=n, num_ab_stage=2, num_cta=n)])
        for n, tokens in ((1, 64), (4, 16))
    ),
]
# Tensor cores keep 25 fractional bits of the largest product (``emulator.isa.products``), Hopper's keep 13.
BOUNDS = {"sm_90a": 2e-3, "sm_100a": 1e-5, "sm_120a": 1e-5}


@SLOW
@pytest.mark.parametrize(("arch", "configs"), SAME_BITS)
def test_bits_do_not_depend_on_tiles_stages_or_ctas(arch, configs):
    """Values with rounded sums: all configs with the same number of K parts return the same bits."""
    generator = torch.Generator().manual_seed(0)
    x = nv.quantize(torch.randn(70, 512, generator=generator), format=nv.FP8_1x128)
    w = nv.quantize(torch.randn(200, 512, generator=generator), format=nv.FP8_128x128)
    options = {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    got = [on_parts.gemm(x, w, config=c, **options) for c in configs]
    for other in got[1:]:
        assert_bitwise_equal(got[0], other)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    assert (got[0] - want).abs().max() < BOUNDS[arch] * want.abs().max()

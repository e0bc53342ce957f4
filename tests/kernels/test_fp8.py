"""FP8 with fp32 scales on every family of GPUs: where sums are exact, every bit is the reference's."""

from dataclasses import replace

import flat_parts as on_parts
import pytest
import torch
from fp8_check import (
    FORMATS,
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
    variants,
    weights_of,
)
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.planning.arch import sm90_fp8, sm100_fp8, sm120
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
PAIR = (nv.FP8_1x128, nv.FP8_128x128)
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


# ---- layouts, choices, and what is refused -------------------------------------------------------------------------------
def test_scales_of_any_strides():
    """Column-major scales, which kernels with TMA loads of scales need, return the same bits."""
    x, w = tokens_of(40, 256), weights_of(2, 256, 256)
    by_column = x.scale.T.contiguous().T
    offs = torch.tensor([7, 40], dtype=torch.int32)
    parts = (x.data, w.data, by_column, w.scale, offs)
    want = nv.grouped_gemm(x, w, offs=offs, out_dtype=torch.float32)
    for backend in ("auto", "emulator:sm_90a"):
        got = on_parts.grouped_gemm(*parts, out_dtype=torch.float32, backend=backend, **FORMATS)
        assert_bitwise_equal(got, want)
    for m, k in ((9, 128), (1, 256), (1, 128)):  # torch considers any stride contiguous here
        x, w = tokens_of(m, k), weights_of(128, k)
        columns = x.scale.as_strided(x.scale.shape, (1, m + 3)) if k == 128 else x.scale.T.contiguous().T
        got = on_parts.gemm(x.data, w.data, columns, w.scale, out_dtype=torch.float32, **FORMATS)
        assert_bitwise_equal(got, nv.gemm(x, w, out_dtype=torch.float32))


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("arch", "chosen"),
    [("sm_100a", on_sm100(128)), ("sm_100a", on_sm100(128, True)), ("sm_120a", on_sm120(32, 2))],
    ids=str,
)
def test_results_in_columns(arch, chosen, out_dtype):
    x, w = tokens_of(40, 256), weights_of(136, 256)
    got, want = (torch.full((136, 40), 7.0, dtype=out_dtype).T for _ in range(2))
    with observe(check=True):
        on_parts.gemm(x, w, out=got, out_dtype=out_dtype, config=chosen, backend=f"emulator:{arch}")
    nv.gemm(x, w, out=want, out_dtype=out_dtype)
    assert_bitwise_equal(got, want)


@SLOW
def test_dual_results_in_columns():
    x, gate, up = tokens_of(40, 256), weights_of(136, 256), weights_of(136, 256, seed=2)
    got, want = (torch.full((136, 40), torch.nan).T for _ in range(2))
    options = {"activation": "relu2", "out_dtype": torch.float32}
    chosen = on_sm120(16, 2, rows=64)
    on_parts.dual_gemm(x, gate, up, out=got, config=chosen, backend="emulator:sm_120a", **options)
    on_parts.dual_gemm(x, gate, up, out=want, **options)
    torch.testing.assert_close(got, want, rtol=2e-7, atol=0)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", [on_sm90(32), rows_on_sm90()], ids=str)
def test_dual_results_of_other_dtypes(chosen, out_dtype):
    check_dual_ragged(72, 128, chosen, "emulator:sm_90a", out_dtype=out_dtype)


def refusal_of(arch, chosen, num_b):
    if arch == "sm_120a":
        return sm120.unsupported_reason(chosen, num_b, PAIR)
    return {"sm_90a": sm90_fp8, "sm_100a": sm100_fp8}[arch].unsupported_reason(chosen, num_b)


@pytest.mark.parametrize(
    ("arch", "chosen", "fix"),
    [
        ("sm_90a", rows_on_sm90(192), "use M tile 128, N tile 128"),
        ("sm_90a", rows_on_sm90(tokens=256), "use M tile 128, N tile 128"),
        ("sm_90a", rows_on_sm90(512), "use M tile 128, N tile 256"),
        ("sm_90a", KernelConfig((128, 128, 128)), "use num_acc_stage=1"),
        ("sm_90a", rows_on_sm90(128, split_k=2), "use split_k=1"),
        ("sm_90a", on_sm90(128, 192), "use M tile 128"),
        ("sm_90a", on_sm90(160, 256), "use N tile 128"),
        ("sm_90a", on_sm90(12), "use N tile 16"),
        ("sm_90a", on_sm90(24, multicast_n=2), "use N tile 32"),
        ("sm_90a", KernelConfig((128, 64, 256), num_acc_stage=1, swap_ab=True), "use K tile 128"),
        ("sm_90a", on_sm90(32, multicast_n=2, split_k=2), "use multicast_n=1"),
        ("sm_90a", on_sm90(64, 256, split_k=2), "use M tile 128"),
        ("sm_90a", on_sm90(96, split_k=4), "use split_k=2"),
        ("sm_90a", on_sm90(128, num_ab_stage=9), "use 2 to 6"),
        ("sm_90a", on_sm90(16, decode_first=True), "use decode_first=False"),
        ("sm_90a", on_sm90(16, split_k=2, num_cta=1), "launch at least as many"),
        ("sm_100a", on_sm100(256), "use one of (64, 128)"),
        ("sm_100a", KernelConfig((128, 128, 256)), "use K tile 128"),
        ("sm_100a", KernelConfig((64, 128, 128)), "use M tile 128"),
        ("sm_100a", on_sm100(128, num_acc_stage=1), "use num_acc_stage=4"),
        ("sm_100a", on_sm100(128, num_acc_stage=3), "use num_acc_stage=4"),
        ("sm_100a", on_sm100(128, num_ab_stage=7), "use 1 to 6"),
        (
            "sm_100a",
            on_sm100(128, split_k=2, use_2cta_instrs=True),
            "use split_k=2 with use_2cta_instrs=False",
        ),
        ("sm_100a", on_sm100(128, decode_first=True), "use decode_first=False"),
        ("sm_120a", KernelConfig((128, 64, 128), num_acc_stage=1), "use swap_ab=True"),
        ("sm_120a", on_sm120(128), "use an N tile of 8, 16, 32, 64, 96"),
        ("sm_120a", on_sm120(64, 2), "use an N tile of 32"),
        ("sm_120a", KernelConfig((128, 64, 256), num_acc_stage=1, swap_ab=True), "use K tile 128"),
        ("sm_120a", on_sm120(16, decode_first=True), "use decode_first=False"),
        ("sm_120a", on_sm120(96, num_ab_stage=4), "use 2 to 3"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(arch, chosen, fix):
    assert fix in refusal_of(arch, chosen, 1)
    with pytest.raises(ConfigError, match=f"^{arch}: "):
        on_parts.gemm(tokens_of(9, 128), weights_of(128, 128), config=chosen, backend=f"emulator:{arch}")


@pytest.mark.parametrize(
    ("arch", "chosen", "fix"),
    [
        ("sm_90a", rows_on_sm90(256), "use M tile 128, N tile 128"),
        ("sm_90a", on_sm90(64, 256), "use M tile 128"),
        ("sm_90a", on_sm90(160), "use N tile 128"),
        ("sm_90a", on_sm90(64, split_k=4), "use split_k=2"),
        ("sm_100a", on_sm100(128), "use N tile 64"),
        ("sm_100a", on_sm100(64, swap_ab=True, num_ab_stage=6), "use 1 to 5"),
        ("sm_120a", on_sm120(64), "use an N tile of 32"),
        ("sm_120a", on_sm120(32, 2), "use an N tile of 16"),
        ("sm_120a", on_sm120(96, rows=64), "use an N tile of 64"),
        ("sm_120a", on_sm120(32, rows=32), "use M tile 64 or 128"),
    ],
    ids=str,
)
def test_a_refusal_of_two_products_names_the_nearest_legal_value(arch, chosen, fix):
    assert fix in refusal_of(arch, chosen, 2)


@pytest.mark.parametrize("num_b", [1, 2])
def test_every_candidate_of_sm120_can_be_built(num_b):
    found = sm120.candidates(num_b, formats=PAIR)
    assert found and all(sm120.unsupported_reason(c, num_b, PAIR) is None for c in found)


def test_choices_on_sm100():
    """Few tokens are on the N side, many on the M side in pairs. The choice is a candidate that compiles."""
    few, many = (GroupedProblem(((m, 4096, 4096),), **FORMATS) for m in (1, 4096))
    chosen = [sm100_fp8.choose(problem, 148) for problem in (few, many)]
    assert [c.swap_ab for c in chosen] == [True, False] and set(chosen) <= set(sm100_fp8.candidates())
    assert chosen[0].split_k > 1 and chosen[1].use_2cta_instrs
    for problem in (few, many):
        dual = replace(problem, activation="silu")
        assert sm100_fp8.unsupported_reason(sm100_fp8.choose(dual, 148), 2) is None


@pytest.mark.parametrize(
    ("size", "groups", "activation", "name"),
    [
        ((8192, 8192, 8192), 1, None, "t128x256x128_s0a1_m2"),
        ((4096, 4096, 7168), 8, None, "t128x256x128_s0a1_m2"),
        ((4096, 4096, 7168), 1, None, "t128x256x128_s0a1"),
        ((256, 2048, 7168), 1, "silu", "t128x64x128_s0a1_swap_k2"),
        ((16, 2048, 7168), 1, "silu", "t128x8x128_s0a1_swap_k4"),
        ((512, 2048, 7168), 8, "silu", "t128x128x128_s0a1"),
    ],
)
def test_what_is_chosen_was_the_fastest_on_an_h100(size, groups, activation, name):
    """The choice was the fastest or took at most 1 % longer (2026-11-26). Only the longest launches use pairs of CTAs."""
    problem = GroupedProblem((size,) * groups, "ragged", activation=activation, **FORMATS)
    assert sm90_fp8.choose(problem, 132).to_name() == name


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen",
    [
        on_sm90(128, 256), on_sm90(128, 256, multicast_n=2), on_sm90(16), rows_on_sm90(128),
        rows_on_sm90(256, multicast_n=2),
    ],
    ids=str,
)  # fmt: skip
def test_every_launch_gives_the_same_bits_on_the_gpu(chosen):
    """Stages are refilled as soon as they are released."""
    x, w = (t.to("cuda") for t in (tokens_of(512, 8192), weights_of(4096, 8192)))
    outs = [on_parts.gemm(x, w, config=chosen, out_dtype=torch.float32) for _ in range(40)]
    want = (x.dequantize(torch.float64) @ w.dequantize(torch.float64).T).float()
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, want)]

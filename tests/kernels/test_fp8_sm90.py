"""FP8 with fp32 scales on sm_90a: every bit is the reference's where sums are exact."""

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
    tokens_of,
    weights_of,
)
from oracle import assert_bitwise_equal
from stage_release import unfinished_reads

import nvfp4_cute as nv
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.ops import parts as on_parts
from nvfp4_cute.planning.arch import sm90_fp8
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"


def config(tokens, weights=128, **settings):
    return KernelConfig((weights, tokens, 128), num_acc_stage=1, swap_ab=True, **settings)


def rows(weights=128, tokens=128, **settings):
    """Tokens on MMA-M."""
    return KernelConfig((tokens, weights, 128), num_acc_stage=1, **settings)


CONFIGS = [
    (config(16, num_cta=3), "random:1"),
    (config(64, 256, num_cta=2), "lazy"),
    pytest.param(config(128, 256), "eager", marks=SLOW),
    pytest.param(config(96, multicast_n=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(192), "random:2", marks=SLOW),
    pytest.param(config(128, 256, multicast_n=2, num_ab_stage=2), "random:3", marks=SLOW),
    pytest.param(config(32, split_k=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(8, split_k=8), "random:4", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
    (rows(128, num_cta=2), "lazy"),
    pytest.param(rows(256, num_cta=1), "random:5", marks=SLOW),
    pytest.param(rows(256, multicast_n=2, num_cta=2), "eager", marks=SLOW),
    pytest.param(rows(128, multicast_n=2, num_ab_stage=2, num_cta=2), "lazy", marks=SLOW),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 384, chosen, EMULATED, mode)


@pytest.mark.parametrize(
    "chosen",
    [
        config(64, num_cta=2),
        pytest.param(config(32, 256, multicast_n=2), marks=SLOW),
        pytest.param(rows(256, multicast_n=2, num_cta=4), marks=SLOW),
    ],
    ids=str,
)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@pytest.mark.parametrize("out_dtype", [torch.float16, pytest.param(torch.bfloat16, marks=SLOW)], ids=str)
@pytest.mark.parametrize("chosen", [None, pytest.param(rows(256), marks=SLOW)], ids=str)
def test_results_are_rounded_once_and_rows_may_lie_apart(chosen, out_dtype):
    check_rounding_and_pitch(out_dtype, EMULATED, chosen)


def test_scales_of_any_strides():
    """Scales column by column, as kernels that load them by TMA ask for, give the same bits."""
    x, w = tokens_of(40, 256), weights_of(2, 256, 256)
    by_column = x.scale.T.contiguous().T
    offs = torch.tensor([7, 40], dtype=torch.int32)
    parts = (x.data, w.data, by_column, w.scale, offs)
    want = nv.grouped_gemm(x, w, offs=offs, out_dtype=torch.float32)
    assert_bitwise_equal(on_parts.grouped_gemm(*parts, out_dtype=torch.float32, **FORMATS), want)
    got = on_parts.grouped_gemm(*parts, out_dtype=torch.float32, backend=EMULATED, **FORMATS)
    assert_bitwise_equal(got, want)
    for m, k in ((9, 128), (1, 256), (1, 128)):  # where torch takes any stride for contiguous
        x, w = tokens_of(m, k), weights_of(128, k)
        columns = x.scale.as_strided(x.scale.shape, (1, m + 3)) if k == 128 else x.scale.T.contiguous().T
        got = on_parts.gemm(x.data, w.data, columns, w.scale, out_dtype=torch.float32, **FORMATS)
        assert_bitwise_equal(got, nv.gemm(x, w, out_dtype=torch.float32))


@pytest.mark.parametrize("chosen", [config(32), pytest.param(rows(256), marks=SLOW)], ids=str)
def test_any_scales(chosen):
    check_any_scales(chosen, EMULATED)


def test_not_a_number_stays_in_its_row_or_column():
    check_not_a_number(EMULATED)


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_bits_do_not_depend_on_stages_or_ctas(split):
    """On values whose sums round: of one number of parts of K, all configs give the same."""
    generator = torch.Generator().manual_seed(0)
    x = nv.quantize(torch.randn(70, 512, generator=generator), format=nv.FP8_1x128)
    w = nv.quantize(torch.randn(200, 512, generator=generator), format=nv.FP8_128x128)
    configs = [config(16, split_k=split), config(64, split_k=split, num_ab_stage=2, num_cta=split)]
    configs += [rows(128)] * (split == 1)
    got = [on_parts.gemm(x, w, config=c, backend=EMULATED, out_dtype=torch.float32) for c in configs]
    for other in got[1:]:
        assert_bitwise_equal(got[0], other)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    # Tensor cores of Hopper keep 13 bits behind the point of the largest product of 32 (``products.HOPPER_FP8``).
    assert (got[0] - want).abs().max() < 2e-3 * want.abs().max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chosen", [config(16), config(128, 256), rows(256)], ids=str)
def test_release_behind_reads(chosen):
    """In the machine code, no stage is released while its scales are read."""
    key = KernelKey("sm_90a", chosen, 1, torch.bfloat16, True, **FORMATS).validated()
    kernel = get_kernel(key)
    assert kernel.resources.stack_bytes == 0
    stages = sm90_fp8.smem_plan(key.config).num_ab_stage
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, (stages,), "nvfp4_")]


@SLOW
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm90_fp8.candidates(), ids=lambda chosen: chosen.to_name())
def test_no_spills(chosen, form):
    key = KernelKey("sm_90a", chosen, 1, torch.bfloat16, True, form, **FORMATS).validated()
    assert get_kernel(key).resources.stack_bytes == 0


DUAL_CONFIGS = [
    (config(16, num_cta=3), "random:1"),
    (rows(num_cta=2), "lazy"),
    pytest.param(config(128, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(64, multicast_n=2, num_cta=4), "eager", marks=SLOW),
    pytest.param(config(32), "random:2", marks=SLOW),
    pytest.param(config(64, split_k=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(8, split_k=4), "random:3", marks=SLOW),
    pytest.param(rows(multicast_n=2, num_cta=2), "random:4", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("chosen", "mode"), DUAL_CONFIGS, ids=str)
def test_dual_ragged(chosen, mode):
    check_dual_ragged(200, 384, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", [config(32), rows()], ids=str)
def test_dual_results_of_other_dtypes(chosen, out_dtype):
    check_dual_ragged(72, 128, chosen, EMULATED, out_dtype=out_dtype)


@SLOW
@pytest.mark.parametrize("chosen", [config(64, num_cta=2), rows(multicast_n=2, num_cta=2)], ids=str)
def test_dual_list_and_masked(chosen):
    check_dual_list_and_masked(chosen, EMULATED)


@SLOW
@pytest.mark.parametrize("chosen", [config(32), rows()], ids=str)
def test_dual_activations(chosen):
    check_activations(chosen, EMULATED)


SPILLS = {"t128x96x128_s0a1_swap": 8, "t128x96x128_s0a1_swap_m2": 8, "t128x64x128_s0a1_swap_k2": 8}
"""Bytes of local memory of a thread, of duals of lists with float32 results: two registers, once a tile, behind the K loop."""


@SLOW
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", sm90_fp8.candidates(2), ids=lambda chosen: chosen.to_name())
def test_dual_machine_code(chosen, out_dtype, form):
    """No spills but those of ``SPILLS``, and no stage that is released while it is read."""
    options = {"activation": "gelu_tanh", "has_limit": True, **FORMATS}
    kernel = get_kernel(KernelKey("sm_90a", chosen, 1, out_dtype, True, form, **options).validated())
    known = SPILLS.get(chosen.to_name(), 0) if (out_dtype, form) == (torch.float32, "list") else 0
    assert kernel.resources.stack_bytes == known
    stages = (kernel.key.config.num_ab_stage,)
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (rows(256), "use M tile 128, N tile 128"),
        (config(64, 256), "use M tile 128"),
        (config(160), "use N tile 128"),
        (config(64, split_k=4), "use split_k=2"),
    ],
    ids=str,
)
def test_a_refusal_of_two_products_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm90_fp8.unsupported_reason(chosen, 2)


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (rows(192), "use M tile 128, N tile 128"),
        (rows(tokens=256), "use M tile 128, N tile 128"),
        (rows(512), "use M tile 128, N tile 256"),
        (KernelConfig((128, 128, 128)), "use num_acc_stage=1"),
        (rows(128, split_k=2), "use split_k=1"),
        (config(128, 192), "use M tile 128"),
        (config(160, 256), "use N tile 128"),
        (config(12), "use N tile 16"),
        (config(24, multicast_n=2), "use N tile 32"),
        (KernelConfig((128, 64, 256), num_acc_stage=1, swap_ab=True), "use K tile 128"),
        (config(32, multicast_n=2, split_k=2), "use multicast_n=1"),
        (config(64, 256, split_k=2), "use M tile 128"),
        (config(96, split_k=4), "use split_k=2"),
        (config(128, num_ab_stage=9), "use 2 to 6"),
        (config(16, decode_first=True), "use decode_first=False"),
        (config(16, split_k=2, num_cta=1), "launch at least as many"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm90_fp8.unsupported_reason(chosen)


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
    """Or took at most 1 % longer (2026-11-26). A pair of CTAs for the longest launches alone."""
    formats = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
    problem = GroupedProblem((size,) * groups, "ragged", activation=activation, **formats)
    assert sm90_fp8.choose(problem, 132).to_name() == name


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(200, 384, chosen, "cuda", device="cuda")


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in DUAL_CONFIGS], ids=str
)
def test_gpu_dual_ragged(chosen):
    check_dual_ragged(200, 384, chosen, "cuda", device="cuda")


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen",
    [config(128, 256), config(128, 256, multicast_n=2), config(16), rows(128), rows(256, multicast_n=2)],
    ids=str,
)
def test_every_launch_gives_the_same_bits_on_the_gpu(chosen):
    """Stages are filled again as soon as they are released."""
    x, w = (t.to("cuda") for t in (tokens_of(512, 8192), weights_of(4096, 8192)))
    outs = [on_parts.gemm(x, w, config=chosen, out_dtype=torch.float32) for _ in range(40)]
    want = (x.dequantize(torch.float64) @ w.dequantize(torch.float64).T).float()
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, want)]

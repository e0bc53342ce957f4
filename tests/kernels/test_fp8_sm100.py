"""FP8 with fp32 scales on sm_100a: every bit is the reference's where sums are exact."""

from dataclasses import replace

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

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.ops import parts as on_parts
from nvfp4_cute.planning.arch import sm100_fp8
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_100a"
# Other family members, which the same source serves.
OTHERS = ("emulator:sm_103a", "emulator:sm_110a")


def config(n, swap_ab=False, num_acc_stage=2, **settings):
    return KernelConfig((128, n, 128), num_acc_stage=num_acc_stage, swap_ab=swap_ab, **settings)


CONFIGS = [
    (config(64, swap_ab=True, num_cta=3), "random:1"),
    pytest.param(config(128, num_acc_stage=4, use_2cta_instrs=True), "lazy", marks=SLOW),
    pytest.param(config(128, use_2cta_instrs=True, num_ab_stage=2, num_cta=2), "random:2", marks=SLOW),
    pytest.param(config(64, num_acc_stage=4), "lazy", marks=SLOW),
    pytest.param(config(128, swap_ab=True, use_2cta_instrs=True, num_cta=4), "random:3", marks=SLOW),
    pytest.param(config(128, swap_ab=True, split_k=2, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(128, split_k=2), "eager", marks=SLOW),
    # Fewer K tiles than CTAs.
    pytest.param(config(64, swap_ab=True, split_k=8), "random:4", marks=SLOW),
    pytest.param(config(128, multicast_n=2), "random:5", marks=SLOW),
    pytest.param(config(64, swap_ab=True, multicast_n=2, use_2cta_instrs=True), "lazy", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 384, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("backend", OTHERS)
def test_on_the_rest_of_the_family(backend):
    check_ragged(200, 256, None, backend)


@SLOW
@pytest.mark.parametrize(
    "chosen", [config(64, swap_ab=True, num_cta=2), config(128, use_2cta_instrs=True)], ids=str
)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once_and_rows_may_lie_apart(out_dtype):
    check_rounding_and_pitch(out_dtype, EMULATED)


@pytest.mark.parametrize("swap_ab", [False, pytest.param(True, marks=SLOW)])
def test_any_scales(swap_ab):
    check_any_scales(config(64, swap_ab), EMULATED)


@SLOW
def test_not_a_number_stays_in_its_row_or_column():
    check_not_a_number(EMULATED)


@SLOW
def test_an_infinite_scale_where_ctas_have_no_k_tile():
    """They add zeros, whatever the scales are."""
    x, w = tokens_of(9, 256), weights_of(128, 256)
    x.scale[3, 1] = torch.inf
    options = {"out_dtype": torch.float32, "backend": EMULATED}
    got, want = (
        on_parts.gemm(x, w, config=config(64, swap_ab=True, split_k=split), **options) for split in (4, 1)
    )
    assert want[3].isinf().any()
    assert_bitwise_equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@SLOW
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_in_columns(swap_ab, out_dtype):
    x, w = tokens_of(40, 256), weights_of(136, 256)
    got, want = (torch.full((136, 40), 7.0, dtype=out_dtype).T for _ in range(2))
    with observe(check=True):
        on_parts.gemm(x, w, out=got, out_dtype=out_dtype, config=config(128, swap_ab), backend=EMULATED)
    nv.gemm(x, w, out=want, out_dtype=out_dtype)
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("split", [1, 2])
def test_bits_do_not_depend_on_tiles_stages_or_ctas(split):
    """On values whose sums round: of one number of parts of K, all configs give the same."""
    generator = torch.Generator().manual_seed(0)
    x = nv.quantize(torch.randn(70, 512, generator=generator), format=nv.FP8_1x128)
    w = nv.quantize(torch.randn(200, 512, generator=generator), format=nv.FP8_128x128)
    configs = [
        config(64, swap_ab=True, split_k=split),
        config(128, num_acc_stage=4, num_ab_stage=2, split_k=split, num_cta=split),
    ]
    got = [on_parts.gemm(x, w, config=c, backend=EMULATED, out_dtype=torch.float32) for c in configs]
    assert_bitwise_equal(*got)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    # Tensor cores keep 25 bits behind the point of the largest product (``emulator.isa.products``).
    assert (got[0] - want).abs().max() < 1e-5 * want.abs().max()


DUAL_CONFIGS = [
    (config(64, swap_ab=True, num_cta=3), "random:1"),
    pytest.param(config(64, num_acc_stage=4, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(64, num_acc_stage=4, use_2cta_instrs=True), "random:2", marks=SLOW),
    pytest.param(config(64, swap_ab=True, use_2cta_instrs=True, num_ab_stage=2), "eager", marks=SLOW),
    pytest.param(config(64, swap_ab=True, split_k=4, num_cta=4), "random:3", marks=SLOW),
    pytest.param(None, "lazy", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), DUAL_CONFIGS, ids=str)
def test_dual_ragged(chosen, mode):
    check_dual_ragged(200, 256, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("backend", OTHERS)
def test_dual_on_the_rest_of_the_family(backend):
    check_dual_ragged(128, 128, None, backend, out_dtype=torch.float16)


@SLOW
@pytest.mark.parametrize(
    "chosen", [config(64, swap_ab=True, num_cta=2), config(64, num_acc_stage=4)], ids=str
)
def test_dual_list_and_masked(chosen):
    check_dual_list_and_masked(chosen, EMULATED)


@SLOW
def test_dual_activations():
    check_activations(config(64, swap_ab=True), EMULATED)


def check_machine_code(chosen, form, out_dtype, **options):
    """No spills."""
    key = KernelKey("sm_100a", chosen, 1, out_dtype, True, form, **FORMATS, **options)
    assert get_kernel(key.validated()).resources.stack_bytes == 0


def test_machine_code():
    check_machine_code(config(128, swap_ab=True, split_k=8), "ragged", torch.bfloat16)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm100_fp8.candidates(), ids=lambda chosen: chosen.to_name())
def test_machine_code_of_every_candidate(chosen, form, out_dtype):
    check_machine_code(chosen, form, out_dtype)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm100_fp8.candidates(2), ids=lambda chosen: chosen.to_name())
def test_machine_code_of_every_dual_candidate(chosen, form, out_dtype):
    check_machine_code(chosen, form, out_dtype, activation="silu", has_limit=True)


def test_a_refusal_of_dual_ones_names_the_nearest_legal_value():
    assert "use N tile 64" in sm100_fp8.unsupported_reason(config(128), 2)
    assert "use 1 to 5" in sm100_fp8.unsupported_reason(config(64, swap_ab=True, num_ab_stage=6), 2)


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (config(256), "use one of (64, 128)"),
        (KernelConfig((128, 128, 256)), "use K tile 128"),
        (KernelConfig((64, 128, 128)), "use M tile 128"),
        (config(128, num_acc_stage=1), "use num_acc_stage=4"),
        (config(128, num_acc_stage=3), "use num_acc_stage=4"),
        (config(128, num_ab_stage=7), "use 1 to 6"),
        (config(128, split_k=2, use_2cta_instrs=True), "use split_k=2 with use_2cta_instrs=False"),
        (config(128, decode_first=True), "use decode_first=False"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm100_fp8.unsupported_reason(chosen)
    with pytest.raises(ConfigError, match="^sm_100a: "):
        on_parts.gemm(tokens_of(9, 128), weights_of(128, 128), config=chosen, backend=EMULATED)


def test_choices():
    """Few tokens lie on the N side, many on the M side in pairs; what is chosen is a candidate that can be built."""
    few, many = (
        GroupedProblem(((m, 4096, 4096),), a_format=nv.FP8_1x128, b_format=nv.FP8_128x128) for m in (1, 4096)
    )
    chosen = [sm100_fp8.choose(problem, 148) for problem in (few, many)]
    assert [c.swap_ab for c in chosen] == [True, False] and set(chosen) <= set(sm100_fp8.candidates())
    assert chosen[0].split_k > 1 and chosen[1].use_2cta_instrs
    for problem in (few, many):
        dual = replace(problem, activation="silu")
        assert sm100_fp8.unsupported_reason(sm100_fp8.choose(dual, 148), 2) is None


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(200, 384, chosen, "cuda", device="cuda")


@pytest.mark.gpu("sm_100a")
@pytest.mark.parametrize(
    "chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in DUAL_CONFIGS], ids=str
)
def test_gpu_dual_ragged(chosen):
    check_dual_ragged(200, 256, chosen, "cuda", device="cuda")

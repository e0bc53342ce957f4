"""FP8 with fp32 scales on sm_120a: every bit is the reference's where sums are exact."""

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
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.ops import parts as on_parts
from nvfp4_cute.planning.arch import sm120
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_120a"
PAIR = (nv.FP8_1x128, nv.FP8_128x128)
# Another family member, which the same source serves.
OTHER = "emulator:sm_121a"


def config(tokens, teams=1, rows=sm120.TILE_M, **settings):
    return KernelConfig((rows, tokens, 128), num_acc_stage=teams, swap_ab=True, **settings)


CONFIGS = [
    (config(16, 2, num_cta=3), "random:1"),
    pytest.param(config(96, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(64), "eager", marks=SLOW),
    pytest.param(config(32, 2, num_ab_stage=2, num_cta=3), "random:2", marks=SLOW),
    pytest.param(config(8, 2), "lazy", marks=SLOW),
    pytest.param(config(32, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(64, split_k=2, num_cta=4), "random:3", marks=SLOW),
    # Fewer K tiles than CTAs.
    pytest.param(config(8, split_k=8), "lazy", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 384, chosen, EMULATED, mode)


@SLOW
@pytest.mark.parametrize("chosen", [config(64, num_cta=2), config(32, 2)], ids=str)
def test_list_masked_and_batched(chosen):
    check_list_masked_and_batched(chosen, EMULATED)


@SLOW
def test_on_sm121():
    check_ragged(200, 256, None, OTHER)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once_and_rows_may_lie_apart(out_dtype):
    check_rounding_and_pitch(out_dtype, EMULATED)


@SLOW
def test_any_scales():
    check_any_scales(config(32), EMULATED)


@SLOW
def test_an_infinite_scale_where_ctas_have_no_k_tile():
    """They add zeros, whatever the scales are."""
    x, w = tokens_of(9, 256), weights_of(128, 256)
    x.scale[3, 1] = torch.inf
    options = {"out_dtype": torch.float32, "backend": EMULATED}
    got, want = (on_parts.gemm(x, w, config=config(16, split_k=split), **options) for split in (4, 1))
    assert want[3].isinf().any()
    assert_bitwise_equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@SLOW
def test_not_a_number_stays_in_its_row_or_column():
    check_not_a_number(EMULATED)


@SLOW
def test_results_in_columns():
    x, w = tokens_of(40, 256), weights_of(136, 256)
    got, want = (torch.full((136, 40), torch.nan).T for _ in range(2))
    on_parts.gemm(x, w, out=got, out_dtype=torch.float32, config=config(32, 2), backend=EMULATED)
    nv.gemm(x, w, out=want, out_dtype=torch.float32)
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("split", [1, 4])
def test_bits_do_not_depend_on_stages_or_ctas(split):
    """On values whose sums round. Which CTA adds up the parts of K first differs from tile to tile."""
    generator = torch.Generator().manual_seed(0)
    x = nv.quantize(torch.randn(70, 512, generator=generator), format=nv.FP8_1x128)
    w = nv.quantize(torch.randn(200, 512, generator=generator), format=nv.FP8_128x128)
    tokens = 64 if split == 1 else 16
    configs = [config(16, split_k=split), config(tokens, split_k=split, num_ab_stage=2, num_cta=split)]
    got = [on_parts.gemm(x, w, config=c, backend=EMULATED, out_dtype=torch.float32) for c in configs]
    assert_bitwise_equal(*got)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    # Tensor cores keep 25 bits behind the point of the largest product (``emulator.isa.products``).
    assert (got[0] - want).abs().max() < 1e-5 * want.abs().max()


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm120.candidates(formats=PAIR), ids=lambda chosen: chosen.to_name())
def test_machine_code(chosen, form, out_dtype):
    """No spills, no calls, and no stage that is released while it is read."""
    kernel = get_kernel(KernelKey("sm_120a", chosen, 1, out_dtype, True, form, **FORMATS).validated())
    assert kernel.resources.stack_bytes == 0
    assert b"__cuda_syscall" not in kernel.cubin
    stages = (kernel.key.config.num_ab_stage,)
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


@pytest.mark.parametrize("num_b", [1, 2])
def test_every_candidate_can_be_built(num_b):
    found = sm120.candidates(num_b, formats=PAIR)
    assert found and all(sm120.unsupported_reason(c, num_b, PAIR) is None for c in found)


DUAL_CONFIGS = [
    (config(16, 2, rows=64, num_cta=3), "random:1"),
    pytest.param(config(64, rows=64, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(32, num_cta=2), "lazy", marks=SLOW),
    pytest.param(config(8, 2), "eager", marks=SLOW),
    pytest.param(config(16, rows=64, split_k=4, num_cta=8), "random:2", marks=SLOW),
    pytest.param(None, "lazy", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), DUAL_CONFIGS, ids=str)
def test_dual_ragged(chosen, mode):
    check_dual_ragged(200, 256, chosen, EMULATED, mode)


@SLOW
def test_dual_on_sm121():
    check_dual_ragged(128, 128, None, OTHER, out_dtype=torch.float16)


@SLOW
@pytest.mark.parametrize("chosen", [config(32, rows=64, num_cta=2), config(16, 2)], ids=str)
def test_dual_list_and_masked(chosen):
    check_dual_list_and_masked(chosen, EMULATED)


@SLOW
def test_dual_activations():
    check_activations(config(32), EMULATED)


@SLOW
def test_dual_results_in_columns():
    x, gate, up = tokens_of(40, 256), weights_of(136, 256), weights_of(136, 256, seed=2)
    got, want = (torch.full((136, 40), torch.nan).T for _ in range(2))
    options = {"activation": "relu2", "out_dtype": torch.float32}
    on_parts.dual_gemm(x, gate, up, out=got, config=config(16, 2, rows=64), backend=EMULATED, **options)
    on_parts.dual_gemm(x, gate, up, out=want, **options)
    torch.testing.assert_close(got, want, rtol=2e-7, atol=0)


@SLOW
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm120.candidates(2, formats=PAIR), ids=lambda chosen: chosen.to_name())
def test_dual_machine_code(chosen, form):
    """As of products."""
    options = {"activation": "silu", "has_limit": True, **FORMATS}
    kernel = get_kernel(KernelKey("sm_120a", chosen, 1, torch.bfloat16, True, form, **options).validated())
    assert kernel.resources.stack_bytes == 0
    stages = (kernel.key.config.num_ab_stage,)
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (config(64), "use an N tile of 32"),
        (config(32, 2), "use an N tile of 16"),
        (config(96, rows=64), "use an N tile of 64"),
        (config(32, rows=32), "use M tile 64 or 128"),
    ],
    ids=str,
)
def test_a_refusal_of_dual_ones_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm120.unsupported_reason(chosen, 2, PAIR)


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (KernelConfig((128, 64, 128), num_acc_stage=1), "use swap_ab=True"),
        (config(128), "use an N tile of 8, 16, 32, 64, 96"),
        (config(64, 2), "use an N tile of 32"),
        (KernelConfig((128, 64, 256), num_acc_stage=1, swap_ab=True), "use K tile 128"),
        (config(16, decode_first=True), "use decode_first=False"),
        (config(96, num_ab_stage=4), "use 2 to 3"),
    ],
    ids=str,
)
def test_a_refusal_names_the_nearest_legal_value(chosen, fix):
    assert fix in sm120.unsupported_reason(chosen, 1, PAIR)
    with pytest.raises(ConfigError, match="^sm_120a: "):
        on_parts.gemm(tokens_of(9, 128), weights_of(128, 128), config=chosen, backend=EMULATED)


@pytest.mark.gpu("sm_120a")
@pytest.mark.parametrize("chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in CONFIGS], ids=str)
def test_gpu_ragged(chosen):
    check_ragged(200, 384, chosen, "cuda", device="cuda")


@pytest.mark.gpu("sm_120a")
@pytest.mark.parametrize(
    "chosen", [c.values[0] if hasattr(c, "values") else c[0] for c in DUAL_CONFIGS], ids=str
)
def test_gpu_dual_ragged(chosen):
    check_dual_ragged(200, 256, chosen, "cuda", device="cuda")

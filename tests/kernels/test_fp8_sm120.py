"""FP8 with fp32 scales on sm_120a: machine code, layouts, choices, and what is refused. ``test_fp8`` has the rest."""

import pytest
import torch
from fp8_check import FORMATS, tokens_of, weights_of
from fp8_check import on_sm120 as config
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


@SLOW
def test_results_in_columns():
    x, w = tokens_of(40, 256), weights_of(136, 256)
    got, want = (torch.full((136, 40), torch.nan).T for _ in range(2))
    on_parts.gemm(x, w, out=got, out_dtype=torch.float32, config=config(32, 2), backend=EMULATED)
    nv.gemm(x, w, out=want, out_dtype=torch.float32)
    assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("chosen", sm120.candidates(formats=PAIR), ids=lambda chosen: chosen.to_name())
def test_machine_code(chosen, form, out_dtype):
    """No spills, no calls, and no release of a stage before its reads are complete."""
    kernel = get_kernel(KernelKey("sm_120a", chosen, 1, out_dtype, True, form, **FORMATS).validated())
    assert kernel.resources.stack_bytes == 0
    assert b"__cuda_syscall" not in kernel.cubin
    stages = (kernel.key.config.num_ab_stage,)
    assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


@pytest.mark.parametrize("num_b", [1, 2])
def test_every_candidate_can_be_built(num_b):
    found = sm120.candidates(num_b, formats=PAIR)
    assert found and all(sm120.unsupported_reason(c, num_b, PAIR) is None for c in found)


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
    """Checks the same properties as for single products."""
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

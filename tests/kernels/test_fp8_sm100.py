"""FP8 with fp32 scales on sm_100a: machine code, layouts, choices, and what is refused. ``test_fp8`` has the rest."""

from dataclasses import replace

import pytest
import torch
from fp8_check import (
    FORMATS,
    tokens_of,
    weights_of,
)
from fp8_check import (
    on_sm100 as config,
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


def check_machine_code(chosen, form, out_dtype, **options):
    """Checks for spills."""
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
    """Few tokens are on the N side, many on the M side in pairs. The choice is a candidate that compiles."""
    few, many = (
        GroupedProblem(((m, 4096, 4096),), a_format=nv.FP8_1x128, b_format=nv.FP8_128x128) for m in (1, 4096)
    )
    chosen = [sm100_fp8.choose(problem, 148) for problem in (few, many)]
    assert [c.swap_ab for c in chosen] == [True, False] and set(chosen) <= set(sm100_fp8.candidates())
    assert chosen[0].split_k > 1 and chosen[1].use_2cta_instrs
    for problem in (few, many):
        dual = replace(problem, activation="silu")
        assert sm100_fp8.unsupported_reason(sm100_fp8.choose(dual, 148), 2) is None

"""FP8 with fp32 scales on sm_90a: machine code, layouts, choices, and what is refused. ``test_fp8`` has the rest."""

import pytest
import torch
from fp8_check import (
    FORMATS,
    check_dual_ragged,
    tokens_of,
    weights_of,
)
from fp8_check import (
    on_sm90 as config,
)
from fp8_check import (
    rows_on_sm90 as rows,
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


def test_scales_of_any_strides():
    """Column-major scales, which kernels with TMA loads of scales need, return the same bits."""
    x, w = tokens_of(40, 256), weights_of(2, 256, 256)
    by_column = x.scale.T.contiguous().T
    offs = torch.tensor([7, 40], dtype=torch.int32)
    parts = (x.data, w.data, by_column, w.scale, offs)
    want = nv.grouped_gemm(x, w, offs=offs, out_dtype=torch.float32)
    assert_bitwise_equal(on_parts.grouped_gemm(*parts, out_dtype=torch.float32, **FORMATS), want)
    got = on_parts.grouped_gemm(*parts, out_dtype=torch.float32, backend=EMULATED, **FORMATS)
    assert_bitwise_equal(got, want)
    for m, k in ((9, 128), (1, 256), (1, 128)):  # torch considers any stride contiguous here
        x, w = tokens_of(m, k), weights_of(128, k)
        columns = x.scale.as_strided(x.scale.shape, (1, m + 3)) if k == 128 else x.scale.T.contiguous().T
        got = on_parts.gemm(x.data, w.data, columns, w.scale, out_dtype=torch.float32, **FORMATS)
        assert_bitwise_equal(got, nv.gemm(x, w, out_dtype=torch.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chosen", [config(16), config(128, 256), rows(256)], ids=str)
def test_release_behind_reads(chosen):
    """The machine code does not release a stage before the reads of its scales are complete."""
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


@SLOW
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", [config(32), rows()], ids=str)
def test_dual_results_of_other_dtypes(chosen, out_dtype):
    check_dual_ragged(72, 128, chosen, EMULATED, out_dtype=out_dtype)


SPILLS = {"t128x96x128_s0a1_swap": 8, "t128x96x128_s0a1_swap_m2": 8, "t128x64x128_s0a1_swap_k2": 8}
"""Bytes of local memory of a thread, of duals of lists with float32 results: two registers, once a tile, behind the K loop."""


@SLOW
@pytest.mark.parametrize("form", ["list", "ragged"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", sm90_fp8.candidates(2), ids=lambda chosen: chosen.to_name())
def test_dual_machine_code(chosen, out_dtype, form):
    """No spills except those of ``SPILLS``, and no release of a stage before its reads are complete."""
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
    """The choice was the fastest or took at most 1 % longer (2026-11-26). Only the longest launches use pairs of CTAs."""
    formats = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
    problem = GroupedProblem((size,) * groups, "ragged", activation=activation, **formats)
    assert sm90_fp8.choose(problem, 132).to_name() == name


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen",
    [config(128, 256), config(128, 256, multicast_n=2), config(16), rows(128), rows(256, multicast_n=2)],
    ids=str,
)
def test_every_launch_gives_the_same_bits_on_the_gpu(chosen):
    """Stages are refilled as soon as they are released."""
    x, w = (t.to("cuda") for t in (tokens_of(512, 8192), weights_of(4096, 8192)))
    outs = [on_parts.gemm(x, w, config=chosen, out_dtype=torch.float32) for _ in range(40)]
    want = (x.dequantize(torch.float64) @ w.dequantize(torch.float64).T).float()
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, want)]

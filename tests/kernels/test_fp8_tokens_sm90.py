"""FP8 rows times MXFP4 weights on sm_90a: every bit is the reference's where sums are exact."""

from functools import partial

import flat_parts as parts
import pytest
import torch
from fp8_tokens_check import check_dual, check_ragged, config, mxfp4_of, tokens_of, weights_of
from oracle import assert_bitwise_equal
from stage_release import unfinished_reads

import nvfp4_cute as nv
from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.emulator.cubin import read_instructions
from nvfp4_cute.formats.exact_fp8 import mxfp4_for_fp8
from nvfp4_cute.planning.arch import sm90_weight_only

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
# Opcode of WARPGROUP.ARRIVE and .DEPBAR in machine code, a bit of the latter, and waits of a kernel: three in the loop, two after.
WARPGROUP, WAIT, MOST_WAITS = 0x9C5, 1 << 47, 5
FORMATS = {"a_format": nv.FP8_1xK, "b_format": nv.MXFP4_FP8}
CANDIDATES = sm90_weight_only.candidates(formats=sm90_weight_only.FP8_PAIR)
CONFIGS = [
    (config(16, num_cta=2), "random:1"),
    (config(64, 128, stream_k=True, num_cta=3), "lazy"),
    pytest.param(config(64, 128, num_cta=3), "lazy", marks=SLOW),
    pytest.param(config(16, stream_k=True, num_cta=5), "random:4", marks=SLOW),
    pytest.param(config(128, multicast_n=2, stream_k=True, num_cta=4), "eager", marks=SLOW),
    pytest.param(config(32, multicast_n=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(128, 128, multicast_n=2, num_cta=4), "random:2", marks=SLOW),
    pytest.param(config(24, split_k=2, num_cta=4), "lazy", marks=SLOW),
    pytest.param(config(8, split_k=8, num_cta=8), "eager", marks=SLOW),
    pytest.param(config(96), "random:3", marks=SLOW),
    pytest.param(None, "eager", marks=SLOW),
]
DUALS = [
    ("interleaved_64_up_first", config(16, num_cta=1), "random:1"),
    pytest.param("separate", config(32, weights=64, num_cta=3), "lazy", marks=SLOW),
    pytest.param("interleaved_32_gate_first", config(64, 128, num_cta=2), "random:2", marks=SLOW),
    pytest.param("separate", config(64, 128, 64, multicast_n=2, num_cta=4), "eager", marks=SLOW),
]


@pytest.mark.parametrize(("chosen", "mode"), CONFIGS, ids=str)
def test_ragged(chosen, mode):
    check_ragged(200, 416, chosen, EMULATED, mode)


@pytest.mark.parametrize(("layout", "chosen", "mode"), DUALS)
def test_dual(layout, chosen, mode):
    check_dual(layout, chosen, EMULATED, mode)


def test_scales_of_tokens_of_tiles_that_are_not_full():
    """With stream-K, 140 tokens are tiles of 96 and 44."""
    x, w, chosen = tokens_of(140, 160), weights_of(72, 160), config(128, 128, stream_k=True, num_cta=2)
    with observe(check=True):
        got = parts.gemm(x, w, config=chosen, out_dtype=torch.float32, backend=EMULATED)
    assert_bitwise_equal(got, nv.gemm(x, w, out_dtype=torch.float32))


@SLOW
@pytest.mark.parametrize("chosen", [config(32, num_cta=3), config(24, 128, split_k=4, num_cta=8)], ids=str)
def test_list_masked_and_batched(chosen):
    """Different sizes, an empty group, and rows of no group, which stay unchanged."""
    options = {"out_dtype": torch.float32}
    a = [tokens_of(m, k) for m, k in ((40, 288), (0, 128), (66, 160))]
    b = [weights_of(n, x.shape[1], seed=n) for n, x in zip((200, 64, 300), a, strict=True)]
    with observe(check=True):
        got = parts.grouped_gemm(a, b, config=chosen, backend=EMULATED, **options)
    for result, want in zip(got, parts.grouped_gemm(a, b, **options), strict=True):
        assert_bitwise_equal(result, want)
    x, w, sizes = tokens_of(3, 50, 256), weights_of(3, 200, 256), torch.tensor([3, 0, 50], dtype=torch.int32)
    outs = [torch.full((3, 50, 200), torch.nan) for _ in range(2)]
    for out, settings in zip(outs, ({"config": chosen, "backend": EMULATED}, {}), strict=True):
        parts.grouped_gemm(x, w, masked_m=sizes, out=out, **settings, **options)
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
    got = parts.gemm(x, w, config=chosen, backend=EMULATED, **options)
    assert_bitwise_equal(got, parts.gemm(x, w, **options))


def test_any_scales_bias_and_random_values():
    """Scales of rows that are not powers of two are rounded once; random operands differ by the roundings of tensor cores."""
    k = 832  # like gpt-oss's 2,880, no multiple of a K tile
    x, w, bias = tokens_of(20, k), weights_of(136, k), torch.arange(136).float() / 8
    generator = torch.Generator().manual_seed(1)
    x.scale[:] = torch.rand(x.scale.shape, generator=generator) + 0.5
    with observe(check=True):
        got = nv.gemm(x, w, bias=bias, out_dtype=torch.float32, backend=EMULATED)
    assert_bitwise_equal(got, nv.gemm(x, w, bias=bias, out_dtype=torch.float32))
    x = nv.quantize(torch.randn(20, k, generator=generator), format=nv.FP8_1xK)
    got = nv.gemm(x, w, out_dtype=torch.float32, backend=EMULATED)
    want = nv.gemm(x, w, out_dtype=torch.float32)
    assert (got - want).norm() < 2e-3 * want.norm()


def test_every_weight_times_every_power():
    """All e2m1 codes times 15 powers of two in one row, also near both ends of the range of ue8m0."""
    weight = mxfp4_of(24, 512)
    weight.data[:] = torch.arange(256).byte()
    for part, exponent in zip(weight.scale.split(8), (-120, 0, 120), strict=True):
        powers = torch.arange(16) % 15 - (14 if exponent > 0 else 0)
        part[:] = (127 + exponent + powers).clamp(0, 254).byte()
    x = nv.BlockScaledTensor(
        torch.eye(512).to(torch.float8_e4m3fn),
        torch.ones(512, 1),
        None,
        (512, 512),
        "rowmajor",
        format=nv.FP8_1xK,
    )
    prepared = mxfp4_for_fp8(weight)
    got = nv.gemm(x, prepared, out_dtype=torch.float32, backend=EMULATED)
    assert torch.equal(prepared.dequantize(), weight.dequantize())
    assert torch.equal(got.T.contiguous(), weight.dequantize())


@SLOW
@pytest.mark.parametrize("chosen", CANDIDATES, ids=lambda chosen: chosen.to_name())
def test_registers_and_release(chosen):
    """No spills, no release of a stage before its reads are complete, and no wait after each MMA.

    ptxas waits after each where registers are scarce.
    """
    key = KernelKey("sm_90a", chosen, 1, torch.bfloat16, True, "ragged", **FORMATS).validated()
    kernel = get_kernel(key)
    assert kernel.resources.stack_bytes == 0
    words = (word & 0xFFFFFFFFFFFF for word in read_instructions(kernel.cubin))
    assert sum(word & WAIT == WAIT and word & 0xFFF == WARPGROUP for word in words) <= MOST_WAITS
    # With split-K, the last read of results may be under way when other memory is given back.
    if chosen.split_k == 1:
        stages = (key.config.num_ab_stage,)
        assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")]


def test_refusals():
    reason = partial(sm90_weight_only.unsupported_reason, formats=sm90_weight_only.FP8_PAIR)
    assert "use N tile 128" in reason(config(256)) and "use K tile 128" in reason(config(16, 64))
    assert "use split_k=1" in reason(config(16, stream_k=True, split_k=2))
    weight = mxfp4_of(8, 256)
    with pytest.raises(UnsupportedProblem, match=r"no kernel for fp8_1xk x mxfp4 .*mxfp4_for_fp8\(b\)$"):
        nv.gemm(tokens_of(4, 256), weight, backend=EMULATED)
    weight.scale[3, 5] = 127 - 30
    with pytest.raises(UnsupportedProblem, match=r"row 3, K 160 on has .* more than 14 binades below"):
        nv.mxfp4_for_fp8(weight)
    weight.data[3, 80:96] = 0x80  # zeros
    assert torch.equal(nv.mxfp4_for_fp8(weight).dequantize(), weight.dequantize())


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("chosen", CANDIDATES, ids=lambda chosen: chosen.to_name())
def test_gpu(chosen):
    check_ragged(200, 416, chosen, "cuda", device="cuda")

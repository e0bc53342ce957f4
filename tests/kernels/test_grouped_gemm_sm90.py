"""The sm_90a grouped GEMM on the emulator and on a Hopper GPU if there is one, compared with the float64 reference."""

import re
from dataclasses import replace

import cases
import pytest
import torch
from flat_parts import grouped_dual_gemm, grouped_gemm
from oracle import assert_bitwise_equal, poisoned, repro_line, unwritten
from sm90_check import (
    EMULATED,
    assert_mmas_overlap,
    assert_same_bits_in_every_launch,
    assert_sizes_on_the_device_match,
    config,
    run,
)

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.formats.codecs import decode_e2m1, decode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.reference import expand_operand, grouped_gemm_reference


def error_bound(case, operands, expected):
    """``cases.error_bound`` for wgmma: 16 products at a time, with terms and accumulator cut below 2^-24 of the largest.

    The error of a step is at most 18 times 2^-24 of the sum of absolute products so far; there are K / 16 steps.
    """
    bounds = cases.error_bound(case, operands, expected)
    for g, (_, _, k) in enumerate(case.sizes):
        a, b = (
            expand_operand(x[g], s[g], "blocked").abs()
            for x, s in ((operands.a, operands.a_scale), (operands.b, operands.b_scale))
        )
        factor = 1.0 if operands.alpha is None else operands.alpha[g].abs().double()
        bounds[g] = bounds[g] + factor * (a @ b.T) * (k / 16 * 18 * 2.0**-24)
    return bounds


def check(case, backend, chosen=None):
    operands = cases.make_operands(case)
    actual = run(case, operands, backend, chosen)
    if case.kind == "exact":
        for got, want in zip(actual, run(case, operands, "reference"), strict=True):
            assert_bitwise_equal(got, want, case=case.name, seed=case.seed)
        return
    expected = grouped_gemm_reference(*operands, out_dtype=torch.float64)
    for got, want, bound in zip(actual, expected, error_bound(case, operands, expected), strict=True):
        error = (got.double() - want).abs()
        assert bool((error <= bound).all()), f"error {error.max():.3g}\n{repro_line(case=case.name)}"


QUICK = (
    "one_element",
    "n_tail_odd",
    "k_below_tile",
    "k_pitched",
    "empty_first",
    "out_bfloat16_alpha",
    "nan_padding",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK)
def test_case(name):
    check(next(case for case in cases.ALL if case.name == name), EMULATED)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.name)
def test_every_case(case):
    check(case, EMULATED)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.name)
def test_every_case_on_the_gpu(case):
    check(case, "cuda")


TOKENS = cases.Case("tokens", ((150, 40, 288), (9, 136, 128)), seed=7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [8, 112, 240])
def test_number_of_tokens_in_a_tile(tokens):
    check(TOKENS, EMULATED, config(tokens))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("tokens", [*range(8, 129, 8), 160, 192, 240, 256])
def test_number_of_tokens_in_a_tile_on_the_gpu(tokens):
    check(TOKENS, "cuda", config(tokens))


@pytest.mark.gpu("sm_90a")
def test_emulator_and_gpu_give_the_same_bits():
    """Sums are not exact; the emulator rounds as the tensor cores do."""
    case = cases.Case("wide", ((70, 136, 640), (9, 128, 288)), 5, torch.float32, has_alpha=True, kind="wide")
    operands = cases.make_operands(case)
    for got, want in zip(run(case, operands, "cuda"), run(case, operands, EMULATED), strict=True):
        assert_bitwise_equal(got, want)


def test_every_value_times_every_scale_is_exact():
    """Row n of B holds all e2m1 codes with e4m3 scale n, and A is a unit matrix, so C is B decoded without rounding."""
    codes = torch.arange(256)
    b = torch.tensor([2 * i + 1 << 4 | 2 * i for i in range(8)], dtype=torch.uint8).repeat(256, 2)
    b_scale = to_blocked(codes.to(torch.uint8).view(256, 1).repeat(1, 2))
    # Values 1 on the diagonal, with scale 1: element (m, k) = 1 where m == k.
    a = torch.zeros(16, 16, dtype=torch.uint8)
    for row in range(16):
        a[row, row // 2] = 0x2 << 4 * (row % 2)
    a_scale = to_blocked(torch.full((16, 2), 0x38, dtype=torch.uint8))
    for first, second, first_scale, second_scale in ((a, b, a_scale, b_scale), (b, a, b_scale, a_scale)):
        (out,) = grouped_gemm(
            [first], [second], [first_scale], [second_scale], out_dtype=torch.float32, backend=EMULATED
        )
        decoded = out if first is b else out.T
        expected = decode_e4m3((codes & 0x7F).to(torch.uint8))[:, None] * decode_e2m1(
            torch.arange(16).to(torch.uint8)
        )
        torch.testing.assert_close(decoded, expected.float(), rtol=0, atol=0, equal_nan=True)


SHAPES = cases.Case("shapes", ((130, 136, 640), (40, 128, 288)), seed=11, kind="wide")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "random:1"])
def test_same_bits_whenever_asynchronous_operations_happen(mode):
    operands = cases.make_operands(SHAPES)
    for chosen in (None, config(64, num_ab_stage=2, num_cta=3)):
        expected = run(SHAPES, operands, EMULATED)
        with observe(mode=mode, check=True):
            actual = run(SHAPES, operands, EMULATED, chosen)
        for got, want in zip(actual, expected, strict=True):
            assert_bitwise_equal(got, want, mode=mode)


SPLIT = cases.Case("split", ((5, 300, 640), (8, 136, 128), (20, 128, 320)), 3, has_alpha=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chosen", [config(8, split_k=2, num_cta=4), config(16, split_k=4)], ids=str)
def test_k_tiles_of_several_ctas(chosen):
    """More CTAs than K tiles, and several tiles per cluster."""
    with observe(mode="random:1", check=True):
        check(SPLIT, EMULATED, chosen)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("split", [2, 4])
def test_k_tiles_of_several_ctas_on_the_gpu(tokens, split):
    check(SPLIT, "cuda", config(tokens, split_k=split))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(("tokens", "split"), [(32, 4), (8, 4), (128, 1), (256, 1)])
def test_every_launch_gives_the_same_bits_on_the_gpu(tokens, split):
    """Stages are refilled as soon as they are released, so a late read gets wrong values."""
    assert_same_bits_in_every_launch(config(tokens, split_k=split))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [(config(96, num_cta=3), "random:1"), pytest.param(config(48), "lazy", marks=pytest.mark.slow)],
)
def test_sizes_on_the_device(form, chosen, mode):
    assert_sizes_on_the_device_match(form, chosen, mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("n", "pitch", "first"),
    [(136, 136, 0), (136, 137, 0), (136, 144, 1), (130, 136, 0)],
    ids=("whole", "pitch", "address", "columns"),
)
@pytest.mark.parametrize("is_dual", [False, True])
def test_where_rows_are_stored(n, pitch, first, is_dual):
    """Stores have 16 bytes only if all of them are aligned and complete.

    Nothing outside the rows is written, also for tiles of several passes.
    """
    case = cases.Case("rows", ((100, n, 128),), seed=9)
    a, b, a_scale, b_scale, _ = cases.make_operands(case)
    buffer = poisoned(100, pitch, dtype=torch.bfloat16)
    out = buffer[:, first : first + n]
    chosen = config(80)
    with observe(mode="random:1", check=True):
        if is_dual:
            chosen = replace(chosen, cta_tile_shape_mnk=(64, 80, 128))
            arguments = (a, b, b, a_scale, b_scale, b_scale)
            grouped_dual_gemm(*arguments, out=[out], backend=EMULATED, config=chosen)
            (expected,) = grouped_dual_gemm(*arguments, backend="emulator:sm_100a")
        else:
            grouped_gemm(a, b, a_scale, b_scale, out=[out], backend=EMULATED, config=chosen)
            (expected,) = grouped_gemm(a, b, a_scale, b_scale, backend="reference")
    assert_bitwise_equal(out.contiguous(), expected)
    beside = torch.ones(pitch, dtype=torch.bool)
    beside[first : first + n] = False
    assert bool(unwritten(buffer)[:, beside].all())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [8, 32, 128, 256])
def test_machine_code(tokens):
    """No spills. K loops of wgmma have A in registers, decoded with byte permutes and exact products.

    Results are transposed between two warp barriers. The emulator cannot detect their absence, because it executes the
    lanes together.
    """
    kernel = get_kernel(KernelKey("sm_90a", config(tokens), 2, torch.float16, True).validated())
    assert kernel.resources.stack_bytes == 0
    assert_mmas_overlap(kernel.cubin)
    assert "wgmma.mma_async.sync.aligned.m64n" in kernel.ptx
    assert "setmaxnreg.inc" in kernel.ptx
    order = re.findall(r"bar\.warp\.sync|stmatrix|ld\.volatile\.shared", kernel.ptx)
    turned = "".join(name[0] for name in order[order.index("stmatrix") - 1 :])
    assert re.match("bs+bl+(?!s)", turned), order


@pytest.mark.parametrize(
    "chosen, fix",
    [
        (config(12), "use N tile 16"),
        (config(300), "use N tile 256"),
        (replace(config(128), cta_tile_shape_mnk=(64, 128, 128)), "use M tile 128"),
        (replace(config(128), cta_tile_shape_mnk=(128, 128, 256)), "use K tile 128"),
        (replace(config(128), num_acc_stage=2), "there is one; use 1"),
        (replace(config(128), swap_ab=False), "use swap_ab=True"),
        (config(128, num_ab_stage=40), "use 1 to 6"),
        (config(160, split_k=2), "use split_k=1"),
        (config(128, split_k=4), "use split_k=2"),
        (config(8, split_k=4, num_cta=3), "launch at least as many"),
    ],
    ids=str,
)
def test_a_refused_config_says_why(chosen, fix):
    with pytest.raises(ConfigError, match=fix):
        KernelKey("sm_90a", chosen, 1, torch.float16, False).validated()

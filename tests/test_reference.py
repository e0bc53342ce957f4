"""The oracle compared with explicit loops in rational arithmetic. It must also ignore padding."""

import math
from fractions import Fraction

import pytest
import torch
from oracle import assert_bitwise_equal, assert_error_within

from nvfp4_cute import reference
from nvfp4_cute.formats.block_format import FORMATS, MXFP4, MXFP8_E5M2, FP8_1x128
from nvfp4_cute.formats.block_scaled import dequantize, quantize
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.reference import expand_operand, grouped_gemm_reference

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_operand(rows, k, seed, scale_codes=(0x00, 0x7F)):
    """Random value bytes, and row-major scales with codes from ``scale_codes[0]`` to below ``scale_codes[1]``."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    return data, torch.randint(*scale_codes, (rows, k // 16), dtype=torch.uint8, generator=generator)


def exact_value(data, scale, row, k) -> Fraction:
    """Returns one element from its bits: nibble k times the magnitude of its scale."""
    byte = int(data[row, k // 2])
    nibble = byte >> 4 if k % 2 else byte & 0xF
    code = int(scale[row, k // 16]) & 0x7F
    exponent, mantissa = code >> 3, code & 7
    magnitude = (
        Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)
    )
    return Fraction(E2M1[nibble & 7]) * (-1 if nibble & 8 else 1) * magnitude


def exact_gemm(a, b, a_scale, b_scale) -> list[list[Fraction]]:
    """Computes three loops, of which the innermost is a sum of products."""
    expanded = [
        [[exact_value(data, scale, row, k) for k in range(2 * data.shape[1])] for row in range(data.shape[0])]
        for data, scale in ((a, a_scale), (b, b_scale))
    ]
    return [
        [sum((x * y for x, y in zip(row, col, strict=True)), Fraction(0)) for col in expanded[1]]
        for row in expanded[0]
    ]


def rounded(exact: list[list[Fraction]], alpha: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to float32, times alpha in float32, then to ``dtype``.

    float(Fraction) rounds correctly, and these sums fit float64.
    """
    assert all(Fraction(float(value)) == value for row in exact for value in row)
    acc = torch.tensor([[float(value) for value in row] for row in exact], dtype=torch.float64).float()
    return (acc if alpha is None else acc * torch.tensor(alpha, dtype=torch.float32)).to(dtype)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("alpha", [None, [1.0, -0.3, 1e-5]])
def test_matches_explicit_loops(out_dtype, alpha):
    """Three groups of different M, N and K, K = 16 and K = 48 (not a whole scale atom), all finite scale codes."""
    sizes = [(3, 5, 64), (1, 2, 16), (6, 1, 48)]
    a, a_scale = zip(*(random_operand(m, k, seed=k) for m, _, k in sizes), strict=True)
    b, b_scale = zip(*(random_operand(n, k, seed=k + 1) for _, n, k in sizes), strict=True)
    blocked = [[to_blocked(scale) for scale in scales] for scales in (a_scale, b_scale)]
    rowmajor = grouped_gemm_reference(a, b, a_scale, b_scale, alpha, out_dtype, scale_layout="rowmajor")
    outputs = grouped_gemm_reference(a, b, *blocked, alpha, out_dtype)
    for i in range(len(sizes)):
        expected = rounded(exact_gemm(a[i], b[i], a_scale[i], b_scale[i]), alpha and alpha[i], out_dtype)
        assert_bitwise_equal(outputs[i], expected, group=i)
        assert_bitwise_equal(rowmajor[i], expected, group=i)


def single_product(a_code: int, b_code: int, alpha, out_dtype) -> float:
    """Product of two rows in which only the first values (e2m1 codes) are not zero, with all scales 1."""
    operands = [torch.tensor([[code, *[0] * 7]], dtype=torch.uint8) for code in (a_code, b_code)]
    one = torch.tensor([[0x38]], dtype=torch.uint8)
    args = ([operands[0]], [operands[1]], [one], [one], alpha, out_dtype)
    return grouped_gemm_reference(*args, scale_layout="rowmajor")[0].item()


def test_the_sum_is_rounded_to_float32_unless_float64_is_asked_for():
    data = torch.zeros(1, 16, dtype=torch.uint8)
    data[0, 0], data[0, 8] = 0x2, 0x2  # values 1 at k = 0 and k = 16
    scale = torch.tensor([[0x7E, 0x01]], dtype=torch.uint8)  # 448 and 2^-9
    args = ([data], [data], [scale], [scale])
    exact = Fraction(448) ** 2 + Fraction(1, 1 << 18)
    acc = grouped_gemm_reference(*args, None, torch.float32, scale_layout="rowmajor")[0]
    assert acc.item() == 448.0**2
    full = grouped_gemm_reference(*args, [3.0], torch.float64, scale_layout="rowmajor")[0]
    assert Fraction(full.item()) == 3 * exact


def test_the_product_with_alpha_is_rounded_to_float32_before_the_output_type():
    """3 * alpha is just above a tie of bfloat16. float32 rounds it to the tie, which goes to the even side."""
    tried = 0
    for even in range(0, 128, 2):
        tie = Fraction(256 + 2 * even + 1, 256)
        alpha = torch.tensor(float(tie / 3), dtype=torch.float32).item()
        if 3 * Fraction(alpha) > tie:
            tried += 1
            assert single_product(0x5, 0x2, [alpha], torch.float32) == tie
            assert single_product(0x5, 0x2, [alpha], torch.bfloat16) == tie - Fraction(1, 256)
    assert tried > 5


def test_a_sum_of_zeros_is_positive():
    for a_code, b_code in ((0x0, 0x5), (0x8, 0x5), (0x8, 0x8)):
        for alpha, sign in ((None, 1), ([1.0], 1), ([-1.0], -1)):
            out = single_product(a_code, b_code, alpha, torch.float32)
            assert out == 0 and math.copysign(1, out) == sign
    # All sixteen products are -0.
    minus, five, one = (
        torch.full((1, n), v, dtype=torch.uint8) for n, v in ((8, 0x88), (8, 0x55), (1, 0x38))
    )
    out = grouped_gemm_reference([minus], [five], [one], [one], scale_layout="rowmajor")[0].item()
    assert out == 0 and math.copysign(1, out) == 1


def test_alpha_is_rounded_to_float32_and_may_be_a_tensor():
    a, a_scale = random_operand(4, 64, seed=1)
    b, b_scale = random_operand(3, 64, seed=2)
    args = ([a, a], [b, b], [a_scale] * 2, [b_scale] * 2)
    outputs = [
        grouped_gemm_reference(*args, alpha, torch.float32, scale_layout="rowmajor")
        for alpha in ([0.1, 2.0], torch.tensor([0.1, 2.0]), torch.tensor([0.1, 2.0], dtype=torch.float64))
    ]
    for other in outputs[1:]:
        for group in range(2):
            assert_bitwise_equal(other[group], outputs[0][group])


def test_padding_of_the_scales_is_never_read():
    a, a_scale = random_operand(5, 48, seed=3)
    b, b_scale = random_operand(130, 48, seed=4)
    expected = grouped_gemm_reference([a], [b], [a_scale], [b_scale], scale_layout="rowmajor")[0]
    clean = [to_blocked(scale) for scale in (a_scale, b_scale)]
    real = [to_blocked(torch.ones_like(scale)) for scale in (a_scale, b_scale)]
    for garbage in (0x7F, 0xFF, 0x7E, 0x3A):
        dirty = [torch.where(mask == 1, scale, garbage) for mask, scale in zip(real, clean, strict=True)]
        assert_bitwise_equal(
            grouped_gemm_reference([a], [b], [dirty[0]], [dirty[1]])[0], expected, garbage=garbage
        )


def test_every_form_and_dtype_of_the_operands_gives_the_same():
    a, a_scale = random_operand(7, 128, seed=5)
    b, b_scale = random_operand(140, 128, seed=6)
    a_blocked, b_blocked = to_blocked(a_scale), to_blocked(b_scale)
    expected = grouped_gemm_reference([a], [b], [a_blocked], [b_blocked])[0]
    fp4 = [operand.view(torch.float4_e2m1fn_x2) for operand in (a, b)]
    fp8 = [scale.view(torch.float8_e4m3fn) for scale in (a_blocked, b_blocked)]
    permuted = [scale.unsqueeze(0).permute(3, 4, 1, 5, 2, 0) for scale in fp8]
    for scales in (fp8, [scale.flatten() for scale in fp8], permuted):
        got = grouped_gemm_reference([fp4[0]], [fp4[1]], [scales[0]], [scales[1]])[0]
        assert_bitwise_equal(got, expected)


def test_the_sign_of_a_scale_is_ignored():
    a, a_scale = random_operand(4, 64, seed=7)
    b, b_scale = random_operand(4, 64, seed=8)
    plain = grouped_gemm_reference([a], [b], [a_scale], [b_scale], scale_layout="rowmajor")[0]
    signed = grouped_gemm_reference([a], [b], [a_scale | 0x80], [b_scale], scale_layout="rowmajor")[0]
    assert_bitwise_equal(signed, plain)


def test_a_nan_scale_reaches_its_row_and_no_other():
    a, a_scale = random_operand(4, 64, seed=9)
    b, b_scale = random_operand(3, 64, seed=10)
    a_scale[2, 1] = 0x7F
    out = grouped_gemm_reference([a], [b], [a_scale], [b_scale], scale_layout="rowmajor")[0]
    assert torch.isnan(out).nonzero().tolist() == [[2, n] for n in range(3)]


def test_overflow_of_float16_is_infinity():
    ones = torch.full((1, 8), 0x77, dtype=torch.uint8)
    scale = torch.tensor([[0x7E]], dtype=torch.uint8)
    for alpha, expected in (([1.0], math.inf), ([-1.0], -math.inf)):
        args = ([ones], [ones], [scale], [scale], alpha, torch.float16)
        assert grouped_gemm_reference(*args, scale_layout="rowmajor")[0].item() == expected


def test_long_k_in_pieces_is_exact_and_inputs_stay_untouched(monkeypatch):
    """K = 16384 with B split into pieces of 3 rows, compared with a product of integers."""
    m, n, k = 3, 10, 16384
    a, a_pick = random_operand(m, k, seed=11, scale_codes=(0, 3))
    b, b_pick = random_operand(n, k, seed=12, scale_codes=(0, 3))
    scale_codes = torch.tensor([0x30, 0x38, 0x40], dtype=torch.uint8)  # 0.5, 1 and 2
    a_scale, b_scale = (scale_codes[pick.int()] for pick in (a_pick, b_pick))
    before = [t.clone() for t in (a, b, a_scale, b_scale)]
    monkeypatch.setattr("nvfp4_cute.reference.CHUNK_ELEMS", 3 * k)
    out = grouped_gemm_reference([a], [b], [a_scale], [b_scale], None, torch.float32, scale_layout="rowmajor")
    doubled_value = torch.tensor([int(2 * v) for v in (*E2M1, *(-v for v in E2M1))])
    quadrupled = [
        doubled_value[torch.stack((x & 15, x >> 4), -1).int()].flatten(-2)
        * (1 << pick.int()).repeat_interleave(16, 1)
        for x, pick in ((a, a_pick), (b, b_pick))
    ]
    assert_bitwise_equal(out[0], (quadrupled[0] @ quadrupled[1].T).float() / 16)
    for now, then in zip((a, b, a_scale, b_scale), before, strict=True):
        assert_bitwise_equal(now, then)


def test_agrees_with_a_product_of_dequantized_tensors():
    generator = torch.Generator().manual_seed(13)
    x, y = (torch.randn(rows, 256, generator=generator) for rows in (33, 129))
    a, b = (quantize(t, global_scale="auto") for t in (x, y))
    alpha = a.global_scale * b.global_scale
    out = grouped_gemm_reference([a.data], [b.data], [a.scale], [b.scale], alpha.reshape(1), torch.float32)[0]
    product = dequantize(a, torch.float64) @ dequantize(b, torch.float64).T
    assert_error_within(out, product, max_tol=1e-6, rms_tol=2e-7)
    assert_error_within(out, x.double() @ y.double().T, max_tol=1.0, rms_tol=0.2)


def test_empty_groups_and_empty_lists():
    a, a_scale = random_operand(0, 64, seed=14)
    b, b_scale = random_operand(3, 64, seed=15)
    out = grouped_gemm_reference(
        [a, b], [b, a], [to_blocked(a_scale), to_blocked(b_scale)], [to_blocked(b_scale), to_blocked(a_scale)]
    )
    assert [tuple(t.shape) for t in out] == [(0, 3), (3, 0)] and out[0].dtype == torch.bfloat16
    assert grouped_gemm_reference([], [], [], []) == []


def test_expand_operand_is_exact():
    data, scale = random_operand(3, 32, seed=16)
    values = expand_operand(data, scale, "rowmajor")
    expected = [[float(exact_value(data, scale, row, k)) for k in range(32)] for row in range(3)]
    # Fractions have no -0, so the test compares values and not bits.
    assert values.dtype == torch.float64 and torch.equal(values, torch.tensor(expected, dtype=torch.float64))


def test_refuses_what_does_not_fit():
    a, a_scale = random_operand(4, 64, seed=17)
    b, b_scale = random_operand(3, 128, seed=18)
    with pytest.raises(ValueError, match="1 in a, 2 in b, 1 in a_scale, 1 in b_scale"):
        grouped_gemm_reference([a], [b, b], [a_scale], [b_scale])
    with pytest.raises(ValueError, match="2 in alpha"):
        grouped_gemm_reference([a], [a], [a_scale], [a_scale], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"the same K; got \(4, 32\) and \(3, 64\)"):
        grouped_gemm_reference([a], [b], [a_scale], [b_scale], scale_layout="rowmajor")
    with pytest.raises(ValueError, match=r"shape \(4, 4\); got \(3, 8\)"):
        grouped_gemm_reference([a], [a], [b_scale], [a_scale], scale_layout="rowmajor")
    with pytest.raises(ValueError, match="these look row-major"):
        grouped_gemm_reference([a], [a], [a_scale], [a_scale])
    with pytest.raises(ValueError, match="neither"):
        grouped_gemm_reference([a], [a], [a_scale], [a_scale], scale_layout="8x4")
    with pytest.raises(TypeError, match="out_dtype=torch.int32"):
        grouped_gemm_reference([a], [a], [a_scale], [a_scale], None, torch.int32)


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("b_format", FORMATS.values(), ids=str)
def test_any_pair_of_formats(a_format, b_format, monkeypatch):
    """Compares with the product of dequantized operands; pieces of B start at a block."""
    monkeypatch.setattr(reference, "CHUNK_ELEMS", 150 * 256)
    generator = torch.Generator().manual_seed(5)
    a = quantize(torch.randn(5, 256, generator=generator), format=a_format, scale_layout="rowmajor")
    b = quantize(torch.randn(300, 256, generator=generator), format=b_format, scale_layout="rowmajor")
    [got] = grouped_gemm_reference(
        [a.data], [b.data], [a.scale], [b.scale], [2.0], torch.float64, scale_layout="rowmajor",
        a_format=a_format, b_format=b_format,
    )  # fmt: skip
    expected = 2 * (a.dequantize(torch.float64) @ b.dequantize(torch.float64).T)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-11)
    assert got.abs().amax() > 1


@pytest.mark.parametrize("format", [MXFP4, MXFP8_E5M2], ids=str)
def test_blocked_scales_of_other_formats(format):
    x = torch.randn(130, 96, generator=torch.Generator().manual_seed(6))
    blocked, plain = quantize(x, format=format), quantize(x, format=format, scale_layout="rowmajor")
    assert torch.equal(
        expand_operand(blocked.data, blocked.scale, "blocked", format),
        expand_operand(plain.data, plain.scale, "rowmajor", format),
    )
    with pytest.raises(ValueError, match=r"convert row-major scales \[rows, K/32\]"):
        expand_operand(blocked.data, blocked.scale[:, :, :16], "blocked", format)


def test_formats_that_do_not_fit_are_refused():
    x, y = quantize(torch.ones(2, 64)), quantize(torch.ones(2, 64), format=MXFP8_E5M2)
    with pytest.raises(ValueError, match="the same K"):
        grouped_gemm_reference([x.data], [y.data], [x.scale], [y.scale])
    with pytest.raises(ValueError, match=r"row-major scales of 2 rows and K=128 have shape \(2, 1\)"):
        expand_operand(torch.zeros(2, 128), torch.zeros(1, 1), "blocked", FP8_1x128)

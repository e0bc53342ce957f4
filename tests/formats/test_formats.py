"""Codecs against the bit fields of the formats and exact rational arithmetic; quantize against NumPy in float64.

Nothing here takes a table, a boundary or an offset from the code under test.
"""

import itertools
import math
from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import assert_bitwise_equal

from nvfp4_cute.formats import codecs
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, dequantize, quantize
from nvfp4_cute.formats.codecs import (
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_packed_e2m1,
    decode_ue4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_ue8m0,
    pack_e2m1,
    unpack_e2m1,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL_BYTES = torch.arange(256).to(torch.uint8)


def e4m3_value(code: int) -> float:
    """Decodes from bit fields alone: sign, 4 exponent bits with bias 7, 3 mantissa bits, all ones is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = tuple(e4m3_value(code) for code in range(127))


def exact_code(x: float, magnitudes: tuple[float, ...], sign_bit: int, nan_code: int) -> int:
    """Finds the nearest code in rational arithmetic, ties to the even code, saturating, like cvt.rn.satfinite."""
    if math.isnan(x):
        return nan_code
    sign = sign_bit if math.copysign(1.0, x) < 0 else 0
    if abs(x) >= magnitudes[-1]:
        return sign | (len(magnitudes) - 1)
    below = bisect_right(magnitudes, abs(x)) - 1
    past, rest = (abs(Fraction(abs(x)) - Fraction(m)) for m in magnitudes[below : below + 2])
    if past == rest:
        return sign | (below + below % 2)
    return sign | (below + (rest < past))


def exact_e2m1(x: float) -> int:
    return exact_code(x, E2M1, 0x8, nan_code=0x7)


def exact_e4m3(x: float) -> int:
    return exact_code(x, E4M3, 0x80, nan_code=0x7F)


def e5m2_value(code: int) -> float:
    """Decodes from bit fields alone: sign, 5 exponent bits with bias 15, 2 mantissa bits; IEEE infinity and NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 2) & 0x1F, code & 3
    if exponent == 0x1F:
        return math.nan if mantissa else sign * math.inf
    return sign * (mantissa * 2.0**-16 if exponent == 0 else (4 + mantissa) * 2.0 ** (exponent - 17))


E5M2 = tuple(e5m2_value(code) for code in range(0x7C))


def exact_e5m2(x: float) -> int:
    return exact_code(x, E5M2, 0x80, nan_code=0x7F)


CODECS = {
    "e2m1": (encode_e2m1, exact_e2m1, E2M1),
    "e4m3": (encode_e4m3, exact_e4m3, E4M3),
    "e5m2": (encode_e5m2, exact_e5m2, E5M2),
}


# ---- every code --------------------------------------------------------------------------------------------------


def test_every_e2m1_code():
    codes = torch.arange(16).to(torch.uint8)
    expected = torch.tensor([*E2M1, *(-v for v in E2M1)])
    assert_bitwise_equal(decode_e2m1(codes), expected)
    for dtype in FLOAT_DTYPES:
        assert_bitwise_equal(encode_e2m1(expected.to(dtype)), codes)
    assert codecs.E2M1_VALUES == tuple(expected.tolist())


def test_every_e4m3_code():
    values = decode_e4m3(ALL_BYTES)
    assert_bitwise_equal(
        values.nan_to_num(7777), torch.tensor(list(map(e4m3_value, range(256)))).nan_to_num(7777)
    )
    torch_values = ALL_BYTES.view(torch.float8_e4m3fn)
    assert_bitwise_equal(values.nan_to_num(7777), torch_values.float().nan_to_num(7777))
    assert_bitwise_equal(decode_e4m3(torch_values).nan_to_num(7777), values.nan_to_num(7777))
    assert torch.isnan(values).nonzero().flatten().tolist() == [0x7F, 0xFF]
    for dtype in FLOAT_DTYPES:
        expected = torch.where(ALL_BYTES == 0xFF, 0x7F, ALL_BYTES)
        assert_bitwise_equal(encode_e4m3(values.to(dtype)), expected)


def test_every_e5m2_code():
    values = decode_e5m2(ALL_BYTES)
    assert_bitwise_equal(
        values.nan_to_num(7777), torch.tensor(list(map(e5m2_value, range(256)))).nan_to_num(7777)
    )
    torch_values = ALL_BYTES.view(torch.float8_e5m2)
    assert_bitwise_equal(values.nan_to_num(7777), torch_values.float().nan_to_num(7777))
    assert_bitwise_equal(
        decode_e5m2(torch_values, torch.float64).float().nan_to_num(7777), values.nan_to_num(7777)
    )
    finite = torch.isfinite(values)
    for dtype in FLOAT_DTYPES:
        assert_bitwise_equal(encode_e5m2(values.to(dtype))[finite], ALL_BYTES[finite])


def test_every_ue4m3_code_ignores_the_sign():
    for dtype in (torch.float32, torch.float64):
        values = decode_ue4m3(ALL_BYTES, dtype)
        assert_bitwise_equal(values[128:], values[:128])
        assert_bitwise_equal(values[:127], decode_e4m3(ALL_BYTES[:127]).to(dtype))
        assert torch.isnan(values[127])


def test_every_ue8m0_code():
    values = decode_ue8m0(ALL_BYTES)
    assert values.tolist()[:255] == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(values[255])
    for rounding in ("up", "zero"):
        assert_bitwise_equal(encode_ue8m0(values, rounding=rounding), ALL_BYTES)
        assert_bitwise_equal(encode_ue8m0(-values.double(), rounding=rounding), ALL_BYTES)


# ---- rounding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_ties_and_their_neighbours(name, dtype):
    """Tests every value, every midpoint between two, and beyond the last, plus one representable step each way."""
    encode, exact, magnitudes = CODECS[name]
    middles = [(low + high) / 2 for low, high in zip(magnitudes, magnitudes[1:], strict=False)]
    points = [*magnitudes, *middles, magnitudes[-1] * 17 / 16, magnitudes[-1] * 2]
    points = torch.tensor(points, dtype=torch.float64).to(dtype)
    away = torch.full_like(points, math.inf)
    x = torch.cat((points, points.nextafter(away), points.nextafter(-away)))
    x = torch.cat((x, -x))
    assert encode(x).tolist() == [exact(value) for value in x.tolist()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_float(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    number = ~torch.isnan(x)
    assert_bitwise_equal(encode_e2m1(x), torch.from_numpy(numpy_e2m1(x.double().numpy())))
    assert_bitwise_equal(encode_e4m3(x), torch.from_numpy(numpy_e4m3(x.double().numpy())))
    # torch's own cast, without overflow, whose behavior changed between releases.
    cast = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert_bitwise_equal(encode_e4m3(x)[number], cast[number])


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=300)
@given(x=st.floats() | st.floats(-600, 600) | st.floats(-8, 8) | st.floats(-0.01, 0.01))
@example(x=0.25 + 2**-50)  # rounding to float32 first would give a tie, and 0
@example(x=2.0**-10 * (1 + 2**-50))
def test_float64_is_rounded_once(name, x):
    encode, exact, _ = CODECS[name]
    assert encode(torch.tensor(x, dtype=torch.float64)).item() == exact(x)


@pytest.mark.parametrize("name", CODECS)
def test_signed_zero_saturation_infinity_and_nan(name):
    encode, _, magnitudes = CODECS[name]
    top, sign = len(magnitudes) - 1, 0x8 if name == "e2m1" else 0x80
    nan = top if name == "e2m1" else 0x7F
    x = torch.tensor([0.0, -0.0, -1e-30, -1e-45, 1e9, -1e9, math.inf, -math.inf, math.nan, -math.nan])
    assert encode(x).tolist() == [0, sign, sign, sign, top, sign | top, top, sign | top, nan, nan]


def test_encode_takes_any_strides_and_refuses_integers():
    x = torch.randn(6, 4)
    assert_bitwise_equal(encode_e2m1(x.t()), encode_e2m1(x).t().contiguous())
    assert encode_e4m3(torch.empty(0, 3)).shape == (0, 3)
    for encode in (encode_e2m1, encode_e4m3, encode_ue8m0):
        with pytest.raises(TypeError, match=r"got torch.int32; convert with .float\(\)"):
            encode(torch.zeros(2, dtype=torch.int32))


@settings(deadline=None, max_examples=300)
@given(x=st.floats(min_value=2.0**-140, max_value=2.0**140))
@example(x=2.0**-127)
@example(x=2.0**-127 * (1 + 2**-52))
@example(x=2.0**127 * (1 + 2**-52))
def test_ue8m0_rounding(x):
    def code(rounding):
        return encode_ue8m0(torch.tensor(-x, dtype=torch.float64), rounding=rounding).item()

    down = math.floor(Fraction(x).numerator.bit_length() - Fraction(x).denominator.bit_length())
    down -= Fraction(2) ** down > Fraction(x)
    up = down + (Fraction(2) ** down < Fraction(x))
    assert code("zero") == min(max(down + 127, 0), 254)
    assert code("up") == min(max(up + 127, 0), 254)


def test_ue8m0_specials():
    x = torch.tensor([0.0, -0.0, 1e-45, math.inf, -math.inf, math.nan])
    for rounding in ("up", "zero"):
        assert encode_ue8m0(x, rounding=rounding).tolist() == [0, 0, 0, 254, 254, 255]
    with pytest.raises(ValueError, match='"up" nor "zero"'):
        encode_ue8m0(x, rounding="nearest")


# ---- packing -----------------------------------------------------------------------------------------------------


def test_pack_puts_the_even_index_in_the_low_nibble():
    assert pack_e2m1(torch.tensor([0x1, 0xA, 0xF, 0x0], dtype=torch.uint8)).tolist() == [0xA1, 0x0F]


def test_pack_and_unpack_every_byte():
    codes = unpack_e2m1(ALL_BYTES.reshape(4, 64))
    assert codes.shape == (4, 128) and codes.max() == 15
    assert_bitwise_equal(pack_e2m1(codes), ALL_BYTES.reshape(4, 64))
    assert_bitwise_equal(unpack_e2m1(ALL_BYTES.view(torch.float4_e2m1fn_x2)), codes.flatten())
    for dtype in (torch.float32, torch.float64):
        expected = decode_e2m1(codes).to(dtype)
        assert_bitwise_equal(decode_packed_e2m1(ALL_BYTES.reshape(4, 64), dtype), expected)
    assert_bitwise_equal(
        decode_packed_e2m1(ALL_BYTES.view(torch.float4_e2m1fn_x2)), decode_e2m1(codes).flatten()
    )


def test_pack_refuses_odd_k():
    with pytest.raises(ValueError, match="K=3 is odd, and two values share a byte; pad K to 4"):
        pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))


# ---- quantize against NumPy --------------------------------------------------------------------------------------


def numpy_minifloat(x, mantissa_bits, min_exponent, largest):
    """Rounds magnitudes to the grid of their binade in float64, where quotients by powers of two are exact."""
    magnitude = np.minimum(np.abs(x), largest)
    _, exponent = np.frexp(np.where(np.isnan(magnitude), largest, magnitude))
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    return np.rint(magnitude / step) * step


def numpy_e2m1(x):
    rounded = numpy_minifloat(x, 1, 0, 6.0)
    code = np.searchsorted(np.array(E2M1), np.where(np.isnan(x), 6.0, rounded))
    return (code + 8 * (np.signbit(x) & ~np.isnan(x))).astype(np.uint8)


def numpy_e4m3(x):
    rounded = numpy_minifloat(x, 3, -6, 448.0)
    code = np.searchsorted(np.array(E4M3), np.where(np.isnan(x), 0.0, rounded))
    return np.where(np.isnan(x), 0x7F, code + 0x80 * np.signbit(x)).astype(np.uint8)


def to_float32(x):
    return np.float32(x).astype(np.float64)


def numpy_quantize(x, g=None):
    """Computes the documented steps in float64, rounding each result to float32; returns packed data and row-major scale codes."""
    with np.errstate(all="ignore"):
        blocks = to_float32(x).reshape(*x.shape[:-1], -1, 16)
        q = to_float32(np.max(np.abs(blocks), axis=-1) / 6)
        if g is not None:
            q = to_float32(q / np.float64(g))
        codes = numpy_e4m3(q)
        divisor = np.array([e4m3_value(code) for code in range(256)])[codes]
        if g is not None:
            divisor = to_float32(divisor * np.float64(g))
        quotient = to_float32(blocks / divisor[..., None])
        zeros = np.copysign(0.0, blocks)
        nibbles = numpy_e2m1(np.where(divisor[..., None] == 0, zeros, quotient)).reshape(x.shape)
    return nibbles[..., 0::2] + 16 * nibbles[..., 1::2], codes


def numpy_blocked(scale):
    """Places element by element with the published byte offset."""
    rows, k_blocks = scale.shape
    rm, rk = -(-rows // 128), -(-k_blocks // 4)
    flat = np.zeros(rm * rk * 512, np.uint8)
    for i in range(rows):
        for j in range(k_blocks):
            flat[((i // 128) * rk + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4] = scale[
                i, j
            ]
    return flat.reshape(rm, rk, 32, 4, 4)


def assert_matches_numpy(x: torch.Tensor, g: float | None, **facts):
    before = x.clone()
    t = quantize(x, global_scale=g, scale_layout="rowmajor")
    data, codes = numpy_quantize(
        x.double().numpy(), None if t.global_scale is None else t.global_scale.item()
    )
    assert_bitwise_equal(t.data, torch.from_numpy(data), global_scale=g, **facts)
    assert_bitwise_equal(t.scale.view(torch.uint8), torch.from_numpy(codes), global_scale=g, **facts)
    assert_bitwise_equal(x, before)


FLOATS32 = st.floats(width=32)
SIMILAR = st.floats(-20, 20, width=32)
SMALL = st.floats(-(2.0**-120), 2.0**-120, width=32)
LARGE = st.floats(2.0**126, float(np.finfo(np.float32).max), width=32)
GLOBAL_SCALES = (
    st.none()
    | st.floats(2.0**-126, float(np.finfo(np.float32).max), width=32)
    | st.floats(2.0**-20, 1024, width=32)
)


@settings(deadline=None, max_examples=200)
@given(
    x=st.one_of(
        *(
            hnp.arrays(np.float32, st.sampled_from([(16,), (2, 16), (1, 48)]), elements=elements)
            for elements in (FLOATS32, SIMILAR, SMALL, LARGE, st.floats(-8, 8, width=16))
        )
    ),
    g=GLOBAL_SCALES,
)
def test_quantize_matches_numpy(x, g):
    assert_matches_numpy(torch.from_numpy(x), g)


@pytest.mark.parametrize("g", [None, 1.0, 0.37, 2.0**-126, 1.3e-38, 1e30, 3.4e38, "auto"])
def test_quantize_matches_numpy_on_random_bit_patterns(g):
    """One tensor contains every float32 exponent, including subnormals, infinities and NaNs."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (256, 512), generator=generator).to(torch.int32)
    x = words.view(torch.float32)
    assert torch.isnan(x).any() and (x.abs() < 2.0**-126).any()
    if g == "auto":
        x = x.nan_to_num(0.0)
    assert_matches_numpy(x, g, seed=1)


@pytest.mark.parametrize("exponent", range(-149, 128, 9))
@pytest.mark.parametrize("relative_g", [None, 2.0**-7, 1 / 2688, 1.1])
def test_quantize_matches_numpy_at_every_magnitude(exponent, relative_g):
    """Normal data around one power of two, with a global scale that fits it, is too large, or is too small."""
    generator = torch.Generator().manual_seed(exponent + 200)
    x = torch.randn(8, 256, generator=generator, dtype=torch.float64) * 2.0**exponent
    g = None if relative_g is None else min(max(relative_g * 2.0**exponent, 2.0**-126), 2.0**127)
    assert_matches_numpy(x.float(), g, exponent=exponent)
    assert_matches_numpy(x, g, exponent=exponent)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_g", [False, True])
def test_quantize_matches_numpy_one_step_from_every_tie(seed, with_g):
    """A single wrong rounding shows at these values: amax / 6 / g around ties of e4m3, and x / d around ties of e2m1."""
    generator = torch.Generator().manual_seed(seed)
    g = (torch.rand((), generator=generator) + 0.5).item() if with_g else 1.0
    ties = torch.tensor([(low + high) / 2 for low, high in zip(E4M3, E4M3[1:], strict=False)])
    amax = one_step_around(ties * g * 6, generator)
    values = torch.tensor([(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)])
    for middle in (0, 1):
        # Scales on both sides of the tie, so that one of them fits the values that follow it in the block.
        scale = torch.tensor([E4M3[tie + middle] for tie in range(126)]) * g
        rest = one_step_around(scale.unsqueeze(1) * torch.cat((values, -values, values[:1])), generator)
        rest = torch.where(rest.abs() < amax.unsqueeze(1), rest, 0)
        assert_matches_numpy(torch.cat((amax.unsqueeze(1), rest), dim=1), g if with_g else None, seed=seed)


def one_step_around(x: torch.Tensor, generator) -> torch.Tensor:
    """Moves each element by -2 to 2 representable steps."""
    steps = torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)
    return (x.view(torch.int32) + steps).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_matches_numpy_on_every_16_bit_float(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3))]
    for values in (x, shuffled):
        for g in (None, 0.01):
            assert_matches_numpy(values.reshape(64, 1024), g)


@pytest.mark.parametrize("scale_code", [0x01, 0x07, 0x08, 0x38, 0x7E])
def test_quantize_rounds_ties_to_even(scale_code):
    """With amax = 6 * scale, the scale and the quotients at midpoints are exact."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([6.0, *ties, *(-v for v in ties), -0.0]) * e4m3_value(scale_code)
    t = quantize(x, scale_layout="rowmajor")
    assert t.scale.view(torch.uint8).tolist() == [scale_code]
    codes = [7, 0, 2, 2, 4, 4, 6, 6]
    assert unpack_e2m1(t.data).tolist() == [*codes, *(code | 8 for code in codes[1:]), 8]


@pytest.mark.parametrize("lead", [(), (1,), (5,), (130,), (2, 3), (0,), (2, 129), (0, 4)])
def test_quantize_takes_any_leading_shape_in_both_layouts(lead):
    x = torch.randn(*lead, 80, generator=torch.Generator().manual_seed(5))
    rowmajor = quantize(x, scale_layout="rowmajor", global_scale=0.002)
    blocked = quantize(x, global_scale=0.002)
    assert rowmajor.shape == blocked.shape == (*lead, 80)
    assert rowmajor.data.shape == (*lead, 40) and rowmajor.scale.shape == (*lead, 5)
    assert blocked.scale_layout == "blocked" and blocked.scale.dtype == torch.float8_e4m3fn
    assert_bitwise_equal(blocked.data, rowmajor.data)
    *batches, rows = lead or (1,)
    matrices = rowmajor.scale.view(torch.uint8).numpy().reshape(math.prod(batches), rows, 5)
    expected = b"".join(numpy_blocked(matrix).tobytes() for matrix in matrices)
    assert blocked.scale.view(torch.uint8).numpy().tobytes() == expected
    assert_bitwise_equal(dequantize(blocked), dequantize(rowmajor))


def test_quantize_takes_any_strides_and_gradients():
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(6))
    expected = quantize(x.t().contiguous(), global_scale="auto")
    for source in (x.t(), x.t().requires_grad_()):
        t = quantize(source, global_scale="auto")
        assert_bitwise_equal(t.data, expected.data)
        assert_bitwise_equal(t.scale, expected.scale)
        assert not t.global_scale.requires_grad


def test_quantize_gives_the_same_bits_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; compares its bits with the CPU's")
    words = torch.randint(-(1 << 31), 1 << 31, (512, 4096), generator=torch.Generator().manual_seed(8))
    for x in (words.to(torch.int32).view(torch.float32), torch.randn(512, 4096)):
        for g in (None, 0.37, 1.3e-38, "auto"):
            cpu, gpu = quantize(x, global_scale=g), quantize(x.cuda(), global_scale=g)
            assert_bitwise_equal(gpu.data, cpu.data)
            assert_bitwise_equal(gpu.scale, cpu.scale)
            assert_bitwise_equal(dequantize(gpu).nan_to_num(7777), dequantize(cpu).nan_to_num(7777).cuda())


# ---- quantize: stated behaviour ----------------------------------------------------------------------------------


def one_block(*values: float, g=None) -> tuple[int, list[int]]:
    """Quantizes one block that starts with ``values`` and ends with zeros; returns its scale code and value codes."""
    t = quantize(
        torch.tensor([*values, *[0.0] * (16 - len(values))]), global_scale=g, scale_layout="rowmajor"
    )
    return t.scale.view(torch.uint8).item(), unpack_e2m1(t.data).tolist()


def test_zero_blocks_have_scale_zero_and_keep_signs():
    assert one_block(0.0, -0.0) == (0, [0, 8] + [0] * 14)
    assert one_block(0.0, g=0.5) == (0, [0] * 16)


def test_blocks_whose_scale_underflows_become_zeros():
    """The boundary is scale 2^-10, a tie between 0 and 2^-9 that goes to 0."""
    assert one_block(6 * 2.0**-10, -1e-3) == (0, [0, 8] + [0] * 14)
    assert one_block(math.nextafter(6 * 2.0**-10, 1) + 1e-9, -1e-3)[0] == 1
    assert one_block(1e-42, -1e-42, g=1.0) == (0, [0, 8] + [0] * 14)


def test_subnormal_scales():
    assert one_block(6 * 2.0**-9, 2.0**-9) == (1, [7, 2] + [0] * 14)
    assert one_block(6 * 5 * 2.0**-9) == (5, [7] + [0] * 15)
    # Just above 2^-10 the scale doubles, so the largest value becomes 3 scales.
    assert one_block(6 * 2.0**-10 * 1.001) == (1, [5] + [0] * 15)


def test_large_blocks_saturate():
    assert one_block(6 * 448.0, 448.0) == (0x7E, [7, 2] + [0] * 14)
    assert one_block(1e30, -1e30, 448.0) == (0x7E, [7, 15, 2] + [0] * 13)


def test_infinity_saturates_and_leaves_its_neighbours_the_largest_scale():
    assert one_block(math.inf, -math.inf, 448.0, 1.0) == (0x7E, [7, 15, 2, 0] + [0] * 12)
    assert one_block(math.inf, 448.0 * 0.25, g=0.25) == (0x7E, [7, 2] + [0] * 14)


def test_nan_marks_its_block_and_no_other():
    assert one_block(1.0, math.nan, -math.inf) == (0x7F, [7] * 16)
    x = torch.ones(3, 48)
    x[1, 20] = math.nan
    values = dequantize(quantize(x, global_scale=1 / 2688))
    assert torch.isnan(values).nonzero().tolist() == [[1, k] for k in range(16, 32)]
    assert torch.equal(values[0], torch.ones(48))


@pytest.mark.parametrize("k, fix", [(100, "pad K to 112"), (8, "pad K to 16"), (0, "pad K to 16")])
def test_quantize_refuses_other_k(k, fix):
    with pytest.raises(ValueError, match=rf"K={k} is not a positive multiple of 16 .*; {fix}"):
        quantize(torch.zeros(2, k))


def test_quantize_refuses_other_arguments():
    x = torch.ones(2, 16)
    with pytest.raises(TypeError, match="got torch.int64"):
        quantize(x.long())
    with pytest.raises(ValueError, match="no dimensions"):
        quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale_layout='swizzled' is neither"):
        quantize(x, scale_layout="swizzled")
    with pytest.raises(ValueError, match="both given"):
        quantize(x, global_scale=1.0, global_scale_inv=1.0)
    with pytest.raises(ValueError, match="global_scale='max'"):
        quantize(x, global_scale="max")
    with pytest.raises(ValueError, match=r"global_scale has shape \[2\]; pass one number"):
        quantize(x, global_scale=torch.ones(2))


@pytest.mark.parametrize("g", [0.0, -1.0, math.nan, math.inf, 2.0**-127, 1e39])
def test_quantize_refuses_unusable_global_scales(g):
    for given_scale in (g, torch.tensor(g)):
        with pytest.raises(ValueError, match="global_scale=.* is not a positive, normal float32 number"):
            quantize(torch.ones(2, 16), global_scale=given_scale)


@pytest.mark.parametrize("inverse", [0.0, math.inf, 2.0**127, -3.0])
def test_quantize_refuses_unusable_inverse_global_scales(inverse):
    with pytest.raises(ValueError, match="1 / global_scale_inv=.* is not a positive, normal"):
        quantize(torch.ones(2, 16), global_scale_inv=inverse)


# ---- global scale ------------------------------------------------------------------------------------------------


def test_global_scale_is_the_factor_that_dequantizes():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    plain, scaled = quantize(x * 8), quantize(x * 8 * 2.0**20, global_scale=2.0**20)
    assert_bitwise_equal(plain.data, scaled.data)
    assert_bitwise_equal(plain.scale, scaled.scale)
    assert_bitwise_equal(dequantize(scaled), dequantize(plain) * 2.0**20)


def test_the_inverse_is_accepted_by_name():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10))
    inverse = 2688 / x.abs().amax()
    t, expected = quantize(x, global_scale_inv=inverse), quantize(x, global_scale=1 / inverse)
    assert_bitwise_equal(t.global_scale, (1 / inverse).reshape(()))
    assert_bitwise_equal(t.data, expected.data)
    assert_bitwise_equal(t.scale, expected.scale)
    assert quantize(x, global_scale_inv=4).global_scale.item() == 0.25


def test_a_tensor_of_one_element_is_a_global_scale():
    t = quantize(torch.ones(2, 16), global_scale=torch.tensor([[0.25]], dtype=torch.float64))
    assert t.global_scale.shape == () and t.global_scale.dtype == torch.float32


def test_auto_global_scale():
    def auto(*values):
        return quantize(
            torch.tensor([*values, *[0.0] * (16 - len(values))]), global_scale="auto"
        ).global_scale.item()

    assert auto(1.0, -5.3) == np.float32(np.float32(5.3) / np.float32(2688))
    assert auto(3.0, math.inf, math.nan) == np.float32(3.0 / 2688)
    assert auto(0.0) == auto(math.nan) == 1.0
    assert auto(1e-40) == 2.0**-126
    assert quantize(torch.empty(0, 16), global_scale="auto").global_scale.item() == 1.0


@pytest.mark.parametrize("method", ["amax", "four_over_six"])
def test_the_global_scale_of_every_row_is_auto_of_that_row(method):
    x = torch.randn(2, 5, 64) * torch.logspace(-3, 3, 5)[:, None]
    x[0, 1], x[1, 2, 3], x[1, 3, 4] = 0, math.inf, math.nan
    q = quantize(x, global_scale="per_row", method=method)
    assert q.has_row_scales and q[1].has_row_scales and q[:, :3].global_scale.shape == (2, 3)
    for batch, row in itertools.product(range(2), range(5)):
        own = quantize(x[batch, row : row + 1], global_scale="auto", method=method)
        one = q[batch].with_scale_layout("rowmajor")[row : row + 1]
        assert_bitwise_equal(one.data, own.data)
        assert_bitwise_equal(one.global_scale, own.global_scale.view(1))
        assert_bitwise_equal(one.dequantize(), own.dequantize())
    assert BlockScaledTensor.from_parts(q[0].data, q[0].scale, q[0].global_scale[:5]).has_row_scales
    with pytest.raises(ValueError, match="has shape"):
        BlockScaledTensor.from_parts(q.data, q.scale, q.global_scale[:, :4])


def test_auto_uses_the_largest_scale_and_value():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(11)) * 1e-5
    t = quantize(x, global_scale="auto", scale_layout="rowmajor")
    at = divmod(x.abs().argmax().item(), 64)
    assert t.scale[at[0], at[1] // 16].item() == 448
    assert unpack_e2m1(t.data)[at].item() & 7 == 7


# ---- dequantize --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 1 << 30),
    magnitude=st.floats(1e-4, 400),
    g=st.sampled_from([None, 0.03, 1e20, "auto"]),
)
def test_round_trip_error_bound(seed, magnitude, g):
    """Half of the widest gap (4 to 6) is one scale, and a normal scale is at most 17/16 of amax / 6."""
    factor = g if isinstance(g, float) else 1.0
    x = (
        torch.randn(4, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * magnitude
        * factor
    )
    t = quantize(x, global_scale=g, scale_layout="rowmajor")
    error = (dequantize(t, torch.float64) - x).abs().unflatten(-1, (-1, 16)).amax(-1)
    amax = x.abs().unflatten(-1, (-1, 16)).amax(-1)
    scale = t.scale.double()
    normal = (scale >= 2**-6) & (amax <= 2688 * (1.0 if t.global_scale is None else t.global_scale.double()))
    assert (error[normal] <= amax[normal] * (17 / 96) * (1 + 1e-6)).all()
    # A subnormal scale is up to a third too small, so that amax loses a third, or up to twice too large.
    assert (
        error[(scale > 0) & (scale < 2**-6)] <= amax[(scale > 0) & (scale < 2**-6)] * (1 / 3) * (1 + 1e-6)
    ).all()
    assert torch.equal(error[scale == 0], amax[scale == 0])


def test_quantize_is_idempotent_on_its_own_values():
    """A block that contains 6 gets the same scale again, and so the same bits."""
    codes = torch.randint(0, 16, (32, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(12))
    codes[:, 3] = 7
    scale = torch.randint(1, 127, (32, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(13))
    t = NVFP4Tensor(pack_e2m1(codes), scale, None, (32, 16), "rowmajor")
    again = quantize(dequantize(t), scale_layout="rowmajor")
    assert_bitwise_equal(again.data, t.data)
    assert_bitwise_equal(again.scale.view(torch.uint8), scale)


def test_dequantize_every_value_times_every_scale():
    """Covers all 16 codes under all 256 scale bytes; the scale's sign is ignored, and NaN spreads over the block."""
    data = pack_e2m1(torch.arange(16).to(torch.uint8).expand(256, 16))
    t = NVFP4Tensor(data, ALL_BYTES.reshape(256, 1), None, (256, 16), "rowmajor")
    magnitudes = [abs(e4m3_value(code)) for code in range(256)]
    expected = torch.tensor([[v * s for v in (*E2M1, *(-v for v in E2M1))] for s in magnitudes])
    for dtype in (torch.float32, torch.float64):
        values = dequantize(t, dtype)
        assert torch.isnan(values[[127, 255]]).all()
        finite = [code for code in range(256) if code % 128 != 127]
        assert_bitwise_equal(values[finite], expected[finite].to(dtype))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_dequantize_rounds_as_stated(dtype):
    g = np.float32(1.2345678)
    t = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(14)), global_scale=float(g))
    exact = dequantize(NVFP4Tensor(t.data, t.scale, None, t.shape), torch.float64) * float(g)
    expected = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert_bitwise_equal(dequantize(t, dtype), expected)
    as_stored = NVFP4Tensor(
        t.data.view(torch.float4_e2m1fn_x2), t.scale.view(torch.uint8), t.global_scale, t.shape
    )
    assert_bitwise_equal(dequantize(as_stored, dtype), expected)


def test_dequantize_refuses_other_dtypes():
    with pytest.raises(TypeError, match="dtype=torch.int32: dequantize to"):
        dequantize(quantize(torch.ones(1, 16)), torch.int32)


# ---- NVFP4Tensor -------------------------------------------------------------------------------------------------


def parts(**changes):
    fields = {
        "data": torch.zeros(130, 40, dtype=torch.uint8),
        "scale": torch.zeros(2, 2, 32, 4, 4, dtype=torch.uint8),
        "global_scale": torch.tensor(0.5),
        "shape": (130, 80),
        "scale_layout": "blocked",
    }
    return NVFP4Tensor(**{**fields, **changes})


def test_repr_tells_sizes_and_not_values():
    assert repr(parts()) == (
        "NVFP4Tensor(shape=(130, 80), scale_layout='blocked', global_scale=0.5, scale=[2, 2, 32, 4, 4], "
        "7248 bytes on cpu)"
    )
    assert "global_scale=None" in repr(parts(global_scale=None))
    without_memory = quantize(torch.ones(4, 32, device="meta"), global_scale="auto")
    assert "global_scale=[]" in repr(without_memory) and "on meta" in repr(without_memory)


def test_tensor_is_frozen_and_compares_by_identity():
    t = parts()
    with pytest.raises(AttributeError):
        t.shape = (1, 16)
    assert t == t and t != parts()


BAD_PARTS = {
    "data shape": ({"data": torch.zeros(130, 80, dtype=torch.uint8)}, ValueError, r"expected \(130, 40\)"),
    "data dtype": ({"data": torch.zeros(130, 40)}, TypeError, "data is torch.uint8 or"),
    "scale shape": ({"scale": torch.zeros(130, 5, dtype=torch.uint8)}, ValueError, r"\(2, 2, 32, 4, 4\)"),
    "scale dtype": ({"scale": torch.zeros(2, 2, 32, 4, 4)}, TypeError, "scale is torch.uint8 or"),
    "layout": ({"scale_layout": "rowmajor"}, ValueError, r"scale has shape .*; expected \(130, 5\)"),
    "rowmajor": (
        {"scale": torch.zeros(130, 5, dtype=torch.uint8)},
        ValueError,
        r"which is rowmajor; expected \(2, 2, 32, 4, 4\); pass scale_layout=\"rowmajor\"",
    ),
    "shape": ({"shape": 130}, TypeError, "shape=130 is not a tuple"),
    "a number": ({"global_scale": 0.5}, TypeError, r"global_scale=0.5 is not a tensor; pass torch.tensor\("),
    "no scale": ({"scale": None}, TypeError, "scale is None; pass a torch.Tensor"),
    "unknown layout": ({"scale_layout": "8x4"}, ValueError, "neither"),
    "K": ({"shape": (130, 81)}, ValueError, "K=81 is not a positive multiple of 16"),
    "no K": ({"shape": ()}, ValueError, "at least one dimension"),
    "global scale shape": ({"global_scale": torch.ones(1)}, ValueError, r"global_scale has shape \(1,\)"),
    "global scale dtype": ({"global_scale": torch.ones(()).double()}, TypeError, "call .float()"),
    "device": (
        {"scale": torch.zeros(2, 2, 32, 4, 4, dtype=torch.uint8, device="meta")},
        ValueError,
        "move them",
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_global_scale_for_each_batch(dtype):
    """Every expert's weights get the bits that they get alone, also when they are zero or when there are no experts."""
    x = torch.randn(4, 200, 32, dtype=dtype) * torch.tensor([1, 50, 0, 0.01], dtype=dtype).view(4, 1, 1)
    each = quantize(x, global_scale="per_batch")
    assert each.global_scale.tolist()[2] == 1 and "global_scale=[4]" in repr(each)
    for i in range(4):
        one = quantize(x[i], global_scale="auto")
        for got, want in (
            (each[i].data, one.data),
            (each[i].scale, one.scale),
            (each[i].global_scale, one.global_scale),
        ):
            assert torch.equal(got.float(), want.float())
        assert torch.equal(dequantize(each)[i], dequantize(one))
    given = quantize(x, global_scale=each.global_scale, scale_layout="rowmajor")
    assert torch.equal(dequantize(given), dequantize(each)) and given[1:3].global_scale.shape == (2,)
    assert quantize(x[:0], global_scale="per_batch").global_scale.shape == (0,)
    assert quantize(x[0], global_scale="per_batch").global_scale.shape == ()
    inverse = quantize(x, global_scale_inv=1 / each.global_scale)
    assert inverse.global_scale.shape == (4,)
    for wrong, words in (
        (torch.ones(3), r"shape \[3\]; pass one number, or one for each batch, \[4\]"),
        ([1.0, 1, 1, 0], "=0 is not"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(x, global_scale=wrong)


@pytest.mark.parametrize("name", BAD_PARTS)
def test_tensor_refuses_parts_that_do_not_fit(name):
    changes, error, message = BAD_PARTS[name]
    with pytest.raises(error, match=message):
        parts(**changes)

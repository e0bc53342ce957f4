"""Tensors of every format: quantization against NumPy, scales by hand, moved parts and sliced rows."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from oracle import assert_bitwise_equal

import nvfp4_cute
from nvfp4_cute.formats.block_format import (
    FORMATS,
    INT8,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    FP8_1x128,
    FP8_1xK,
    FP8_128x128,
    NumberType,
)
from nvfp4_cute.formats.block_scaled import (
    BlockScaledTensor,
    NVFP4Tensor,
    check_is_tensor,
    dequantize,
    quantize,
)

OTHERS = [f for f in FORMATS.values() if f is not NVFP4]
MX = [MXFP4, MXFP8_E4M3, MXFP8_E5M2]
ids = str
# Largest element, mantissa bits, exponent of the smallest normal number, exponent of the largest power of two.
ELEMENTS = {
    "e2m1": (6.0, 1, 0, 2),
    "e4m3": (448.0, 3, -6, 8),
    "e5m2": (57344.0, 2, -14, 15),
    "s8": (127.0, 6, 6, 6),
}


def nearest(x: np.ndarray, element: str) -> np.ndarray:
    """Rounds to the grid of each value's binade in float64, ties to even, saturating."""
    largest, mantissa_bits, min_exponent, _ = ELEMENTS[element]
    magnitude = np.minimum(np.abs(x), largest)
    _, exponent = np.frexp(magnitude)
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    return np.copysign(np.rint(magnitude / step) * step, x)


def expected_values(x: np.ndarray, f, rounding: str) -> np.ndarray:
    """Quantizes and dequantizes finite ``x`` [rows, K] block by block in float64."""
    largest, _, _, top = ELEMENTS[f.element.name]
    result = np.zeros_like(x)
    for i in range(0, x.shape[0], f.block_rows):
        block_k = f.block_of(x.shape[1])
        for k in range(0, x.shape[1], block_k):
            place = slice(i, i + f.block_rows), slice(k, k + block_k)
            amax = np.abs(x[place]).max()
            if amax == 0:
                continue
            quotient = float(np.float32(amax / largest))
            if f.scale.name == "fp32":
                scale = quotient
            elif rounding == "up":
                scale = 2.0 ** min(max(math.ceil(math.log2(quotient)), -127), 127)
            else:
                scale = 2.0 ** min(max(math.floor(math.log2(amax)) - top, -127), 127)
            inside = np.float32(x[place] / scale).astype(np.float64)
            result[place] = nearest(inside, f.element.name) * scale
    return result


@pytest.mark.parametrize(
    ("f", "rounding"),
    [*((f, "up") for f in OTHERS), *((f, "down") for f in OTHERS if f.scale.name == "ue8m0")],
)
def test_quantize_matches_numpy(f, rounding):
    generator = torch.Generator().manual_seed(1)
    # Magnitudes from tiny to large give blocks with many different scales; one row is zero.
    x = torch.randn(140, 256, generator=generator) * torch.exp2(torch.arange(140) - 70)[:, None]
    x[3] = 0
    t = quantize(x, format=f, scale_rounding=rounding)
    expected = expected_values(x.double().numpy(), f, rounding)
    # Integers have no -0.
    expected = expected + 0.0 if f.has_integer_sums else torch.from_numpy(expected).copysign(x).numpy()
    assert_bitwise_equal(t.dequantize(torch.float64), torch.from_numpy(expected))
    assert t.format == f and t.shape == (140, 256) and t.scale_layout == f.scale_layout


def test_scales_of_mx_by_hand():
    """For amax = 7, 7 / 6 is over 1: "up" gives 2, and 3.5 is a tie that goes to 4; "down" gives 2^(2 - 2), and 7 saturates."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.0, 1.0, -0.25])
    up = quantize(x, format=MXFP4, scale_layout="rowmajor")
    down = quantize(x, format=MXFP4, scale_layout="rowmajor", scale_rounding="down")
    assert (up.scale.view(torch.uint8).item(), down.scale.view(torch.uint8).item()) == (128, 127)
    assert up.dequantize()[0, :3].tolist() == [8.0, 1.0, -0.0]
    assert down.dequantize()[0, :3].tolist() == [6.0, 1.0, -0.0]
    assert (up.scale.dtype, up.data.dtype) == (torch.float8_e8m0fnu, torch.uint8)
    # 12 = 6 * 2^1 is the largest amax for which "up" gives 2^1.
    x[0, 0] = 12.0
    assert quantize(x, format=MXFP4, scale_layout="rowmajor").scale.view(torch.uint8).item() == 128
    x[0, 0] = 12.0 * (1 + 2**-20)
    assert quantize(x, format=MXFP4, scale_layout="rowmajor").scale.view(torch.uint8).item() == 129


def test_scales_of_tiny_blocks_are_those_of_their_magnitude():
    """One step under 2^-125 must not count as 2^-125: by OCP's rule its MXFP4 scale is code 0, that of 2^-124 is code 1."""
    x = torch.zeros(1, 32)
    for amax, code in ((2.0**-124 - 2.0**-148, 0), (2.0**-124, 1), (2.0**-149, 0)):
        x[0, 5] = amax
        t = quantize(x, format=MXFP4, scale_layout="rowmajor", scale_rounding="down")
        assert t.scale.view(torch.uint8).item() == code


@pytest.mark.parametrize("f", OTHERS, ids=ids)
def test_zeros_infinities_and_nans(f):
    x = torch.zeros(256, 2 * f.block_of(64))
    x[1, 0], x[1, 1] = -math.inf, 3.0
    x[200, f.block_k] = math.nan
    values = quantize(x, format=f).dequantize(torch.float64)
    largest = f.element.max * (
        2.0**127 if f.scale.name == "ue8m0" else torch.finfo(torch.float32).max / f.element.max
    )
    assert values[1, 0].item() == pytest.approx(-largest, rel=2**-20) and values[1, 1] == 0
    is_nan = torch.isnan(values)
    rows = slice(128, 256) if f.block_rows > 1 else 200
    assert is_nan[rows, f.block_k :].all() and is_nan.sum() == is_nan[rows, f.block_k :].numel()
    assert (torch.signbit(values[2]) == 0).all()


def test_which_rounding_of_scales_errs_less():
    """The errors are the figures in the docstring of ``scale_codes``."""
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    for f, up, down in ((MXFP8_E4M3, 2.66, 2.93), (MXFP4, 11.56, 11.50)):
        for rounding, percent in (("up", up), ("down", down)):
            error = (quantize(x, format=f, scale_rounding=rounding).dequantize() - x).norm() / x.norm()
            assert 100 * error.item() == pytest.approx(percent, abs=0.02)


@pytest.mark.parametrize("f", OTHERS, ids=ids)
@pytest.mark.parametrize("lead", [(), (3,), (2, 130)])
def test_any_leading_shape_in_every_layout(f, lead):
    x = torch.randn(*lead, 256)
    plain = quantize(x, format=f, scale_layout="rowmajor")
    assert_bitwise_equal(quantize(x, format=f).dequantize(), plain.dequantize())
    if lead:
        rows = quantize(x.reshape(-1, *x.shape[-2:])[0], format=f).dequantize()
        assert_bitwise_equal(plain.dequantize().reshape(-1, *x.shape[-2:])[0], rows)


def test_what_quantize_refuses():
    x = torch.ones(2, 64)
    with pytest.raises(
        ValueError, match=r"K=64 is not a positive multiple of 128 \(FP8_1X128 block size\); pad K to 128"
    ):
        quantize(x, format=FP8_1x128)
    with pytest.raises(ValueError, match="MXFP4 has no global scale"):
        quantize(x, format=MXFP4, global_scale="auto")
    with pytest.raises(ValueError, match='scale_rounding=\'even\' is neither "up" nor "down"'):
        quantize(x, format=MXFP4, scale_rounding="even")
    with pytest.raises(ValueError, match='scales of FP8_1X128 are row-major; pass "rowmajor"'):
        quantize(torch.ones(2, 128), format=FP8_1x128, scale_layout="blocked")


# ---- the tensor --------------------------------------------------------------------------------------------------


def tensor(f=NVFP4, lead=(3, 300), layout=None):
    g = {"global_scale": 0.25} if f.has_global_scale else {}
    x = torch.randn(*lead, 256, generator=torch.Generator().manual_seed(2))
    return quantize(x, format=f, scale_layout=layout, **g)


def same(x, y):
    assert (type(x), x.format, x.shape, x.scale_layout) == (type(y), y.format, y.shape, y.scale_layout)
    assert (x.data.dtype, x.scale.dtype) == (y.data.dtype, y.scale.dtype)
    assert_bitwise_equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
    assert_bitwise_equal(x.scale.contiguous().view(torch.uint8), y.scale.contiguous().view(torch.uint8))
    assert x.global_scale is y.global_scale is None or torch.equal(x.global_scale, y.global_scale)


@pytest.mark.parametrize("f", FORMATS.values(), ids=ids)
def test_copies_of_every_kind(f):
    t = tensor(f)
    same(copy.deepcopy(t), t)
    assert copy.deepcopy(t).data.data_ptr() != t.data.data_ptr()
    same(pickle.loads(pickle.dumps(t)), t)
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    with torch.serialization.safe_globals([BlockScaledTensor, NVFP4Tensor, BlockFormat, NumberType]):
        same(torch.load(file), t)


@pytest.mark.parametrize("f", list(FORMATS.values()), ids=ids)
def test_torch_load_reads_tensors_by_its_safe_default(f):
    given = quantize(
        torch.randn(2, 128, 256), format=f, global_scale="per_batch" if f.has_global_scale else None
    )
    file = io.BytesIO()
    torch.save({"w": given, "row": given[0]}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert type(found["w"]) is type(given) and found["w"].format == f and found["row"].shape == (128, 256)
    assert torch.equal(found["w"].dequantize(), given.dequantize())


@pytest.mark.parametrize("f", list(FORMATS.values()), ids=ids)
def test_formats_are_named_or_passed_as_records(f):
    x = torch.randn(128, 256)
    named, given = quantize(x, format=f.name), quantize(x, format=f)
    assert named.format is f and torch.equal(named.dequantize(), given.dequantize())
    assert nvfp4_cute.quantize(x, format=f.name).format is f


def test_what_names_no_format():
    with pytest.raises(ValueError, match="format='mxfp8' is unknown; use one of nvfp4, mxfp4, mxfp8_e4m3"):
        nvfp4_cute.quantize(torch.ones(4, 32), format="mxfp8")
    with pytest.raises(TypeError, match="format=8 is not a format; pass nvfp4_cute.MXFP4, or its name"):
        nvfp4_cute.quantize(torch.ones(4, 32), format=8)
    offs = torch.tensor([4], dtype=torch.int32)
    rows = torch.ones(4, 32).half()
    assert nvfp4_cute.grouped_quantize(rows, offs, format="mxfp8_e4m3").data.dtype == torch.float8_e4m3fn


def test_tensors_pickled_before_there_were_formats():
    """Their pickled state has exactly the five fields of that time."""
    t = tensor()
    old = NVFP4Tensor.__new__(NVFP4Tensor)
    old.__setstate__(
        {name: getattr(t, name) for name in ("data", "scale", "global_scale", "shape", "scale_layout")}
    )
    same(old, t)
    same(old[0], t[0])


def test_an_nvfp4_tensor_is_nvfp4():
    t = tensor(MXFP4)
    with pytest.raises(TypeError, match="format"):
        NVFP4Tensor(t.data, t.scale, None, t.shape, format=MXFP4)
    with pytest.raises(TypeError, match="format"):
        BlockScaledTensor(t.data, t.scale, None, t.shape)
    with pytest.raises(ValueError, match="global_scale is given; MXFP4 has none"):
        BlockScaledTensor(t.data, t.scale, torch.tensor(1.0), t.shape, format=MXFP4)
    with pytest.raises(ValueError, match=r"scale has shape .*; expected \(3, 3, 2, 32, 4, 4\)"):
        BlockScaledTensor(t.data, tensor().scale.view(torch.uint8), None, t.shape, format=MXFP4)
    with pytest.raises(
        TypeError, match="scale is torch.uint8 or torch.float8_e8m0fnu; got torch.float8_e4m3fn"
    ):
        BlockScaledTensor(t.data, t.scale.view(torch.float8_e4m3fn), None, t.shape, format=MXFP4)
    assert repr(t) == (
        "BlockScaledTensor(shape=(3, 300, 256), format=mxfp4, scale_layout='blocked', scale=[3, 3, 2, 32, 4, 4], "
        "124416 bytes on cpu)"
    )


def test_a_whole_tensor_where_a_part_belongs():
    t = tensor(MXFP4, (40,))
    with pytest.raises(TypeError, match=r"x is quantized already, to MXFP4; pass values: x.dequantize"):
        quantize(t)
    with pytest.raises(TypeError, match=r"b is a BlockScaledTensor of MXFP4; pass its .data, its .scale"):
        check_is_tensor("b", t)


def test_to_another_device():
    t = tensor()
    assert t.to("cpu") is t is t.cpu() is t.to()
    moved = t.to("meta")
    assert {part.device.type for part in (moved.data, moved.scale, moved.global_scale, moved)} == {"meta"}
    assert type(moved) is NVFP4Tensor
    same(t.to("cpu", copy=True), t)
    assert t.to("cpu", copy=True).data.data_ptr() != t.data.data_ptr()
    with pytest.raises(TypeError, match=r"call .dequantize\(torch.float16\)"):
        t.to(torch.float16)


@pytest.mark.parametrize("f", FORMATS.values(), ids=ids)
def test_rows_and_batches_are_views(f):
    t, plain = tensor(f), tensor(f, layout="rowmajor")
    whole = t.dequantize()
    for index in (1, slice(1, 3), (0, slice(128, 300)), (slice(None), slice(128, 200)), (2, slice(256, None)),
                  (slice(0, 2), slice(5, 5))):  # fmt: skip
        assert_bitwise_equal(t[index].dequantize(), whole[index])
        assert_bitwise_equal(plain[index].dequantize(), whole[index])
    assert t[1].data.data_ptr() == t.data[1].data_ptr()
    assert t[1].scale.data_ptr() == t.scale[1].data_ptr()
    if f.block_rows == 1:
        assert_bitwise_equal(plain[1, 5:9].dequantize(), whole[1, 5:9])
        assert_bitwise_equal(t.with_scale_layout("rowmajor")[1, 5:9].dequantize(), whole[1, 5:9])


def test_rows_that_cannot_be_cut():
    t = tensor()
    message = r'rows 5:9:1 with blocked scales: .* multiple of 128 .*; use \[0:9\] or call .with_scale_layout\("rowmajor"\) first'
    with pytest.raises(ValueError, match=message):
        t[0, 5:9]
    with pytest.raises(ValueError, match="rows 0:300:2"):
        t[0, ::2]
    with pytest.raises(ValueError, match=r"index 7 of the rows is not a slice; use \[7:8\]"):
        t[0, 7]
    with pytest.raises(ValueError, match=r"rows 64:128:1 with rowmajor .*; use \[0:128\] and step 1"):
        tensor(FP8_128x128)[0, 64:128]
    for index in ((0, slice(0, 128), slice(0, 16)), (3,), (0, 0, 0)):
        with pytest.raises(IndexError):
            t[index]
    with pytest.raises(IndexError, match="K stays whole"):
        quantize(torch.ones(64))[0]
    with pytest.raises(TypeError, match="not iterable"):
        list(t)
    with pytest.raises(
        AttributeError, match=r"no attribute 'T': it is not a torch.Tensor; multiply with gemm\(x, w\)"
    ):
        t.T  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'datum'$"):
        t.datum  # noqa: B018
    assert len(t) == 3


@pytest.mark.parametrize("f", [NVFP4, *MX], ids=ids)
def test_layouts_are_converted(f):
    t = tensor(f)
    same(t.with_scale_layout("rowmajor"), tensor(f, layout="rowmajor"))
    same(t.with_scale_layout("rowmajor").with_scale_layout("blocked"), t)
    assert t.with_scale_layout("blocked") is t
    one_row = quantize(torch.ones(256), format=f)
    same(one_row.with_scale_layout("rowmajor").with_scale_layout("blocked"), one_row)
    with pytest.raises(ValueError, match="neither"):
        t.with_scale_layout("8x4")


def test_dequantize_is_a_function_and_a_method():
    t = tensor()
    assert_bitwise_equal(t.dequantize(torch.float16), dequantize(t, torch.float16))


@pytest.mark.parametrize("f, k", [(FP8_128x128, 300), (FP8_1x128, 300), (FP8_1xK, 30), (INT8, 30)], ids=str)
def test_rows_may_end_within_a_block(f, k):
    """Checkpoints have such weights of FP8 and INT8. Blocked scales have whole blocks."""
    data = torch.arange(2 * 200 * k).remainder(120).to(torch.uint8).view(2, 200, k).view(f.data_dtypes[-1])
    scale = torch.rand(2, *f.scale_shape(200, k, "rowmajor"))
    t = BlockScaledTensor.from_parts(data, scale, format=f)
    assert t.shape == (2, 200, k) and not t.has_whole_blocks
    n, columns = torch.arange(200)[:, None], torch.arange(k)
    of_value = scale[:, n // f.block_rows, columns // f.block_of(k)]
    assert_bitwise_equal(t.dequantize(), data.float() * of_value)
    assert_bitwise_equal(t[1, 128:].dequantize(), t.dequantize()[1, 128:])
    with pytest.raises(ValueError, match="K=24 is not a positive multiple of 16"):
        BlockScaledTensor.from_parts(
            torch.zeros(8, 12).byte(), torch.zeros(8, 2).byte(), scale_layout="rowmajor"
        )


def test_products_need_whole_blocks():
    """Every operation names the rule, whether rows are FP8 or 16-bit."""
    k, rows = (
        160,
        torch.zeros(4, 160, dtype=torch.bfloat16),
    )  # 160: what loads of 16-bit rows and weights allow

    def part(f, *lead):
        data = torch.zeros(*lead, k, dtype=torch.float8_e4m3fn)
        scale = torch.ones(*lead[:-1], *f.scale_shape(lead[-1], k, "rowmajor"))
        return BlockScaledTensor.from_parts(data, scale, format=f)

    b, of_groups, offs = part(FP8_128x128, 128), part(FP8_128x128, 2, 128), torch.tensor([2, 4]).int()
    for a in (part(FP8_1x128, 4), rows):
        for call in (
            lambda a: nvfp4_cute.gemm(a, b),
            lambda a: nvfp4_cute.grouped_gemm([a], [b]),
            lambda a: nvfp4_cute.grouped_gemm(a, of_groups, offs=offs),
            lambda a: nvfp4_cute.dual_gemm(a, nvfp4_cute.GateUp(b, b)),
            lambda a: nvfp4_cute.grouped_dual_gemm(a, nvfp4_cute.GateUp(of_groups, of_groups), offs=offs),
        ):
            with pytest.raises(ValueError, match=r"K=160 is not a (positive )?multiple of 128"):
                call(a)
    for call in (
        lambda: nvfp4_cute.gemv(b, rows[0]),
        lambda: nvfp4_cute.QuantizedLinear.from_quantized(b),
        lambda: nvfp4_cute.MoE.from_quantized(of_groups, part(FP8_128x128, 2, k)),
    ):
        with pytest.raises(ValueError, match=r"K=160 is not a (positive )?multiple of 128"):
            call()

"""The quantize kernel for formats with ue8m0 scales returns the bits of block_scaled.quantize."""

import pytest
import torch
from flat_parts import grouped_quantize
from oracle import assert_bitwise_equal
from quantize_inputs import assert_same, hostile, spread

from nvfp4_cute import quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3, MXFP8_E5M2, FP8_1x128, FP8_128x128
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.planning.arch import simt

DTYPES = (torch.bfloat16, torch.float16)
MX = (MXFP4, MXFP8_E4M3, MXFP8_E5M2)
ROUNDINGS = ("up", "down")
# One architecture with an instruction for e2m1, and one without.
TWO_KINDS = pytest.mark.parametrize("backend", ["emulator:sm_90a", "emulator:sm_100a"])


def inputs(dtype, rows=3):
    """Blocks of 32 at all magnitudes, and all special values."""
    special = hostile(dtype)
    special = special[:, : special.shape[1] // 32 * 32]
    return torch.cat([spread((rows, special.shape[1]), dtype), special])


def every_power(dtype):
    """A block for every exponent of the dtype, with a largest value at or next to a change of the scale."""
    info = torch.finfo(dtype)
    tiny = torch.tensor(info.smallest_normal * info.eps).log2().int()
    most = torch.tensor(info.max).log2().int()
    powers = torch.exp2(torch.arange(int(tiny), int(most) + 1, dtype=torch.float64))
    steps = torch.tensor([1.0, 1 + info.eps, 1.5, 1.5 + info.eps, 1.75, 1.75 + info.eps, 2 - info.eps])
    largest = (powers[:, None] * steps).flatten()
    ladder = torch.linspace(-1, 1, 31, dtype=torch.float64)
    blocks = torch.cat([largest[:, None], largest[:, None] * ladder], 1)
    return blocks.to(dtype).view(7, -1)


def check(x, backend, **options):
    """Checks one launch for the bits of the specification and no hazard."""
    with observe(check=True) as observer:
        got = quantize(x, backend=backend, **options)
    assert len(observer.stats) == 1
    assert_same(got, block_scaled.quantize(x, **options))
    assert got.format == options["format"]


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_hostile_blocks_and_every_power(backend, dtype, format, rounding):
    for x in (inputs(dtype), every_power(dtype)):
        check(x, backend, format=format, scale_rounding=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("arch", simt.ARCHS)
@pytest.mark.parametrize("format", MX, ids=str)
def test_every_architecture(arch, format):
    check(inputs(torch.bfloat16), f"emulator:{arch}", format=format)


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 96), (129, 64), (33, 288), (2, 3, 5, 160), (40, 1056)])
def test_shapes(backend, format, shape):
    """Padding is written as zeros; leading dimensions are batches."""
    for scale_layout in ("blocked", "rowmajor"):
        check(spread(shape, torch.bfloat16), backend, format=format, scale_layout=scale_layout)


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_same_bits_in_any_mode(mode):
    x = spread((140, 160), torch.float16)
    with observe(mode=mode, check=True):
        got = quantize(x, format=MXFP8_E4M3, backend="emulator")
    assert_same(got, block_scaled.quantize(x, format=MXFP8_E4M3))


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("stops", [(5, 5, 140, 290), (300,), (0, 0)])
def test_groups(backend, format, stops):
    x, offs = spread((300, 96), torch.bfloat16), torch.tensor(stops, dtype=torch.int32)
    with observe(check=True):
        data, scale = grouped_quantize(x, offs, format=format, backend=backend)
    want_data, want_scale = grouped_quantize(x, offs, format=format, backend="reference")
    assert scale.shape == (300 // 128 + len(stops), 1, 32, 4, 4)
    assert_bitwise_equal(data[: stops[-1]], want_data[: stops[-1]])
    assert_bitwise_equal(scale, want_scale)


def test_groups_of_the_reference_are_quantized_one_by_one():
    x, offs = spread((200, 64), torch.float16), torch.tensor([130, 150], dtype=torch.int32)
    data, scale = grouped_quantize(x, offs, format=MXFP4, scale_rounding="down")
    groups = [
        block_scaled.quantize(x[r], format=MXFP4, scale_rounding="down")
        for r in (slice(130), slice(130, 150))
    ]
    assert_bitwise_equal(data[:150], torch.cat([group.data for group in groups]))
    assert_bitwise_equal(
        scale[:3], torch.cat([group.scale.view(torch.uint8) for group in groups]).view(scale.dtype)
    )


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("format", MX, ids=str)
def test_silu_quantize_is_bit_equal(backend, format):
    x = torch.cat([torch.linspace(-130, 130, 1024), inputs(torch.bfloat16).flatten().float()])
    x = x[: x.numel() // 128 * 128].to(torch.bfloat16).view(4, -1)
    up = x.flip(1).contiguous()
    with observe(check=True) as observer:
        got = quantize(x, up=up, format=format, backend=backend)
    assert len(observer.stats) == 1
    assert_same(got, block_scaled.quantize(silu_mul(x, up), format=format))


def test_formats_without_a_kernel_take_the_specification():
    """On every backend, as for dtypes without a kernel."""
    x = spread((4, 256), torch.bfloat16)
    for backend in ("reference", "emulator"):
        assert_same(
            quantize(x, format=FP8_128x128, backend=backend), block_scaled.quantize(x, format=FP8_128x128)
        )
    for values in (x.float(), x.double()):
        assert_same(
            quantize(values, format=MXFP4, backend="emulator"), block_scaled.quantize(values, format=MXFP4)
        )


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_refusals(backend):
    x, offs = torch.zeros(2, 48, dtype=torch.float16), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match="K=48 is not a positive multiple of 32"):
        quantize(x, format=MXFP4, backend=backend)
    x = x[:, :32].contiguous()
    for given in ({"global_scale": 1.0}, {"global_scale": "auto"}, {"global_scale_inv": 2.0}):
        with pytest.raises(ValueError, match="MXFP4 has no global scale"):
            quantize(x, format=MXFP4, backend=backend, **given)
    with pytest.raises(ValueError, match="scale_rounding='x' is neither"):
        quantize(x, format=MXFP4, scale_rounding="x", backend=backend)
    with pytest.raises(ValueError, match="MXFP8_E4M3 has no global scale"):
        grouped_quantize(x, offs, format=MXFP8_E4M3, global_scale=torch.ones(1), backend=backend)
    with pytest.raises(ValueError, match=r"format=FP8_1X128: .* call quantize\(x, format=FP8_1x128\)"):
        grouped_quantize(x, offs, format=FP8_1x128, backend=backend)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gpu(dtype, format, rounding):
    for x in (inputs(dtype), every_power(dtype), spread((300, 2080), dtype), spread((2, 3, 5, 96), dtype)):
        for layout in ("blocked", "rowmajor"):
            options = {"format": format, "scale_rounding": rounding, "scale_layout": layout}
            assert_same(quantize(x.cuda(), **options).cpu(), block_scaled.quantize(x, **options))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("format", MX, ids=str)
def test_gpu_groups_and_graph_capture(format):
    x, offs = spread((300, 96), torch.bfloat16), torch.tensor([5, 5, 140, 290], dtype=torch.int32)
    arguments = [t.cuda() for t in (x, offs)]
    grouped_quantize(*arguments, format=format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, scale = grouped_quantize(*arguments, format=format)
    graph.replay()
    want_data, want_scale = grouped_quantize(x, offs, format=format)
    assert_bitwise_equal(data[:290].cpu(), want_data[:290])
    assert_bitwise_equal(scale.cpu(), want_scale)


@pytest.mark.parametrize("global_scale", [None, "auto", "per_batch"])
@pytest.mark.parametrize("backend", ["reference", "emulator:sm_100a"])
def test_a_rounding_that_there_is_not_is_refused_on_every_way(backend, global_scale):
    """Also if one launch finds the global scale, and if each batch has its own."""
    x = torch.ones(2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scale_rounding='even' is neither"):
        quantize(x, global_scale=global_scale, scale_rounding="even", backend=backend)
    with pytest.raises(ValueError, match="scale_rounding='even' is neither"):
        quantize(x[0], global_scale=global_scale, scale_rounding="even", backend=backend)
    with pytest.raises(ValueError, match='"down" of NVFP4, whose scales are not powers of two'):
        quantize(x, global_scale=global_scale, scale_rounding="down", backend=backend)
    with pytest.raises(ValueError, match='"down" of NVFP4'):
        grouped_quantize(x[0], torch.tensor([8], dtype=torch.int32), scale_rounding="down", backend=backend)

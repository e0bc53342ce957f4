"""16-bit activations times int4 weights with both kernels on the emulator: where sums are exact, every bit is the reference's."""

import flat_parts as parts
import pytest
import torch
from oracle import assert_bitwise_equal
from weight_only_check import ROWS, config, dual, run_both, tokens, weights

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.block_format import INT4_FORMATS
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.problem import Gate

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
FORMATS = list(INT4_FORMATS.values())
DTYPES = (torch.bfloat16, torch.float16)
KIMI, AWQ = nv.int4_format(32), nv.int4_format(128, "float16", zero_points=True)


# ---- the kernel for few rows -------------------------------------------------------------------------------------


def few_rows(m, n, k, format, dtype=torch.bfloat16):
    """x [M, K, 2], w [N, K/2, 2], scales [2, bytes of their dtype] with NaN in padding rows. Sums are exact."""
    generator = torch.Generator().manual_seed(m)
    x = tokens(2, m, k, dtype, generator)
    w, scale = weights(2, n, k, generator, format)
    stored = scale.view(format.scale_dtypes[0]).view(2, *format.scale_shape(n, k))
    return x.permute(1, 2, 0), w.permute(1, 2, 0), None, stored


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", simt.ARCHS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows(arch, format, dtype):
    """Partial tiles in every direction, an odd number of blocks, more K than the warps take at once, two batches, one launch."""
    operands, alpha = few_rows(3, 150, 1024 + 5 * format.block_k, format, dtype), torch.tensor([0.5, -2.0])
    options = {"alpha": alpha, "b_format": format, "out_dtype": torch.float32}
    with observe(mode="random:1", check=True) as observer:
        got = parts.gemm(*operands, **options, backend=f"emulator:{arch}")
    assert_bitwise_equal(got, parts.gemm(*operands, **options))
    assert len(observer.stats) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_products_with_scales_are_rounded_once(dtype, scale_dtype):
    """Every integer times scales of all mantissas, one per column: the values of dequantize in the type of the rows."""
    codes = torch.arange(16).repeat(128, 2)
    scale = (torch.arange(128) / 127 + 1).to(scale_dtype)[:, None]
    w = nv.int4_tensor(codes, scale)
    x = torch.eye(32, dtype=dtype)[:16]
    for call in (lambda **o: parts.gemm(x, w, **o), lambda **o: parts.grouped_gemm([x], [w], **o)[0]):
        got = call(out_dtype=torch.float32, backend=EMULATED)
        assert_bitwise_equal(got, w.dequantize(dtype)[:, :16].float().T.contiguous())
        assert_bitwise_equal(got, call(out_dtype=torch.float32))


def test_gemv_and_row_major_scales():
    x, w, _, scale = few_rows(1, 130, 384, AWQ, torch.float16)
    want = parts.gemm(x, w, None, scale, b_format=AWQ, out_dtype=torch.float32)[0]
    one = nv.BlockScaledTensor(w[:, :, 0].contiguous(), scale[0], None, (130, 384), format=AWQ)
    options = {"out_dtype": torch.float32, "backend": "emulator"}
    assert_bitwise_equal(parts.gemv(one, x[0, :, 0], **options), want[:, 0].contiguous())
    plain = one.with_scale_layout("rowmajor")
    got = parts.gemv(
        plain.data, x[0, :, 0], plain.scale, None, a_format=AWQ, scale_layout="rowmajor", **options
    )
    assert_bitwise_equal(got, want[:, 0].contiguous())


def test_what_is_refused():
    x, w = torch.zeros(4, 256).half(), nv.quantize(torch.ones(8, 256), format=AWQ)
    options = {"backend": "emulator:sm_100a"}
    other = nv.quantize(torch.ones(8, 256), format=nv.FP8_1x128)
    with pytest.raises(
        nv.UnsupportedProblem,
        match=r"fp8_1x128 \(.*16-bit a x fp8_128x128, .*16-bit a x int4_format\(\.\.\.\)\);",
    ):
        parts.gemm(x, other, **options)
    with pytest.raises(nv.UnsupportedProblem, match="no kernel for uint4_128_float16 x uint4_128_float16"):
        parts.gemm(w, w, **options)
    with pytest.raises(TypeError, match=r"b_scale: scales are torch.int32; got torch.float16"):
        parts.gemm(x, w.data, None, w.scale.half(), b_format=AWQ, **options)
    with pytest.raises(ValueError, match="K=64 is not a positive multiple of 128"):
        parts.gemm(x[:, :64], w.data[:, :32], None, w.scale, b_format=AWQ, **options)
    assert parts.gemm(x[:0], w, **options).shape == (0, 8)


# ---- the grouped kernel of sm_90a --------------------------------------------------------------------------------


def assert_same_bits(**arguments):
    for got, want in zip(*run_both(**arguments), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("form", "chosen", "mode"),
    [
        ("ragged", config(16, num_cta=2), "random:1"),
        ("ragged", config(32, multicast_n=2, num_cta=4), "lazy"),
        ("masked", config(64, 256), "eager"),
        ("list", config(24, split_k=2, num_cta=4), "lazy"),
        ("batched", config(16, 256, num_cta=2), "random:2"),
    ],
    ids=str,
)
def test_forms(format, form, chosen, mode):
    """Partial tiles in every direction, several per CTA, an odd number of K tiles, rows of no group, fp16 and bf16 tokens."""
    rows = (20, 20, 20) if form == "batched" else ROWS
    k, dtype = 384 if format.block_k == 128 else 320 + format.block_k, DTYPES[form == "masked"]
    arguments = dict(form=form, rows=rows, n=200, k=k, chosen=chosen, has_alpha=True, mode=mode)
    assert_same_bits(format=format, dtype=dtype, **arguments)


@SLOW
@pytest.mark.parametrize("format", [KIMI, AWQ, nv.int4_format(128)], ids=str)
@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        ("separate", dual(32, multicast_n=2, num_cta=4)),
        ("interleaved_64_up_first", config(16, num_cta=1)),
        ("interleaved_32_gate_first", config(64, 256, num_cta=1)),
    ],
)
def test_dual(format, layout, chosen):
    gate = Gate("relu2", 40.0, layout)
    arguments = dict(form="ragged", rows=ROWS, n=192, k=256, chosen=chosen, gate=gate, mode="random:1")
    assert_same_bits(format=format, dtype=torch.float16 if format == AWQ else torch.bfloat16, **arguments)


# ---- dequantization ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_dequantize(format, layout):
    """One launch returns the bits of the specification."""
    x = torch.randn(2, 37, 384, generator=torch.Generator().manual_seed(2))
    t = nv.quantize(x, format=format, scale_layout=layout)
    for dtype in DTYPES:
        with observe(check=True) as observer:
            got = nv.dequantize(t, dtype, backend=EMULATED)
        assert_bitwise_equal(got, t.dequantize(dtype))
        assert len(observer.stats) == 1


# ---- silicon -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 1152), (20, 136, 4096), (40, 264, 128), (300, 520, 2944)])
def test_gpu_equals_the_reference_where_sums_are_exact(m, n, k, format):
    x, w, _, scale = few_rows(m, n, k, format)
    options = {"b_format": format, "out_dtype": torch.float32}
    got = parts.gemm(x.cuda(), w.cuda(), None, scale.cuda(), **options)
    assert_bitwise_equal(got.cpu(), parts.gemm(x, w, None, scale, **options))

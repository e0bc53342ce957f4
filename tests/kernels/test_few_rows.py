"""gemm of two to eight rows of activations with its own kernel: where sums are exact, it equals the reference in every bit."""

import pytest
import torch
from flat_parts import gemm
from oracle import assert_bitwise_equal, bits, poisoned
from simt_model import launches, make_gemv_operands

from nvfp4_cute import quantize
from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import decode_ue4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.launch.simt import few_rows_task
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.products import Product
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.reference import expand_operand
from nvfp4_cute.roofline.modelled import modelled_times

SM90 = "emulator:sm_90a"
NAN_CODE = 0x7F


def make_operands(m, n, k, l=1, seed=0, small_scales=True):
    """a [M, K/2, L], b [N, K/2, L] and their scales with NaN in all padding. Small scales make sums exact."""
    tokens, weights = (make_gemv_operands(rows, k, l, seed + rows, small_scales) for rows in (m, n))
    return tokens.a, weights.a, tokens.a_scale, weights.a_scale


def run(operands, alpha=None, out_dtype=torch.float32, **options):
    a, b, *_ = operands
    out = poisoned(a.shape[2], len(a), len(b), dtype=out_dtype).permute(1, 2, 0)
    assert gemm(*operands, alpha, out=out, out_dtype=out_dtype, **options) is out
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("m", "n", "k", "l"),
    [
        (2, 40, 32, 1),  # K that only one lane of four has
        (3, 150, 352, 2),  # partial tiles in every direction, a K tail for most lanes
        (8, 33, 1184, 1),  # more K than the warps take at once
        (5, 129, 2080, 1),  # more than the first loads fetch
        (7, 1, 4128, 2),
        (8, 300, 3072, 1),  # a multiple of everything
    ],
)
def test_bit_equal_to_the_reference(m, n, k, l, mode):
    operands, alpha = make_operands(m, n, k, l), torch.linspace(0.5, -2.0, l)
    out, count, plans = launches(lambda: run(operands, alpha, backend=SM90), mode=mode)
    assert (count, plans) == (1, 0)
    assert_bitwise_equal(out, run(operands, alpha, backend="reference"), n=n, k=k)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
def test_other_outputs(out_dtype):
    """Both 16-bit types, with row-major and column-major outputs in a larger buffer, whose other elements stay unchanged."""
    operands = make_operands(4, 72, 192)
    want = run(operands, 0.25, out_dtype, backend="reference")[:, :, 0]
    a, b, a_scale, b_scale = (t[..., 0] if t.ndim == 3 else t[0] for t in operands)
    for buffer in (poisoned(6, 80, dtype=out_dtype), poisoned(80, 6, dtype=out_dtype).t()):
        out, before = buffer[1:5, :72], buffer.clone()
        assert gemm(a, b, a_scale, b_scale, 0.25, out=out, out_dtype=out_dtype, backend=SM90) is out
        assert_bitwise_equal(out.contiguous(), want.contiguous())
        out.copy_(before[1:5, :72])
        assert torch.equal(bits(buffer.contiguous()), bits(before.contiguous()))


def test_every_product_is_exact():
    """All e2m1 codes of weights times all finite scales, and each value of the activations times the smallest one; both signs."""
    codes = [code for code in range(256) if code & 0x7F != NAN_CODE]
    scale = torch.tensor(codes, dtype=torch.uint8).repeat_interleave(2).unsqueeze(1)
    b = torch.zeros(len(scale), 16, dtype=torch.uint8)
    b[:, :8] = (torch.arange(8) | torch.arange(8, 16) << 4).byte()
    b_scale = to_blocked(torch.cat([scale, torch.zeros_like(scale)], 1))
    a_scale = to_blocked(torch.full((8, 2), 0x01, dtype=torch.uint8))
    rows = torch.arange(8)
    for first in (0, 8):
        nibbles = torch.zeros(8, 32, dtype=torch.uint8)
        nibbles[rows, first + rows] = (
            rows | rows % 2 << 3
        ).byte()  # each row has one nonzero value, each in a different column
        a = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        got = gemm(a, b, a_scale, b_scale, out_dtype=torch.float32, backend=SM90)
        want = expand_operand(a, a_scale, "blocked") @ expand_operand(b, b_scale, "blocked").T
        assert torch.equal(got.double(), want)
    assert decode_ue4m3(scale).unique().numel() == 127


def test_nan_stays_in_its_row_and_column():
    a, b, a_scale, b_scale = make_operands(5, 70, 128)
    b_scale.view(-1)[0] = NAN_CODE  # row 0, block 0
    a_scale.view(-1)[2 * 16 + 1] = NAN_CODE  # row 2, block 1
    got = run((a, b, a_scale, b_scale), backend=SM90)[:, :, 0]
    is_nan = torch.zeros(5, 70, dtype=torch.bool)
    is_nan[2], is_nan[:, 0] = True, True
    assert torch.equal(got.isnan(), is_nan)


def test_sums_depend_on_k_alone():
    """A row has the same bits for any number of rows and any position of weights, with scales of all magnitudes."""
    a, b, a_scale, b_scale = (
        t[..., 0] if t.ndim == 3 else t[0] for t in make_operands(8, 96, 1056, small_scales=False)
    )
    every = gemm(a, b, a_scale, b_scale, out_dtype=torch.float32, backend=SM90)
    for m, n in ((2, 96), (5, 40)):
        out = gemm(a[:m], b[:n], a_scale, b_scale, out_dtype=torch.float32, backend=SM90)
        assert_bitwise_equal(out, every[:m, :n].contiguous(), m=m, n=n)
    exact = expand_operand(a, a_scale, "blocked") @ expand_operand(b, b_scale, "blocked").T
    magnitudes = expand_operand(a, a_scale, "blocked").abs() @ expand_operand(b, b_scale, "blocked").abs().T
    # An MMA truncates its sum with an error of at most 2^-22 of the magnitudes. A warp does 2 * 4 in a row, then 7
    # additions.
    assert bool(((every.double() - exact).abs() <= 2.0**-22 * (10 + 7) * magnitudes).all())


@pytest.mark.parametrize(
    ("rows", "n", "k", "options"),
    [
        (9, 40, 64, {}),
        (2, 4225, 32, {}),  # more CTAs than SMs
        (2, 40, 64, {"backend": "emulator:sm_100a"}),
        (2, 40, 64, {"config": next(iter(candidates("sm_90a", "batched")))}),
        (2, 40, 48, {}),
    ],
)
def test_all_else_stays_with_the_gemm(rows, n, k, options):
    a, b, a_scale, b_scale = make_operands(rows, n, k)
    scales = [
        torch.nan_to_num(s.view(torch.float8_e4m3fn).float(), 0.0).to(torch.float8_e4m3fn)
        for s in (a_scale, b_scale)
    ]
    _, count, plans = launches(lambda: run((a, b, *scales), **({"backend": SM90} | options)))
    assert count == plans >= 1


def test_batches_count_as_rows_of_weights():
    """The CTAs of all batches have to fit on the device."""
    for n, l, fits in ((4224, 1, True), (2112, 2, True), (2112, 3, False), (32, 132, True), (33, 132, False)):
        a, b = (
            torch.zeros(2, 16, l, dtype=torch.uint8),
            torch.zeros(1, 16, l, dtype=torch.uint8).expand(n, -1, -1),
        )
        scale, out = torch.zeros(l, 512, dtype=torch.uint8), torch.zeros(l, 1, 1).expand(l, 2, n)
        left, right = (Operand(x.permute(2, 0, 1), scale, NVFP4, len(x), 32, l) for x in (a, b))
        assert (few_rows_task(Product(left, right, None, out), H200.gpu) is not None) == fits


def test_quantized_operands_of_a_layer():
    """gemm of quantized operands is close to the product of the original values."""
    generator = torch.Generator().manual_seed(1)
    x, w = (quantize(torch.randn(rows, 256, generator=generator), backend="reference") for rows in (6, 96))
    out = gemm(x.data, w.data, x.scale, w.scale, out_dtype=torch.float32, backend=SM90)
    want = gemm(x.data, w.data, x.scale, w.scale, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(out, want, rtol=2e-6, atol=1e-4)


@pytest.mark.gpu("sm_90a")
def test_gpu_equals_the_reference_and_the_emulator():
    for m, n, k, l in ((2, 40, 32, 1), (8, 4224, 4096, 1), (5, 300, 2080, 2), (7, 129, 14336, 1)):
        operands = make_operands(m, n, k, l)
        on_gpu = [t.cuda() for t in operands]
        got = gemm(*on_gpu, out_dtype=torch.float32)
        assert_bitwise_equal(got, run(operands, backend="reference"), n=n, k=k)
        out = torch.full_like(got, torch.nan)
        for _ in range(20):  # prepared calls
            assert gemm(*on_gpu, out=out, out_dtype=torch.float32) is out
        assert_bitwise_equal(out, got)
    operands = make_operands(8, 96, 1056, small_scales=False)
    on_gpu = gemm(*(t.cuda() for t in operands), out_dtype=torch.float32)
    assert_bitwise_equal(on_gpu, run(operands, backend=SM90))


def test_its_time_is_modelled_where_copies_have_no_source():
    """For rows that a tile lacks, cp.async reads nothing and writes zeros, and the model counts no bytes."""
    case = Case("few", "few", "8 rows", "gemm", ((8, 256, 1024),))
    operands = empty_operands(case)
    (timing,) = modelled_times(lambda backend: ours.prepare(case, operands, backend).run(), H200)
    assert 2.0 < timing.us < 20.0 and timing.hbm_bytes < 2 * case.work.bytes

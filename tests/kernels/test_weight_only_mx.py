"""16-bit activations times MXFP4 and MXFP8 weights with both kernels on the emulator.

Where sums are exact, every bit is the reference's.
"""

import pytest
import torch
from flat_parts import gemm, gemv, grouped_gemm
from oracle import assert_bitwise_equal, poisoned, unwritten
from weight_only_check import ROWS, config, dual, on_gpu, run_both, task, tokens, weights

from nvfp4_cute import MXFP4, MXFP8_E4M3, MXFP8_E5M2, UnsupportedProblem, backends, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.codecs import encode
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.problem import Gate

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"


# ---- the grouped kernel of sm_90a --------------------------------------------------------------------------------


def assert_same_bits(**arguments):
    for got, want in zip(*run_both(format=MXFP4, **arguments), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        (config(16, num_cta=2), "random:1"),
        pytest.param(config(32, multicast_n=2, num_cta=4), "lazy", marks=SLOW),
        pytest.param(config(64, 256), "eager", marks=SLOW),
        pytest.param(config(24, split_k=2, num_cta=4), "lazy", marks=SLOW),
    ],
    ids=str,
)
def test_ragged(chosen, mode):
    """Partial tiles in every direction, several per CTA, an odd number of K tiles, the last one partial, and rows of no group."""
    assert_same_bits(form="ragged", rows=ROWS, n=200, k=352, chosen=chosen, has_alpha=True, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
@pytest.mark.parametrize(
    ("form", "chosen", "mode"),
    [
        ("ragged", config(16, num_cta=2), "random:1"),
        ("ragged", config(32, multicast_n=2, num_cta=4), "lazy"),
        ("masked", config(64, 256), "eager"),
        ("list", config(24, split_k=2, num_cta=4), "lazy"),
        ("ragged", None, "random:2"),
    ],
    ids=str,
)
def test_weights_of_8_bits(format, form, chosen, mode):
    arguments = dict(form=form, rows=ROWS, n=200, k=352, chosen=chosen, has_alpha=True, mode=mode)
    for got, want in zip(*run_both(format=format, **arguments), strict=True):
        assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize("layout", ["separate", "interleaved_64_up_first", "interleaved_32_gate_first"])
def test_dual_of_8_bits(layout):
    chosen = dual(32, num_cta=3) if layout == "separate" else config(64, num_cta=1)
    gate = Gate("relu2", 40.0, layout)
    arguments = dict(form="ragged", rows=ROWS, n=192, k=160, chosen=chosen, gate=gate, format=MXFP8_E4M3)
    for got, want in zip(*run_both(**arguments), strict=True):
        assert_bitwise_equal(got, want)


@SLOW
@pytest.mark.parametrize(("form", "mode"), [("masked", "random:1"), ("list", "lazy")])
def test_other_forms(form, mode):
    assert_same_bits(form=form, rows=ROWS, n=136, k=288, chosen=config(32, num_cta=3), mode=mode)


@SLOW
def test_batches():
    assert_same_bits(form="batched", rows=(20, 20, 20), n=72, k=160, chosen=config(16, num_cta=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        ("separate", dual(32, multicast_n=2, num_cta=4)),
        ("interleaved_64_up_first", config(16, num_cta=1)),
        ("interleaved_32_gate_first", config(64, 256, num_cta=1)),
    ],
)
def test_dual(layout, chosen):
    assert_same_bits(
        form="ragged",
        rows=ROWS,
        n=192,
        k=160,
        chosen=chosen,
        gate=Gate("relu2", 40.0, layout),
        mode="random:1",
    )


def every_weight():
    """uint8 [256, 64] whose first 8 bytes contain all e2m1 codes, and blocked scales with all codes, one per row."""
    b = torch.zeros(256, 64, dtype=torch.uint8)
    b[:, :8] = (torch.arange(8) * 2 | (torch.arange(8) * 2 + 1) << 4).byte()
    scale = torch.full((256, 4), 127, dtype=torch.uint8)
    scale[:, 0] = torch.arange(256)
    return b, to_blocked(scale)


@pytest.mark.parametrize("operation", ["gemm", "grouped_gemm"])
def test_every_weight_times_every_scale(operation):
    """2^-127 to 2^127 times every value times 2^-6: float32 holds all products. A NaN scale makes its row NaN."""
    (b, scale), x = every_weight(), torch.zeros(16, 128, dtype=torch.bfloat16)
    x[torch.arange(16), torch.arange(16)] = 2.0**-6
    options = {"b_format": MXFP4, "out_dtype": torch.float32, "backend": EMULATED}
    with observe(check=True):
        if operation == "gemm":
            got = gemm(x, b, None, scale, **options)
        else:
            (got,) = grouped_gemm([x], [b], None, [scale], **options)
    want = gemm(x, b, None, scale, b_format=MXFP4, out_dtype=torch.float32)
    assert_bitwise_equal(got[:, :255], want[:, :255])
    assert got[:, 255].isnan().all() and want[:, 255].isnan().all()
    assert want[:, :255].isfinite().all() and want[1, 0] == 2.0**-134 and want[7, 254] == 6 * 2.0**121


def test_nan_scale_and_infinite_token():
    """A NaN scale makes its column NaN, and a non-finite token affects only its row."""
    arguments = dict(form="ragged", rows=(5, 9), n=136, k=128, chosen=config(16), format=MXFP4)
    made, expected = task(**arguments), task(**arguments)
    for one in (made, expected):
        one.operands.b[0].scale[1, 0] = 0xFF  # group 1, row 0, block 0
        one.operands.a[0].data[0, 7, 3] = float("inf")
    with observe(check=True):
        backends.run_task(EMULATED, made)
    expected.reference()
    (got,), (want,) = made.operands.out, expected.operands.out
    assert got[0, 5:14, 0].isnan().all() and not got[0, :5].isnan().any()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.slow
def test_operation_chooses_and_computes():
    """Whole quantized weights and more rows than the kernel for few rows takes. The call names only the formats."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-7, 8, (70, 288), generator=generator).bfloat16()
    w = quantize(torch.randint(-3, 4, (136, 288), generator=generator).float(), format=MXFP4)
    for call in (lambda **o: gemm(x, w, **o), lambda **o: grouped_gemm([x], [w], **o)[0]):
        got = call(out_dtype=torch.float32, backend=EMULATED)
        assert_bitwise_equal(got, call(out_dtype=torch.float32))


def test_float16_is_refused():
    x, w = torch.zeros(4, 64, dtype=torch.float16), quantize(torch.zeros(8, 64), format=MXFP4)
    for call in (lambda: gemm(x, w, backend=EMULATED), lambda: grouped_gemm([x], [w], backend=EMULATED)):
        with pytest.raises(UnsupportedProblem, match="a is float16 with MXFP4 weights.*pass bfloat16 a"):
            call()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("format", "least"), [(MXFP8_E4M3, 3), (MXFP8_E5M2, 10)], ids=["e4m3", "e5m2"])
def test_every_8_bit_weight_times_scales_of_groups(format, least):
    """The grouped kernel with all codes, one per column. Scales below ``least`` round with an error of at most 2^-134."""
    codes = torch.tensor([0, 1, 2, 3, 9, 10, 60, 127, 200, 239, 240, 254, 255], dtype=torch.uint8)
    w = torch.arange(256, dtype=torch.uint8).repeat(len(codes), 1)
    alone = torch.zeros(32, len(codes), 256, dtype=torch.uint8)
    for group, columns in enumerate(alone.split(1)):
        columns[0, :, group::32] = w[:, group::32]
    # Eight weights per row and group, each with a separate token. 0 times infinity is NaN in both sums.
    x = torch.zeros(32, 8, 256, dtype=torch.bfloat16)
    group, token = torch.arange(256) % 32, torch.arange(256) // 32
    x[group, token, torch.arange(256)] = 1
    scale = to_blocked(codes[:, None].expand(-1, 8).contiguous()).expand(32, -1, -1, -1, -1, -1).contiguous()
    offs = torch.arange(8, 257, 8, dtype=torch.int32)
    operands = (x.reshape(256, 256), alone, None, scale, offs)
    options = {"b_format": format, "out_dtype": torch.float32}
    got = grouped_gemm(*operands, **options, backend=EMULATED)
    want = grouped_gemm(*operands, **options)
    finite = want.isfinite()
    is_exact = finite & (codes >= least)
    # A product from 2^128 on is infinite, so the other seven tokens' zeros times it are NaN.
    unlike = got.isnan() != want.isnan()
    assert not unlike[:, codes < 239].any()
    assert torch.equal(got[is_exact & ~unlike], want[is_exact & ~unlike])
    assert ((got - want)[finite & ~unlike].abs() <= 2.0**-134).all()
    assert (got[:, codes < least] != want[:, codes < least]).any()


# ---- the kernel for few rows -------------------------------------------------------------------------------------


def few_rows(m, n, k, batches=1, seed=0, format=MXFP4):
    """x [M, K, L], w [N, bytes of K, L], scales [L, bytes], whose padding rows are NaN; sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = tokens(batches, m, k, torch.bfloat16, generator)
    w, scale = weights(batches, n, k, generator, MXFP4)
    if format != MXFP4:
        values = torch.randint(-7, 8, (batches, n, k), generator=generator).float()
        w = encode(values, format.element).view(torch.uint8)
    rm, rk = MXFP4.scale_atoms(n, k)
    return x.permute(1, 2, 0), w.permute(1, 2, 0), scale.view(batches, rm, rk, 32, 4, 4)


def run(operands, alpha=None, format=MXFP4, **options):
    x, w, scale = operands
    out = poisoned(x.shape[2], x.shape[0], w.shape[0], dtype=torch.float32).permute(1, 2, 0)
    return gemm(x, w, None, scale, alpha, out=out, out_dtype=torch.float32, b_format=format, **options)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", simt.ARCHS)
@pytest.mark.parametrize(("m", "k"), [(3, 352), (13, 160), (8, 1184)])
def test_few_rows(arch, m, k):
    """Partial tiles in every direction, a K tail for most lanes, more K than the warps take at once, two batches, one launch."""
    operands, alpha = few_rows(m, 150, k, 2), torch.tensor([0.5, -2.0])
    with observe(mode="random:1" if m % 2 else "lazy", check=True) as observer:
        actual = run(operands, alpha, backend=f"emulator:{arch}")
    assert_bitwise_equal(actual, run(operands, alpha))
    assert len(observer.stats) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
@pytest.mark.parametrize(("arch", "m", "k"), [("sm_90a", 3, 352), ("sm_100a", 13, 160), ("sm_90a", 40, 1184)])
def test_few_rows_of_8_bit_weights(format, arch, m, k):
    operands, alpha = few_rows(m, 150, k, 2, format=format), torch.tensor([0.5, -2.0])
    with observe(mode="random:1" if m % 2 else "lazy", check=True):
        actual = run(operands, alpha, format, backend=f"emulator:{arch}")
    assert_bitwise_equal(actual, run(operands, alpha, format))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("format", "least"), [(MXFP8_E4M3, 11), (MXFP8_E5M2, 26)], ids=["e4m3", "e5m2"])
def test_every_8_bit_weight_times_every_scale(format, least):
    """All codes with infinities and NaN, one per column. Scales of e4m3 below ``least`` round with an error of at most 2^-126."""
    w = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = to_blocked(torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous())
    options = {"b_format": format, "out_dtype": torch.float32}
    for first in (0, 64, 120, 184, 248):
        x, alone = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros_like(w)
        columns = slice(first, first + 8)
        x[torch.arange(8), first + torch.arange(8)] = 1
        alone[:, columns] = w[:, columns]
        got = gemm(x, alone, None, scale, **options, backend="emulator:sm_90a")
        want = gemm(x, alone, None, scale, **options)
        # 0 times infinity is NaN in both sums.
        assert torch.equal(got.isnan(), want.isnan())
        same = (got == want) | got.isnan()
        assert same[:, least:].all()
        assert (got - want).abs()[:, :least].nan_to_num(0).max() <= 2.0 ** (least - 11 - 126)


def test_gemv():
    x, w, scale = few_rows(1, 130, 288)
    one = gemv(
        w[:, :, 0],
        x[0, :, 0],
        scale[0],
        None,
        0.5,
        a_format=MXFP4,
        out_dtype=torch.float32,
        backend="emulator",
    )
    assert_bitwise_equal(one, run((x, w, scale), torch.tensor(0.5))[0, :, 0])


# ---- silicon -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 1184), (20, 136, 4128), (40, 264, 32), (300, 520, 2880)])
def test_gpu_equals_the_reference_where_sums_are_exact(m, n, k):
    x, w, scale = few_rows(m, n, k, 2, seed=m)
    got = gemm(x.cuda(), w.cuda(), None, scale.cuda(), b_format=MXFP4, out_dtype=torch.float32)
    assert_bitwise_equal(got.cpu(), run((x, w, scale)))


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("operation", ["gemm", "grouped_gemm"])
def test_gpu_every_weight_times_every_scale(operation):
    (b, scale), x = every_weight(), torch.zeros(16, 128, dtype=torch.bfloat16)
    x[torch.arange(16), torch.arange(16)] = 2.0**-6
    (b, scale, x), options = (
        (t.cuda() for t in (b, scale, x)),
        {"b_format": MXFP4, "out_dtype": torch.float32},
    )
    got = (
        gemm(x, b, None, scale, **options)
        if operation == "gemm"
        else grouped_gemm([x], [b], None, [scale], **options)[0]
    )
    want = gemm(x.cpu(), b.cpu(), None, scale.cpu(), b_format=MXFP4, out_dtype=torch.float32)
    assert_bitwise_equal(got.cpu()[:, :255], want[:, :255])
    assert got[:, 255].isnan().all()


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("form", ["ragged", "masked", "list", "batched"])
def test_gpu_forms(form):
    rows = (20, 20, 20) if form == "batched" else ROWS
    for chosen in (config(16), config(64, 256), config(24, split_k=2), None):
        made = task(form, rows, 200, 352, chosen, format=MXFP4)
        moved = on_gpu(made)
        backends.run_task("cuda", moved)
        made.reference()
        for got, want in zip(moved.operands.out, made.operands.out, strict=True):
            written = ~unwritten(want)
            assert_bitwise_equal(got.cpu()[written], want[written])

"""MXFP4 and MXFP8 in pairs on sm_90a, decoded to bf16: where sums are exact, every bit is the reference's."""

import flat_parts as parts
import pytest
import torch
from format_cases import Groups
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
FORMATS = {"a_format": nv.MXFP4, "b_format": nv.MXFP4}
ENDS = (0, 40, 40, 45, 111)
# e4m3 and e5m2 on either side, and with MXFP4.
BYTE_PAIRS = ((nv.MXFP8_E4M3, nv.MXFP8_E5M2), (nv.MXFP8_E5M2, nv.MXFP4), (nv.MXFP4, nv.MXFP8_E4M3))
# Tails in every extent, an empty group, an odd number of K tiles.
SIZES = ((40, 200, 352), (0, 200, 352), (5, 200, 352), (66, 200, 352))
# Codes of zeros, the smallest values, those around 1, the largest, infinities and NaN.
CODES = {
    nv.MXFP8_E4M3: (0x00, 0x01, 0x87, 0x08, 0x39, 0xFE, 0x7F),
    nv.MXFP8_E5M2: (0x80, 0x01, 0x83, 0x05, 0x3D, 0xFB, 0x7C, 0xFD),
}


def config(tokens, weights=128, **settings):
    return KernelConfig((weights, tokens, 128), num_acc_stage=1, swap_ab=True, **settings)


def some(*shape, seed=0, format=nv.MXFP4):
    """Few bits times few powers of two, quantized without loss, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    powers = torch.randint(-2, 3, (*shape[:-1], shape[-1] // 32), generator=generator).float()
    values = torch.randint(-3, 4, shape, generator=generator).float()
    values[..., ::32] = 3.0
    return nv.quantize(values * torch.exp2(powers).repeat_interleave(32, -1), format=format)


def ragged(n, k, num_weights=1, device="cpu", pair=(nv.MXFP4, nv.MXFP4)):
    """Arguments of a ragged product of ``num_weights`` weights, with rows of no group after the last group."""
    offs = torch.tensor(ENDS, dtype=torch.int32)
    rows = some(120, k).dequantize().bfloat16()
    data, scale = nv.grouped_quantize(rows, offs, format=pair[0], backend="reference")
    weights = [some(len(ENDS), n, k, seed=seed, format=pair[1]) for seed in range(num_weights)]
    operands = data, *(w.data for w in weights), scale, *(w.scale for w in weights)
    return [t.to(device) for t in operands], offs.to(device)


def check_ragged(n, k, chosen, mode="eager", backend=EMULATED):
    operands, offs = ragged(n, k)
    alpha = torch.tensor([0.5, -2.0, 1.0, 4.0, 0.25])
    options = {"out_dtype": torch.float32, **FORMATS}
    with observe(mode=mode, check=True):
        got = parts.grouped_gemm(*operands, offs, alpha, config=chosen, backend=backend, **options)
    want = parts.grouped_gemm(*operands, offs, alpha, **options)
    assert_bitwise_equal(got[: ENDS[-1]], want[: ENDS[-1]])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        (config(16, num_cta=3), "random:1"),
        (config(64, decode_first=True, num_cta=2), "lazy"),
        pytest.param(config(96), "eager", marks=SLOW),
        pytest.param(config(160), "lazy", marks=SLOW),
        pytest.param(config(32, split_k=2, num_cta=4), "random:2", marks=SLOW),
        pytest.param(config(128, decode_first=True, stream_k=True), "random:3", marks=SLOW),
        pytest.param(None, "eager", marks=SLOW),
    ],
    ids=str,
)
def test_ragged(chosen, mode):
    """Partial tiles in every direction, scale blocks that tiles share, and an odd number of K tiles, the last one partial."""
    check_ragged(200, 352, chosen, mode)


@SLOW
@pytest.mark.parametrize("chosen", [config(64, num_cta=2), config(32, decode_first=True)], ids=str)
def test_list_masked_and_batched(chosen):
    options = {"config": chosen, "out_dtype": torch.float32}
    a, b = [some(m, 352) for m in (40, 5, 66)], [some(200, 352, seed=i) for i in range(3)]
    for got, want in zip(
        parts.grouped_gemm(a, b, backend=EMULATED, **options),
        parts.grouped_gemm(a, b, **options | {"config": None}),
        strict=True,
    ):
        assert_bitwise_equal(got, want)
    x, w, sizes = some(3, 50, 352), some(3, 200, 352), torch.tensor([3, 0, 50], dtype=torch.int32)
    got = parts.grouped_gemm(x, w, masked_m=sizes, backend=EMULATED, **options)
    want = nv.grouped_gemm(x, w, masked_m=sizes, out_dtype=torch.float32)
    for g, size in enumerate(sizes.tolist()):
        assert_bitwise_equal(got[g, :size], want[g, :size])
    assert_bitwise_equal(
        nv.gemm(x, w, backend=EMULATED, out_dtype=torch.float32), nv.gemm(x, w, out_dtype=torch.float32)
    )


@SLOW
def test_dual_and_quantized_results():
    operands, offs = ragged(192, 160, 2)
    options = {"offs": offs, "activation": "relu2", "limit": 4.0, **FORMATS}
    got = parts.grouped_dual_gemm(*operands, out_dtype=torch.float32, backend=EMULATED, **options)
    assert_bitwise_equal(
        got[: ENDS[-1]], parts.grouped_dual_gemm(*operands, out_dtype=torch.float32, **options)[: ENDS[-1]]
    )
    x, w = some(40, 160), some(192, 160)
    got, want = (
        nv.gemm(x, w, out_dtype="nvfp4", out_global_scale=0.5, backend=b) for b in (EMULATED, "reference")
    )
    assert_bitwise_equal(got.data, want.data)
    assert torch.equal(got.dequantize(), want.dequantize())


def every_scale(rows):
    """MXFP4 [rows, 32] with the value 3 in column row % 32 of every row, scaled by code row % 256, and zeros elsewhere."""
    values = torch.zeros(rows, 128)
    values[torch.arange(rows), torch.arange(rows) % 32] = 3.0
    t = nv.quantize(values, format=nv.MXFP4)
    scale = torch.full((rows, 4), 127, dtype=torch.uint8)
    scale[:, 0] = torch.arange(rows) % 256
    return t.data, to_blocked(scale)


@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_every_scale(side):
    """2^-127 to 2^127 on one side and ones on the other. NaN makes its row or column NaN."""
    extreme, plain = every_scale(256), some(32, 128)
    a, b = (plain, extreme) if side == "weights" else (extreme, plain)
    (a, a_scale), (b, b_scale) = ((t.data, t.scale) if not isinstance(t, tuple) else t for t in (a, b))
    options = {"out_dtype": torch.float32, **FORMATS}
    with observe(check=True):
        got = parts.gemm(a, b, a_scale, b_scale, backend=EMULATED, **options)
    want = parts.gemm(a, b, a_scale, b_scale, **options)
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().any()
    assert_bitwise_equal(
        got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:1"])
@pytest.mark.parametrize("pair", BYTE_PAIRS, ids=str)
@pytest.mark.parametrize(
    "chosen",
    [
        config(16, num_cta=3),
        config(96),
        config(160),
        config(32, split_k=2, num_cta=4),
        config(48, decode_first=True, num_cta=2),
        config(128, decode_first=True, stream_k=True),
        config(256, decode_first=True),
    ],
    ids=str,
)
def test_elements_of_8_bits(chosen, pair, mode):
    """Every kernel: tokens decoded by warps or by a preceding launch, stages of one and of two K tiles, K tiles in two stages."""
    with observe(mode=mode, check=True) as observer:
        Groups.of(pair, SIZES, seed=1).check("ragged", EMULATED, chosen)
    assert not observer.hazards


def every_code(format, scales):
    """[scales * codes, 128]: every code of ``CODES`` with every scale, one value per row, in column row % 32."""
    codes = torch.tensor(CODES[format], dtype=torch.uint8).repeat(len(scales))
    data = torch.zeros(len(codes), 128, dtype=torch.uint8)
    data[torch.arange(len(codes)), torch.arange(len(codes)) % 32] = codes
    scale = torch.full((len(codes), 4), 127, dtype=torch.uint8)
    scale[:, 0] = scales.repeat_interleave(len(CODES[format]))
    return data, to_blocked(scale)


def check_every_code(format, side, scales, device="cpu", backend="auto"):
    """Checks each code times an MXFP4 one.

    Products that are multiples of 2^-133 are exact; others are rounded to one. Infinities and NaN are kept, and
    products from 2^128 on are infinite.
    """
    extreme, plain = every_code(format, scales), nv.quantize(torch.eye(32, 128), format=nv.MXFP4)
    a, b, formats = (plain.data, extreme[0]), (plain.scale, extreme[1]), (nv.MXFP4, format)
    if side == "tokens":
        a, b, formats = a[::-1], b[::-1], formats[::-1]
    options = {"a_format": formats[0], "b_format": formats[1], "out_dtype": torch.float32}
    with observe(check=True):
        got = parts.gemm(*(t.to(device) for t in (*a, *b)), **options, backend=backend).cpu()
    want = parts.gemm(*a, *b, **options)
    # A code meets a one in one row and zeros in the others. Zeros times infinity are NaN.
    rows = torch.arange(len(extreme[0]))
    got, want = ((y if side == "tokens" else y.T)[rows, rows % 32] for y in (got, want))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    exact = (want.double() * 2.0**133) % 1 == 0
    assert_bitwise_equal(got[exact], want[exact])
    assert ((got - want)[want.isfinite()].abs() <= 2.0**-134).all()
    assert exact[want.isfinite()].float().mean() > 0.7 and not exact[want.isfinite()].all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", list(CODES), ids=str)
@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_ends_of_the_range(format, side):
    scales = torch.tensor([0, 1, 2, 3, 9, 10, 60, 127, 200, 238, 254, 255], dtype=torch.uint8)
    check_every_code(format, side, scales, backend=EMULATED)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen", [config(16), config(64, decode_first=True), config(96), config(160), None], ids=str
)
def test_gpu_ragged(chosen):
    operands, offs = ragged(200, 352, device="cuda")
    options = {"out_dtype": torch.float32, **FORMATS}
    got = parts.grouped_gemm(*operands, offs, config=chosen, **options)
    want = parts.grouped_gemm(*(t.cpu() for t in operands), offs.cpu(), **options)
    assert_bitwise_equal(got.cpu()[: ENDS[-1]], want[: ENDS[-1]])


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_gpu_every_scale(side):
    extreme, plain = every_scale(256), some(32, 128)
    a, b = (plain, extreme) if side == "weights" else (extreme, plain)
    (a, a_scale), (b, b_scale) = ((t.data, t.scale) if not isinstance(t, tuple) else t for t in (a, b))
    options = {"out_dtype": torch.float32, **FORMATS}
    got = parts.gemm(a.cuda(), b.cuda(), a_scale.cuda(), b_scale.cuda(), **options).cpu()
    want = parts.gemm(a, b, a_scale, b_scale, **options)
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(
        got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    )


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("pair", BYTE_PAIRS, ids=str)
@pytest.mark.parametrize(
    "chosen", [config(16), config(64, decode_first=True), config(96), config(160), None], ids=str
)
def test_gpu_elements_of_8_bits(pair, chosen):
    operands, offs = ragged(200, 352, device="cuda", pair=pair)
    options = {"out_dtype": torch.float32, "a_format": pair[0], "b_format": pair[1]}
    got = parts.grouped_gemm(*operands, offs, config=chosen, **options)
    want = parts.grouped_gemm(*(t.cpu() for t in operands), offs.cpu(), **options)
    assert_bitwise_equal(got.cpu()[: ENDS[-1]], want[: ENDS[-1]])


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("format", list(CODES), ids=str)
@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_gpu_ends_of_the_range(format, side):
    check_every_code(format, side, torch.arange(256, dtype=torch.uint8), "cuda")

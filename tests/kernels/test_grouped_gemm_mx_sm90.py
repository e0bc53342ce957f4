"""MXFP4 times MXFP4 on sm_90a, decoded to bf16: every bit is the reference's where sums are exact."""

import pytest
import torch
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.planning.arch import sm90
from nvfp4_cute.planning.config import KernelConfig

SLOW = pytest.mark.slow
EMULATED = "emulator:sm_90a"
FORMATS = {"a_format": nv.MXFP4, "b_format": nv.MXFP4}
ENDS = (0, 40, 40, 45, 111)


def config(tokens, weights=128, **settings):
    return KernelConfig((weights, tokens, 128), num_acc_stage=1, swap_ab=True, **settings)


def some(*shape, seed=0):
    """Few bits times few powers of two, quantized without a loss: sums are exact."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    powers = torch.randint(-2, 3, (*shape[:-1], shape[-1] // 32), generator=generator).float()
    values = torch.randint(-3, 4, shape, generator=generator).float()
    values[..., ::32] = 3.0
    return nv.quantize(values * torch.exp2(powers).repeat_interleave(32, -1), format=nv.MXFP4)


def ragged(n, k, num_weights=1, device="cpu"):
    """Arguments of a ragged product of as many weights; rows of no group behind the last."""
    offs = torch.tensor(ENDS, dtype=torch.int32)
    rows = some(120, k).dequantize().bfloat16()
    data, scale = nv.grouped_quantize(rows, offs, format=nv.MXFP4, backend="reference")
    weights = [some(len(ENDS), n, k, seed=seed) for seed in range(num_weights)]
    operands = data, *(w.data for w in weights), scale, *(w.scale for w in weights)
    return [t.to(device) for t in operands], offs.to(device)


def check_ragged(n, k, chosen, mode="eager", backend=EMULATED):
    operands, offs = ragged(n, k)
    alpha = torch.tensor([0.5, -2.0, 1.0, 4.0, 0.25])
    options = {"out_dtype": torch.float32, **FORMATS}
    with observe(mode=mode, check=True):
        got = nv.grouped_gemm(*operands, offs, alpha, config=chosen, backend=backend, **options)
    want = nv.grouped_gemm(*operands, offs, alpha, **options)
    assert_bitwise_equal(got[: ENDS[-1]], want[: ENDS[-1]])


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
    """Tiles cut in every direction, blocks of scales that a tile shares, an odd number of K tiles, the last one cut."""
    check_ragged(200, 352, chosen, mode)


@SLOW
@pytest.mark.parametrize("chosen", [config(64, num_cta=2), config(32, decode_first=True)], ids=str)
def test_list_masked_and_batched(chosen):
    options = {"config": chosen, "out_dtype": torch.float32}
    a, b = [some(m, 352) for m in (40, 5, 66)], [some(200, 352, seed=i) for i in range(3)]
    for got, want in zip(
        nv.grouped_gemm(a, b, backend=EMULATED, **options),
        nv.grouped_gemm(a, b, **options | {"config": None}),
        strict=True,
    ):
        assert_bitwise_equal(got, want)
    x, w, sizes = some(3, 50, 352), some(3, 200, 352), torch.tensor([3, 0, 50], dtype=torch.int32)
    got = nv.grouped_gemm(x, w, masked_m=sizes, backend=EMULATED, **options)
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
    got = nv.grouped_dual_gemm(*operands, out_dtype=torch.float32, backend=EMULATED, **options)
    assert_bitwise_equal(
        got[: ENDS[-1]], nv.grouped_dual_gemm(*operands, out_dtype=torch.float32, **options)[: ENDS[-1]]
    )
    x, w = some(40, 160), some(192, 160)
    got, want = (
        nv.gemm(x, w, out_dtype="nvfp4", out_global_scale=0.5, backend=b) for b in (EMULATED, "reference")
    )
    assert_bitwise_equal(got.data, want.data)
    assert torch.equal(got.dequantize(), want.dequantize())


def every_scale(rows):
    """MXFP4 [rows, 32] with a value 3 in every row, at column row % 32, and as scales code row % 256; others zero."""
    values = torch.zeros(rows, 128)
    values[torch.arange(rows), torch.arange(rows) % 32] = 3.0
    t = nv.quantize(values, format=nv.MXFP4)
    scale = torch.full((rows, 4), 127, dtype=torch.uint8)
    scale[:, 0] = torch.arange(rows) % 256
    return t.data, to_blocked(scale)


@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_every_scale(side):
    """2^-127 to 2^127 on one side, beside ones on the other; NaN makes its row or column NaN."""
    extreme, plain = every_scale(256), some(32, 128)
    a, b = (plain, extreme) if side == "weights" else (extreme, plain)
    (a, a_scale), (b, b_scale) = ((t.data, t.scale) if not isinstance(t, tuple) else t for t in (a, b))
    options = {"out_dtype": torch.float32, **FORMATS}
    with observe(check=True):
        got = nv.gemm(a, b, a_scale, b_scale, backend=EMULATED, **options)
    want = nv.gemm(a, b, a_scale, b_scale, **options)
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().any()
    assert_bitwise_equal(
        got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    )


@SLOW
@pytest.mark.parametrize("chosen", sm90.candidates()[::7], ids=lambda chosen: chosen.to_name())
def test_no_spills(chosen):
    key = KernelKey("sm_90a", chosen, 1, torch.bfloat16, True, "ragged", **FORMATS).validated()
    assert get_kernel(key).resources.stack_bytes == 0


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize(
    "chosen", [config(16), config(64, decode_first=True), config(96), config(160), None], ids=str
)
def test_gpu_ragged(chosen):
    operands, offs = ragged(200, 352, device="cuda")
    options = {"out_dtype": torch.float32, **FORMATS}
    got = nv.grouped_gemm(*operands, offs, config=chosen, **options)
    want = nv.grouped_gemm(*(t.cpu() for t in operands), offs.cpu(), **options)
    assert_bitwise_equal(got.cpu()[: ENDS[-1]], want[: ENDS[-1]])


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("side", ["weights", "tokens"])
def test_gpu_every_scale(side):
    extreme, plain = every_scale(256), some(32, 128)
    a, b = (plain, extreme) if side == "weights" else (extreme, plain)
    (a, a_scale), (b, b_scale) = ((t.data, t.scale) if not isinstance(t, tuple) else t for t in (a, b))
    options = {"out_dtype": torch.float32, **FORMATS}
    got = nv.gemm(a.cuda(), b.cuda(), a_scale.cuda(), b_scale.cuda(), **options).cpu()
    want = nv.gemm(a, b, a_scale, b_scale, **options)
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(
        got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    )

"""Weight-only products on the emulator: bit-equal to the reference where sums are exact, and close to it elsewhere."""

import pytest
import torch
from flat_parts import gemm, gemv
from oracle import assert_bitwise_equal, poisoned

from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.simt_keys import W4A16Key
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.formats.codecs import decode_ue4m3, encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.reference import expand_operand, weight_only_reference

NAN_CODE = 0x7F


def make_operands(m, n, k, l=1, dtype=torch.bfloat16, seed=0):
    """x [M, K, L], w [N, K/2, L], scales [L, rm, rk, 32, 4, 4]: 3-bit integers times e2m1 times 0.5 to 2, with exact sums.

    Every padding scale is NaN, and rows have gaps.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-7, 8, (l, m, k + 8), generator=generator).to(dtype)[:, :, :k]
    w = torch.randint(0, 256, (l, n, k // 2 + 16), dtype=torch.uint8, generator=generator)[:, :, : k // 2]
    codes = encode_e4m3(torch.tensor([0.0, 0.5, 1.0, 2.0]))
    rows, k_blocks = -(-n // 128) * 128, -(-k // 64) * 4
    scale = torch.full((l, rows, k_blocks), NAN_CODE, dtype=torch.uint8)
    scale[:, :n, : k // 16] = codes[torch.randint(0, 4, (l, n, k // 16), generator=generator)]
    return x.permute(1, 2, 0), w.permute(1, 2, 0), to_blocked(scale)


def run(operands, alpha=None, out_dtype=torch.float32, **options):
    x, w, scale = operands
    out = poisoned(x.shape[2], x.shape[0], w.shape[0], dtype=out_dtype).permute(1, 2, 0)
    assert gemm(x, w, None, scale, alpha, out=out, out_dtype=out_dtype, **options) is out
    return out


# The others differ from sm_100a only in their assembler.
EVERY_ARCH = [
    arch if arch in ("sm_80", "sm_90a", "sm_100a") else pytest.param(arch, marks=pytest.mark.slow)
    for arch in simt.ARCHS
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EVERY_ARCH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_architecture(arch, dtype):
    """Partial tiles in every direction, a K tail for most lanes, and two batches in one launch."""
    operands, alpha = make_operands(3, 150, 352, 2, dtype), torch.tensor([0.5, -2.0])
    with observe(check=True) as observer:
        actual = run(operands, alpha, backend=f"emulator:{arch}")
    assert_bitwise_equal(actual, run(operands, alpha, backend="reference"))
    assert len(observer.stats) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "mode"),
    [
        *((m, "random:1" if m % 2 else "lazy") for m in (1, 8, 13, 32, 40)),
        *(pytest.param(m, "lazy" if m % 2 else "random:2", marks=pytest.mark.slow) for m in (1, 8, 13, 32)),
    ],
)
def test_rows(m, mode):
    """Every variant, more rows than the largest one holds, and more K than the warps take at once."""
    operands = make_operands(m, 40, 1184, seed=m)
    with observe(mode=mode, check=True):
        actual = run(operands, out_dtype=torch.bfloat16, backend="emulator")
    assert_bitwise_equal(actual, run(operands, out_dtype=torch.bfloat16))


@pytest.mark.slow
def test_gemv_is_one_row():
    x, w, scale = make_operands(1, 130, 288, 2, torch.float16)
    out = poisoned(130, 2, dtype=torch.float16)
    expected = run((x, w, scale), out_dtype=torch.float16)[0]
    assert gemv(w, x[0], scale, None, out=out, out_dtype=torch.float16, backend="emulator") is out
    assert_bitwise_equal(out, expected)
    one = gemv(w[:, :, 1], x[0, :, 1], scale[1], None, 0.5, backend="emulator")
    assert_bitwise_equal(one, (expected[:, 1] * 0.5).bfloat16())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_weight_is_exact(dtype):
    """All e2m1 codes times all finite scales times 1, one per row, with both signs of scales."""
    codes = [code for code in range(256) if code & 0x7F != NAN_CODE]
    scale = torch.tensor(codes, dtype=torch.uint8).repeat_interleave(2).unsqueeze(1)
    w = torch.zeros(len(scale), 16, dtype=torch.uint8)
    w[:, :8] = (torch.arange(8) | torch.arange(8, 16) << 4).byte()
    x = torch.zeros(8, 32, dtype=dtype)
    x[torch.arange(8), torch.arange(8)] = 1
    scales = to_blocked(torch.cat([scale, torch.zeros_like(scale)], 1))
    for first in (0, 8):
        got = gemm(x.roll(first, 1), w, None, scales, out_dtype=torch.float32, backend="emulator")
        want = expand_operand(w, scales, "blocked")[:, first : first + 8].T
        assert torch.equal(got.double(), want)
    assert decode_ue4m3(scale).unique().numel() == 127


@pytest.mark.parametrize("m", [1, 11])
def test_many_warps_of_one_cta(m):
    """Sums of 16 warps: more threads than results of 8 tokens, K that does not divide evenly, two batches."""
    operands, alpha = make_operands(m, 70, 4128, 2, seed=m), torch.tensor([0.5, -2.0])
    assert simt.w4a16_warps(132, m, 70, 4128, 2) == simt.W4A16_MANY_WARPS
    with observe(check=True, mode="random:1"):
        actual = run(operands, alpha, torch.bfloat16, backend="emulator:sm_90a")
    assert_bitwise_equal(actual, run(operands, alpha, torch.bfloat16, backend="reference"))


def test_number_of_warps():
    """16 warps only where every CTA has an SM to itself, and every warp has two chunks of K."""
    assert [simt.w4a16_warps(132, 8, n, 14336, 1) for n in (4096, 4224, 4225)] == [16, 16, 8]
    assert [simt.w4a16_warps(132, 8, 4096, k, 1) for k in (4096, 4064)] == [16, 8]
    assert simt.w4a16_warps(108, 8, 4096, 14336, 1) == simt.w4a16_warps(132, 40, 4096, 14336, 1) == 8


def test_nan_stays_in_its_row_and_column():
    x, w, scale = make_operands(5, 70, 128)
    plain = scale.view(-1)
    plain[0] = NAN_CODE  # row 0, block 0
    x = x.clone()
    x[2, 3, 0] = float("inf")
    got = run((x, w, scale), backend="emulator")[:, :, 0]
    assert got[:, 0].isnan().all() and not got[[0, 1, 3, 4], 1:].isnan().any()
    want = run((x, w, scale))[:, :, 0]
    assert torch.equal(got.isinf(), want.isinf()) and torch.equal(got.isnan(), want.isnan())


def test_error_of_random_operands():
    """Fp32 accumulation that truncates has an error of at most 2^-22 of the sum of magnitudes per sequential addition."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 1024, generator=generator).bfloat16()
    w = quantize(torch.randn(64, 1024, generator=generator), global_scale="auto")
    got = gemm(x, w.data, None, w.scale, w.global_scale, out_dtype=torch.float32, backend="emulator")
    exact = weight_only_reference(x, w.data, w.scale, w.global_scale, torch.float64)
    values = expand_operand(w.data, w.scale, "blocked").abs() * w.global_scale
    bound = 2.0**-22 * (8 + 8) * (x.abs().double() @ values.T)
    assert bool(((got.double() - exact).abs() <= bound).all())
    assert not torch.equal(got, exact.float())


def test_memory_instructions():
    """Weights are read in 16-byte vectors that bypass L1: once before the loop and once in it."""
    ptx = get_kernel(W4A16Key("sm_90a", torch.float16, torch.float16, False, 8)).ptx
    assert ptx.count("ld.global.nc.L1::no_allocate.v4.b32") == 2 * 4


def test_refusals():
    x, w, scale = make_operands(2, 40, 64)
    other = torch.zeros(2, 48, 1, dtype=torch.bfloat16)
    for error, part, call in (
        (TypeError, "dtype of a=torch.float32", (x.float(), w, None, scale)),
        (ValueError, "K/2 bytes along K", (x[:, :32], w, None, scale)),
        (UnsupportedProblem, "K=48 .* pad K to 64", (other, w[:, :24], None, scale)),
        (ValueError, "stride 2 in K", (torch.zeros(2, 128, 1).half()[:, ::2], w, None, scale)),
        (
            ValueError,
            "rows 144 bytes apart|multiple of 16",
            (torch.zeros(2, 66, 1).half()[:, :64], w, None, scale),
        ),
        (ValueError, "16-bit a has none", (x, w, scale, scale)),
        (ValueError, "b_scale: blocked scales", (x, w, None, scale[:, :, :, :16])),
    ):
        with pytest.raises(error, match=part):
            gemm(*call)
    with pytest.raises(UnsupportedProblem, match="nothing to configure"):
        from nvfp4_cute import KernelConfig

        gemm(x, w, None, scale, config=KernelConfig())
    with pytest.raises(ValueError, match="16-bit b has none"):
        gemv(w, x[0], scale, scale)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_equals_the_reference_where_sums_are_exact(dtype):
    for m, n, k in ((1, 300, 1184), (20, 130, 4128), (40, 70, 32)):
        x, w, scale = make_operands(m, n, k, 2, dtype, seed=m)
        got = gemm(x.cuda(), w.cuda(), None, scale.cuda(), out_dtype=torch.float32)
        assert_bitwise_equal(got, gemm(x, w, None, scale, out_dtype=torch.float32))

"""gemv on the emulator, on every architecture: bit-equal to its documented order of summation."""

from itertools import product

import numpy as np
import pytest
import torch
from flat_parts import gemv
from oracle import assert_bitwise_equal, bits, poisoned
from simt_model import NAN_CODE, gemv_expected, make_gemv_operands

from nvfp4_cute import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.simt_keys import GemvKey
from nvfp4_cute.formats.codecs import E2M1_VALUES, decode_ue4m3
from nvfp4_cute.gpus import targets
from nvfp4_cute.planning.arch import is_weight_only, simt
from nvfp4_cute.reference import gemv_reference

ARCHS = [arch for arch in simt.ARCHS if not is_weight_only(arch)]
EMULATORS = ("emulator:sm_90a", "emulator:sm_100a")
TWO_KINDS = pytest.mark.parametrize("backend", EMULATORS)


# ---- results ---------------------------------------------------------------------------------------------------

SHAPES = ((1, 16), (2, 32), (33, 48), (128, 64), (129, 272), (64, 528), (20, 1024), (5, 1056), (257, 96))
# One and several steps per warp, with and without a tail.
LONG = ((9, 2048), (3, 2064), (40, 4112), (3, 8208))


@pytest.mark.sampled(2)
@TWO_KINDS
@pytest.mark.parametrize("m, k", SHAPES + LONG)
def test_bit_equal_in_the_documented_order(backend, m, k):
    operands = make_gemv_operands(m, k, seed=m + k)
    out = poisoned(m, 1, dtype=torch.float32)
    assert gemv(*operands, out=out, out_dtype=torch.float32, backend=backend) is out
    assert_bitwise_equal(out, gemv_expected(operands), m=m, k=k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
def test_every_architecture_gives_the_same_bits(arch, out_dtype):
    operands, alpha = make_gemv_operands(40, 336, 2, seed=3, small_scales=True), torch.tensor([0.3, -1.7])
    out = gemv(*operands, alpha, out_dtype=out_dtype, backend=f"emulator:{arch}")
    assert_bitwise_equal(out, gemv_expected(operands, alpha, out_dtype), arch=arch)


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:5"])
def test_no_hazards_in_any_mode(backend, mode):
    operands = make_gemv_operands(34, 2064, 2, seed=9)
    with observe(mode=mode, check=True) as observer:
        out = gemv(*operands, out_dtype=torch.float32, backend=backend)
    assert len(observer.stats) == 1, "one launch"
    assert_bitwise_equal(out, gemv_expected(operands), mode=mode)


@pytest.mark.sampled(1)
@TWO_KINDS
def test_same_bits_whatever_m_and_l(backend):
    operands = make_gemv_operands(131, 2080, 2, seed=4)
    whole = gemv(*operands, out_dtype=torch.float32, backend=backend)
    a, b, a_scale, b_scale = operands
    one = gemv(a[:3, :, 1], b[:, 1], a_scale[1, :1], b_scale[1], out_dtype=torch.float32, backend=backend)
    assert one.shape == (3,)
    assert_bitwise_equal(one, whole[:3, 1].contiguous())


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("k", [2064, 4096 + 1040, 48])
def test_ctas_that_go_from_rows_to_rows(backend, k, monkeypatch):
    """Persistent CTAs, as many as one SM holds, and two batches that share the SM: the same bits."""
    one_sm = targets.lookup(backend.removeprefix("emulator:")).gpu._replace(num_sms=1)
    monkeypatch.setattr(targets.Target, "gpu", one_sm)
    operands = make_gemv_operands(131, k, 2, seed=k)
    with observe(mode="random:3", check=True):
        out = gemv(*operands, out_dtype=torch.float32, backend=backend)
    assert_bitwise_equal(out, gemv_expected(operands), k=k)


@pytest.mark.sampled(1)
@TWO_KINDS
def test_exact_sums_equal_the_reference(backend):
    operands = make_gemv_operands(70, 1056, 2, seed=5, small_scales=True)
    out, want = (
        gemv(*operands, 0.5, out_dtype=torch.float16, backend=name) for name in (backend, "reference")
    )
    assert_bitwise_equal(out, want)


@TWO_KINDS
def test_a_nan_scale_reaches_its_row_only(backend):
    a, b, a_scale, b_scale = make_gemv_operands(64, 96, seed=6, small_scales=True)
    flat = a_scale.view(-1)
    flat[33 % 32 * 16 + 33 // 32 * 4 + 2] = NAN_CODE  # row 33, block 2
    out = gemv(a[:, :, 0], b[:, 0], flat, b_scale[0].view(-1), backend=backend)
    assert out.isnan().nonzero().flatten().tolist() == [33]


@TWO_KINDS
def test_zeros_give_plus_zero(backend):
    a, b, a_scale, b_scale = make_gemv_operands(4, 64, seed=7, small_scales=True)
    b.fill_(0x88)
    out = gemv(a, b, a_scale, b_scale, out_dtype=torch.float32, backend=backend)
    assert (bits(out) == 0).all()


@pytest.mark.sampled(1)
@TWO_KINDS
def test_scales_in_their_other_forms(backend):
    """The permuted view and row-major scales return the same bits as the blocked form. `out` may have any strides."""
    operands = make_gemv_operands(72, 192, 2, seed=8)
    want = gemv(*operands, backend=backend)
    a, b, a_scale, b_scale = operands
    permuted = [scale.permute(3, 4, 1, 5, 2, 0) for scale in (a_scale, b_scale)]
    assert permuted[0].shape == (32, 4, 1, 4, 3, 2)
    buffer = poisoned(72, 5, dtype=torch.bfloat16)
    gemv(a.view(torch.float4_e2m1fn_x2), b, *permuted, out=buffer[:, 1:4:2], backend=backend)
    assert_bitwise_equal(buffer[:, 1:4:2].contiguous(), want.contiguous())
    buffer[:, 1:4:2] = poisoned(72, 2, dtype=torch.bfloat16)
    assert torch.equal(bits(buffer), bits(poisoned(72, 5, dtype=torch.bfloat16)))


@pytest.mark.slow
@TWO_KINDS
@pytest.mark.parametrize("seed", range(6))
def test_random_problem(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    m, k, l = (int(torch.randint(1, n, (), generator=generator)) for n in (300, 400, 4))
    operands = make_gemv_operands(m, 16 * k, l, seed)
    with observe(mode=f"random:{seed}", check=True):
        out = gemv(*operands, out_dtype=torch.float32, backend=backend)
    assert_bitwise_equal(out, gemv_expected(operands), seed=seed)


@pytest.mark.parametrize("m, l", [(0, 2), (4, 0)])
def test_nothing_to_compute(m, l):
    operands = make_gemv_operands(max(m, 1), 64, max(l, 1))
    a, b = operands.a[:m, :, :l], operands.b[:, :l]
    rm = -(-m // 128)
    out = gemv(a, b, operands.a_scale[:l, :rm], operands.b_scale[:l], backend="emulator")
    assert out.shape == (m, l)


# ---- why blocks are exact --------------------------------------------------------------------------------------


def test_fp16_holds_the_sum_of_eight_products():
    """One half of a word adds eight products of values, or of values times 4: integers that fp16 holds."""
    products = {x * (4 * y) for x, y in product(E2M1_VALUES, E2M1_VALUES)}
    assert all(p == int(p) for p in products)
    most = 8 * max(map(abs, products))
    integers = np.arange(-most, most + 1)
    assert np.array_equal(integers.astype(np.float16).astype(np.float64), integers)


def test_fp16_holds_the_products_of_scales():
    """A quarter of a scale times a scale, for every finite pair."""
    scales = decode_ue4m3(torch.arange(127, dtype=torch.uint8), torch.float64).numpy()
    exact = np.outer(scales / 4, scales)
    assert np.array_equal((scales / 4).astype(np.float16).astype(np.float64), scales / 4)
    assert np.array_equal(exact.astype(np.float16).astype(np.float64), exact)


def test_fp32_holds_a_block_term():
    """Four times a block's dot product is an integer of 12 bits and a product of scales has 8 bits: 20 of fp32's 24 bits."""
    scales = decode_ue4m3(torch.arange(1, 127, dtype=torch.uint8), torch.float64).numpy()
    mantissas = np.unique(np.frexp(np.outer(scales, scales))[0]) * 2**8
    assert np.array_equal(mantissas, np.rint(mantissas))
    assert 16 * 4 * 6 * 6 < 2**12


# ---- compiled code ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_memory_instructions(arch):
    """A is read in 16-byte vectors that bypass L1: once before the loop and once in it."""
    ptx = get_kernel(GemvKey(arch, torch.bfloat16, False)).ptx
    assert ptx.count("ld.global.nc.L1::no_allocate.v4.b32") == 2 * simt.gemv_spread(arch).rows
    assert ("cvt.rn.f16x2.e2m1x2" in ptx) == simt.has_fp4_convert(arch)
    assert ("dp4a" in ptx) != simt.has_fp4_convert(arch)


def test_unknown_arch():
    with pytest.raises(UnsupportedTarget, match="no gemv.* kernel for sm_75; there is one for sm_80"):
        GemvKey("sm_75", torch.float16, False)


# ---- refusals --------------------------------------------------------------------------------------------------


def refused(error, text, **changes):
    operands = make_gemv_operands(64, 64, small_scales=True)
    arguments = {
        "a": operands.a[:, :, 0],
        "b": operands.b[:, 0],
        "a_scale": operands.a_scale[0],
        "b_scale": operands.b_scale[0],
        "out": poisoned(64, dtype=torch.bfloat16),
    }
    arguments |= {name: change(arguments) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(error, match=text):
        gemv(**arguments, backend="reference")
    if isinstance(arguments["out"], torch.Tensor) and "out" not in changes:
        assert torch.equal(bits(arguments["out"]), bits(poisoned(64, dtype=torch.bfloat16)))


def test_refusals():
    refused(TypeError, "a has dtype torch.int8", a=lambda x: x["a"].view(torch.int8))
    refused(ValueError, "with the same K and L", b=lambda x: x["b"][:16])
    refused(ValueError, "stride 2 in K", b=lambda x: torch.zeros(64, dtype=torch.uint8)[::2])
    refused(ValueError, "not a multiple of 16 bytes", b=lambda x: torch.zeros(40, dtype=torch.uint8)[1:33])
    refused(ValueError, "rows 40 bytes apart", a=lambda x: torch.zeros(64, 40, dtype=torch.uint8)[:, :32])
    wide = torch.empty(2**25 + 32, dtype=torch.uint8).as_strided((2, 32), (2**25, 1))
    refused(UnsupportedProblem, "row pitch of a in bytes=33554432 exceeds", a=wide)
    refused(ValueError, "a_scale: blocked scales", a_scale=lambda x: x["a_scale"][:, :, :16])
    refused(ValueError, "row-major scales", scale_layout="rowmajor")
    refused(ValueError, "scale_layout='swizzled' is not supported", scale_layout="swizzled")
    refused(TypeError, "out_dtype=torch.int8 is not supported", out_dtype=torch.int8)
    refused(TypeError, "out has dtype", out_dtype=torch.float16)
    refused(ValueError, "out has shape", out=torch.zeros(65, dtype=torch.bfloat16))
    refused(ValueError, "out overlaps a in memory", out=lambda x: x["a"].view(-1).view(torch.bfloat16)[:64])
    refused(TypeError, "alpha has dtype", alpha=torch.ones(1, dtype=torch.float64))
    refused(ValueError, "one per batch", alpha=torch.ones(2))
    refused(TypeError, "pass a torch.Tensor", a=[1])
    refused(UnsupportedProblem, "no backward pass", alpha=torch.ones(1, requires_grad=True))


def test_k_must_be_whole_blocks():
    with pytest.raises(ValueError, match="K=24 is not a positive multiple of 16"):
        data, scale = torch.zeros(1, 12, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
        gemv(data, data[0], scale, scale)


def test_reference_is_a_gemm_with_one_column():
    operands = make_gemv_operands(40, 80, seed=2)
    a, b, a_scale, b_scale = operands
    got = gemv_reference(a[:, :, 0], b[:, 0], a_scale[0], b_scale[0], 0.5, torch.float64)
    want = gemv_expected(operands).double()[:, 0] * 0.5
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu("sm_90a")
def test_gpu_equals_the_documented_order():
    # The last has more rows than the CTAs that an H200 holds at once.
    for m, k, l in ((257, 96, 2), (130, 4192, 2), (40, 16416, 1), (11000, 1088, 1)):
        operands, alpha = make_gemv_operands(m, k, l, seed=m), torch.tensor([0.3])
        out = gemv(*(t.cuda() for t in operands), alpha.cuda(), out_dtype=torch.float32)
        assert_bitwise_equal(out, gemv_expected(operands, alpha), m=m, k=k)

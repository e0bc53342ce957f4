"""The quantize kernel returns the bits of block_scaled.quantize, on every architecture of the emulator."""

import itertools
import math

import numpy as np
import pytest
import torch
from flat_parts import grouped_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_bitwise_equal, bits
from quantize_inputs import assert_same, hostile, spread

from nvfp4_cute import NVFP4, UnsupportedProblem, quantize
from nvfp4_cute import grouped_quantize as quantize_groups
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.formats import block_scaled, codecs
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.gpus.targets import GB10
from nvfp4_cute.planning.arch import simt

DTYPES = (torch.bfloat16, torch.float16)
TWO_KINDS = pytest.mark.parametrize("backend", ["emulator:sm_90a", "emulator:sm_100a"])
# The others differ from sm_100a only in their assembler.
EVERY_ARCH = [
    arch if arch in ("sm_80", "sm_90a", "sm_100a") else pytest.param(arch, marks=pytest.mark.slow)
    for arch in simt.ARCHS
]
LARGEST = torch.finfo(torch.float32).max


def check(x, backend, **options):
    """Checks the bits of the specification, in one launch, or two if a first one finds the global scale of batches."""
    with observe(check=True) as observer:
        got = quantize(x, backend=backend, **options)
    want = block_scaled.quantize(x, **options)
    launches = 2 if options.get("global_scale") == "auto" and "up" not in options and x.ndim != 2 else 1
    assert len(observer.stats) == (launches if got.scale.numel() else 0)
    assert_same(got, want)


def test_few_values_have_a_kernel_of_their_own():
    """Every other test has few values; these are just too many for that kernel."""
    k = 4 * 16 * (simt.QUANTIZE_FEW_CTAS_PER_SM[False] * GB10.num_sms // 2 + 1)
    words = [simt.quantize_words(GB10.arch, GB10.num_sms, 1, NVFP4, columns) for columns in (k - 64, k)]
    assert words == [simt.QUANTIZE_FEW_WORDS, simt.QUANTIZE_WORDS]
    assert simt.quantize_words("sm_90a", GB10.num_sms, 1, NVFP4, k) == simt.QUANTIZE_FEW_WORDS
    check(spread((3, k), torch.bfloat16), "emulator:GB10")


GLOBAL_SCALES = (None, "auto", "per_row", 1.0, 0.37, 3e-38, 1.17549435e-38, 7e37, LARGEST)


@pytest.mark.sampled(2)
@TWO_KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_hostile_blocks(backend, dtype, global_scale):
    check(hostile(dtype), backend, global_scale=global_scale)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EVERY_ARCH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_architecture(arch, dtype):
    special = hostile(dtype)
    x = torch.cat([spread((3, special.shape[1]), dtype), special.expand(2, -1)])
    check(x, f"emulator:{arch}", global_scale=0.013)
    check(x, f"emulator:{arch}", scale_layout="rowmajor")


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("shape", [(16,), (1, 16), (2, 48), (129, 64), (33, 336), (2, 3, 5, 80), (40, 1040)])
def test_shapes(backend, shape):
    """Padding is written as zeros; leading dimensions are batches."""
    for scale_layout in ("blocked", "rowmajor"):
        check(spread(shape, torch.bfloat16, len(shape)), backend, scale_layout=scale_layout)


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize(
    ("shape", "global_scale"),
    [
        ((3, 130, 64), torch.tensor([0.5, 0.01, 3.0])),
        ((3, 40, 64), [0.5, 0.01, 3.0]),
        ((2, 2, 5, 32), "per_batch"),
    ],
    ids=["tensor", "numbers", "per_batch"],
)
def test_a_global_scale_for_each_batch(backend, shape, global_scale):
    """One launch for all batches returns the bits of one call per batch, also for rows that do not fill their atoms."""
    x = (
        spread(shape, torch.bfloat16)
        * torch.tensor([1.0, 9.0, 0.1])[: shape[0]].view(-1, *[1] * (len(shape) - 1)).bfloat16()
    )
    for options in ({}, {"scale_layout": "rowmajor"}, {"up": x.flip(0)}):
        with observe(check=True) as observer:
            got = quantize(x, global_scale=global_scale, backend=backend, **options)
        assert len(observer.stats) == 1 and got.global_scale.shape == shape[:-2]
        for index in itertools.product(*map(range, shape[:-2])):
            given = "auto" if global_scale == "per_batch" else got.global_scale[index]
            own = {name: value[index] if name == "up" else value for name, value in options.items()}
            assert_same(got[index], quantize(x[index], global_scale=given, **own))
        assert_bitwise_equal(got.dequantize(), quantize(x, global_scale=global_scale, **options).dequantize())


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("method", ["amax", "four_over_six"])
@pytest.mark.parametrize("options", [{}, {"scale_layout": "rowmajor"}, {"up": True}], ids=str)
def test_a_global_scale_for_each_row(backend, method, options):
    x = spread((2, 3, 80), torch.bfloat16) * torch.tensor([1.0, 9.0, 0.1])[:, None].bfloat16()
    own = {"up": x.flip(0)} if "up" in options else options
    with observe(check=True) as observer:
        got = quantize(x, backend=backend, global_scale="per_row", method=method, **own)
    assert len(observer.stats) == 1
    assert_same(got, quantize(x, backend="reference", global_scale="per_row", method=method, **own))
    rows, offs = x.flatten(0, 1), torch.tensor([1, 1, 5], dtype=torch.int32)
    got, want = (
        quantize_groups(rows, offs, global_scale="per_row", method=method, backend=b)
        for b in (backend, "reference")
    )
    assert_bitwise_equal(got.scale, want.scale)
    for part in ("data", "global_scale"):  # the last row belongs to no group
        assert_bitwise_equal(getattr(got, part)[:5], getattr(want, part)[:5])
    assert got.has_row_scales


@pytest.mark.parametrize("few_per_sm", [0, 8])
@pytest.mark.parametrize("has_up", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_that_threads_hold_and_one_that_is_longer(few_per_sm, has_up, monkeypatch):
    """The kernels for many and for few rows, with special values in the held blocks and in the rest."""
    monkeypatch.setattr(simt, "SCALED_ROWS_FEW_PER_SM", few_per_sm)
    special = hostile(torch.bfloat16)
    for blocks in (37, 600):
        x = torch.cat([spread((2, 16 * blocks), torch.bfloat16), special.repeat(1, 40)[:, : 16 * blocks]])
        options = {"global_scale": "per_row", "up": x.flip(0) if has_up else None}
        with observe(check=True):
            got = quantize(x, backend="emulator:sm_90a", **options)
        assert_same(got, quantize(x, backend="reference", **options))


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_same_bits_in_any_mode(backend, mode):
    x = spread((140, 176), torch.float16)
    with observe(mode=mode, check=True):
        assert_same(
            quantize(x, global_scale="auto", backend=backend), block_scaled.quantize(x, global_scale="auto")
        )


@pytest.mark.sampled(1)
@TWO_KINDS
def test_rows_that_vectors_cannot_read_are_copied(backend):
    x = spread((70, 96), torch.float16)
    for view in (
        x[:, :64],
        x[3:, 8:72],
        x[1:, 1:65],
        x.t()[:, :64],
        x[::2, :32],
        torch.stack([x, x], 2)[..., 0],
    ):
        check(view, backend)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32)])
def test_nothing_to_quantize(shape):
    check(torch.zeros(shape, dtype=torch.float16), "emulator")


def test_other_dtypes_take_the_specification():
    """On every backend, because no kernel reads these dtypes."""
    for x in (torch.randn(4, 32), torch.randn(4, 32, dtype=torch.float64)):
        for backend in ("auto", "reference", "emulator"):
            assert_same(quantize(x, backend=backend), block_scaled.quantize(x))


def test_inverse_convention_and_refusals():
    x = spread((4, 32), torch.bfloat16)
    check(x, "emulator", global_scale_inv=12.5)
    with pytest.raises(ValueError, match="both given"):
        quantize(x, global_scale=1.0, global_scale_inv=1.0, backend="emulator")
    with pytest.raises(ValueError, match="not a positive, normal"):
        quantize(x, global_scale=-1.0, backend="emulator")
    with pytest.raises(ValueError, match="K=20 is not a positive multiple of 16"):
        quantize(torch.zeros(2, 20, dtype=torch.float16), backend="emulator")
    with pytest.raises(ValueError, match="no dimensions"):
        quantize(torch.zeros((), dtype=torch.float16), backend="emulator")
    with pytest.raises(ValueError, match="scale_layout='x' is not supported"):
        quantize(x, scale_layout="x", backend="emulator")


@pytest.mark.slow
@TWO_KINDS
@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.integers(0, 65535), min_size=32, max_size=32),
    bf16=st.booleans(),
    factor=st.one_of(st.none(), st.floats(2.0**-126, LARGEST, width=32)),
)
def test_any_bits(backend, words, bf16, factor):
    x = torch.tensor(np.array(words, np.uint16).view(np.int16)).view(DTYPES[0] if bf16 else DTYPES[1])
    check(x, backend, global_scale=factor)


# ---- division by three instructions, and rounding by three sums ------------------------------------------------


def f32(x):
    return np.asarray(x, np.float64).astype(np.float32)


def quotients(x, d):
    """The kernel's result for regular blocks.

    float64 holds a product of two floats, and that product plus a third one up to roundings that do not matter; NumPy's
    longdouble holds the sum of all bits.
    """
    wide = np.longdouble
    inverse = f32(1.0 / d.astype(np.float64))
    estimate = f32(x.astype(np.float64) * inverse)
    error = (estimate.astype(wide) * d.astype(wide) - x.astype(wide)).astype(np.float32)
    return (estimate.astype(wide) - error.astype(wide) * inverse.astype(wide)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_instructions_divide(dtype):
    """Every 16-bit magnitude with a quotient between 1/64 and 8, and many divisors, including the product scale * g."""
    rng = np.random.default_rng(5)
    every = (
        torch.arange(1, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, dtype=torch.int16)
        .view(dtype)
        .float()
        .numpy()
    )
    scales = codecs.decode_ue4m3(torch.arange(1, 127, dtype=torch.uint8)).numpy()
    divisors = [*scales[::6], *(s * f32(rng.uniform(0.5, 2) * 2.0 ** rng.integers(-60, 60)) for s in scales)]
    count = 0
    for d in map(f32, divisors):
        x = every[(every >= d / 64) & (every <= d * 8)]
        count += x.size
        divisor = np.full_like(x, d)
        assert np.array_equal(quotients(x, divisor), x / divisor), d
    assert count > 100_000


def test_rounding_by_sums_is_the_conversion():
    """Every float around every boundary, and a million others: the code is the minimum of the rounded sums."""
    magic = np.float32(2**23)
    rng = np.random.default_rng(1)
    ties = f32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0])
    near = (ties.view(np.int32)[:, None] + np.arange(-300, 301)).astype(np.int32).view(np.float32).ravel()
    y = np.concatenate([near, f32(rng.uniform(0, 9, 1_000_000)), f32([0, 1e-40, 1e30, np.inf, np.nan])])
    sums = [
        f32(2.0 * y.astype(np.float64) + magic),
        f32(y + np.float64(magic + 2)),
        f32(0.5 * y.astype(np.float64) + magic + 4),
    ]
    codes = np.fmin(np.fmin(*sums[:2]), np.fmin(sums[2], magic + np.float32(7))).view(np.int32) & 7
    assert np.array_equal(codes, codecs.encode_e2m1(torch.from_numpy(y)).numpy())


# ---- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@TWO_KINDS
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stops", [(5, 5, 140, 290), (300,), (0, 0, 128, 256), (0, 0)])
def test_groups(backend, scaled, stops):
    x = spread((300, 80), torch.bfloat16)
    offs = torch.tensor(stops, dtype=torch.int32)
    factors = torch.rand(len(stops)) + 0.01 if scaled else None
    with observe(check=True):
        data, scale = grouped_quantize(x, offs, global_scale=factors, backend=backend)
    want_data, want_scale = grouped_quantize(x, offs, global_scale=factors, backend="reference")
    assert scale.shape == (300 // 128 + len(stops), 2, 32, 4, 4)
    assert_bitwise_equal(data[: stops[-1]], want_data[: stops[-1]])
    assert_bitwise_equal(scale, want_scale)


def test_groups_of_the_reference_are_quantized_one_by_one():
    x, offs = spread((200, 64), torch.float16), torch.tensor([130, 150], dtype=torch.int32)
    factors = torch.tensor([0.5, 0.25])
    data, scale = grouped_quantize(x, offs, global_scale=factors)
    first = block_scaled.quantize(x[:130], global_scale=0.5)
    second = block_scaled.quantize(x[130:150], global_scale=0.25)
    assert torch.equal(data[:150], torch.cat([first.data, second.data]))
    assert torch.equal(bits(scale[:3]), bits(torch.cat([first.scale, second.scale])))


def test_group_refusals():
    x, offs = torch.zeros(4, 32, dtype=torch.float16), torch.tensor([4], dtype=torch.int32)
    for arguments, error, text in (
        ((x.float(), offs), TypeError, "dtype of x"),
        ((x[0], offs), ValueError, r"expected \[sum M, K\]"),
        ((x, offs.long()), TypeError, "contiguous int32"),
        ((x, offs, torch.ones(2)), ValueError, "one per group"),
        ((x.clone().requires_grad_(), offs), UnsupportedProblem, "no backward pass"),
    ):
        with pytest.raises(error, match=text):
            grouped_quantize(*arguments[:2], global_scale=arguments[2] if len(arguments) > 2 else None)


# ---- compiled code ---------------------------------------------------------------------------------------------

# ---- silicon ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_gpu(dtype, global_scale):
    for x in (hostile(dtype), spread((300, 2080), dtype), spread((2, 3, 5, 80), dtype)):
        got = quantize(x.cuda(), global_scale=global_scale)
        want = block_scaled.quantize(x, global_scale=global_scale)
        assert_bitwise_equal(got.data, want.data)
        assert_bitwise_equal(got.scale, want.scale)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_every_16_bit_number(dtype):
    """Each number with each of sixteen scales: the number is in a block with a separate largest value."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for largest in torch.logspace(-6, 4, 16).to(dtype):
        x = torch.cat([largest.expand(every.numel(), 1), every.unsqueeze(1).expand(-1, 15)], 1).contiguous()
        got, want = quantize(x.cuda(), global_scale=0.37), block_scaled.quantize(x, global_scale=0.37)
        assert_bitwise_equal(got.data, want.data)
        assert_bitwise_equal(got.scale, want.scale)


@pytest.mark.gpu("sm_90a")
def test_gpu_groups_and_graph_capture():
    x, offs = spread((300, 80), torch.bfloat16), torch.tensor([5, 5, 140, 290], dtype=torch.int32)
    factors = torch.rand(4) + 0.01
    arguments = [t.cuda() for t in (x, offs, factors)]
    grouped_quantize(arguments[0], arguments[1], global_scale=arguments[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, scale = grouped_quantize(arguments[0], arguments[1], global_scale=arguments[2])
    graph.replay()
    want_data, want_scale = grouped_quantize(x, offs, global_scale=factors)
    assert_bitwise_equal(data[:290].cpu(), want_data[:290])
    assert_bitwise_equal(scale.cpu(), want_scale)


# ---- silu(x) * up ----------------------------------------------------------------------------------------------


def gates(dtype):
    """Every magnitude of a gate that matters and special values, with a second factor."""
    x = torch.cat([torch.linspace(-130, 130, 1984), hostile(dtype).flatten().float()[: 16 * 4]])
    up = torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    up[-64:] = hostile(dtype).flatten().float()[16 * 8 : 16 * 12]
    return x.to(dtype).view(4, -1), up.to(dtype).view(4, -1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EVERY_ARCH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_quantize_is_bit_equal(arch, dtype):
    """One launch returns the bits of ``formats.quantize`` of ``silu.silu_mul``."""
    x, up = gates(dtype)
    for global_scale, layout in ((0.02, "blocked"), (None, "rowmajor")):
        with observe(check=True) as observer:
            got = quantize(
                x, up=up, global_scale=global_scale, scale_layout=layout, backend=f"emulator:{arch}"
            )
        assert len(observer.stats) == 1
        want = block_scaled.quantize(silu_mul(x, up), global_scale=global_scale, scale_layout=layout)
        assert_same(got, want)


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_halves_of_one_tensor(mode):
    """Gate and up in one tensor, as a layer's first product leaves them, with partial tiles of rows and columns."""
    h = spread((70, 2 * 208), torch.bfloat16)
    x, up = h[:, :208], h[:, 208:]
    with observe(mode=mode, check=True):
        got = quantize(x, up=up, global_scale="auto", backend="emulator")
    assert_same(got, quantize(x, up=up, global_scale="auto"))


def test_groups_of_silu():
    h, offs = spread((150, 2 * 96), torch.float16), torch.tensor([40, 40, 140], dtype=torch.int32)
    x, up, factors = h[:, :96], h[:, 96:], torch.tensor([0.5, 1.0, 0.01])
    with observe(check=True) as observer:
        got = grouped_quantize(x, offs, up=up, global_scale=factors, backend="emulator")
    want = grouped_quantize(x, offs, up=up, global_scale=factors)
    assert len(observer.stats) == 1
    assert_bitwise_equal(got[0][:140], want[0][:140])
    assert_bitwise_equal(got[1], want[1])


def test_error_of_silu():
    """Compared with float64: within the bound that the module states, and 0 where it says so."""
    x = torch.cat([torch.linspace(-100, 100, 200001), torch.randn(100000) * 3])
    up = torch.ones_like(x)
    got = silu_mul(x, up).double()
    want = torch.nn.functional.silu(x.double())
    kept = x > -86
    assert bool(((got - want).abs() <= (x.abs() + 16) * 2.0**-24 * want.abs())[kept].all())
    assert not got[x < -87.7].any()
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    got = silu_mul(special, torch.ones(5))
    assert got[0] == math.inf and got[1:3].isnan().all()
    assert got[3:].tolist() == [0.0, 0.0] and torch.signbit(got[3:]).tolist() == [False, True]


def test_silu_refusals():
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    for up in (x[:1], x.half()):
        with pytest.raises(ValueError, match="takes two of one dtype, shape and device"):
            quantize(x, up=up)
    with pytest.raises(TypeError, match="dtype of x with up"):
        quantize(x.double(), up=x.double())

"""gemm on the emulator: one launch for a matrix or a batch, equal to the reference in every bit on every architecture."""

import cases
import pytest
import torch
from flat_parts import gemm
from oracle import assert_bitwise_equal, poisoned
from quantized_check import assert_quantized

from nvfp4_cute import KernelConfig, NVFP4Tensor, UnsupportedProblem, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.planning.arch import base, sm90, sm100, sm120
from nvfp4_cute.problem import GroupedProblem

SIZES = (150, 200, 288)
MODES = ("eager", "lazy", "random:1")


def make_batch(batches, sizes=SIZES, seed=0):
    """a [M, K/2, L], b [N, K/2, L], scales [L, rm, rk, 32, 4, 4], alpha [L], with exact sums."""
    case = cases.Case("batch", (sizes,) * batches, seed, has_alpha=True)
    a, b, a_scale, b_scale, alpha = cases.make_operands(case)
    k_atoms = -(-sizes[2] // 64)
    scales = [torch.stack(s).unflatten(1, (-1, k_atoms, 32, 4, 4)) for s in (a_scale, b_scale)]
    return [torch.stack(a).permute(1, 2, 0), torch.stack(b).permute(1, 2, 0), *scales, alpha]


def run(operands, *, m_major=False, dtype=torch.float16, **options):
    """Returns the result, written to a poisoned output."""
    m, n, batches = operands[0].shape[0], operands[1].shape[0], operands[0].shape[2]
    shape = (batches, n, m) if m_major else (batches, m, n)
    out = poisoned(*shape, dtype=dtype).permute(*((2, 1, 0) if m_major else (1, 2, 0)))
    returned = gemm(*operands, out=out, out_dtype=dtype, **options)
    assert returned is out
    return out.contiguous()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "config", "mode", "m_major"),
    [
        ("sm_100a", "t128x128x256_s0a2", "eager", False),
        ("sm_100a", "t128x64x256_s2a2_swap_p3", "lazy", True),
        ("sm_100a", "t128x192x256_s2a2_2cta_swap_p4", "random:1", False),
        pytest.param("sm_100a", "t128x256x256_s0a2_2cta_p4", "lazy", False, marks=pytest.mark.slow),
        ("sm_120a", "t128x32x256_s2a2_swap_p3", "lazy", False),
        pytest.param("sm_120a", "t128x128x128_s0a1", "random:1", True, marks=pytest.mark.slow),
    ],
)
def test_a_batch_equals_the_reference(arch, config, mode, m_major):
    operands = make_batch(3)
    expected = run(operands, backend="reference", m_major=m_major)
    with observe(mode=mode, check=True) as observer:
        actual = run(
            operands, backend=f"emulator:{arch}", config=KernelConfig.from_name(config), m_major=m_major
        )
    assert_bitwise_equal(actual, expected)
    assert len(observer.stats) == 1
    assert [plan.problem.form for plan in observer.plans] == ["batched"]


@pytest.mark.parametrize(
    "arch",
    [
        *sm90.ARCHS,
        sm120.ARCHS[0],
        # These architectures share their code with another one.
        *(pytest.param(arch, marks=pytest.mark.slow) for arch in (*sm100.ARCHS[1:], *sm120.ARCHS[1:])),
    ],
)
def test_every_architecture(arch):
    operands = make_batch(2, (70, 130, 256))
    with observe(check=True) as observer:
        actual = run(operands, backend=f"emulator:{arch}")
    assert_bitwise_equal(actual, run(operands, backend="reference"))
    assert len(observer.stats) == 1


def test_one_matrix_takes_the_list_kernel_of_one_group():
    """The compiled kernel is that of ``grouped_gemm`` with one group. [M, K/2] and [M, K/2, 1] are equivalent."""
    operands = make_batch(1)
    flat = [operands[0][:, :, 0], operands[1][:, :, 0], operands[2][0], operands[3][0], operands[4]]
    with observe(check=True) as observer:
        actual = gemm(*flat, backend="emulator")
    assert observer.plans[0].problem.form == "list"
    assert_bitwise_equal(actual, gemm(*flat))
    assert_bitwise_equal(run(operands, dtype=torch.bfloat16).squeeze(2), actual)


def test_more_batches_than_a_list_has_groups():
    batches = base.MAX_LIST_GROUPS + 5
    operands = make_batch(batches, (3, 40, 64))
    with observe(check=True) as observer:
        actual = run(operands, backend="emulator")
    assert_bitwise_equal(actual, run(operands))
    assert len(observer.stats) == 1


@pytest.mark.slow
def test_more_batches_than_a_list_has_groups_on_sm90():
    operands = make_batch(base.MAX_LIST_GROUPS + 5, (3, 40, 64))
    assert_bitwise_equal(run(operands, backend="emulator:sm_90a"), run(operands))


def test_batches_may_interleave_and_scales_be_plain():
    """[M, L, K/2] in memory. Row-major scales return the bits of blocked ones, and one factor applies to all batches."""
    a, b, a_scale, b_scale, _ = make_batch(2)
    (m, row_bytes, _), n = a.shape, len(b)
    mixed = a.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    plain = [
        torch.stack([from_blocked(s, rows, row_bytes // 8) for s in scale], 2)
        for scale, rows in ((a_scale, m), (b_scale, n))
    ]
    expected = gemm(a, b, a_scale, b_scale, 0.5)
    assert_bitwise_equal(gemm(mixed, b, a_scale, b_scale, torch.tensor(0.5), backend="emulator"), expected)
    got = gemm(a, b, *plain, 0.5, scale_layout="rowmajor", backend="emulator")
    assert_bitwise_equal(got, expected)
    assert got.shape == (m, n, 2) and got.permute(2, 0, 1).is_contiguous()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        *(("sm_100a", mode) for mode in MODES),
        *(pytest.param("sm_120a", mode, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_a_chain_of_layers_stays_at_four_bits(arch, mode):
    """Three layers with NVFP4 between them and one launch each, bit for bit as the reference.

    The last one writes a given tensor.
    """
    generator = torch.Generator().manual_seed(0)
    x = quantize(torch.randn(70, 128, generator=generator), global_scale=0.002)
    weights = [
        quantize(torch.randn(n, k, generator=generator).round(), global_scale=0.5)
        for n, k in ((192, 128), (96, 192), (96, 96))
    ]
    expected, actual = x, x
    out = None
    with observe(mode=mode, check=True) as observer:
        for w in weights:
            factors = {"alpha": 0.25, "out_dtype": "nvfp4", "out_global_scale": 0.03}
            expected = gemm(expected.data, w.data, expected.scale, w.scale, **factors)
            if w is weights[-1]:
                out = NVFP4Tensor(
                    torch.zeros_like(expected.data), torch.zeros_like(expected.scale), None, (70, 96)
                )
            layer = actual.data, w.data, actual.scale, w.scale
            actual = gemm(*layer, **factors, out=out, backend=f"emulator:{arch}")
            expected, actual = (clean(t) for t in (expected, actual))
    assert len(observer.stats) == 3
    assert_bitwise_equal(actual.data, expected.data)
    assert_bitwise_equal(actual.scale, expected.scale)
    assert torch.equal(out.data, actual.data)
    with pytest.raises(ValueError, match="it goes with out_dtype='nvfp4'"):
        gemm(x.data, weights[0].data, x.scale, weights[0].scale, out_global_scale=1.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_100a", "t128x128x256_s0a2_p2"),
        ("sm_100a", "t128x64x256_s2a2_2cta_swap_p3"),
        pytest.param("sm_120a", "t128x64x256_s0a2_swap_p3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("own_out", [False, True])
def test_a_batch_stays_at_four_bits(arch, config, own_out):
    """One launch for three batches. Each result is its quantized float32 result, and the next call reads it unchanged."""
    operands, factor = make_batch(3, (150, 224, 288)), torch.tensor(0.37)
    sums = gemm(*operands, out_dtype=torch.float32)
    out = None
    if own_out:
        data, scale = torch.full((3, 150, 128), 0x5A).byte(), torch.full((3, 2, 4, 32, 4, 4), 0x5A).byte()
        out = NVFP4Tensor(data[..., :112], scale, None, (3, 150, 224))
    backend = f"emulator:{arch}"
    options = {"out_dtype": "nvfp4", "out_global_scale": factor, "backend": backend}
    with observe(check=True) as observer:
        got = gemm(*operands, out=out, config=KernelConfig.from_name(config), **options)
    assert len(observer.stats) == 1 and [plan.problem.form for plan in observer.plans] == ["batched"]
    assert got.shape == (3, 150, 224) and got.global_scale == factor
    assert not own_out or got.data.data_ptr() == out.data.data_ptr()
    for batch in range(3):
        poison = 0x5A if own_out else None
        assert_quantized(got.data[batch], got.scale[batch], sums[:, :, batch], factor, poison)
    weights = quantize(torch.randn(3, 40, 224, generator=torch.Generator().manual_seed(0)))
    chained = (got.data.permute(1, 2, 0), weights.data.permute(1, 2, 0), got.scale, weights.scale)
    assert_bitwise_equal(gemm(*chained, factor, backend=backend), gemm(*chained, factor))


@pytest.mark.parametrize(
    ("out", "error", "match"),
    [
        (torch.zeros(2, 150, 104), TypeError, "out is a Tensor"),
        (
            quantize(torch.zeros(2, 150, 192)),
            ValueError,
            r"out has shape \[2, 150, 192\]; expected \[2, 150, 224\]",
        ),
        (quantize(torch.zeros(2, 150, 224), scale_layout="rowmajor"), ValueError, "rowmajor scales"),
    ],
)
def test_refusals_of_quantized_batches(out, error, match):
    with pytest.raises(error, match=match):
        gemm(*make_batch(2, (150, 224, 288)), out=out, out_dtype="nvfp4")


def clean(t):
    """Returns the tensor with zeros in the padding rows of the scales, which nothing writes."""
    return NVFP4Tensor(
        t.data, to_blocked(from_blocked(t.scale, t.shape[0], t.shape[1] // 16)), t.global_scale, t.shape
    )


def test_no_rows():
    x, w = quantize(torch.zeros(0, 64)), quantize(torch.ones(8, 64))
    assert gemm(x.data, w.data, x.scale, w.scale, backend="emulator").shape == (0, 8)


def test_the_same_config_as_of_the_list():
    """The choice for dense shapes is that for a list of the same sizes."""
    sizes = ((128, 4096, 7168),) * 2
    batched = make_plan(GroupedProblem(sizes, "batched"), "sm_100a", 148, KernelConfig())
    assert (
        batched.kernel.key
        == KernelKey("sm_100a", KernelConfig(), 1, torch.bfloat16, False, "batched").validated()
    )


def test_refusals():
    a, b, a_scale, b_scale, alpha = make_batch(2)
    for error, part, call in (
        (ValueError, r"b has shape \[200, 144\] and a \[150, 144, 2\]", (a, b[:, :, 0], a_scale, b_scale)),
        (ValueError, "L=0", (a[:, :, :0], b[:, :, :0], a_scale[:0], b_scale[:0])),
        (ValueError, "K=288 and b has K=256", (a, b[:, :128], a_scale, b_scale[:, :, :4].contiguous())),
        (ValueError, "a_scale: blocked scales of 2 batches", (a, b, a_scale[:1], b_scale)),
        (ValueError, "batches .* bytes apart", (a, b, torch.cat([a_scale, a_scale])[::2], b_scale)),
        (ValueError, "alpha has shape", (a, b, a_scale, b_scale, alpha.repeat(2))),
        (TypeError, "a is a list", ([a], b, a_scale, b_scale)),
    ):
        with pytest.raises(error, match=part):
            gemm(*call)
    out = poisoned(150, 200, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="stride"):
        gemm(a, b, a_scale, b_scale, out=out)
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        gemm(a, b, a_scale, b_scale, alpha.requires_grad_())

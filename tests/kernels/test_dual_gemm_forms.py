"""Ragged and masked dual GEMMs, weights of every layout, and limits, on the emulator."""

from dataclasses import replace

import cases
import device_groups_check
import pytest
import torch
from flat_parts import dual_gemm, grouped_dual_gemm
from oracle import assert_bitwise_equal, bits
from quantized_check import assert_quantized

from nvfp4_cute import ConfigError, KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.scale_layout import from_blocked, to_blocked
from nvfp4_cute.planning.arch import sm90
from nvfp4_cute.reference import grouped_dual_gemm_reference, separate_weights

EVERY_FAMILY = pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_120a", "sm_90a"))]
)
LAYOUTS = ("concatenated", "interleaved_64_up_first", "interleaved_32_gate_first")
ALPHAS = ([2.0**-7, 2.0**-6, 2.0**-7, 0.0, 2.0**-5], [-(2.0**-6), 2.0**-5, 0.5, 1.0, 2.0**-6])
ROWS = (40, 0, 130, 1, 0)
N, K = 256, 320


def close(got, want):
    """Within one unit of bfloat16, because the error of the approximate exponential may change a rounding."""
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-7, atol=1e-6)


def operands(sizes, seed=4):
    """a, b1, b2, a_scale, b1_scale, b2_scale, with exact sums."""
    case = cases.Case("dual", sizes, seed)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=seed + 50))
    return [first.a, first.b, second.b, first.a_scale, first.b_scale, second.b_scale]


def join(gate, up, gate_scale, up_scale, layout):
    """Joins two operands' rows and blocked scales into one operand, the inverse of ``separate_weights``."""
    n, k_blocks = len(gate), gate.shape[1] // 8
    width = {"concatenated": n, "interleaved_64_up_first": 64, "interleaved_32_gate_first": 32}[layout]
    parts = [(gate, gate_scale), (up, up_scale)]
    if layout == "interleaved_64_up_first":
        parts.reverse()
    rows = torch.stack([x.reshape(-1, width, x.shape[1]) for x, _ in parts], 1).flatten(0, 2)
    plain = [from_blocked(s.view(torch.uint8), n, k_blocks).view(-1, width, k_blocks) for _, s in parts]
    return rows.contiguous(), to_blocked(torch.stack(plain, 1).flatten(0, 2)).flatten()


def joined(listed, layout):
    """Joins b1 and b2 into one operand."""
    a, b1, b2, a_scale, b1_scale, b2_scale = listed
    pairs = [join(*parts, layout) for parts in zip(b1, b2, b1_scale, b2_scale, strict=True)]
    return [a, [b for b, _ in pairs], None, a_scale, [s for _, s in pairs], None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_what_they_say(layout):
    listed = operands(((3, N, K),))
    _, (b,), _, _, (scale,), _ = joined(listed, layout)
    parts = separate_weights(b, scale, layout)
    for (rows, s), i in zip(parts, (1, 2), strict=True):
        assert_bitwise_equal(rows, listed[i][0])
        assert_bitwise_equal(from_blocked(s, N, K // 16), from_blocked(listed[i + 3][0], N, K // 16))
    first = {"concatenated": 1, "interleaved_64_up_first": 2, "interleaved_32_gate_first": 1}[layout]
    assert_bitwise_equal(b[:32], listed[first][0][:32])
    if layout == "interleaved_64_up_first":
        assert_bitwise_equal(b[64:128], listed[1][0][:64])
        assert_bitwise_equal(b[128:192], listed[2][0][64:128])
    if layout == "interleaved_32_gate_first":
        assert_bitwise_equal(b[32:64], listed[2][0][:32])
        assert_bitwise_equal(b[64:96], listed[1][0][32:64])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "arch", "name", "mode"),
    [
        ("concatenated", "sm_100a", "t128x64x256_s2a3_2cta_swap_p4", "eager"),
        ("interleaved_64_up_first", "sm_100a", "t128x128x256_s0a3_p2", "lazy"),
        ("interleaved_64_up_first", "sm_100a", "t128x256x256_s2a2_p2", "eager"),
        ("interleaved_32_gate_first", "sm_100a", "t128x256x256_s0a2_2cta_p2", "random:1"),
        ("interleaved_32_gate_first", "sm_100a", "t128x64x256_s0a3_p2", "eager"),
        ("interleaved_32_gate_first", "sm_120a", "t128x64x128_s0a2_p2", "random:1"),
        ("interleaved_64_up_first", "sm_90a", "t128x96x128_s2a1_swap_p3", "random:1"),
        *(
            pytest.param(*variant, marks=pytest.mark.slow)
            for variant in (
                ("interleaved_64_up_first", "sm_120a", "t128x32x256_s2a2_swap_p3", "lazy"),
                ("concatenated", "sm_120a", "t128x32x256_s0a2_swap_p4", "eager"),
                ("interleaved_64_up_first", "sm_120a", "t128x128x128_s0a1_p2", "eager"),
                ("interleaved_64_up_first", "sm_120a", "t128x64x128_s0a1_swap_p2", "random:1"),
                ("interleaved_32_gate_first", "sm_120a", "t128x8x256_s0a2_swap_p3", "lazy"),
                ("interleaved_32_gate_first", "sm_120a", "t128x128x128_s0a1_p2", "eager"),
                ("interleaved_32_gate_first", "sm_90a", "t128x32x128_s0a1_swap_k2_p4", "lazy"),
                ("concatenated", "sm_90a", "t64x128x128_s0a1_swap_p5", "eager"),
            )
        ),
    ],
)
def test_weights_in_one_operand(layout, arch, name, mode):
    """The bits of separate weights, in one launch, with groups of several tiles, one row, and none."""
    listed = operands(((150, 384, K), (1, 128, 256), (0, 128, 256)))
    alphas = [factors[:3] for factors in ALPHAS]
    separate = KernelConfig((128, 64, 256))
    want = grouped_dual_gemm(*listed, *alphas, config=separate, backend="emulator")
    with observe(mode=mode, check=True) as observer:
        got = grouped_dual_gemm(
            *joined(listed, layout), *alphas, weight_layout=layout, config=KernelConfig.from_name(name),
            backend=f"emulator:{arch}",
        )  # fmt: skip
    assert len(observer.stats) == 1
    for x, y in zip(got, want, strict=True):
        assert_bitwise_equal(x, y)
    by_reference = grouped_dual_gemm(*joined(listed, layout), *alphas, weight_layout=layout)
    for x, y in zip(got, by_reference, strict=True):
        close(x, y)


def on_device(form, layout, slack=5):
    """Arguments of a ragged or masked call, and the same groups as lists."""
    sizes = tuple((m, N, K) for m in ROWS)
    first = device_groups_check.operands(form, ROWS, n=N, k=K, seed=4, slack=slack, has_alpha=False)
    listed = operands(sizes)
    arguments = {name: first[name] for name in ("a", "a_scale", "offs", "masked_m") if name in first}
    whole = listed if layout == "separate" else joined(listed, layout)
    for i, name in ((1, "b1"), (2, "b2"), (4, "b1_scale"), (5, "b2_scale")):
        arguments[name] = None if whole[i] is None else torch.stack(whole[i])
    return arguments | {"weight_layout": layout}, listed


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "arch"),
    [
        *((layout, "sm_100a") for layout in ("separate", *LAYOUTS)),
        ("separate", "sm_120a"),
        *(pytest.param(layout, "sm_120a", marks=pytest.mark.slow) for layout in LAYOUTS),
        *(pytest.param(layout, "sm_90a", marks=pytest.mark.slow) for layout in ("separate", *LAYOUTS[1:])),
    ],
)
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_groups_on_the_device(form, layout, arch):
    """Every group's rows equal the list form's, and other rows stay unchanged. The device reads sizes and factors."""
    arguments, listed = on_device(form, layout)
    factors = [torch.tensor(alpha) for alpha in ALPHAS]
    want = grouped_dual_gemm(*listed, *factors, backend="emulator", config=KernelConfig((128, 64, 256)))
    shape = (sum(ROWS) + 5, N) if form == "ragged" else (len(ROWS), max(ROWS) + 5, N)
    out = torch.full(shape, 0x7FDB, dtype=torch.int16).view(torch.bfloat16)
    with observe(check=True) as observer:
        got = grouped_dual_gemm(
            **arguments, alpha1=factors[0], alpha2=factors[1], out=out, backend=f"emulator:{arch}"
        )
    assert got is out and len(observer.stats) == 1
    rows = got if form == "masked" else got[: sum(ROWS)].split(ROWS)
    for part, y in zip(rows, want, strict=True):
        assert_bitwise_equal(part[: len(y)], y)
        assert (bits(part[len(y) :]) == 0x7FDB).all()
    by_reference = grouped_dual_gemm(**arguments, alpha1=factors[0], alpha2=factors[1])
    for part, y in zip(
        by_reference if form == "masked" else by_reference.split((*ROWS, 5)), want, strict=False
    ):
        close(part[: len(y)], y)


@EVERY_FAMILY
def test_quantized_results_of_groups_on_the_device(arch):
    """Ragged rows without padding, a factor per group, interleaved weights, NVFP4 results: all in one launch."""
    arguments, _ = on_device("ragged", "interleaved_64_up_first")
    factors = [torch.tensor(alpha) for alpha in ALPHAS]
    options = {"alpha1": factors[0], "alpha2": factors[1], "backend": f"emulator:{arch}"}
    sums = grouped_dual_gemm(**arguments, **options, out_dtype=torch.float32)
    global_scale = torch.tensor([0.5, 1.0, 2.0, 3.0, 1.0])
    data, scale = grouped_dual_gemm(**arguments, **options, out_dtype="nvfp4", out_global_scale=global_scale)
    start = block = 0
    for g, m in enumerate(ROWS):
        blocks = -(-m // 128)
        assert_quantized(
            data[start : start + m], scale[block : block + blocks], sums[start : start + m], global_scale[g]
        )
        start, block = start + m, block + blocks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@EVERY_FAMILY
def test_limit(arch, activation):
    """Both products are clamped before they are combined, and NaN stays NaN."""
    listed = operands(((40, 128, 256),))
    alphas, limit = ([2.0**-3], [2.0**-2]), 2.5
    options = {"activation": activation, "out_dtype": torch.float32, "limit": limit}
    backend = f"emulator:{arch}"
    (got,) = grouped_dual_gemm(*listed, *alphas, **options, backend=backend)
    (want,) = grouped_dual_gemm_reference(*listed, *alphas, torch.float64, activation=activation, limit=limit)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)
    free = grouped_dual_gemm(*listed, *alphas, activation=activation, out_dtype=torch.float32)[0]
    assert (free - want).abs().max() > 1
    (nan,) = grouped_dual_gemm(*listed, [float("nan")], alphas[1], **options, backend=backend)
    assert nan.isnan().all()


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("layout", ["separate", *LAYOUTS])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_gpu(layout, activation):
    """The list form equals the reference, and NVFP4 results are the kernel's quantized float32 results."""
    listed = operands(((150, 384, K), (1, 128, 256), (0, 128, 256), (300, 128, 256)))
    alphas = [factors[:4] for factors in ALPHAS]
    whole = listed if layout == "separate" else joined(listed, layout)
    on_gpu = [None if tensors is None else [x.cuda() for x in tensors] for tensors in whole]
    options = {"activation": activation, "weight_layout": layout, "limit": 3.0}
    want = grouped_dual_gemm(*whole, *alphas, **options)
    for got, expected in zip(grouped_dual_gemm(*on_gpu, *alphas, **options), want, strict=True):
        close(got.cpu(), expected)
    sums = grouped_dual_gemm(*on_gpu, *alphas, **options, out_dtype=torch.float32)
    for got, x in zip(grouped_dual_gemm(*on_gpu, *alphas, **options, out_dtype="nvfp4"), sums, strict=True):
        assert_quantized(got.data.cpu(), got.scale.cpu(), x.cpu(), None)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_gpu_groups_on_the_device(form):
    arguments, _ = on_device(form, "interleaved_64_up_first")
    factors = [torch.tensor(alpha) for alpha in ALPHAS]
    want = grouped_dual_gemm(**arguments, alpha1=factors[0], alpha2=factors[1])
    moved = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    got = grouped_dual_gemm(**moved, alpha1=factors[0].cuda(), alpha2=factors[1].cuda()).cpu()
    if form == "ragged":
        close(got[: sum(ROWS)], want[: sum(ROWS)])
    else:
        for part, expected, m in zip(got, want, ROWS, strict=True):
            close(part[:m], expected[:m])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocated_nvfp4_results_have_the_shapes_of_the_results(layout):
    """The number of result columns is half the number of joint rows."""
    listed = operands(((20, 128, 256), (3, 256, 256)))
    for got, (m, n) in zip(
        grouped_dual_gemm(*joined(listed, layout), weight_layout=layout, out_dtype="nvfp4"),
        ((20, 128), (3, 256)),
        strict=True,
    ):
        assert got.shape == (m, n) and tuple(got.scale.shape) == (1, n // 64, 32, 4, 4)


def test_one_product_of_two_halves():
    """dual_gemm also takes the layouts."""
    listed = operands(((20, 128, 256),))
    want = dual_gemm(*(x[0] for x in listed), 0.5, 0.25)
    for layout in LAYOUTS:
        a, b, _, a_scale, scale, _ = joined(listed, layout)
        got = dual_gemm(a[0], b[0], None, a_scale[0], scale[0], None, 0.5, 0.25, weight_layout=layout)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"weight_layout": "gate_up"},
            ValueError,
            'weight_layout=.gate_up. is unknown; use one of "separate"',
        ),
        ({"weight_layout": "concatenated"}, TypeError, "b1 holds both; pass None for b2"),
        ({"b2": None, "b2_scale": None}, TypeError, "pass b2 and b2_scale"),
        ({"limit": -1.0}, ValueError, "limit=-1.0 is not a positive number"),
        (
            {"weight_layout": "concatenated", "b2": None, "b2_scale": None},
            ValueError,
            "group 0: b1 has 128 rows.*a multiple of 256",
        ),
    ],
)
def test_refusals(change, error, match):
    names = ("a", "b1", "b2", "a_scale", "b1_scale", "b2_scale")
    arguments = dict(zip(names, operands(((4, 128, 256),)), strict=True))
    with pytest.raises(error, match=match):
        grouped_dual_gemm(**{**arguments, **change})


def test_what_no_kernel_computes_is_refused():
    listed = operands(((4, 96, 256),))
    whole = [torch.cat([listed[1][0], listed[2][0]])], [torch.zeros(2 * 4 * 512, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="192 rows.*whole periods of 128"):
        grouped_dual_gemm(
            listed[0], whole[0], None, listed[3], whole[1], None, weight_layout="interleaved_64_up_first"
        )
    variant = {"activation": "silu", "weight_layout": "interleaved_64_up_first"}
    with pytest.raises(ConfigError, match="swap_ab with interleaved weights"):
        KernelKey("sm_100a", KernelConfig(swap_ab=True), 1, torch.float16, False, **variant).validated()
    with pytest.raises(ConfigError, match="N tile 64 with weight_layout"):
        KernelKey("sm_100a", KernelConfig((128, 64, 256)), 1, torch.float16, False, **variant).validated()
    with pytest.raises(ConfigError, match="N tile 64 with weight_layout.*N tile 128 or swap_ab"):
        KernelKey(
            "sm_120a", KernelConfig((128, 64, 128), num_acc_stage=1), 1, torch.float16, False, **variant
        ).validated()
    with pytest.raises(ConfigError, match="64 rows of weights each, of 1 operand; use M tile 128"):
        half = replace(sm90.DEFAULT_CONFIG, cta_tile_shape_mnk=(64, 128, 128))
        KernelKey("sm_90a", half, 1, torch.float16, False, **variant).validated()

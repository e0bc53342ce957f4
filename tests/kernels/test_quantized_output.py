"""NVFP4 output of the kernels of every family: the bits of ``formats.quantize`` of the float32 results."""

import math
from dataclasses import replace

import cases
import device_groups_check
import pytest
import torch
from list_checks import check_list_operands
from oracle import assert_bitwise_equal
from quantized_check import POISON, assert_quantized, poisoned_out

from nvfp4_cute import ConfigError, KernelConfig, NVFP4Tensor, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.operands.grouped import Result, Weights, check_device_groups
from nvfp4_cute.ops.parts import dual_gemm, grouped_dual_gemm, grouped_gemm
from nvfp4_cute.planning.arch import sm90, sm100, sm120
from nvfp4_cute.reference import expand_operand

EVERY_FAMILY = pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_120a", "sm_90a"))]
)
# Tiles that are partial on both sides, N that ends within a slice and within a scale block, one row, an empty group
TILES = cases.Case("tiles", ((270, 272, 512), (1, 48, 768), (0, 64, 256)), 11, has_alpha=True)
SMALL = cases.Case("small", ((70, 112, 256), (3, 64, 288)), 5, has_alpha=True)
GLOBAL_SCALES = (0.37, 3.0, 1.0)
CONFIGS = (
    "t128x128x256_s0a2_p2",
    "t128x64x256_s2a3_swap_p2",
    "t128x256x256_s0a2_2cta_p2",
    "t128x64x256_s0a4_swap_p3",
    "t128x192x256_s0a2_2cta_swap_p4",
    "t128x64x256_s0a2_swap_k2_p4",
    "t128x64x256_s0a2_k2_p4",
    "t128x64x256_s2a2_2cta_swap_m2_p4",
)
SM90_CONFIGS = ("t128x32x128_s0a1_swap_p2", "t128x96x128_s2a1_swap_p2", "t128x8x128_s0a1_swap_k2_p8")
SM120_CONFIGS = (
    "t128x64x128_s0a1_p2",
    "t128x16x256_s2a2_swap_p3",
    "t128x128x128_s0a1_p2",
    "t128x128x128_s0a2_p2",
    "t128x32x256_s0a2_p2",
    "t128x64x128_s0a1_swap_p2",
    "t128x32x256_s0a2_swap_p4",
)


def check(case, operands, got, sums, factors):
    """Compares ``got`` of the list form with the float32 results ``sums``."""
    for g, (result, x) in enumerate(zip(got, sums, strict=True)):
        factor = None if factors is None else torch.tensor(factors[g])
        assert result.shape == x.shape and (result.global_scale is None) == (factor is None)
        assert_quantized(result.data, result.scale, x, factor, POISON)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mode",
    [
        "eager",
        pytest.param("lazy", marks=pytest.mark.slow),
        pytest.param("random:1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("sm_100a", name) for name in CONFIGS),
        *(("sm_120a", name) for name in SM120_CONFIGS[:2]),
        *(pytest.param("sm_120a", name, marks=pytest.mark.slow) for name in SM120_CONFIGS[2:]),
        *(pytest.param("sm_90a", name, marks=pytest.mark.slow) for name in SM90_CONFIGS),
    ],
)
def test_every_tile_shape_is_right_and_clean(arch, name, mode):
    """One launch without hazards, along rows and across lanes, that writes nothing else."""
    a, b, a_scale, b_scale, alpha = cases.make_operands(TILES)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    out = poisoned_out(TILES.sizes)
    with observe(mode=mode, check=True) as observer:
        got = grouped_gemm(
            a, b, a_scale, b_scale, alpha=alpha, out=out, out_dtype="nvfp4",
            out_global_scale=GLOBAL_SCALES, config=KernelConfig.from_name(name), backend=f"emulator:{arch}",
        )  # fmt: skip
    assert len(observer.stats) == 1
    assert all(x.data.data_ptr() == y.data.data_ptr() for x, y in zip(got, out, strict=True))
    check(TILES, (a, b), got, sums, GLOBAL_SCALES)


@pytest.mark.parametrize("mode", ["lazy", "random:1"])
@EVERY_FAMILY
def test_same_bits_whenever_asynchronous_operations_happen(arch, mode):
    a, b, a_scale, b_scale, alpha = cases.make_operands(SMALL)
    options = {"alpha": alpha, "out_dtype": "nvfp4", "backend": f"emulator:{arch}"}
    expected = grouped_gemm(a, b, a_scale, b_scale, **options, out=poisoned_out(SMALL.sizes))
    with observe(mode=mode, check=True):
        actual = grouped_gemm(a, b, a_scale, b_scale, **options, out=poisoned_out(SMALL.sizes))
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got.data, want.data, mode=mode)
        assert_bitwise_equal(got.scale, want.scale, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("sm_100a", f"t128x64x256_s0a2{swap}") for swap in ("", "_swap")),
        *(
            pytest.param("sm_120a", f"t128x64x256_s0a2{swap}", marks=pytest.mark.slow)
            for swap in ("", "_swap")
        ),
        pytest.param("sm_90a", "t128x32x128_s0a1_swap", marks=pytest.mark.slow),
    ],
)
def test_hostile_results(arch, name):
    """Zeros, infinities, NaN, subnormals and overflow reach the blocks through alpha; global scales at their limits."""
    alphas = (math.inf, -math.inf, math.nan, 1e-42, 3e38, -0.0, 2.0**-13, 1e-30, math.inf, 1e37)
    factors = (1.0, 3e-38, 0.5, 2.0**-126, 7e37, 1.0, 1.0, 1e-33, 3.4e38, 3.4e38)
    case = cases.Case("hostile", ((18, 64, 64),) * len(alphas), 3)
    a, b, a_scale, b_scale, _ = cases.make_operands(case)
    for data in a:  # rows whose sums are zero: infinity times zero is NaN
        data[5:9] = 0
    alpha = torch.tensor(alphas)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    assert all(x.isinf().any() for x in sums[:2]) and sums[0].isnan().any()
    got = grouped_gemm(
        a, b, a_scale, b_scale, alpha=alpha, out=poisoned_out(case.sizes), out_dtype="nvfp4",
        out_global_scale=torch.tensor(factors), backend=f"emulator:{arch}",
        config=KernelConfig.from_name(name),
    )  # fmt: skip
    check(case, None, got, sums, factors)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", [*sm100.ARCHS[1:], *sm120.ARCHS, *sm90.ARCHS])
def test_other_architectures(arch):
    a, b, a_scale, b_scale, alpha = cases.make_operands(SMALL)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    out = poisoned_out(SMALL.sizes)
    options = {"out_dtype": "nvfp4", "backend": f"emulator:{arch}"}
    check(SMALL, None, grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out=out, **options), sums, None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_100a", "t128x128x256_s0a2_p3"),
        ("sm_100a", "t128x64x256_s2a2_swap_p3"),
        pytest.param("sm_120a", "t128x64x256_s0a2_p3", marks=pytest.mark.slow),
        pytest.param("sm_120a", "t128x32x256_s2a2_swap_p3", marks=pytest.mark.slow),
        pytest.param("sm_90a", "t128x48x128_s0a1_swap_p3", marks=pytest.mark.slow),
    ],
)
def test_groups_on_the_device(form, arch, name):
    """Rows without padding, and a factor per group for the product and its global scale. The next layer reads the result."""
    rows = (0, 40, 129, 1, 0)
    arguments = device_groups_check.operands(form, rows, n=208, k=320, slack=9, out_dtype=torch.float32)
    factors = torch.tensor([0.5, 0.37, 3.0, 1.0, 2.0])
    sums = device_groups_check.run(arguments, "reference")
    del arguments["out"], arguments["out_dtype"]
    groups = len(rows)
    total = sum(rows) + 9
    atoms = (total // 128 + groups, 4) if form == "ragged" else (groups, 2, 4)
    lead = (total,) if form == "ragged" else (groups, max(rows) + 9)
    out = (
        torch.full((*lead, 112), POISON, dtype=torch.uint8)[..., :104],
        torch.full((*atoms, 32, 4, 4), POISON, dtype=torch.uint8),
    )
    with observe(check=True) as observer:
        data, scale = grouped_gemm(
            **arguments, out=out, out_dtype="nvfp4", out_global_scale=factors,
            config=KernelConfig.from_name(name), backend=f"emulator:{arch}",
        )  # fmt: skip
    assert len(observer.stats) == 1 and data.data_ptr() == out[0].data_ptr()
    start = block = 0
    for g, m in enumerate(rows):
        blocks = -(-m // 128)
        if form == "ragged":
            part = slice(start, start + m), scale[block : block + blocks]
        else:
            part = (g, slice(0, m)), scale[g, :blocks]
        assert_quantized(data[part[0]], part[1], sums[part[0]], factors[g], POISON)
        start, block = start + m, block + blocks
    if form == "ragged":
        assert (scale.view(torch.uint8)[block:] == POISON).all() and (data[start:] == POISON).all()
    by_reference = grouped_gemm(**arguments, out_dtype="nvfp4", out_global_scale=factors)
    assert [tuple(x.shape) for x in by_reference] == [tuple(data.shape), tuple(scale.shape)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_100a", "t128x64x256_s0a3"),
        ("sm_100a", "t128x64x256_s0a3_swap"),
        ("sm_100a", "t128x64x256_s0a3_2cta_swap"),
        *(
            pytest.param("sm_120a", name, marks=pytest.mark.slow)
            for name in (
                "t128x128x128_s0a1",
                "t128x64x128_s0a2",
                "t128x32x128_s0a2_swap",
                "t128x64x128_s0a1_swap",
                "t128x16x256_s0a2_swap",
            )
        ),
        pytest.param("sm_90a", "t64x64x128_s0a1_swap", marks=pytest.mark.slow),
        pytest.param("sm_90a", "t64x16x128_s0a1_swap_k4", marks=pytest.mark.slow),
    ],
)
def test_dual_gemm(arch, name):
    """The result is that of quantize for the same kernel's float32 output."""
    case = replace(SMALL, has_alpha=False)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=9))
    operands = (first.a, first.b, second.b, first.a_scale, first.b_scale, second.b_scale)
    alphas = ([2.0**-7] * 2, [-(2.0**-6)] * 2)
    options = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    sums = grouped_dual_gemm(*operands, *alphas, out_dtype=torch.float32, **options)
    out = poisoned_out(case.sizes)
    with observe(check=True):
        got = grouped_dual_gemm(
            *operands, *alphas, out=out, out_dtype="nvfp4", out_global_scale=GLOBAL_SCALES[:2], **options
        )
    check(case, None, got, sums, GLOBAL_SCALES)
    single = dual_gemm(
        *(tensors[0] for tensors in operands), 2.0**-7, -(2.0**-6), out_dtype="nvfp4",
        out_global_scale=GLOBAL_SCALES[0], **options,
    )  # fmt: skip
    assert_quantized(single.data, single.scale, sums[0], torch.tensor(GLOBAL_SCALES[0]))


@pytest.mark.slow
@EVERY_FAMILY
def test_dual_gemm_of_batches(arch):
    """Each batch equals a separate call; a given output is written."""
    case = cases.Case("batch", ((70, 112, 256),) * 2, 5)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=9))
    a, b1, b2 = (torch.stack(x).permute(1, 2, 0) for x in (first.a, first.b, second.b))
    scales = [torch.stack(x).view(2, -1, 4, 32, 4, 4) for x in (first.a_scale, first.b_scale, second.b_scale)]
    backend = f"emulator:{arch}"
    options = {"out_dtype": "nvfp4", "out_global_scale": 0.37, "backend": backend}
    data = torch.zeros(2, 70, 64, dtype=torch.uint8)[..., :56]
    out = NVFP4Tensor(data, torch.zeros(2, 1, 2, 32, 4, 4, dtype=torch.uint8), None, (2, 70, 112))
    with observe(check=True) as observer:
        got = dual_gemm(a, b1, b2, *scales, 2.0**-7, out=out, **options)
    assert len(observer.stats) == 1 and got.data.data_ptr() == data.data_ptr() and got.shape == out.shape
    for batch in range(2):
        alone = [x[:, :, batch] for x in (a, b1, b2)] + [x[batch] for x in scales]
        sums = dual_gemm(*alone, 2.0**-7, out_dtype=torch.float32, backend=backend)
        assert_quantized(got.data[batch], got.scale[batch], sums, torch.tensor(0.37), 0)


def quantization_bound(x, global_scale):
    """Largest |x - dequantize(quantize(x))| of every element [M, N], as ``formats.quantize`` states it."""
    amax = x.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True).expand(-1, -1, 16).flatten(-2)
    return amax / 6 * (1 + 2**-4) + 6 * 2.0**-10 * global_scale


@pytest.mark.slow
@EVERY_FAMILY
def test_layers_chain_within_the_bound(arch):
    """Two layers in 4 bits and a float64 chain: the bound of the first quantization, carried through the second layer."""
    torch.manual_seed(0)
    tokens = [quantize(torch.randn(m, 256)) for m in (37, 150)]
    weights = [[quantize(torch.randn(n, k) / k**0.5) for _ in tokens] for n, k in ((192, 256), (64, 192))]
    layers = [([w.data for w in layer], [w.scale for w in layer]) for layer in weights]
    factors = [2.0**-8, 2.0**-9]
    a, a_scale = [x.data for x in tokens], [x.scale for x in tokens]
    hidden = grouped_gemm(
        a, layers[0][0], a_scale, layers[0][1], out_dtype="nvfp4",
        out_global_scale=factors, backend=f"emulator:{arch}",
    )  # fmt: skip
    out = grouped_gemm(
        [h.data for h in hidden], layers[1][0], [h.scale for h in hidden], layers[1][1],
        alpha=torch.tensor(factors), out_dtype=torch.float32, backend=f"emulator:{arch}",
    )  # fmt: skip
    for g, result in enumerate(out):
        first, second = (expand_operand(layer[0][g], layer[1][g].flatten(), "blocked") for layer in layers)
        exact = expand_operand(a[g], a_scale[g].flatten(), "blocked") @ first.T
        error = (result.double() - exact @ second.T).abs()
        # Sums of up to 256 products in float32 add an error of 2^-14 of the magnitudes.
        rounding = 2.0**-14 * (exact.abs() @ second.abs().T)
        bound = quantization_bound(exact, factors[g]) @ second.abs().T + rounding
        assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"
        # The error is that of quantization: e2m1 in blocks of 16 costs about a tenth.
        assert error.square().mean() < 0.15**2 * (exact @ second.T).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (config, activation)
        for candidates, activation in ((sm100.CANDIDATES, None), (sm100.DUAL_CANDIDATES, "silu"))
        for config in candidates[:: len(candidates) // 4]
    ],
    ids=str,
)
def test_machine_code(config, activation):
    """No candidate spills. A block takes eight conversions of two values, and its scale one."""
    kernel = get_kernel(KernelKey("sm_100a", config, 2, "nvfp4", True, activation=activation).validated())
    assert kernel.resources.stack_bytes == 0
    assert kernel.ptx.count("cvt.rn.satfinite.e2m1x2.f32") == 16
    assert kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 2
    assert kernel.ptx.count("shfl.sync.bfly") == (80 if config.swap_ab else 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_dual", [False, True])
def test_machine_code_of_sm120(is_dual):
    """No candidate spills. A block takes eight conversions of two values and 16 shuffles, and its scale one conversion."""
    for config in sm120.candidates(2 if is_dual else 1, out_format=NVFP4):
        key = KernelKey(
            "sm_120a", config, 2, "nvfp4", True, activation="silu" if is_dual else None
        ).validated()
        kernel = get_kernel(key)
        assert kernel.resources.stack_bytes == 0, config
        blocks = kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32")
        assert kernel.ptx.count("cvt.rn.satfinite.e2m1x2.f32") == 8 * blocks
        assert kernel.ptx.count("shfl.sync.bfly") == 16 * blocks
        assert kernel.ptx.count("movmatrix") == (16 * blocks if config.swap_ab else 0)


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("name", SM90_CONFIGS)
def test_gpu(name):
    *operands, alpha = cases.make_operands(TILES)
    sums = grouped_gemm(*operands, alpha=alpha, out_dtype=torch.float32)
    lists = [[x.cuda() for x in tensors] for tensors in operands]
    got = grouped_gemm(
        *lists, alpha=alpha.cuda(), out_dtype="nvfp4", out_global_scale=GLOBAL_SCALES,
        config=KernelConfig.from_name(name),
    )  # fmt: skip
    for g, (result, x) in enumerate(zip(got, sums, strict=True)):
        assert_quantized(result.data.cpu(), result.scale.cpu(), x, torch.tensor(GLOBAL_SCALES[g]))


def test_a_prepared_call_writes_addresses_where_the_launch_reads_them():
    a, b, a_scale, b_scale, alpha = cases.make_operands(SMALL)
    factors = torch.tensor(GLOBAL_SCALES[:2])
    problem, operands = check_list_operands(
        a, b, a_scale, b_scale, alpha, out_dtype="nvfp4", out_global_scale=factors
    )
    plan = make_plan(problem, "sm_100a", 148, KernelConfig(), for_emulator=True)
    tensors = [*a, *b, *a_scale, *b_scale, alpha, factors, *operands.out, *operands.out_scale]
    table = plan.table(operands).reshape(-1)
    assert table[plan.address_places(operands)].tolist() == [t.data_ptr() for t in tensors]

    with pytest.raises(ValueError, match="N=200 is not a positive multiple of 16"):
        check_ragged(device_groups_check.operands("ragged", (3, 40)))
    arguments = device_groups_check.operands("ragged", (3, 40), n=64)
    problem, operands, results = check_ragged(arguments, factors)
    launch = GroupedTask(problem, operands).launch(B200.gpu, for_emulator=True)
    inputs = [arguments[name] for name in ("a", "b", "a_scale", "b_scale", "offs", "alpha")]
    assert launch.table.reshape(-1)[launch.places].tolist() == [
        t.data_ptr() for t in [*inputs, factors, *results]
    ]


def check_ragged(arguments, factors=None):
    """Checks a ragged call with NVFP4 results."""
    weights = [Weights("b", arguments["b"], arguments["b_scale"], "alpha", arguments["alpha"])]
    result = Result(None, "nvfp4", factors)
    return check_device_groups(
        arguments["a"], arguments["a_scale"], weights, (arguments["offs"], None), result
    )


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"out_global_scale": torch.ones(3)}, ValueError, r"out_global_scale has shape \[3\]"),
        ({"out_global_scale": [1.0]}, ValueError, "out_global_scale has 1 entries for 2 groups"),
        ({"out_dtype": torch.float16, "out_global_scale": [1.0, 1.0]}, ValueError, 'goes with out_dtype=.nvfp4'),
        ({"out_dtype": "fp4"}, ValueError, "out_dtype='fp4' is not supported; use torch.float16"),
        ({"out": [torch.empty(70, 56), torch.empty(3, 32)]}, TypeError, "a list of NVFP4Tensor"),
        ({"out": poisoned_out(((70, 96, 1), (3, 64, 1)))}, ValueError, r"group 0: data of out has shape \[70, 48\]"),
        ({"out": poisoned_out(SMALL.sizes)[:1] * 2}, ValueError, "group 1: data of out"),
    ],
)  # fmt: skip
def test_refusals(change, error, match):
    a, b, a_scale, b_scale, _ = cases.make_operands(SMALL)
    with pytest.raises(error, match=match):
        grouped_gemm(a, b, a_scale, b_scale, **{"out_dtype": "nvfp4", **change})


@pytest.mark.parametrize(
    ("name", "least"), [("t128x8x256_s0a2_swap", 16), ("t128x16x256_s0a1_swap", 32), ("t128x16x256_s0a2", 32)]
)
def test_a_block_of_two_warps_is_refused(name, least):
    with pytest.raises(ConfigError, match=f"two warps would share 16 columns of a block.*N tile of {least}"):
        KernelKey("sm_120a", KernelConfig.from_name(name), 1, "nvfp4", False).validated()

"""NVFP4, MXFP4 and MXFP8 output of the kernels of every family: the bits of ``formats.quantize`` of the float32 results."""

import math
from dataclasses import replace

import cases
import device_groups_check
import flat_parts as on_parts
import pytest
import torch
from flat_parts import dual_gemm, gemm, grouped_dual_gemm, grouped_gemm
from format_cases import Groups
from fp8_check import relu2_of
from list_checks import check_list_operands
from oracle import assert_bitwise_equal
from quantized_check import POISON, assert_quantized, poisoned_out

import nvfp4_cute as nv
from nvfp4_cute import ConfigError, KernelConfig, NVFP4Tensor, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.operands.grouped import Result, Weights, check_device_groups
from nvfp4_cute.planning.arch import sm90, sm100, sm120
from nvfp4_cute.planning.arch.sm100.limits import skips_columns
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Gate
from nvfp4_cute.reference import expand_operand

EVERY_FAMILY = pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_120a", "sm_90a"))]
)
MX = (nv.MXFP8_E4M3, nv.MXFP4, nv.MXFP8_E5M2)
MODES = ("eager", "lazy", "random:1")
# Tiles that are partial on both sides, N that ends within a slice and within a scale block, one row, an empty group
TILES = cases.Case("tiles", ((270, 272, 512), (1, 48, 768), (0, 64, 256)), 11, has_alpha=True)
SMALL = cases.Case("small", ((70, 112, 256), (3, 64, 288)), 5, has_alpha=True)
# Sizes like these for blocks of 32.
MX_TILES = cases.Case("tiles", ((270, 288, 512), (1, 32, 768), (0, 64, 256)), 11, has_alpha=True)
MX_SMALL = cases.Case("small", ((70, 96, 256), (3, 160, 288)), 5, has_alpha=True)
GLOBAL_SCALES = (0.37, 3.0, 1.0)
CONFIGS = {
    "sm_100a": (
        "t128x128x256_s0a2_p2", "t128x64x256_s2a3_swap_p2", "t128x256x256_s0a2_2cta_p2", "t128x64x256_s0a4_swap_p3",
        "t128x192x256_s0a2_2cta_swap_p4", "t128x64x256_s0a2_swap_k2_p4", "t128x64x256_s0a2_k2_p4",
        "t128x64x256_s2a2_2cta_swap_m2_p4", "t128x128x256_s0a2_k4_p4",
    ),
    "sm_120a": (
        "t128x64x128_s0a1_p2", "t128x16x256_s2a2_swap_p3", "t128x128x128_s0a1_p2", "t128x128x128_s0a2_p2",
        "t128x32x256_s0a2_p2", "t128x64x128_s0a1_swap_p2", "t128x32x256_s0a2_swap_p4",
    ),
    "sm_90a": ("t128x32x128_s0a1_swap_p2", "t128x96x128_s2a1_swap_p2", "t128x8x128_s0a1_swap_k2_p8"),
}  # fmt: skip
DUAL_CONFIGS = {
    "sm_100a": (
        "t128x64x256_s0a3", "t128x64x256_s0a3_swap", "t128x64x256_s0a3_2cta_swap", "t128x64x256_s0a2_swap_k2",
        "t128x64x256_s1a1_swap_k4",
    ),
    "sm_120a": (
        "t128x128x128_s0a1", "t128x64x128_s0a2", "t128x32x128_s0a2_swap", "t128x64x128_s0a1_swap", "t128x16x256_s0a2_swap",
    ),
    "sm_90a": ("t64x64x128_s0a1_swap", "t64x16x128_s0a1_swap_k4"),
}  # fmt: skip


def every_config(configs, fast):
    """Every config with NVFP4, and with one MX format and mode each, the first of an architecture with all three.

    Variants are slow but those with NVFP4 on ``fast`` architectures, and the first one with MX on each of these.
    """
    found = []
    for arch, names in configs.items():
        for i, name in enumerate(names):
            variants = [(NVFP4, mode) for mode in MODES]
            variants += [(f, MODES[(i + j) % 3]) for j, f in enumerate(MX if i == 0 else MX[i % 3 :][:1])]
            for format, mode in variants:
                is_fast = arch in fast and (mode == "eager" if format == NVFP4 else (i, format) == (0, MX[0]))
                marks, name_of = (() if is_fast else pytest.mark.slow), f"{arch}-{name}-{format}-{mode}"
                found.append(pytest.param(arch, name, format, mode, marks=marks, id=name_of))
    return pytest.mark.parametrize(("arch", "name", "format", "mode"), found)


def factors_of(format, count=3):
    """Global scales of results, which only NVFP4 has."""
    return {"out_global_scale": GLOBAL_SCALES[:count]} if format == NVFP4 else {}


def check(got, sums, factors=None, format=NVFP4):
    """Compares ``got`` of the list form with the float32 results ``sums``."""
    for g, (result, x) in enumerate(zip(got, sums, strict=True)):
        factor = None if not factors else torch.tensor(factors[g])
        assert result.format == format and result.shape == x.shape
        assert (result.global_scale is None) == (factor is None)
        assert_quantized(result.data, result.scale, x, factor, POISON, format)


@pytest.mark.sampled(1)
@every_config(CONFIGS, ("sm_100a", "sm_120a"))
def test_every_tile_shape_is_right_and_clean(arch, name, format, mode):
    """One launch without hazards, along rows and across lanes, that writes nothing else."""
    case = TILES if format == NVFP4 else MX_TILES
    a, b, a_scale, b_scale, alpha = cases.make_operands(case)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    out, factors = poisoned_out(case.sizes, format), factors_of(format)
    with observe(mode=mode, check=True) as observer:
        got = grouped_gemm(
            a, b, a_scale, b_scale, alpha=alpha, out=out, out_dtype=format.name, **factors,
            config=KernelConfig.from_name(name), backend=f"emulator:{arch}",
        )  # fmt: skip
    assert len(observer.stats) == 1
    assert all(x.data.data_ptr() == y.data.data_ptr() for x, y in zip(got, out, strict=True))
    check(got, sums, factors.get("out_global_scale"), format)


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
    ("arch", "name", "format"),
    [
        *(("sm_100a", f"t128x64x256_s0a2{swap}", NVFP4) for swap in ("", "_swap")),
        *(
            pytest.param(*variant, marks=pytest.mark.slow)
            for variant in (
                ("sm_120a", "t128x64x256_s0a2", NVFP4),
                ("sm_120a", "t128x64x256_s0a2_swap", NVFP4),
                ("sm_90a", "t128x32x128_s0a1_swap", NVFP4),
                *(
                    (arch, names[k], format)
                    for format in MX
                    for arch, names in CONFIGS.items()
                    for k in (0, 1)
                ),
            )
        ),
    ],
    ids=str,
)
def test_hostile_results(arch, name, format):
    """Zeros, infinities, NaN, subnormals and overflow reach the blocks through alpha; global scales at their limits."""
    alphas = [math.inf, -math.inf, math.nan, 1e-42, 3e38, -0.0, 2.0**-13, 1e-30, math.inf, 1e37]
    factors = (1.0, 3e-38, 0.5, 2.0**-126, 7e37, 1.0, 1.0, 1e-33, 3.4e38, 3.4e38)
    case = cases.Case("hostile", ((18, 64, 64),) * len(alphas), 3)
    a, b, a_scale, b_scale, _ = cases.make_operands(case)
    for data in a:  # rows whose sums are zero: infinity times zero is NaN
        data[5:9] = 0
    kernel = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    exact, scaled = {}, {"out_global_scale": torch.tensor(factors)}
    if format != NVFP4:
        alphas[8], exact, scaled = 2.0**-140, kernel, {}
    options = {"alpha": torch.tensor(alphas)}
    sums = grouped_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32, **options, **exact)
    assert all(x.isinf().any() for x in sums[:2]) and sums[0].isnan().any()
    options |= {"out": poisoned_out(case.sizes, format), "out_dtype": format.name, **kernel, **scaled}
    got = grouped_gemm(a, b, a_scale, b_scale, **options)
    check(got, sums, factors if format == NVFP4 else None, format)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "format"),
    [
        *((arch, NVFP4) for arch in (*sm100.ARCHS[1:], *sm120.ARCHS, *sm90.ARCHS)),
        *(
            pytest.param(arch, nv.MXFP4, marks=pytest.mark.slow)
            for arch in (*sm100.ARCHS[1:], *sm120.ARCHS[1:])
        ),
    ],
    ids=str,
)
def test_other_architectures(arch, format):
    case = SMALL if format == NVFP4 else MX_SMALL
    a, b, a_scale, b_scale, alpha = cases.make_operands(case)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    options = {
        "out_dtype": format.name,
        "backend": f"emulator:{arch}",
        "out": poisoned_out(case.sizes, format),
    }
    check(grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, **options), sums, None, format)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("arch", "name", "format"),
    [
        ("sm_100a", "t128x128x256_s0a2_p3", NVFP4),
        ("sm_100a", "t128x64x256_s2a2_swap_p3", NVFP4),
        ("reference", None, nv.MXFP8_E4M3),
        *(
            pytest.param(*variant, marks=pytest.mark.slow)
            for variant in (
                ("sm_120a", "t128x64x256_s0a2_p3", NVFP4),
                ("sm_120a", "t128x32x256_s2a2_swap_p3", NVFP4),
                ("sm_90a", "t128x48x128_s0a1_swap_p3", NVFP4),
                *((arch, names[k], MX[k]) for arch, names in CONFIGS.items() for k in (0, 1)),
            )
        ),
    ],
    ids=str,
)
def test_groups_on_the_device(form, arch, name, format):
    """Rows without padding, and with NVFP4 a global scale per group. The next layer reads the result."""
    rows, n, factors = (0, 40, 129, 1, 0), 208 if format == NVFP4 else 224, [None] * 5
    arguments = device_groups_check.operands(form, rows, n=n, k=320, slack=9, out_dtype=torch.float32)
    sums = device_groups_check.run(arguments, "reference")
    del arguments["out"], arguments["out_dtype"]
    if format == NVFP4:
        factors = arguments["out_global_scale"] = torch.tensor([0.5, 0.37, 3.0, 1.0, 2.0])
    total, groups, is_ragged = sum(rows) + 9, len(rows), form == "ragged"
    lead = (total,) if is_ragged else (groups, max(rows) + 9)
    atoms = (
        format.ragged_scale_shape(total, n, groups)
        if is_ragged
        else (groups, *format.scale_shape(lead[1], n))
    )
    pitch = -(-format.row_bytes(n) // 16) * 16 + 16
    out = (
        torch.full((*lead, pitch), POISON, dtype=torch.uint8)[..., : format.row_bytes(n)],
        torch.full(atoms, POISON, dtype=torch.uint8),
    )
    options = {"backend": "reference"}
    if name is not None:
        options = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    with observe(check=True) as observer:
        data, scale = grouped_gemm(**arguments, out=out, out_dtype=format.name, **options)
    assert len(observer.stats) == (name is not None) and data.data_ptr() == out[0].data_ptr()
    assert scale.dtype == (torch.float8_e4m3fn if format == NVFP4 else torch.float8_e8m0fnu)
    start = block = 0
    for g, m in enumerate(rows):
        blocks = -(-m // 128)
        if is_ragged:
            part = slice(start, start + m), scale[block : block + blocks]
        else:
            part = (g, slice(0, m)), scale[g, :blocks]
        assert_quantized(data[part[0]], part[1], sums[part[0]], factors[g], POISON if name else None, format)
        start, block = start + m, block + blocks
    if is_ragged:
        assert (scale.view(torch.uint8)[block:] == POISON).all()
        assert (data.view(torch.uint8)[start:] == POISON).all()
    by_reference = grouped_gemm(**arguments, out_dtype=format.name)
    assert [tuple(x.shape) for x in by_reference] == [tuple(data.shape), tuple(scale.shape)]


@pytest.mark.sampled(1)
@every_config(DUAL_CONFIGS, ("sm_100a", "sm_120a"))
def test_dual_gemm(arch, name, format, mode):
    """The result is that of quantize for the same kernel's float32 output."""
    case = replace(SMALL if format == NVFP4 else MX_SMALL, has_alpha=False)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=9))
    operands = (first.a, first.b, second.b, first.a_scale, first.b_scale, second.b_scale)
    alphas = ([2.0**-7] * 2, [-(2.0**-6)] * 2)
    options = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    sums = grouped_dual_gemm(*operands, *alphas, out_dtype=torch.float32, **options)
    out, factors = poisoned_out(case.sizes, format), factors_of(format, 2)
    with observe(mode=mode, check=True):
        got = grouped_dual_gemm(*operands, *alphas, out=out, out_dtype=format.name, **factors, **options)
    check(got, sums, factors.get("out_global_scale"), format)
    if format == NVFP4 and mode == "eager":
        single = dual_gemm(
            *(tensors[0] for tensors in operands), 2.0**-7, -(2.0**-6), out_dtype="nvfp4",
            out_global_scale=GLOBAL_SCALES[0], **options,
        )  # fmt: skip
        assert_quantized(single.data, single.scale, sums[0], torch.tensor(GLOBAL_SCALES[0]))


def every_candidate():
    """Every config of single and dual products, each with one format of the results in turn."""
    formats = (*MX, NVFP4)
    for arch in (*CONFIGS, "sm_103a"):
        for gate in (None, Gate("relu2", None, "separate")):
            allowed = {format: candidates(arch, "list", format, gate) for format in formats}
            for i, config in enumerate(dict.fromkeys(c for some in allowed.values() for c in some)):
                if arch == "sm_103a" and not config.use_k96_instrs:
                    continue
                turns = formats[i % 4 :] + formats[: i % 4]
                format = next(format for format in turns if config in allowed[format])
                name = f"{arch}-{config.to_name()}-{format}{'-dual' if gate else ''}"
                yield pytest.param(arch, config, format, gate is not None, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "config", "format", "dual"), [*every_candidate()])
def test_every_config_that_may_be_chosen_is_right(arch, config, format, dual):
    """Several tiles and tails along both sides, and K tiles that K fills only in part. Sums are exact."""
    sizes = ((270, 352, 416), (0, 64, 128), (33, 96, 640))
    groups = Groups.of((nv.NVFP4, nv.NVFP4), sizes, seed=11)
    factors = [2.0**-5] * 3  # for relu2
    operands = [groups.b, groups.b2] if dual else [groups.b]
    told = {"alpha": factors, "out_dtype": torch.float32}
    sums = [on_parts.grouped_gemm(groups.a, side, **told) for side in operands]
    if dual:
        sums = [[relu2_of(*pair, torch.float32) for pair in zip(*sums, strict=True)]]
    options = {"alpha1": factors, "alpha2": factors, "activation": "relu2"} if dual else {"alpha": factors}
    options |= {"config": config, "backend": f"emulator:{arch}", "out_dtype": format.name}
    multiply = grouped_dual_gemm if dual else grouped_gemm
    with observe(mode="random:1", check=True):
        got = multiply(groups.a, *operands, out=poisoned_out(sizes, format), **options)
    for result, x in zip(got, sums[0], strict=True):
        assert_quantized(result.data, result.scale, x, None, POISON, format)


@pytest.mark.slow
@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("layout", ["interleaved_64_up_first", "interleaved_32_gate_first", "concatenated"])
@pytest.mark.parametrize("arch", CONFIGS)
def test_weights_of_both_products_in_one_operand(arch, layout, format):
    case = cases.Case("one", ((70, 256, 256), (0, 256, 256), (1, 256, 256)), 7)
    operands = cases.make_operands(case)
    options = {"weight_layout": layout, "backend": f"emulator:{arch}"}
    given = (operands.a, operands.b, None, operands.a_scale, operands.b_scale, None, [2.0**-7] * 3)
    sums = grouped_dual_gemm(*given, out_dtype=torch.float32, **options)
    out = poisoned_out([(m, n // 2, k) for m, n, k in case.sizes], format)
    with observe(check=True):
        got = grouped_dual_gemm(*given, out=out, out_dtype=format.name, **options)
    check(got, sums, None, format)


@pytest.mark.parametrize("format", MX, ids=str)
def test_one_product_and_its_batches(format):
    """gemm and dual_gemm on the reference: each batch as quantize returns it; a given output is written."""
    case = cases.Case("batch", ((70, 96, 256),) * 2, 5)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=9))
    a, b1, b2 = (torch.stack(x).permute(1, 2, 0) for x in (first.a, first.b, second.b))
    scales = [torch.stack(x).view(2, -1, 4, 32, 4, 4) for x in (first.a_scale, first.b_scale, second.b_scale)]
    products = (
        gemm(a, b1, *scales[:2], out_dtype=torch.float32),
        gemm(a, b1, *scales[:2], out_dtype=format.name),
    )
    gates = (
        dual_gemm(a, b1, b2, *scales, 2.0**-7, out_dtype=dtype) for dtype in (torch.float32, format.name)
    )
    for sums, made in (products, gates):
        assert made.shape == (2, 70, 96) and made.format == format
        want = nv.quantize(sums.movedim(-1, 0).contiguous(), format=format)
        assert made.data.dtype == want.data.dtype and made.scale.dtype == want.scale.dtype
        for batch in range(2):
            assert_quantized(made.data[batch], made.scale[batch], sums[:, :, batch], None, format=format)
    out = nv.quantize(torch.zeros(2, 70, 96), format=format)
    got = gemm(a, b1, *scales[:2], out_dtype=format.name, out=out)
    assert got.data.data_ptr() == out.data.data_ptr()
    assert_bitwise_equal(got.data.view(torch.uint8), products[1].data.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("format", MX, ids=str)
def test_operands_of_the_same_format(arch, format):
    """Operands of a pair other than NVFP4, with chosen configs. Hidden rows are the next product's ``a``."""
    groups = Groups.of((format, format), ((70, 96, 128), (0, 96, 128), (3, 96, 128)))
    options = {"backend": f"emulator:{arch}"}
    sums = grouped_gemm(groups.a, groups.b, out_dtype=torch.float32, **options)
    with observe(check=True):
        hidden = grouped_gemm(groups.a, groups.b, out_dtype=format.name, **options)
    for made, x in zip(hidden, sums, strict=True):
        assert_quantized(made.data, made.scale, x, None, format=format)
    weights = [nv.quantize(torch.randn(64, 96), format=format) for _ in sums]
    grouped_gemm(hidden, weights, out_dtype=torch.float32, backend=f"emulator:{arch}")


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
    """No candidate spills. A block takes eight conversions of two values, and its scale one.

    Tiles of few tokens also have code for eight columns: half a block per lane, 12 shuffles that exchange values, and one for a
    block's largest magnitude.
    """
    kernel = get_kernel(KernelKey("sm_100a", config, 2, "nvfp4", True, activation=activation).validated())
    skips = skips_columns(config)
    assert kernel.resources.stack_bytes == 0
    assert kernel.ptx.count("cvt.rn.satfinite.e2m1x2.f32") == 16 + 4 * skips
    assert kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 2 + skips
    assert kernel.ptx.count("shfl.sync.bfly") == 80 * config.swap_ab + 13 * skips


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
@pytest.mark.parametrize("name", CONFIGS["sm_90a"])
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
        ({"out_dtype": "mxfp4", "out_global_scale": [1.0, 1.0]}, ValueError, 'goes with out_dtype=.nvfp4'),
        ({"out_dtype": nv.MXFP4}, TypeError, "is a record; pass its name, out_dtype='mxfp4'"),
        ({"out_dtype": "int8"}, nv.UnsupportedProblem, "no kernel quantizes these products to INT8"),
    ],
)  # fmt: skip
def test_refusals(change, error, match):
    a, b, a_scale, b_scale, _ = cases.make_operands(SMALL)
    with pytest.raises(error, match=match):
        grouped_gemm(a, b, a_scale, b_scale, **{"out_dtype": "nvfp4", **change})


@pytest.mark.parametrize(
    ("out_dtype", "out", "error", "match"),
    [
        ("mxfp4", poisoned_out(MX_SMALL.sizes), TypeError, "a list of BlockScaledTensor of MXFP4"),
        ("nvfp4", poisoned_out(MX_SMALL.sizes, nv.MXFP4), TypeError, "a list of NVFP4Tensor"),
        (
            "mxfp8_e4m3", poisoned_out(((70, 64, 1), (3, 64, 1)), nv.MXFP8_E4M3), ValueError,
            r"group 0: data of out has shape \[70, 64\]; expected \[M, N\] = \[70, 96\]",
        ),
    ],
    ids=["NVFP4 for MXFP4", "MXFP4 for NVFP4", "shape"],
)  # fmt: skip
def test_refusals_of_outputs(out_dtype, out, error, match):
    a, b, a_scale, b_scale, _ = cases.make_operands(MX_SMALL)
    with pytest.raises(error, match=match):
        grouped_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype, out=out)


def test_columns_that_are_no_blocks_are_refused():
    a, b, a_scale, b_scale, _ = cases.make_operands(cases.Case("half", ((70, 112, 256),), 5))
    with pytest.raises(
        ValueError, match="N=112 is not a positive multiple of 32 .MXFP4 block size.*pad b to 128 rows"
    ):
        grouped_gemm(a, b, a_scale, b_scale, out_dtype="mxfp4")


@pytest.mark.parametrize(
    ("name", "format", "match"),
    [
        *(
            (name, "nvfp4", f"two warps would share 16 columns of a block.*N tile of {least}")
            for name, least in (
                ("t128x8x256_s0a2_swap", 16), ("t128x16x256_s0a1_swap", 32), ("t128x16x256_s0a2", 32),
            )
        ),
        ("t128x8x256_s0a2_swap", "mxfp4", "two warps would share 16 columns of a block; use an N tile of 16"),
        ("t128x64x128_s0a1_swap_k2", "mxfp4", "two warps have the halves of a block.*use split_k=1"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(name, format, match):
    with pytest.raises(ConfigError, match=match):
        KernelKey("sm_120a", KernelConfig.from_name(name), 1, format, False).validated()

"""MXFP4 and MXFP8 output of the kernels of every family: the bits of ``formats.quantize`` of the float32 results."""

import math
from dataclasses import replace

import cases
import device_groups_check
import pytest
import torch
from format_cases import Groups
from fp8_check import relu2_of
from oracle import assert_bitwise_equal
from quantized_check import POISON, assert_quantized, poisoned_out

import nvfp4_cute as nv
from nvfp4_cute import ConfigError, KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.ops import parts as on_parts
from nvfp4_cute.ops.parts import dual_gemm, gemm, grouped_dual_gemm, grouped_gemm
from nvfp4_cute.planning.arch import sm100, sm120
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Gate

FORMATS = (nv.MXFP8_E4M3, nv.MXFP4, nv.MXFP8_E5M2)
MODES = ("eager", "lazy", "random:1")
# Tiles that are partial on both sides, N that ends within a tile and within a scale atom, one row, an empty group.
TILES = cases.Case("tiles", ((270, 288, 512), (1, 32, 768), (0, 64, 256)), 11, has_alpha=True)
SMALL = cases.Case("small", ((70, 96, 256), (3, 160, 288)), 5, has_alpha=True)
CONFIGS = {
    "sm_100a": (
        "t128x128x256_s0a2_p2",
        "t128x64x256_s2a3_swap_p2",
        "t128x256x256_s0a2_2cta_p2",
        "t128x64x256_s0a4_swap_p3",
        "t128x192x256_s0a2_2cta_swap_p4",
        "t128x64x256_s0a2_swap_k2_p4",
        "t128x64x256_s0a2_k2_p4",
        "t128x128x256_s0a2_k4_p4",
    ),
    "sm_120a": (
        "t128x64x128_s0a1_p2",
        "t128x16x256_s2a2_swap_p3",
        "t128x128x128_s0a2_p2",
        "t128x32x256_s0a2_p2",
        "t128x64x128_s0a1_swap_p2",
        "t128x32x256_s0a2_swap_p4",
    ),
    "sm_90a": ("t128x32x128_s0a1_swap_p2", "t128x96x128_s2a1_swap_p2", "t128x8x128_s0a1_swap_k2_p8"),
}
DUAL_CONFIGS = {
    "sm_100a": ("t128x64x256_s0a3", "t128x64x256_s0a3_swap", "t128x64x256_s0a3_2cta_swap"),
    "sm_120a": (
        "t128x64x128_s0a2",
        "t128x32x128_s0a2_swap",
        "t128x64x128_s0a1_swap",
        "t128x16x256_s0a2_swap",
    ),
    "sm_90a": ("t64x64x128_s0a1_swap", "t64x16x128_s0a1_swap_k4"),
}


def every_config(configs, fast):
    """Combinations of config, format and mode: each architecture's first config with every format, the others with one each."""
    return [*_every_config(configs, fast)]


def _every_config(configs, fast):
    for arch, names in configs.items():
        for i, name in enumerate(names):
            for j, format in enumerate(FORMATS if i == 0 else FORMATS[i % 3 :][:1]):
                mode = MODES[(i + j) % 3]
                marks = () if (arch, i, j) == (fast, 0, 0) else pytest.mark.slow
                yield pytest.param(arch, name, format, mode, marks=marks, id=f"{arch}-{name}-{format}-{mode}")


def check(got, sums, format):
    """Compares ``got`` of the list form with the float32 results ``sums``."""
    for result, x in zip(got, sums, strict=True):
        assert result.format == format and result.shape == x.shape and result.global_scale is None
        assert_quantized(result.data, result.scale, x, None, POISON, format)


@pytest.mark.parametrize(("arch", "name", "format", "mode"), every_config(CONFIGS, "sm_100a"))
def test_every_tile_shape_is_right_and_clean(arch, name, format, mode):
    """One launch without hazards, along rows and across lanes, that writes nothing else."""
    a, b, a_scale, b_scale, alpha = cases.make_operands(TILES)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    out = poisoned_out(TILES.sizes, format)
    with observe(mode=mode, check=True) as observer:
        got = grouped_gemm(
            a, b, a_scale, b_scale, alpha=alpha, out=out, out_dtype=format.name,
            config=KernelConfig.from_name(name), backend=f"emulator:{arch}",
        )  # fmt: skip
    assert len(observer.stats) == 1
    assert all(x.data.data_ptr() == y.data.data_ptr() for x, y in zip(got, out, strict=True))
    check(got, sums, format)


@pytest.mark.parametrize(("arch", "name", "format", "mode"), every_config(DUAL_CONFIGS, "sm_120a"))
def test_dual_gemm(arch, name, format, mode):
    """The result is that of quantize for the same kernel's float32 output."""
    case = replace(SMALL, has_alpha=False)
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=9))
    operands = (first.a, first.b, second.b, first.a_scale, first.b_scale, second.b_scale)
    alphas = ([2.0**-7] * 2, [-(2.0**-6)] * 2)
    options = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    sums = grouped_dual_gemm(*operands, *alphas, out_dtype=torch.float32, **options)
    out = poisoned_out(case.sizes, format)
    with observe(mode=mode, check=True):
        got = grouped_dual_gemm(*operands, *alphas, out=out, out_dtype=format.name, **options)
    check(got, sums, format)


def every_candidate():
    """Every config of single and dual products, each with one format of the results in turn."""
    formats = (*FORMATS, nv.NVFP4)
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
@pytest.mark.parametrize("format", FORMATS, ids=str)
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
    check(got, sums, format)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("arch", "name"), [(arch, names[k]) for arch, names in CONFIGS.items() for k in (0, 1)]
)
def test_hostile_results(arch, name, format):
    """Zeros, infinities, NaN, subnormals and overflow reach the blocks through alpha."""
    alphas = (math.inf, -math.inf, math.nan, 1e-42, 3e38, -0.0, 2.0**-13, 1e-30, 2.0**-140, 1e37)
    case = cases.Case("hostile", ((18, 64, 64),) * len(alphas), 3)
    a, b, a_scale, b_scale, _ = cases.make_operands(case)
    for data in a:  # rows whose sums are zero: infinity times zero is NaN
        data[5:9] = 0
    options = {
        "alpha": torch.tensor(alphas),
        "backend": f"emulator:{arch}",
        "config": KernelConfig.from_name(name),
    }
    sums = grouped_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32, **options)
    assert all(x.isinf().any() for x in sums[:2]) and sums[0].isnan().any()
    out = poisoned_out(case.sizes, format)
    check(grouped_gemm(a, b, a_scale, b_scale, out=out, out_dtype=format.name, **options), sums, format)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*sm100.ARCHS[1:], *sm120.ARCHS[1:]])
def test_other_architectures(arch):
    a, b, a_scale, b_scale, alpha = cases.make_operands(SMALL)
    sums = grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out_dtype=torch.float32)
    out = poisoned_out(SMALL.sizes, nv.MXFP4)
    options = {"out_dtype": "mxfp4", "backend": f"emulator:{arch}"}
    check(grouped_gemm(a, b, a_scale, b_scale, alpha=alpha, out=out, **options), sums, nv.MXFP4)


@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize(
    ("arch", "name", "format"),
    [
        ("reference", None, nv.MXFP8_E4M3),
        *(
            pytest.param(arch, names[k], FORMATS[k], marks=pytest.mark.slow)
            for arch, names in CONFIGS.items()
            for k in (0, 1)
        ),
    ],
)
def test_groups_on_the_device(form, arch, name, format):
    """Rows without padding. The next layer reads the result."""
    rows, n = (0, 40, 129, 1, 0), 224
    arguments = device_groups_check.operands(form, rows, n=n, k=320, slack=9, out_dtype=torch.float32)
    sums = device_groups_check.run(arguments, "reference")
    del arguments["out"], arguments["out_dtype"]
    total, groups, is_ragged = sum(rows) + 9, len(rows), form == "ragged"
    lead = (total,) if is_ragged else (groups, max(rows) + 9)
    atoms = (
        format.ragged_scale_shape(total, n, groups)
        if is_ragged
        else (groups, *format.scale_shape(lead[1], n))
    )
    row_bytes = format.row_bytes(n)
    out = (
        torch.full((*lead, row_bytes + 16), POISON, dtype=torch.uint8)[..., :row_bytes],
        torch.full(atoms, POISON, dtype=torch.uint8),
    )
    options = {"backend": "reference"}
    if name is not None:
        options = {"config": KernelConfig.from_name(name), "backend": f"emulator:{arch}"}
    with observe(check=True):
        data, scale = grouped_gemm(**arguments, out=out, out_dtype=format.name, **options)
    assert data.data_ptr() == out[0].data_ptr() and scale.dtype == torch.float8_e8m0fnu
    start = block = 0
    for g, m in enumerate(rows):
        blocks = -(-m // 128)
        if is_ragged:
            part = slice(start, start + m), scale[block : block + blocks]
        else:
            part = (g, slice(0, m)), scale[g, :blocks]
        assert_quantized(data[part[0]], part[1], sums[part[0]], None, POISON if name else None, format)
        start, block = start + m, block + blocks
    if is_ragged:
        assert (scale.view(torch.uint8)[block:] == POISON).all()
        assert (data.view(torch.uint8)[start:] == POISON).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
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
@pytest.mark.parametrize("format", FORMATS, ids=str)
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


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"out_dtype": "mxfp4", "out_global_scale": [1.0, 1.0]}, ValueError, 'goes with out_dtype=.nvfp4'),
        ({"out_dtype": nv.MXFP4}, TypeError, "is a record; pass its name, out_dtype='mxfp4'"),
        ({"out_dtype": "int8"}, nv.UnsupportedProblem, "no kernel quantizes these products to INT8"),
        ({"out_dtype": "mxfp4", "out": poisoned_out(SMALL.sizes)}, TypeError, "a list of BlockScaledTensor of MXFP4"),
        ({"out_dtype": "nvfp4", "out": poisoned_out(SMALL.sizes, nv.MXFP4)}, TypeError, "a list of NVFP4Tensor"),
        (
            {"out_dtype": "mxfp8_e4m3", "out": poisoned_out(((70, 64, 1), (3, 64, 1)), nv.MXFP8_E4M3)},
            ValueError, r"group 0: data of out has shape \[70, 64\]; expected \[M, N\] = \[70, 96\]",
        ),
    ],
)  # fmt: skip
def test_refusals(change, error, match):
    a, b, a_scale, b_scale, _ = cases.make_operands(SMALL)
    with pytest.raises(error, match=match):
        grouped_gemm(a, b, a_scale, b_scale, **change)


def test_columns_that_are_no_blocks_are_refused():
    a, b, a_scale, b_scale, _ = cases.make_operands(cases.Case("half", ((70, 112, 256),), 5))
    with pytest.raises(
        ValueError, match="N=112 is not a positive multiple of 32 .MXFP4 block size.*pad b to 128 rows"
    ):
        grouped_gemm(a, b, a_scale, b_scale, out_dtype="mxfp4")


@pytest.mark.parametrize(
    ("arch", "name", "match"),
    [
        (
            "sm_120a",
            "t128x8x256_s0a2_swap",
            "two warps would share 16 columns of a block; use an N tile of 16",
        ),
        ("sm_120a", "t128x64x128_s0a1_swap_k2", "two warps have the halves of a block.*use split_k=1"),
    ],
)
def test_configs_that_are_refused(arch, name, match):
    with pytest.raises(ConfigError, match=match):
        KernelKey(arch, KernelConfig.from_name(name), 1, "mxfp4", False).validated()

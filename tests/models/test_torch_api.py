"""torch's scaled products computed by this library: signatures, values against exact sums, refusals, and enable()."""

import inspect
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

import nvfp4_cute
from nvfp4_cute.emulator.fronts import torch_products
from nvfp4_cute.emulator.fronts.torch_scaled_mm import scaled_mm as exact_scaled_mm
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.models import torch_api

BLOCKED, PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE
RECIPES = {format: recipe for (recipe, _), format in torch_api.FORMATS.items()}
ELEMENTS = {format: dtype for (_, dtype), format in torch_api.FORMATS.items()}
PAIRS = [(NVFP4, NVFP4), (MXFP4, MXFP4), (MXFP8_E4M3, MXFP8_E4M3), (MXFP8_E5M2, MXFP8_E4M3)]
M, N, K = 40, 96, 192


def operand(rows, format, seed, **options):
    """Returns (data in torch's dtype, blocked scales) of random rows."""
    values = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    result = quantize(values, format=format, **options)
    return result.data.view(ELEMENTS[format]), result.scale


def pair(formats=(NVFP4, NVFP4)):
    (a, a_scale), (b, b_scale) = (
        operand(r, f, i) for i, (r, f) in enumerate(zip((M, N), formats, strict=True))
    )
    return a, b.t(), a_scale, b_scale


def exact(a, b, a_scale, b_scale, dtype=torch.bfloat16, bias=None):
    return exact_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=dtype)


def mm(a, b, a_scale, b_scale, formats=(NVFP4, NVFP4), **options):
    recipes = [RECIPES[format] for format in formats]
    return torch_api.scaled_mm(a, b, a_scale, recipes[0], b_scale, recipes[1], BLOCKED, BLOCKED, **options)


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_grouped_mm"])
def test_signatures_are_torchs(name):
    theirs = inspect.signature(getattr(F, name)).parameters
    ours = inspect.signature(getattr(torch_api, name)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("name", sorted(torch_api.OPERATORS))
def test_signatures_are_those_of_the_operators(name):
    schema = getattr(torch.ops.aten, name).default._schema
    ours = inspect.signature(torch_api.OPERATORS[name]).parameters
    assert list(ours) == [argument.name for argument in schema.arguments]


@pytest.mark.parametrize("dtype", torch_api.OUT_DTYPES)
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: "_".join(map(str, pair)))
def test_products(formats, dtype):
    operands = pair(formats)
    assert torch.equal(mm(*operands, formats, output_dtype=dtype), exact(*operands, dtype))


def test_global_scales_and_bias_are_applied_before_the_rounding():
    a, b, a_scale, b_scale = pair()
    factors, bias = torch.tensor(0.37), torch.randn(N).bfloat16()
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [BLOCKED, PLAIN]
    lists = [a_scale, factors], recipe, [b_scale, torch.tensor([2.5])], recipe, swizzle, swizzle
    result = torch_api.scaled_mm(a, b, *lists, bias=bias, output_dtype=torch.float16)
    product = exact(a, b, a_scale, b_scale, torch.float64) * (factors.double() * 2.5)
    torch.testing.assert_close(result, (product + bias.double()).half(), rtol=1e-3, atol=1e-3)
    ints = [[int(value.value) for value in values] for values in (recipe, swizzle)]
    v2 = torch_api._scaled_mm_v2(
        a, b, [a_scale, factors], *ints, [b_scale, torch.tensor([2.5])], *ints, bias, torch.float16, [1, 0]
    )
    assert torch.equal(v2, result)


@pytest.mark.parametrize("formats", PAIRS[:3], ids=str)
def test_the_operator_without_recipes(formats):
    operands = pair(formats)
    if formats[0] is MXFP4:  # e8m0 means 1x32 for all elements
        assert torch_api._told_by_dtype(*operands, None)[0].format is MXFP4
    assert torch.equal(
        torch_api._scaled_mm(*operands, out_dtype=torch.float32), exact(*operands, torch.float32)
    )


def fp8_blocks(padded=False):
    """Returns (a, b, scale_a, scale_b) in FP8 with float32 scales in torch's layout, with sums that are exact in float32."""
    seeds = torch.Generator().manual_seed(5)
    m, n, k = 24, 200, 384
    a, b = (torch.randint(-3, 4, (rows, k), generator=seeds).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a, scale_b = (
        torch.exp2(torch.randint(-2, 3, (rows, 3), generator=seeds).float()) for rows in (m, 2)
    )
    room = torch.full((2, 4 if padded else 3), torch.nan)
    room[:, :3] = scale_b
    return a, b.t(), scale_a.t().contiguous().t(), room.t()


def right_of_fp8_blocks(dtype):
    a, b, scale_a, scale_b = fp8_blocks()
    a = a.double() * scale_a.double().repeat_interleave(128, 1)
    b = b.t().double() * scale_b.t().double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    return (a @ b.t()).to(dtype)


@pytest.mark.parametrize("padded", [False, True])
def test_fp8_of_blocks(padded):
    """Scales are recognized by their recipes, or by their shapes as in torch; rows of b's may be padded to four."""
    a, b, scale_a, scale_b = fp8_blocks(padded)
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    for dtype in torch_api.OUT_DTYPES:
        right = right_of_fp8_blocks(dtype)
        result = torch_api.scaled_mm(a, b, scale_a, recipes[0], scale_b, recipes[1], output_dtype=dtype)
        assert torch.equal(result, right)
        assert torch.equal(torch_api._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype), right)


def test_fp8_of_other_blocks_is_refused():
    a, b, scale_a, scale_b = fp8_blocks()
    one, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    for recipes, message in (
        ((square, one), "fp8_128x128 by fp8_1x128: float32 block scales are BlockWise1x128 of mat_a by"),
        ((one, one), "fp8_1x128 by fp8_1x128"),
    ):
        with pytest.raises(UnsupportedProblem, match=message):
            torch_api.scaled_mm(a, b, scale_a, recipes[0], scale_b, recipes[1])
    with pytest.raises(UnsupportedProblem, match="float32 scales of fp8_1x128 lie in rows; use NO_SWIZZLE"):
        torch_api.scaled_mm(a, b, scale_a, one, scale_b, square, BLOCKED, None)
    with pytest.raises(
        ValueError, match=r"scale_a \(24, 2\) and .*; expected float32 \(24, 3\) and \(3, 2\)"
    ):
        torch_api.scaled_mm(a, b, scale_a[:, :2], one, scale_b, square)
    with pytest.raises(UnsupportedProblem, match="float32 block scales of groups"):
        torch_api.scaled_grouped_mm(a[None], b[None], scale_a, one, scale_b, square)
    with pytest.raises(UnsupportedProblem, match="scale_a is torch.float32: this library"):
        torch_api._scaled_mm(a, b, torch.ones(24, 1), torch.ones(1, 200), out_dtype=torch.float32)


def ragged():
    ends = torch.tensor([10, 10, M], dtype=torch.int32)
    rows = torch.randn(M, K, generator=torch.Generator().manual_seed(3)).bfloat16()
    a, a_scale = nvfp4_cute.grouped_quantize(rows, ends)
    weights = [operand(N, NVFP4, seed) for seed in range(3)]
    b = torch.stack([w.view(torch.uint8) for w, _ in weights]).view(torch.float4_e2m1fn_x2)
    b_scale = torch.stack([s.view(torch.uint8) for _, s in weights]).view(torch.float8_e4m3fn)
    return a.view(torch.float4_e2m1fn_x2), b.transpose(1, 2), a_scale, b_scale, ends


def test_groups_of_rows():
    a, b, a_scale, b_scale, ends = ragged()
    right = torch_products.scaled_grouped_mm(a, b, a_scale, b_scale, ends)
    recipe = ScalingType.BlockWise1x16
    result = torch_api.scaled_grouped_mm(a, b, a_scale, recipe, b_scale, recipe, BLOCKED, BLOCKED, offs=ends)
    assert torch.equal(result, right)
    assert torch.equal(torch_api._scaled_grouped_mm(a, b, a_scale, b_scale, ends), right)
    flat = torch_api._scaled_grouped_mm(a, b, a_scale, b_scale.flatten(), ends)
    assert torch.equal(flat, right)
    factors = torch.tensor([1.0, 2.0, 4.0])
    lists = [a_scale, factors], [2, 0], [1, 0], [b_scale, torch.tensor(0.5)], [2, 0], [1, 0]
    scaled = torch_api._scaled_grouped_mm_v2(a, b, *lists, ends, out_dtype=torch.float32)
    expected = torch_products.scaled_grouped_mm_v2(a, b, *lists, ends, out_dtype=torch.float32)
    assert torch.equal(scaled, expected)


def test_batches():
    a, b, a_scale, b_scale = ragged()[:4]
    batch = torch.stack([operand(M, NVFP4, seed)[0].view(torch.uint8) for seed in range(3)])
    batch_scale = torch.stack([operand(M, NVFP4, seed)[1].view(torch.uint8) for seed in range(3)])
    batch, batch_scale = batch.view(a.dtype), batch_scale.view(b_scale.dtype)
    result = torch_api._scaled_grouped_mm(batch, b, batch_scale, b_scale)
    assert result.is_contiguous()
    assert torch.equal(result, torch_products.scaled_grouped_mm(batch, b, batch_scale, b_scale))


FLOAT_SCALE = torch.ones(())
REFUSED = {
    "rows": (
        dict(scale_recipe_a=ScalingType.RowWise),
        "scale_recipe_a=RowWise of torch.float4_e2m1fn_x2: this library",
    ),
    "wrong pair": (dict(scale_recipe_b=ScalingType.BlockWise1x128), "scale_recipe_b=BlockWise1x128"),
    "swizzle": (dict(swizzle_a=PLAIN), "swizzle_a=NO_SWIZZLE: block scales lie in SWIZZLE_32_4_4 here"),
    "no swizzle": (dict(swizzle_b=None), "swizzle_b=NO_SWIZZLE"),
    "contraction": (dict(contraction_dim=(0, 0)), "contraction_dim=[0, 0]: the last dimension of mat_a"),
    "no dtype": (dict(output_dtype=None), "output_dtype=None: use one of"),
    "fp8 result": (dict(output_dtype=torch.float8_e4m3fn), "output_dtype=torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    changes, message = REFUSED[case]
    a, b, a_scale, b_scale = pair()
    recipe = ScalingType.BlockWise1x16
    call = dict(
        mat_a=a, mat_b=b, scale_a=a_scale, scale_recipe_a=recipe, scale_b=b_scale, scale_recipe_b=recipe,
        swizzle_a=BLOCKED, swizzle_b=BLOCKED,
    )  # fmt: skip
    with pytest.raises(UnsupportedProblem) as caught:
        torch_api.scaled_mm(**call | changes)
    assert message in str(caught.value)


def test_operands_that_break_a_rule():
    a, b, a_scale, b_scale = pair()
    with pytest.raises(ValueError, match=r"mat_b .* pass the transposed view of contiguous \[N, K\]"):
        mm(a, b.view(torch.uint8).contiguous().view(b.dtype), a_scale, b_scale)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \(3,\); expected floats of shape \(96,\)"):
        mm(a, b, a_scale, b_scale, bias=torch.ones(3))
    with pytest.raises(ValueError, match="scale_a has 2 scales for 1 recipes"):
        mm(a, b, [a_scale, FLOAT_SCALE], b_scale)
    with pytest.raises(UnsupportedProblem, match="scale_a is torch.float32"):
        torch_api._scaled_mm(a, b, FLOAT_SCALE, b_scale, out_dtype=torch.bfloat16)
    for name in ("mat_a", "mat_b", "scale_a", "scale_b", "bias"):
        for wrong in ([1.0], a.view(torch.uint8).numpy()):
            given = {"mat_a": a, "mat_b": b, "scale_a": a_scale, "scale_b": b_scale, "bias": None} | {
                name: wrong
            }
            with pytest.raises(TypeError, match=f"{name} is a"):
                torch_api._scaled_mm(*given.values(), out_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match="scale_result"):
        torch_api._scaled_mm(a, b, a_scale, b_scale, None, FLOAT_SCALE, torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match="bias of a grouped product"):
        torch_api._scaled_grouped_mm(*ragged(), torch.ones(N))
    with pytest.raises(UnsupportedProblem, match="groups are rows of mat_a with offs"):
        torch_api._scaled_grouped_mm(*ragged()[:4])


# ---- enable ----------------------------------------------------------------------------------------------------


def fp8_pair():
    a, b = (
        torch.randn(r, K, generator=torch.Generator().manual_seed(r)).to(torch.float8_e4m3fn) for r in (M, N)
    )
    return a, b.t(), torch.tensor(2.0), torch.tensor(0.25)


@pytest.mark.parametrize("given", ["BlockWise1x16", 99, 2.0, None])
def test_a_recipe_that_is_none(given):
    a, b, a_scale, b_scale = pair()
    with pytest.raises(
        TypeError, match="is not a ScalingType of torch.nn.functional; pass one of TensorWise, RowWise"
    ):
        torch_api.scaled_mm(a, b, a_scale, [given], b_scale, RECIPES[NVFP4], BLOCKED, BLOCKED)


def test_a_graph_holds_the_product():
    torch._dynamo.reset()
    compiled = torch.compile(mm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*pair()), mm(*pair()))


def refused_by_torch():
    """Returns scales that torch's own function refuses, with the messages of torch 2.13 and of 2.11."""
    words = "Invalid scaling configuration|Now _scaled_mm only supports per-tensor"
    return pytest.raises((ValueError, RuntimeError), match=words)


def test_torchs_functions_multiply_what_torch_cannot_and_it_can_be_taken_back():
    operands, plain = pair(), fp8_pair()
    recipe = ScalingType.BlockWise1x16
    call = (*operands[:3], recipe, operands[3], recipe, BLOCKED, BLOCKED)
    before = torch._scaled_mm(*plain, out_dtype=torch.bfloat16)
    for _ in range(2):
        with refused_by_torch():
            torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
        with ExitStack() as stack:
            stack.enter_context(torch_api.enable())
            for _ in range(2):  # the second call does not go to torch
                assert torch.equal(torch._scaled_mm(*operands, out_dtype=torch.bfloat16), exact(*operands))
                assert torch.equal(F.scaled_mm(*call), exact(*operands))
                assert torch.equal(torch._scaled_mm(*plain, out_dtype=torch.bfloat16), before)
            a, b, a_scale, b_scale, ends = ragged()
            grouped = F.scaled_grouped_mm(a, b, a_scale, recipe, b_scale, recipe, BLOCKED, BLOCKED, offs=ends)
            assert torch.equal(grouped, torch_products.scaled_grouped_mm(a, b, a_scale, b_scale, ends))
            with refused_by_torch():  # both refuse
                torch._scaled_mm(*operands[:2], FLOAT_SCALE, operands[3], out_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):
        F.scaled_grouped_mm(a, b, a_scale, recipe, b_scale, recipe, BLOCKED, BLOCKED, offs=ends)


def test_preferring_ours_asks_torch_for_the_rest(monkeypatch):
    plain = fp8_pair()
    before = torch._scaled_mm(*plain, out_dtype=torch.bfloat16)
    asked = []
    ours = torch_api.OPERATORS["_scaled_mm"]
    monkeypatch.setitem(torch_api.OPERATORS, "_scaled_mm", lambda *a, **k: asked.append(a) or ours(*a, **k))
    with torch_api.enable(prefer=True):
        assert torch.equal(torch._scaled_mm(*plain, out_dtype=torch.bfloat16), before)
    assert len(asked) == 1


@pytest.mark.gpu("sm_90a")
def test_on_a_gpu_torchs_own_products_stay_and_ours_are_added():
    plain = [t.cuda() for t in fp8_pair()]
    plain[1] = fp8_pair()[1].t().contiguous().cuda().t()
    before = torch._scaled_mm(*plain, out_dtype=torch.bfloat16)
    operands = pair()
    on_gpu = [operands[0].cuda(), operands[1].t().cuda().t(), *(scale.cuda() for scale in operands[2:])]
    with torch_api.enable():
        assert torch.equal(torch._scaled_mm(*plain, out_dtype=torch.bfloat16), before)
        result = torch._scaled_mm(*on_gpu, out_dtype=torch.bfloat16)
    torch.testing.assert_close(result.cpu(), exact(*operands), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_torchaos_tensors_multiply_through_it(kind):
    """torchao 0.18's linear layers call torch's own functions. make test-trace installs it."""
    pytest.importorskip("torchao", reason="needs torchao: make test-trace")
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    x, w = (torch.randn(rows, 256).bfloat16() for rows in (128, 64))
    if kind == "nvfp4":
        how = nvfp4_tensor.QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
        to, options = nvfp4_tensor.NVFP4Tensor.to_nvfp4, {"is_swizzled_scales": True}
    else:
        how = mx_tensor.QuantizeTensorToMXKwargs(
            elem_dtype=torch.float8_e4m3fn, kernel_preference=KernelPreference.AUTO, is_swizzled_scales=True
        )
        to = mx_tensor.MXTensor.to_mx
        options = {
            "elem_dtype": torch.float8_e4m3fn,
            "kernel_preference": KernelPreference.AUTO,
            "is_swizzled_scales": True,
        }
    weight, rows = to(w, **options, act_quant_kwargs=how), to(x, **options)
    with torch_api.enable():
        result = F.linear(x, weight)
    right = rows.dequantize(torch.float32) @ weight.dequantize(torch.float32).t()
    torch.testing.assert_close(result.float(), right, rtol=1e-2, atol=1e-2)

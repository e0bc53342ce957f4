"""Operands of every pair of formats: the reference gives the exact sums; kernels compute a pair or refuse it by name."""

import flat_parts as on_parts
import pytest
import torch
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute.formats.block_format import FORMATS

BLOCKED = [f for f in FORMATS.values() if f.scale_layout == "blocked"]
PAIRS = [(a, b) for a in BLOCKED for b in BLOCKED]
G, M, N, K = 2, 40, 96, 160


def tensor(format, *shape, seed=0):
    """Draws small integers and few powers of two, whose sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return nv.quantize(torch.randint(-3, 4, shape, generator=generator).float(), format=format)


def product(x, y):
    return (x.dequantize(torch.float64) @ y.dequantize(torch.float64).mT).float()


@pytest.mark.parametrize(("of_a", "of_b"), PAIRS, ids=str)
def test_every_operation_takes_every_pair(of_a, of_b):
    x, w = tensor(of_a, M, K), tensor(of_b, N, K)
    told, options = {"a_format": of_a, "b_format": of_b}, {"out_dtype": torch.float32}
    expected = product(x, w)
    assert_bitwise_equal(on_parts.gemm(x, w, **options), expected)
    assert_bitwise_equal(on_parts.gemm(x.data, w.data, x.scale, w.scale, **told, **options), expected)
    rowmajor = [t.with_scale_layout("rowmajor") for t in (x, w)]
    assert_bitwise_equal(on_parts.gemm(*rowmajor, scale_layout="rowmajor", **options), expected)
    batches, weights = tensor(of_a, G, M, K), tensor(of_b, G, N, K)
    assert_bitwise_equal(
        on_parts.gemm(batches, weights, **options).permute(2, 0, 1), product(batches, weights).contiguous()
    )

    vector = tensor(of_b, K, seed=1)
    by_vector = x.dequantize(torch.float64) @ vector.dequantize(torch.float64)
    assert_bitwise_equal(on_parts.gemv(x, vector, **options), by_vector.float())
    parts = x.data, vector.data, x.scale, vector.scale
    assert_bitwise_equal(on_parts.gemv(*parts, **told, **options), by_vector.float())

    for got, g in zip(
        on_parts.grouped_gemm([x, batches[1]], [w, weights[1]], **options), range(G), strict=True
    ):
        assert_bitwise_equal(got, (expected, product(batches[1], weights[1]))[g])
    lists = [x.data], [w.data], [x.scale], [w.scale]
    assert_bitwise_equal(on_parts.grouped_gemm(*lists, **told, **options)[0], expected)
    tokens, offs = tensor(of_a, 160, K), torch.tensor([128, 160], dtype=torch.int32)
    ragged = torch.cat([product(tokens[:128], weights[0]), product(tokens[128:160], weights[1])])
    assert_bitwise_equal(on_parts.grouped_gemm(tokens, weights, offs=offs, **options), ragged)
    data = tokens.data, weights.data, tokens.scale, weights.scale
    assert_bitwise_equal(on_parts.grouped_gemm(*data, offs, **told, **options), ragged)
    masked = on_parts.grouped_gemm(
        batches, weights, masked_m=torch.tensor([3, M], dtype=torch.int32), **options
    )
    assert_bitwise_equal(masked[1], product(batches[1], weights[1]))
    assert_bitwise_equal(masked[0, :3], product(batches[0], weights[0])[:3])

    gate, up = (tensor(of_b, N, K, seed=seed) for seed in (2, 3))
    factors = [x.dequantize(torch.float64) @ b.dequantize(torch.float64).T for b in (gate, up)]
    dual = (factors[0].clamp(min=0).square() * factors[1]).float()
    choice = {"activation": "relu2"} | options
    assert_bitwise_equal(on_parts.dual_gemm(x, gate, up, **choice), dual)
    given = x.data, gate.data, up.data, x.scale, gate.scale, up.scale
    assert_bitwise_equal(on_parts.dual_gemm(*given, **told, **choice), dual)
    assert_bitwise_equal(on_parts.grouped_dual_gemm([x], [gate], [up], **choice)[0], dual)
    both = on_parts.dual_gemm(batches, weights, weights, **choice)
    assert_bitwise_equal(both[:, :, 0], on_parts.dual_gemm(batches[0], weights[0], weights[0], **choice))


@pytest.mark.parametrize("format", BLOCKED, ids=str)
def test_weights_of_every_format_beside_16_bits(format):
    x, w = torch.randint(-3, 4, (M, K)).bfloat16(), tensor(format, N, K)
    expected = (x.double() @ w.dequantize(torch.float64).T).float()
    assert_bitwise_equal(nv.gemm(x, w, out_dtype=torch.float32), expected)
    assert_bitwise_equal(nv.grouped_gemm([x], [w], out_dtype=torch.float32)[0], expected)
    assert_bitwise_equal(nv.gemv(w, x[0], out_dtype=torch.float32), expected[0])
    parts = on_parts.gemm(x, w.data, None, w.scale, b_format=format, out_dtype=torch.float32)
    assert_bitwise_equal(parts, expected)


def test_a_quantized_result_of_another_pair():
    x, w = tensor(nv.MXFP8_E4M3, M, K), tensor(nv.MXFP4, N, K)
    result = nv.gemm(x, w, out_dtype="nvfp4", out_global_scale=0.5)
    right = nv.quantize(product(x, w), global_scale=0.5)
    assert torch.equal(result.data, right.data)
    assert torch.equal(result.dequantize(), right.dequantize())


def test_torch_compile_keeps_the_formats():
    x, w = tensor(nv.MXFP8_E4M3, M, K), tensor(nv.MXFP4, N, K)
    expected = nv.gemm(x, w, out_dtype=torch.float32)

    def layer(data, scale):
        parts = data, w.data, scale, w.scale
        return on_parts.gemm(*parts, a_format=nv.MXFP8_E4M3, b_format=nv.MXFP4, out_dtype=torch.float32) + 0

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(compiled(x.data, x.scale), expected)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_a_pair_without_a_kernel_is_refused(arch):
    x, w, backend = tensor(nv.NVFP4, M, K), tensor(nv.MXFP4, N, K), f"emulator:{arch}"
    wording = rf'^{arch}.*: no kernel for nvfp4 x mxfp4 \(there is one for nvfp4 x nvfp4.*\); use backend="reference", or quant'
    offs = torch.tensor([M, M], dtype=torch.int32)
    calls = [
        lambda: nv.gemm(x, w, backend=backend),
        lambda: nv.grouped_gemm([x], [w], backend=backend),
        lambda: nv.grouped_gemm(x, tensor(nv.MXFP4, G, N, K), offs=offs, backend=backend),
        lambda: on_parts.dual_gemm(x, w, w, backend=backend),
        lambda: nv.gemv(x, tensor(nv.MXFP4, K), backend=backend),
    ]
    for call in calls:
        with pytest.raises(nv.UnsupportedProblem, match=wording):
            call()


def test_what_is_no_format_of_products_is_refused():
    w = tensor(nv.MXFP4, N, 256)
    with pytest.raises(TypeError, match="^a_format='mxfp4' is not a BlockFormat; pass a record"):
        on_parts.gemm(w.data, w.data, w.scale, w.scale, a_format="mxfp4")
    with pytest.raises(ValueError, match="group 0 is MXFP4 and group 1 NVFP4"):
        nv.grouped_gemm([w, tensor(nv.NVFP4, N, 256)], [w, w])
    with pytest.raises(ValueError, match="b1 is MXFP4 and b2 NVFP4"):
        on_parts.dual_gemm(w, w, tensor(nv.NVFP4, N, 256))
    with pytest.raises(TypeError, match="BlockScaledTensor of MXFP4; pass its .data"):
        on_parts.gemm(w, w, w.scale, w.scale)
    with pytest.raises(ValueError, match="a has K=256 and b has K=512"):
        on_parts.gemm(w.data, w.data.repeat(1, 2), w.scale, w.scale, a_format=nv.MXFP4)


def test_fp8_with_fp32_scales_is_multiplied_by_gemm_and_grouped_gemm():
    """Whole operands and parts work in every form and next to other formats; other operations refuse the format by name."""
    k, options = 256, {"out_dtype": torch.float32}
    x, w = tensor(nv.FP8_1x128, M, k), tensor(nv.FP8_128x128, 200, k)
    told = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
    expected = product(x, w)
    assert_close(on_parts.gemm(x, w, **options), expected)
    assert_close(on_parts.gemm(x.data, w.data, x.scale, w.scale, **told, **options), expected)
    assert_close(on_parts.grouped_gemm([x], [w], **options)[0], expected)
    batches, weights = tensor(nv.FP8_1x128, G, M, k), tensor(nv.FP8_128x128, G, 200, k)
    assert_close(on_parts.gemm(batches, weights, **options).permute(2, 0, 1), product(batches, weights))
    offs, sizes = (torch.tensor(t, dtype=torch.int32) for t in ((3, M), (3, M)))
    want = torch.cat([product(x[:3], weights[0]), product(x[3:], weights[1])])
    assert_close(on_parts.grouped_gemm(x, weights, offs=offs, **options), want)
    masked = on_parts.grouped_gemm(batches, weights, masked_m=sizes, **options)
    assert_close(masked[0, :3], product(batches, weights)[0, :3])
    assert_close(masked[1], product(batches, weights)[1])
    other = tensor(nv.MXFP4, 200, k)
    assert_close(on_parts.gemm(x, other, **options), product(x, other))
    row = torch.randn(M, k).bfloat16()
    want = (row.double() @ w.dequantize(torch.float64).T).float()
    assert_close(on_parts.gemm(row, w, **options), want)
    assert_close(on_parts.grouped_gemm([row], [w], **options)[0], want)
    vector = tensor(nv.FP8_1x128, k)
    for call in (
        lambda: nv.gemm(x, w, out_dtype="nvfp4"),
        lambda: nv.gemv(x, vector),
        lambda: on_parts.dual_gemm(x, w[:128], w[:128], out_dtype="nvfp4"),
    ):
        with pytest.raises(
            nv.UnsupportedProblem,
            match="has fp32 scales: only gemm, grouped_gemm and dual|have float32 scales",
        ):
            call()


def test_fp32_scales_of_one_column_may_have_any_stride():
    x, w = tensor(nv.FP8_1x128, M, 128), tensor(nv.FP8_128x128, 100, 128)
    apart = torch.zeros(1, 1, 2)
    apart[..., 0] = w.scale
    told = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128, "out_dtype": torch.float32}
    assert_close(on_parts.gemm(x.data, w.data, x.scale, apart[..., 0], **told), product(x, w))


def test_a_format_by_its_name_is_refused():
    x, w = tensor(nv.MXFP4, M, 128), tensor(nv.MXFP4, 1, 100, 128)
    offs = torch.tensor([M], dtype=torch.int32)
    with pytest.raises(TypeError, match="is not a BlockFormat; pass a record"):
        on_parts.grouped_gemm(
            x.data, w.data, x.scale, w.scale, offs=offs, a_format="mxfp4", b_format=nv.MXFP4
        )


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("break_it", range(6))
def test_wrong_fp32_scales_are_refused(break_it):
    x, w = tensor(nv.FP8_1x128, M, 256), tensor(nv.FP8_128x128, 200, 256)
    told = {"a_format": nv.FP8_1x128, "b_format": nv.FP8_128x128}
    offs, weights = torch.tensor([M], dtype=torch.int32), tensor(nv.FP8_128x128, 1, 200, 256)
    out = torch.full((M, 200), 7.0)
    calls = [
        (ValueError, r"a_scale has shape \[40, 1\]; expected \[40, 2\]", (x.data, w.data, x.scale[:, :1], w.scale)),
        (ValueError, r"b_scale has shape \[200, 2\]; expected \[2, 2\]", (x.data, w.data, x.scale, w.scale.repeat(100, 1))),
        (TypeError, "a_scale has dtype torch.float64; expected float32", (x.data, w.data, x.scale.double(), w.scale)),
        (ValueError, "K=64 is not a multiple of 128", (x.data[:, :64], w.data[:, :64], x.scale, w.scale)),
        (ValueError, r"a_scale has shape \[39, 2\]", (x.data, weights.data, x.scale[1:], weights.scale, offs)),
        (nv.UnsupportedProblem, "a scale of 128 rows would be of several groups", (w.data, weights.data, w.scale, weights.scale, offs)),
    ]  # fmt: skip
    error, message, arguments = calls[break_it]
    if break_it == 5:
        told["a_format"], out = nv.FP8_128x128, torch.full((200, 200), 7.0)
    operation = on_parts.gemm if len(arguments) == 4 else on_parts.grouped_gemm
    with pytest.raises(error, match=message):
        operation(*arguments, out=out, out_dtype=torch.float32, **told)
    assert (out == 7.0).all()


@pytest.mark.parametrize("out_dtype", ["fp8_1x128", "int8"])
def test_results_of_other_scales_are_no_kernels(out_dtype):
    x, w = tensor(nv.MXFP4, M, K), tensor(nv.MXFP4, N, K)
    calls = [
        lambda: nv.gemm(x, w, out_dtype=out_dtype),
        lambda: nv.grouped_gemm([x], [w], out_dtype=out_dtype),
        lambda: nv.grouped_gemm(
            x, tensor(nv.MXFP4, 1, N, K), offs=torch.tensor([M], dtype=torch.int32), out_dtype=out_dtype
        ),
        lambda: on_parts.dual_gemm(x, w, w, out_dtype=out_dtype),
        lambda: nv.gemv(w, tensor(nv.MXFP4, K), out_dtype=out_dtype),
    ]
    for call in calls:
        with pytest.raises(
            nv.UnsupportedProblem,
            match=f"no kernel quantizes these products to {out_dtype.upper()}; .*quantize.result"
            "|only products of FP8_1X128 and FP8_128X128 are quantized to it, not of MXFP4 x MXFP4; .*quantize.result",
        ):
            call()

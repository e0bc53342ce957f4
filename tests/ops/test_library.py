"""Operations in graphs that torch.compile traces, and from several threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flat_parts import dual_gemm, gemm, gemv, grouped_dual_gemm, grouped_gemm, grouped_quantize

from nvfp4_cute import NVFP4Tensor, UnsupportedProblem, quantize
from nvfp4_cute.formats.block_scaled import dequantize

ROWS, N, K = (5, 3), 64, 128


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def random_scales(*shape):
    """Draws e4m3 scales from two binades, whose sums are exact in any order."""
    return torch.randint(48, 64, shape, dtype=torch.uint8)


def arguments_of(form, rows=ROWS):
    """Positional and keyword arguments for groups with these rows."""
    groups = len(rows)
    if form == "gemv":
        return (
            random_bytes(2, 5, K // 2).permute(1, 2, 0),
            random_bytes(2, K // 2).t(),
            *random_scales(2, 2, 1, 2, 32, 4, 4),
        ), {}
    if form == "gemm":
        a, b = (random_bytes(2, x, K // 2).permute(1, 2, 0) for x in (5, N))
        return (a, b, *random_scales(2, 2, 1, 2, 32, 4, 4)), {}
    b, b_scale = random_bytes(groups, N, K // 2), random_scales(groups, 1024)
    if form == "list":
        a = [random_bytes(m, K // 2) for m in rows]
        return (a, list(b), list(random_scales(groups, 1024)), list(b_scale)), {}
    a, a_scale = random_bytes(sum(rows), K // 2), random_scales(groups, 1024)
    if form == "ragged":
        return (a, b, a_scale, b_scale), {"offs": torch.tensor(rows).cumsum(0).int()}
    a = random_bytes(groups, max(rows), K // 2)
    return (a, b, a_scale, b_scale), {"masked_m": torch.full((groups,), max(rows), dtype=torch.int32)}


def op_of(form):
    return {"gemm": gemm, "gemv": gemv}.get(form, grouped_gemm)


def compiled(form):
    def function(args, options):
        return op_of(form)(*args, **options)

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_same(ours, right):
    for x, y in zip(ours, right, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_a_whole_graph_holds_quantized_results(form):
    args, options = arguments_of(form)
    options |= {
        "alpha": torch.tensor([0.5, 2.0]),
        "out_dtype": "nvfp4",
        "out_global_scale": torch.tensor([0.5, 1.0]),
    }
    # Padding is not written.
    for actual, expected in zip(compiled(form)(args, options), grouped_gemm(*args, **options), strict=True):
        assert actual.shape == expected.shape and actual.stride() == expected.stride()
        assert actual.dtype == expected.dtype
    if form == "masked":
        data = compiled(form)(args, options)[0]
        assert torch.equal(data, grouped_gemm(*args, **options)[0])


def test_a_whole_graph_holds_layers_that_stay_at_four_bits():
    """The graph holds a list of groups, and a batch whose result the next layer multiplies."""

    def layers(groups, batch, weights):
        hidden = gemm(*batch, 0.5, out_dtype="nvfp4", out_global_scale=0.25)
        result = gemm(hidden.data.permute(1, 2, 0), weights[0], hidden.scale, weights[1], hidden.global_scale)
        return result, grouped_gemm(*groups, alpha=[0.5, 2.0], out_dtype="nvfp4", out_global_scale=[0.5, 1.0])

    groups, batch = arguments_of("list")[0], arguments_of("gemm")[0]
    weights = batch[1][:, : N // 2], batch[3][:, :, :1].contiguous()
    expected, expected_groups = layers(groups, batch, weights)
    torch.compiler.reset()
    actual, actual_groups = torch.compile(layers, fullgraph=True, backend="aot_eager")(groups, batch, weights)
    assert_same([actual, *map(dequantize, actual_groups)], [expected, *map(dequantize, expected_groups)])


def dual_arguments(form):
    """Returns the arguments of ``arguments_of`` with both weights."""
    if form == "batch":
        (a, b, a_scale, b_scale), _ = arguments_of("gemm")
        return (a, b, b.flip(0), a_scale, b_scale, b_scale), {}
    (a, b, a_scale, b_scale), options = arguments_of(form)
    b2 = [x.flip(0) for x in b] if form == "list" else b.flip(1)
    return (a, b, b2, a_scale, b_scale, [x.clone() for x in b_scale] if form == "list" else b_scale), options


def test_gradients_of_a_traced_dual_operation_are_refused():
    args, options = dual_arguments("masked")
    alpha = torch.tensor([0.5, 2.0], requires_grad=True)
    torch.compiler.reset()
    traced = torch.compile(lambda: grouped_dual_gemm(*args, alpha, **options), backend="aot_eager")
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        traced()
    with torch.no_grad():
        assert traced().isfinite().all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, "nvfp4"])
@pytest.mark.parametrize("form", ["list", "ragged", "masked", "batch"])
def test_a_whole_graph_holds_the_dual_operation(form, dtype):
    args, options = dual_arguments(form)
    options |= {"out_dtype": dtype, "limit": 7.0}
    if dtype == "nvfp4":
        options["out_global_scale"] = 0.5 if form == "batch" else [0.5, 1.0]
    op = dual_gemm if form == "batch" else grouped_dual_gemm

    def function(args, options):
        return op(*args, 0.5 if form == "batch" else [0.5, 2.0], **options)

    def values(result):
        if dtype != "nvfp4":
            return result if form == "list" else [result]
        results = result if form == "list" else [result]
        # Padding of the scales is not written.
        return [x[0] if isinstance(x, tuple) else dequantize(x) for x in results]

    torch.compiler.reset()
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = function(args, options)
    assert_same(values(traced(args, options)), values(expected))
    out = copy.deepcopy(expected)
    for part in [out] if isinstance(out, torch.Tensor | NVFP4Tensor) else out:
        tensor = part.data if isinstance(part, NVFP4Tensor) else part
        tensor.zero_()
    traced(args, options | {"out": out})
    assert_same(values(out), values(expected))


@pytest.mark.parametrize("form", ["list", "ragged", "masked", "gemm", "gemv"])
def test_a_whole_graph_holds_the_operation(form):
    args, options = arguments_of(form)
    options["alpha"] = torch.tensor([0.5, 2.0])
    expected = op_of(form)(*args, **options)
    assert_same(compiled(form)(args, options), expected)
    out = [torch.zeros_like(t) for t in expected] if form == "list" else torch.zeros_like(expected)
    result = compiled(form)(args, options | {"out": out})
    assert_same(result, expected)
    assert_same(out, expected)


@pytest.mark.parametrize("form", ["list", "ragged", "masked", "gemm", "gemv"])
def test_gradients_are_refused(form):
    args, options = arguments_of(form)
    options["alpha"] = torch.tensor([0.5, 2.0], requires_grad=True)
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        op_of(form)(*args, **options)
    with pytest.raises(Exception, match="no backward pass"):
        result = compiled(form)(args, options)
        sum(t.sum() for t in result).backward()


@pytest.mark.parametrize("has_up", [False, True])
def test_a_whole_graph_holds_grouped_quantize(has_up):
    x, offs = torch.randn(sum(ROWS), K).bfloat16(), torch.tensor(ROWS).cumsum(0).int()

    def function(x, offs):
        return grouped_quantize(
            x, offs, up=x * 2 if has_up else None, global_scale=torch.tensor([0.01, 0.02])
        )

    torch.compiler.reset()
    actual = torch.compile(function, fullgraph=True, backend="aot_eager")(x, offs)
    assert_same([t.view(torch.uint8) for t in actual], [t.view(torch.uint8) for t in function(x, offs)])


def any_number_of_rows(form):
    """Returns a call of a form as a function of tensors with any number of rows, and such tensors."""
    experts = arguments_of("ragged")[0][1], arguments_of("ragged")[0][3]
    w, w_scale = experts[0][0], experts[1].view(2, -1)[0]
    vector, vector_scale = random_bytes(K // 2), random_scales(1024)
    calls = {
        "gemm": lambda a, s: gemm(a, w, s, w_scale),
        "gemm to nvfp4": lambda a, s: gemm(a, w, s, w_scale, out_dtype="nvfp4").data,
        "gemv": lambda a, s: gemv(a, vector, s, vector_scale),
        "dual_gemm": lambda a, s: dual_gemm(a, w, w, s, w_scale, w_scale),
        "dual_gemm to nvfp4": lambda a, s: dual_gemm(a, w, w, s, w_scale, w_scale, out_dtype="nvfp4").data,
        "ragged": lambda a, s, offs: grouped_gemm(a, experts[0], s, experts[1], offs),
        "16 bits": lambda x: gemm(x, w, None, w_scale),
        "quantize": lambda x: quantize(x).data,
        "grouped_quantize": lambda x, offs: grouped_quantize(x, offs)[0],
    }

    def tensors(rows):
        x, data, scales = (
            torch.randn(rows, K).bfloat16(),
            random_bytes(rows, K // 2),
            random_scales((rows + 255) // 128 * 1024),
        )
        offs = torch.tensor([rows // 3, rows], dtype=torch.int32)
        if form in ("16 bits", "quantize"):
            return (x,)
        if form == "grouped_quantize":
            return x, offs
        ragged = random_scales((rows // 128 + 2) * 1024)
        return (data, ragged, offs) if form == "ragged" else (data, scales[: -(-rows // 128) * 1024])

    return calls[form], tensors


@pytest.mark.parametrize(
    "form",
    [
        "gemm",
        "gemm to nvfp4",
        "gemv",
        "dual_gemm",
        "dual_gemm to nvfp4",
        "ragged",
        "16 bits",
        "quantize",
        "grouped_quantize",
    ],
)
def test_a_graph_is_exported_for_any_number_of_rows(form):
    call, tensors = any_number_of_rows(form)

    class Module(torch.nn.Module):
        def forward(self, *args):
            return call(*args)

    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(None if t.dtype == torch.int32 else {0: dynamic} for t in tensors(140))
    exported = torch.export.export(Module(), tensors(140), dynamic_shapes=(shapes,)).module()
    for rows in (129, 250, 1000):
        args = tensors(rows)
        assert_same([exported(*args)], [call(*args)])


def test_threads_with_different_problems_on_the_emulator():
    """Emulated GPUs run one after the other, so launches of two threads never overlap."""
    problems = [arguments_of("list", rows)[0] for rows in ((5, 3), (1, 9))]
    expected = [grouped_gemm(*args) for args in problems]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda args: grouped_gemm(*args, backend="emulator:sm_90a"), problems * 3)
        for result, right in zip(results, expected * 3, strict=True):
            assert_same(result, right)


def test_threads_with_different_problems():
    problems = [arguments_of(form, rows) for form in ("list", "ragged") for rows in ((5, 3), (1, 9, 4))]
    expected = [grouped_gemm(*args, **options) for args, options in problems]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda problem: grouped_gemm(*problem[0], **problem[1]), problems * 8)
        for result, right in zip(results, expected * 8, strict=True):
            assert_same(result, right)

"""Operations in graphs that torch.compile traces, and from several threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nvfp4_cute import UnsupportedProblem, gemm, gemv, grouped_gemm

ROWS, N, K = (5, 3), 64, 128


def random_bytes(*shape):
    return torch.randint(0, 112, shape, dtype=torch.uint8)  # no NaN among scales


def arguments_of(form, rows=ROWS):
    """Positional and named arguments of groups with these rows."""
    groups = len(rows)
    if form == "gemv":
        return (
            random_bytes(2, 5, K // 2).permute(1, 2, 0),
            random_bytes(2, K // 2).t(),
            *random_bytes(2, 2, 1, 2, 32, 4, 4),
        ), {}
    if form == "gemm":
        a, b = (random_bytes(2, x, K // 2).permute(1, 2, 0) for x in (5, N))
        return (a, b, *random_bytes(2, 2, 1, 2, 32, 4, 4)), {}
    b, b_scale = random_bytes(groups, N, K // 2), random_bytes(groups, 1024)
    if form == "list":
        a = [random_bytes(m, K // 2) for m in rows]
        return (a, list(b), list(random_bytes(groups, 1024)), list(b_scale)), {}
    a, a_scale, b_scale = random_bytes(sum(rows), K // 2), random_bytes(1024 * groups), b_scale.view(-1)
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


def test_threads_with_different_problems_on_the_emulator():
    """One emulated GPU after the other: launches of two threads never meet."""
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

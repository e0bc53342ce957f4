"""Calls on a GPU: they never wait, use the current stream, work from several threads, and in graphs with other sizes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from device_groups_check import operands, run
from flat_parts import grouped_gemm
from oracle import bits

pytestmark = pytest.mark.gpu("sm_90a")
FORMS = ("list", "ragged", "masked")
# Both have the same number of rows and of scale blocks.
ROWS, OTHER_ROWS = (40, 100, 1), (100, 1, 40)
LONG = 500_000_000
"""Cycles of a kernel that keeps a stream busy for a quarter of a second."""


def arguments_of(form, rows=ROWS, seed=0):
    """Arguments on the CPU, with an output full of NaN."""
    if form != "list":
        return operands(form, rows, n=256, k=256, seed=seed)
    parts = operands("masked", rows, n=256, k=256, seed=seed)
    del parts["masked_m"]
    whole = {name: list(parts[name]) for name in ("a", "b", "a_scale", "b_scale", "out")}
    whole["a"], whole["out"] = ([t[:m] for t, m in zip(whole[x], rows, strict=True)] for x in ("a", "out"))
    return parts | whole


def expected(arguments):
    """Returns the reference's results for arguments on the CPU."""
    if isinstance(arguments["a"], list):
        return grouped_gemm(**{**arguments, "out": None}, backend="reference")
    return [run(arguments, "reference")]


def on_gpu(arguments):
    def moved(value):
        if isinstance(value, list):
            return [moved(x) for x in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}


def tensors(arguments, name):
    """Returns the tensors of one argument, which may be a list."""
    value = arguments[name]
    return [value] if isinstance(value, torch.Tensor) else value


def write(arguments, name, source):
    """Copies ``source`` into the argument with this name, on any device."""
    for tensor, value in zip(tensors(arguments, name), tensors(source, name), strict=True):
        tensor.copy_(value, non_blocking=True)


def assert_right(out, want):
    for got, right in zip([out] if isinstance(out, torch.Tensor) else out, want, strict=True):
        assert torch.equal(bits(got.cpu()), bits(right))


@pytest.mark.parametrize("form", FORMS)
def test_calls_wait_for_nothing(form):
    """First and repeated calls of a problem return while the stream is still busy."""
    arguments = arguments_of(form)
    moved, want = on_gpu(arguments), expected(arguments)
    for given in (moved, {**moved, "out": None}):
        grouped_gemm(**given)  # compiles, loads the code on the GPU and allocates memory for results
    torch.cuda.synchronize()
    changed = on_gpu(arguments | {"b": [t.clone() for t in arguments["b"]]}) if form == "list" else moved
    idle = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    idle.record()
    results = [grouped_gemm(**given) for given in (moved, changed, {**moved, "out": None})]
    assert not idle.query()
    torch.cuda.synchronize()
    for result in results[:2]:
        assert_right(result, want)


@pytest.mark.parametrize("form", FORMS)
def test_calls_go_to_the_current_stream(form):
    """Operands that a busy stream still has to write are read only afterwards."""
    arguments = arguments_of(form)
    moved, want = on_gpu(arguments), expected(arguments)
    source = on_gpu(arguments)
    for _ in range(2):
        for a in tensors(moved, "a"):
            a.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG // 5)
            write(moved, "a", source)
            out = grouped_gemm(**moved)
        torch.cuda.synchronize()
        assert_right(out, want)


def test_threads_with_a_stream_each():
    """Threads call with equal and with different shapes at the same time; every thread gets its own results."""
    problems = [
        arguments_of(form, rows, seed) for seed, rows in enumerate((ROWS, OTHER_ROWS)) for form in FORMS
    ]

    def work(arguments):
        moved, want = on_gpu(arguments), expected(arguments)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(30):
                write(moved, "out", arguments)
                grouped_gemm(**moved)
                torch.cuda.current_stream().synchronize()
                assert_right(moved["out"], want)

    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(work, problems))


@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_a_replayed_graph_follows_the_sizes(form):
    moved = on_gpu(arguments_of(form))
    grouped_gemm(**moved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(**moved)
    for rows, seed in ((OTHER_ROWS, 1), (ROWS, 2)):
        given = arguments_of(form, rows, seed)
        for name in given.keys() - {"out_dtype"}:
            write(moved, name, given)
        graph.replay()
        assert_right(moved["out"], expected(given))


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_allocates_its_results_and_nothing_else(form):
    """The results are one allocation."""
    moved = on_gpu(arguments_of(form))
    for given, pieces in ((moved, 0), (moved | {"out": None}, 1)):
        for _ in range(3):
            grouped_gemm(**given)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        grouped_gemm(**given)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == pieces


@pytest.mark.parametrize("form", FORMS)
def test_a_traced_graph_gives_the_same_results(form):
    arguments = arguments_of(form)
    moved, want = on_gpu(arguments), expected(arguments)
    traced = torch.compile(lambda: grouped_gemm(**moved), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        write(moved, "out", arguments)
        assert_right(traced(), want)

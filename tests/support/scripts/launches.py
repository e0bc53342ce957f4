"""Launches several kernels of one module with every launch attribute. `nvfp4-cute emulate` runs this."""

import checks
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

THREADS = 32


@cute.kernel
def add(x: cute.Tensor, value: Int32):
    """x += value, with one CTA per 32 elements."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    x[i] = x[i] + value


@cute.kernel
def double(x: cute.Tensor):
    """x *= 2."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    x[i] = x[i] * 2


@cute.kernel
def ranks(x: cute.Tensor):
    """x = the CTA's rank in its cluster; the first element of a CTA gets the cluster's size."""
    tidx = cute.arch.thread_idx()[0]
    i = cute.arch.block_idx()[0] * THREADS + tidx
    cute.arch.griddepcontrol_wait()
    x[i] = cute.arch.block_in_cluster_idx()[0]
    if tidx == 0:
        x[i] = cute.arch.cluster_size()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def add_then_double(x: cute.Tensor, value: Int32, stream: cuda.CUstream):
    grid = (x.shape[0] // THREADS, 1, 1)
    add(x, value).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
    double(x).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.jit
def clustered(x: cute.Tensor):
    grid = (x.shape[0] // THREADS, 1, 1)
    ranks(x).launch(grid=grid, block=(THREADS, 1, 1), cluster=(4, 1, 1), use_pdl=True)


@cute.jit
def cooperative(x: cute.Tensor, ctas: Int32):
    double(x).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), cooperative=True)


def vector(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32, device="cuda")


def wrapped(x: torch.Tensor) -> cute.Tensor:
    return from_dlpack(x, assumed_align=16).mark_layout_dynamic()


def stream_of(stream: torch.cuda.Stream) -> cuda.CUstream:
    return cuda.CUstream(stream.cuda_stream)


X = vector(64)
COMPILED = cute.compile(add_then_double, wrapped(X), 1, stream_of(torch.cuda.current_stream()))


def check_from_dlpack_shares_memory() -> None:
    x = vector(64)
    assert "gmem" in str(wrapped(x))
    back = torch.from_dlpack(x)
    assert back.is_cuda and back.data_ptr() == x.data_ptr()


def check_kernels_run_in_order() -> None:
    x, stream = vector(64), stream_of(torch.cuda.current_stream())
    for value in (3, 5):
        COMPILED(wrapped(x), value, stream)
    assert torch.equal(x.cpu(), ((torch.arange(64, dtype=torch.int32) + 3) * 2 + 5) * 2)


def check_streams_and_torch_operations_in_order() -> None:
    x, side = vector(64), torch.cuda.Stream()
    with torch.cuda.stream(side):
        COMPILED(wrapped(x), 1, stream_of(side))
        x -= 2
    side.synchronize()
    COMPILED(wrapped(x), 0, stream_of(torch.cuda.current_stream()))
    assert torch.equal(x.cpu(), 4 * torch.arange(64, dtype=torch.int32))


def check_a_graph_replays_launches() -> None:
    x, stream, graph = vector(64), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        COMPILED(wrapped(x), 1, stream_of(torch.cuda.current_stream()))
    assert torch.equal(x, vector(64))
    graph.replay()
    graph.replay()
    assert torch.equal(x.cpu(), 4 * torch.arange(64, dtype=torch.int32) + 6)


def check_clusters_and_dependent_launches() -> None:
    x = vector(8 * THREADS)
    clustered(wrapped(x))
    got = x.cpu().view(8, THREADS)
    assert got[:, 0].tolist() == [4] * 8 and got[:, 1].tolist() == [0, 1, 2, 3] * 2


def check_cooperative_launches() -> None:
    x = vector(2 * THREADS)
    launch = cute.compile(cooperative, wrapped(x), 2)
    launch(wrapped(x), 2)
    assert torch.equal(x.cpu(), 2 * torch.arange(2 * THREADS, dtype=torch.int32))
    try:
        launch(wrapped(x), 1 << 16)
    except Exception as error:
        assert "ooperativeLaunchTooLarge" in str(error) or "720" in str(error), error
    else:
        raise AssertionError("65536 CTAs cannot be resident at once")
    launch(wrapped(x), 2)  # the device still works
    assert torch.equal(x.cpu(), 4 * torch.arange(2 * THREADS, dtype=torch.int32))


def check_modules_with_kernels_of_one_name() -> None:
    outcomes = []
    for factor in (2, 3):

        @cute.kernel
        def scale(x: cute.Tensor, factor: cutlass.Constexpr):
            i = cute.arch.thread_idx()[0]
            x[i] = x[i] * factor

        @cute.jit
        def launch(x: cute.Tensor, factor: cutlass.Constexpr):
            scale(x, factor).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

        outcomes.append(cute.compile(launch, wrapped(X), factor))
    x = vector(THREADS)
    for launch in (*outcomes, outcomes[0]):
        launch(wrapped(x))
    assert torch.equal(x.cpu(), 12 * torch.arange(THREADS, dtype=torch.int32))


def check_benchmarks_run_once() -> None:
    from cutlass.testing import JitArguments, benchmark

    x, stream = vector(64), stream_of(torch.cuda.current_stream())
    arguments = JitArguments(wrapped(x), 1, stream)
    assert (
        0
        < benchmark(COMPILED, kernel_arguments=arguments, warmup_iterations=2, iterations=10, stream=stream)
        < 1e8
    )
    assert torch.equal(x.cpu(), 2 * torch.arange(64, dtype=torch.int32) + 2)


if __name__ == "__main__":
    checks.run(globals())

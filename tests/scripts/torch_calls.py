"""What scripts ask of torch and of the CUDA bindings before and after their kernels; run by `nvfp4-cute emulate`."""

import checks
import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    """Every answer about a tensor's place agrees."""
    answers = {
        tensor.is_cuda,
        tensor.device == torch.device("cuda", 0),
        tensor.get_device() == 0,
        not tensor.is_cpu,
    }
    assert len(answers) == 1, answers
    return tensor.is_cuda


def refused(action, error: type, words: str) -> None:
    try:
        action()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError(f"{words}: not refused")


def check_creation() -> None:
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn):
        x = make(3, 5, device="cuda", dtype=torch.float32)
        assert on_gpu(x) and x.shape == (3, 5) and x.data_ptr() % 512 == 0
    assert torch.arange(2, 10, 3, device="cuda:0").tolist() == [2, 5, 8]
    assert torch.full((2,), 7, device=torch.device("cuda")).tolist() == [7, 7]
    assert torch.tensor([[1.5]], device=0).item() == 1.5
    x = torch.randint(3, 9, (1000,), device="cuda", dtype=torch.int32)
    assert on_gpu(x) and set(x.tolist()) == set(range(3, 9))
    assert on_gpu(torch.empty_strided((4, 4), (1, 4), device="cuda")) and on_gpu(torch.zeros_like(x))
    assert (
        on_gpu(x.new_empty(3))
        and not on_gpu(torch.zeros_like(x, device="cpu"))
        and not on_gpu(torch.zeros(1))
    )


def check_results_stay_where_their_operands_are() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    for y in (
        x + 1,
        x.t(),
        x[1:],
        x.sum(0),
        torch.cat([x, x]),
        x.half(),
        torch.einsum("ij,kj->ik", x, x),
        x.contiguous(),
    ):
        assert on_gpu(y), y
    assert (x.cpu() + 1).device.type == "cpu" and (x + x).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert x.t().data_ptr() == x.data_ptr() and x[1:].data_ptr() == x.data_ptr() + 12


def check_moves() -> None:
    host = torch.arange(4.0)
    for x in (
        host.cuda(),
        host.to("cuda"),
        host.to(torch.device("cuda", 0)),
        host.to(device="cuda"),
        host.to(torch.ones(1, device="cuda")),
    ):
        assert on_gpu(x) and x.data_ptr() != host.data_ptr() and x.tolist() == host.tolist()
        assert (
            x.cuda() is x and x.to("cuda").data_ptr() == x.data_ptr() and x.clone().data_ptr() != x.data_ptr()
        )
        assert not on_gpu(x.cpu()) and x.cpu().data_ptr() != x.data_ptr()
    x = host.to("cuda", torch.float16)
    assert x.dtype == torch.float16 and on_gpu(x) and x.to(torch.int32).dtype == torch.int32
    refused(lambda: host.to("cuda:1"), RuntimeError, "invalid device ordinal")
    refused(lambda: x.numpy(), TypeError, "can't convert cuda:0 device type tensor to numpy")


def check_copies_between_devices() -> None:
    host, gpu = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32, device="cuda")
    assert gpu.copy_(host, non_blocking=True) is gpu and on_gpu(gpu) and gpu.tolist() == host.tolist()
    gpu += 1
    assert host.tolist() == list(range(8)) and gpu.tolist() == list(range(1, 9))
    host.copy_(gpu[::2].repeat_interleave(2))
    assert not on_gpu(host) and host.tolist() == [1, 1, 3, 3, 5, 5, 7, 7]
    pinned = torch.zeros(4, pin_memory=True)
    assert pinned.is_pinned() and not torch.zeros(4).is_pinned() and not on_gpu(pinned)


def check_generators() -> None:
    draws = []
    for seed in (3, 3, 4):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        draws.append(torch.randn(5, device="cuda", generator=generator).tolist())
    assert draws[0] == draws[1] != draws[2]
    torch.cuda.manual_seed_all(5)
    torch.manual_seed(5)
    first = torch.rand(3, device="cuda").tolist()
    torch.manual_seed(5)
    assert torch.rand(3, device="cuda").tolist() == first


def check_default_device() -> None:
    torch.set_default_device("cuda")
    assert on_gpu(torch.zeros(2)) and not on_gpu(torch.zeros(2, device="cpu"))
    torch.set_default_device(None)
    assert not on_gpu(torch.zeros(2))


def check_properties() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_capability() == (10, 0) == (properties.major, properties.minor)
    assert properties.multi_processor_count == 148 and "B200" in torch.cuda.get_device_name()
    assert properties.total_memory == torch.cuda.mem_get_info()[1] > 100 << 30 and torch.version.cuda


def check_streams_and_events() -> None:
    stream = torch.cuda.Stream()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream and stream.cuda_stream
        start.record()
        x = torch.ones(4, device="cuda") * 2
        stop.record(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    stream.wait_event(stop)
    stream.synchronize(), stop.synchronize(), torch.cuda.synchronize()
    assert stop.query() and stream.query() and 0 <= start.elapsed_time(stop) < 1e5 and x.tolist() == [2] * 4


def check_graphs() -> None:
    x, count = torch.zeros(3, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count += 1
        y = x + 10
    assert count.item() == 0
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert count.item() == 2 and y.tolist() == [15] * 3


def check_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ones(4, device="cuda").sum()
    assert "sum" in profile.key_averages().table(sort_by="cuda_time_total")


def check_cuda_bindings() -> None:
    from cuda.bindings import driver, runtime

    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)
    error, address = runtime.cudaMalloc(64)
    assert int(error) == 0 and address % 512 == 0
    host = torch.arange(16, dtype=torch.int32)
    back = torch.zeros_like(host)
    kinds = runtime.cudaMemcpyKind
    runtime.cudaMemcpy(address, host.data_ptr(), 64, kinds.cudaMemcpyHostToDevice)
    runtime.cudaMemcpy(back.data_ptr(), address, 64, kinds.cudaMemcpyDeviceToHost)
    assert back.tolist() == host.tolist() and runtime.cudaFree(address) == (runtime.cudaError_t.cudaSuccess,)
    attribute = runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount
    assert runtime.cudaDeviceGetAttribute(attribute, 0) == (runtime.cudaError_t.cudaSuccess, 148)


def check_hardware_info() -> None:
    from cutlass.utils import HardwareInfo

    info = HardwareInfo()
    assert info.get_device_multiprocessor_count() == 148
    assert [info.get_max_active_clusters(n) for n in (1, 2, 4)] == [148, 74, 37]
    refused(lambda: info.get_max_active_clusters(64), ValueError, "between 1 and 32")


if __name__ == "__main__":
    checks.run(globals())

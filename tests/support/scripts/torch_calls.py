"""Calls of torch and the CUDA bindings that scripts make around their kernels. `nvfp4-cute emulate` runs this."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import checks
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def on_gpu(tensor: torch.Tensor) -> bool:
    """Checks that all queries of a tensor's device agree."""
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


def check_identity_limits_and_properties() -> None:
    """Checks queries that packages make before their first launch: answers agree, and unsupported ones are refused by name."""
    from cuda.bindings import driver, runtime

    asked, limits = torch.cuda.get_device_properties(0), runtime.cudaLimit
    error, given = runtime.cudaGetDeviceProperties(0)
    assert int(error) == 0 and given.multiProcessorCount == asked.multi_processor_count == 148
    assert driver.cuDeviceGetUuid(0)[1].bytes == given.uuid.bytes == asked.uuid.bytes
    assert runtime.cudaDeviceGetLimit(limits.cudaLimitStackSize)[1] == 1024
    runtime.cudaDeviceSetLimit(limits.cudaLimitMallocHeapSize, 1 << 24)
    assert driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE)[1] == 1 << 24
    assert torch.cuda.default_generators[0].initial_seed() == torch.initial_seed()
    assert not hasattr(asked, "nonesuch") and torch.cuda.cudart().cudaHostRegister(0, 0, 0) == 0
    refused(lambda: asked.nonesuch, AttributeError, "nonesuch has no answer")
    refused(torch.cuda.power_draw, RuntimeError, "torch.cuda.power_draw is not available")
    unknown = limits.cudaLimitMaxL2FetchGranularity
    refused(lambda: runtime.cudaDeviceGetLimit(unknown), RuntimeError, "cudaLimitMaxL2FetchGranularity")
    refused(lambda: runtime.cudaGraphCreate(0), RuntimeError, "cudaGraphCreate has no answer")


def check_hardware_info() -> None:
    from cutlass.utils import HardwareInfo

    info = HardwareInfo()
    assert info.get_device_multiprocessor_count() == 148
    assert [info.get_max_active_clusters(n) for n in (1, 2, 4)] == [148, 74, 37]
    refused(lambda: info.get_max_active_clusters(64), ValueError, "between 1 and 32")


# ---- Python that torch calls from an operator
# --------------------------------------------------------------------------
class Doubled(torch.autograd.Function):
    seen: list = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        made = torch.empty(3, device="cuda"), torch.empty_like(gradient), torch.zeros(3)
        Doubled.seen = [on_gpu(t) for t in (gradient, ctx.saved_tensors[0], *made)]
        return gradient * 2


def check_backward_functions_see_the_gpu() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    # C++ code computes the gradient that the function gets: of a sum, a product, an expansion.
    (Doubled.apply(x * 3).exp().log() * 5).sum().backward()
    assert Doubled.seen == [True, True, True, True, False]
    assert on_gpu(x.grad) and x.grad.tolist() == [30, 30, 30]
    place = x.grad.data_ptr()
    assert x.grad.data_ptr() == place, "looking at a gradient moved it"
    (gradient,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert on_gpu(gradient) and gradient.tolist() == [2, 2, 2]


def check_backward_on_the_cpu_stays_there() -> None:
    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x * 3).sum().backward()
    assert Doubled.seen == [False, False, True, False, False]
    assert not on_gpu(x.grad)


def check_hooks_and_checkpoints_see_the_gpu() -> None:
    seen = []
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(on_gpu(g) and on_gpu(torch.ones(1, device="cuda"))))

    def work(t):
        seen.append(on_gpu(t) and on_gpu(torch.ones(1, device="cuda")))
        return t * t

    torch.utils.checkpoint.checkpoint(work, y, use_reentrant=False).sum().backward()
    assert seen == [True, True, True] and x.grad.tolist() == [8] * 4


def check_bodies_of_custom_operators_see_the_gpu() -> None:
    places = []

    @torch.library.custom_op("checks::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        places.append((on_gpu(x), on_gpu(torch.empty(2, device=x.device)), torch.cuda.is_available()))
        return torch.empty_like(x).copy_(x) * 2

    @torch.library.custom_op("checks::thrice", mutates_args={"out"}, device_types="cuda")
    def thrice(x: torch.Tensor, out: torch.Tensor) -> None:
        places.append((on_gpu(x), on_gpu(out), True))
        out.copy_(x * 3)

    x = torch.arange(3.0, device="cuda")
    y = twice(x)
    assert on_gpu(y) and y.tolist() == [0, 2, 4] and places == [(True, True, True)]
    assert not on_gpu(twice(torch.ones(2))) and places[1][:2] == (False, False)
    out = torch.zeros(3, device="cuda")
    thrice(x, out)
    assert out.tolist() == [0, 3, 6] and places[2] == (True, True, True)


def check_operators_with_a_body_for_each_device() -> None:
    library = torch.library.Library("checks_each", "DEF")
    library.define("where(Tensor x) -> Tensor")
    library.impl("where", lambda x: torch.zeros(1), "CPU", allow_override=False)
    library.impl("where", lambda x: torch.ones(1, device="cuda"), "CUDA", allow_override=False)
    assert torch.ops.checks_each.where(torch.ones(2)).item() == 0
    assert torch.ops.checks_each.where(torch.ones(2, device="cuda")).item() == 1


def check_custom_operators_with_gradients() -> None:
    seen = []

    @torch.library.custom_op("checks::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, device="cuda").copy_(x / 2)

    def backward(ctx, gradient):
        seen.append(on_gpu(gradient))
        return halve(gradient)

    halve.register_autograd(backward)
    x = torch.ones(4, device="cuda", requires_grad=True)
    halve(x).sum().backward()
    assert seen == [True] and on_gpu(x.grad) and x.grad.tolist() == [0.5] * 4


def check_compiled_functions_run_as_they_are() -> None:
    seen = []

    @torch.compile(dynamic=True)
    def twice(x):
        seen.append(on_gpu(x) and isinstance(torch.cuda.stream(None), torch.cuda.StreamContext))
        return x * 2

    assert twice(torch.ones(2, device="cuda")).tolist() == [2, 2] and seen == [True]
    assert torch.compile(torch.sin, fullgraph=True) is torch.sin


# ---- products that a CPU build of torch lacks
# --------------------------------------------------------------------------
def check_products_take_the_type_of_their_output() -> None:
    a = torch.tensor([[1.0, 2**-9]], device="cuda", dtype=torch.bfloat16)
    b = torch.ones(2, 1, device="cuda", dtype=torch.bfloat16)
    exact = 1 + 2**-9
    assert torch.mm(a, b, out_dtype=torch.float32).item() == exact and torch.mm(a, b).item() == 1
    assert torch.bmm(a[None], b[None], torch.float32).item() == exact
    c = torch.full((1, 1), 4.0, device="cuda")
    assert torch.addmm(c, a, b, out_dtype=torch.float32, beta=0.5).item() == 2 + exact
    out = torch.zeros(1, 1, device="cuda", dtype=torch.bfloat16)
    assert torch.mm(a, b, out=out) is out and out.item() == 1


def check_grouped_products() -> None:
    a = torch.arange(12.0, device="cuda").view(6, 2).bfloat16()
    b = torch.arange(12.0, device="cuda").view(3, 2, 2).bfloat16()
    offs = torch.tensor([1, 1, 4], device="cuda", dtype=torch.int32)
    got = torch._grouped_mm(a, b, offs=offs)
    assert on_gpu(got) and got.dtype == torch.bfloat16
    assert got[:1].equal(a[:1] @ b[0]) and got[1:4].equal(a[1:4] @ b[2]) and not got[4:].any()
    columns = torch._grouped_mm(
        b, a.t().contiguous(), offs=torch.tensor([2, 4, 6], device="cuda", dtype=torch.int32)
    )
    assert columns[:, 2:4].equal(b[1] @ a.t()[:, 2:4])
    ragged_k = torch._grouped_mm(a.t(), a, offs=offs)
    assert ragged_k.shape == (3, 2, 2) and ragged_k[2].equal(a.t()[:, 1:4] @ a[1:4]) and not ragged_k[1].any()


def blocked(scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns] in the 128x4 layout, flat."""
    rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
    whole = torch.zeros(rows, columns).copy_(
        torch.nn.functional.pad(scale, (0, columns - scale.shape[1], 0, rows - scale.shape[0]))
    )
    return whole.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def check_scaled_grouped_products() -> None:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

    torch.manual_seed(0)
    fp8, e8 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    a, b = (
        torch.randint(-4, 5, (5, 64)).float(),
        torch.randint(-4, 5, (2, 3, 64)).float(),
    )  # b: [groups, N, K]
    powers = lambda *shape: 2.0 ** torch.randint(-2, 3, shape)
    scale_a, scale_b = powers(5, 2), powers(2, 3, 2)
    wide_a, wide_b = (s.repeat_interleave(32, -1) for s in (scale_a, scale_b))
    offs = torch.tensor([2, 5], dtype=torch.int32)
    expected = torch.cat([(a * wide_a)[:2] @ (b * wide_b)[0].t(), (a * wide_a)[2:] @ (b * wide_b)[1].t()])
    recipe = ScalingType.BlockWise1x32
    got = scaled_grouped_mm(
        a.cuda().to(fp8),
        b.cuda().to(fp8).transpose(1, 2),
        torch.cat([blocked(scale_a[:2]), blocked(scale_a[2:])]).to(e8).cuda(),
        recipe,
        torch.stack([blocked(s) for s in scale_b]).to(e8).cuda(),
        recipe,
        SwizzleType.SWIZZLE_32_4_4,
        SwizzleType.SWIZZLE_32_4_4,
        offs=offs.cuda(),
        output_dtype=torch.float32,
    )
    assert on_gpu(got) and got.cpu().equal(expected)
    rows, columns = powers(5), powers(2, 3)
    got = torch._scaled_grouped_mm(
        a.cuda().to(fp8),
        b.cuda().to(fp8).transpose(1, 2),
        rows.cuda(),
        columns.cuda(),
        offs.cuda(),
        out_dtype=torch.float32,
    )
    expected = torch.cat([a[:2] @ b[0].t() * columns[0], a[2:] @ b[1].t() * columns[1]]) * rows[:, None]
    assert got.cpu().equal(expected)


def check_threads() -> None:
    made = []

    class Own(Thread):
        def run(self) -> None:
            made.append(torch.ones(2, device="cuda") + 1)

    own = Own()
    own.start()
    own.join()
    with ThreadPoolExecutor(1) as pool:
        made.append(pool.submit(torch.ones, 2, device="cuda").result())
    assert all(map(on_gpu, made)) and made[0].tolist() == [2, 2]


def check_accelerator() -> None:
    here = torch.accelerator
    assert here.is_available() and here.device_count() == 1 and here.current_device_index() == 0
    assert here.current_accelerator() == torch.device("cuda") and on_gpu(
        torch.ones(2, device=here.current_accelerator())
    )
    here.set_device_index(0)
    here.synchronize()
    assert here.current_stream() == torch.cuda.current_stream()


def check_fake_tensors() -> None:
    """Checks tensors without data and with symbolic sizes, as tracers make them."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(4, 8, device="cuda"))
    host = mode.from_tensor(torch.zeros(4, 8))
    with mode:
        unknown = mode.shape_env.create_unbacked_symint()
        others = fake + 1, fake[0], fake.t() @ fake, torch.empty_like(fake), fake.new_empty([unknown, 8])
        made = torch.zeros(3, device="cuda")
        assert torch.addmm(fake[:, :4], fake.half(), fake.half().t()).dtype == torch.float32
        assert all(map(on_gpu, (fake, made, *others, host.cuda(), fake.half())))
        assert not any(map(on_gpu, (host, host + 1, fake.cpu(), torch.zeros(3))))


if __name__ == "__main__":
    checks.run(globals())

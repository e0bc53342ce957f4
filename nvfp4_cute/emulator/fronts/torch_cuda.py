"""Functions and classes of `torch.cuda` for a virtual GPU: properties, streams, events, graphs, memory statistics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from nvfp4_cute.emulator.fronts.virtual_gpu import Graph, VirtualGpu
from nvfp4_cute.errors import EmulatorError


class Stream:
    """A stream of the virtual GPU. All work runs in order when it is submitted, so there is nothing to wait for."""

    gpu: VirtualGpu
    current: "Stream"

    def __init__(self, device: Any = None, priority: int = 0, **options: Any):
        """`stream_ptr`, among the options, wraps an existing handle."""
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.cuda_stream = options["stream_ptr"] if "stream_ptr" in options else self.gpu.new_stream()

    def nothing(self, *args: Any) -> None:
        """Waits for nothing."""

    synchronize = wait_stream = wait_event = nothing

    def query(self) -> bool:
        """Whether all work is done: always True."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Returns an event recorded in this stream."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._before, type(self).current = Stream.current, self
        return self

    def __exit__(self, *error: Any) -> None:
        Stream.current = self._before

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol: version, handle."""
        return 0, self.cuda_stream


class Event:
    """An event of the virtual GPU. It stores the host's time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        """Starts unrecorded."""
        self.cuda_event = Stream.gpu.new_handle()
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Records the host's time."""
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing, because streams run in order."""

    def synchronize(self) -> None:
        """Returns at once, because the work is done."""

    def query(self) -> bool:
        """Whether the earlier work is done: always True."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Returns host milliseconds between two records. They are unrelated to GPU time.

        Raises:
            RuntimeError: an event was not recorded.
        """
        if self._time is None or end._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end._time - self._time)


class CUDAGraph:
    """A graph of launches and torch operations that a capture collects and every replay runs."""

    def __init__(self, keep_graph: bool = False):
        """Starts empty."""
        self._graph = Graph()

    def capture_begin(self, *args: Any, **options: Any) -> None:
        """Starts to collect device work instead of running it."""
        self._graph = Graph()
        Stream.gpu.begin_capture(self._graph)

    def capture_end(self) -> None:
        """Stops collecting device work."""
        Stream.gpu.end_capture()

    def replay(self) -> None:
        """Runs the captured work."""
        self._graph.replay()

    def reset(self) -> None:
        """Forgets the captured work."""
        self._graph = Graph()

    def instantiate(self) -> None:
        """Does nothing."""

    def pool(self) -> tuple[int, int]:
        """Returns an identifier of a memory pool, which nothing uses."""
        return 0, 0


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **options: Any
) -> Iterator[None]:
    """torch.cuda.graph: captures the work of the block."""
    with stream or Stream.current:
        cuda_graph.capture_begin()
        try:
            yield
        finally:
            cuda_graph.capture_end()


class StreamContext:
    """torch.cuda.StreamContext: makes a stream the current one within the block. A class, as torch's compiler requires."""

    def __init__(self, stream: Stream | None):
        """`stream` None: the current stream."""
        self.stream = stream

    def __enter__(self) -> None:
        self._entered = self.stream or Stream.current
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class DeviceContext:
    """torch.cuda.device and similar context managers. There is only one device."""

    def __init__(self, device: Any = None):
        """`device`: ignored, because there is only one."""
        self.idx, self.prev_idx = 0, -1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _range(message: str = "", *args: Any, **kwargs: Any) -> DeviceContext:
    """torch.cuda.nvtx.range: discards the mark."""
    return DeviceContext()


class Answered(SimpleNamespace):
    """Answers by name. A missing answer raises AttributeError with the name, so `hasattr` works."""

    def __init__(self, whose: str, **answers: Any):
        """`whose`: owner of the names, for the error message."""
        super().__init__(**answers)
        object.__setattr__(self, "_whose", whose)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._whose}.{name} has no answer on the virtual GPU")


def properties(gpu: VirtualGpu) -> Answered:
    """Returns the answer of torch.cuda.get_device_properties."""
    major, minor = gpu.device.capability
    numbers = gpu.device.attributes()
    return Answered(
        "torch.cuda.get_device_properties()",
        name=gpu.product.name,
        uuid=gpu.uuid,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        major=major,
        minor=minor,
        multi_processor_count=gpu.product.sm_count,
        total_memory=gpu.product.memory_bytes,
        L2_cache_size=gpu.product.l2_bytes,
        clock_rate=gpu.product.clock_khz,
        warp_size=numbers[10],
        max_threads_per_multi_processor=numbers[39],
        max_threads_per_block=numbers[1],
        regs_per_multiprocessor=numbers[82],
        shared_memory_per_block=numbers[8],
        shared_memory_per_block_optin=numbers[97],
        shared_memory_per_multiprocessor=numbers[81],
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def _refuse(name: str, why: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EmulatorError(f"torch.cuda.{name} is not available on the virtual GPU: {why}")

    return refuse


def _constant(name: str, value: Any) -> Callable:
    """Returns a function of this name that always answers `value`.

    Each name gets its own, since torch's compiler compares them.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    answer.__name__ = answer.__qualname__ = name
    return answer


def cuda_module(gpu: VirtualGpu) -> dict[str, Any]:
    """Returns replacements for attributes of torch.cuda."""
    Stream.gpu = gpu
    Stream.current = Stream(stream_ptr=0)
    default = Stream.current

    def set_stream(stream: Stream) -> None:
        Stream.current = stream

    def synchronize(device: Any = None) -> None:
        # A GPU build reports here that a kernel failed.
        if gpu.failed:
            raise RuntimeError("CUDA error: unspecified launch failure")

    states: dict[str, Callable] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "initial_seed": lambda: torch.initial_seed(),
        "manual_seed": lambda seed: torch.random.default_generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: (
            None
        ),  # torch.manual_seed calls it after it seeds the shared generator
    }
    quiet = (
        "_lazy_init init ipc_collect reset_peak_memory_stats reset_max_memory_allocated seed seed_all "
        "reset_accumulated_memory_stats check_error _sleep reset_accumulated_host_memory_stats "
        "reset_peak_host_memory_stats set_per_process_memory_fraction set_sync_debug_mode set_device "
        "reset_max_memory_cached"
    )
    counts = (
        "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached "
        "max_memory_cached get_sync_debug_mode"
    )
    stats = "memory_stats memory_stats_as_nested_dict host_memory_stats host_memory_stats_as_nested_dict"
    cudart = "cudaProfilerStart cudaProfilerStop cudaHostRegister cudaHostUnregister cudaStreamSynchronize"
    hardware = (
        "utilization clock_rate memory_usage temperature power_draw device_memory_used list_gpu_processes"
    )
    handles = "current_blas_handle current_solver_handle"
    return {
        **{name: _constant(name, None) for name in quiet.split()},
        **{name: _constant(name, 0) for name in counts.split()},
        **states,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_tf32_supported": lambda: True,
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_gencode_flags": lambda: f"-gencode compute={gpu.device.arch[3:]},code={gpu.device.arch}",
        "default_generators": (torch.default_generator,),
        "caching_allocator_alloc": lambda size, device=None, stream=None: gpu.allocate(size),
        "caching_allocator_delete": gpu.free,
        "memory_snapshot": lambda *args, **kwargs: [],
        "get_stream_from_external": lambda handle, device=None: Stream(stream_ptr=handle),
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "can_device_access_peer": lambda *args: False,
        "device_count": lambda: 1,
        "get_arch_list": lambda: [gpu.device.arch],
        "get_device_capability": lambda device=None: gpu.device.capability,
        "get_device_name": lambda device=None: gpu.product.name,
        "get_device_properties": lambda device=None: properties(gpu),
        "mem_get_info": lambda device=None: (gpu.product.memory_bytes, gpu.product.memory_bytes),
        **{name: _constant(name, {}) for name in stats.split()},
        "memory_summary": lambda *args, **kwargs: "the virtual GPU counts no memory",
        "synchronize": synchronize,
        "device": DeviceContext,
        "device_of": DeviceContext,
        "_DeviceGuard": DeviceContext,
        "Stream": Stream,
        "ExternalStream": lambda handle, device=None: Stream(stream_ptr=handle),
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda device=None: Stream.current,
        "default_stream": lambda device=None: default,
        "set_stream": set_stream,
        "stream": lambda stream: StreamContext(stream),
        "StreamContext": StreamContext,
        "cudart": lambda: Answered(
            "torch.cuda.cudart()",
            cudaMemGetInfo=lambda device: (gpu.product.memory_bytes, gpu.product.memory_bytes),
            cudaGetErrorString=lambda error: f"CUDA error {int(error)}",
            **{name: _constant(name, 0) for name in cudart.split()},
        ),
        "make_graphed_callables": _refuse("make_graphed_callables", "capture a torch.cuda.CUDAGraph instead"),
        **{name: _refuse(name, "there is no hardware to ask") for name in hardware.split()},
        **{name: _refuse(name, "kernels that are not in PTX cannot run") for name in handles.split()},
        "change_current_allocator": _refuse("change_current_allocator", "memory is that of the host"),
        "GreenContext": _refuse("GreenContext", "it has all SMs in one context"),
    }


class Profile(torch.profiler.profile):
    """torch.profiler.profile that records only CPU activity, because there is no GPU activity."""

    def __init__(self, *, activities: Any = None, **options: Any) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def nvtx_module() -> dict[str, Any]:
    """Returns replacements for attributes of torch.cuda.nvtx, which discard marks."""

    names = ("range_push", "range_pop", "range_start", "range_end", "mark")
    return {**{name: _constant(name, 0) for name in names}, "range": _range}


def accelerator_module(cuda: dict[str, Any]) -> dict[str, Any]:
    """Returns replacements for attributes of torch.accelerator, given those of torch.cuda."""
    shared = ("is_available", "device_count", "synchronize", "current_stream", "set_stream")
    return {
        **{name: cuda[name] for name in shared},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": _constant("current_device_index", 0),
        "set_device_index": _constant("set_device_index", None),
    }

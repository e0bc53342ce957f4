"""Answers calls of cuda-python (`cuda.bindings.driver` and `.runtime`) from the virtual GPU.

Functions without an answer here raise an error that names them, so nothing reaches a real driver while the shim is in
place. Event times are host times: they measure the emulation, not a GPU.
"""

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from nvfp4_cute.emulator.fronts.virtual_gpu import Graph, VirtualGpu, replaced
from nvfp4_cute.emulator.memory import host_view
from nvfp4_cute.errors import EmulatorError

CUDA_VERSION = 13000
"""Version that the driver and the runtime report."""

PROPERTIES = {
    "maxThreadsPerBlock": 1,
    "sharedMemPerBlock": 8,
    "warpSize": 10,
    "regsPerBlock": 12,
    "multiProcessorCount": 16,
    "concurrentKernels": 31,
    "maxThreadsPerMultiProcessor": 39,
    "unifiedAddressing": 41,
    "sharedMemPerMultiprocessor": 81,
    "regsPerMultiprocessor": 82,
    "cooperativeLaunch": 95,
    "sharedMemPerBlockOptin": 97,
    "maxBlocksPerMultiProcessor": 106,
    "reservedSharedMemPerBlock": 111,
    "clusterLaunch": 120,
}
"""Fields of cudaDeviceProp and the numbers of their cudaDeviceAttr."""

Answer = tuple[Any, ...]


@contextmanager
def answered_cuda(gpu: VirtualGpu) -> Iterator[None]:
    """Context manager in which cuda-python talks to `gpu`. Does nothing without cuda-python."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        for module, answers in ((driver, Driver(gpu, driver)), (runtime, Runtime(gpu, runtime))):
            stack.enter_context(replaced(module, **_functions(module, answers)))
        yield


def _functions(module: Any, answers: "Answers") -> dict[str, Callable]:
    """Returns the answer or the refusal of every CUDA function of a cuda-python module."""
    functions = {}
    for name, value in vars(module).items():
        if re.match(r"cu(da)?[A-Z]", name) and callable(value) and not isinstance(value, type):
            functions[name] = getattr(answers, name, None) or _refusal(module.__name__, name)
    return functions


def _refusal(module: str, name: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EmulatorError(f"{module}.{name} has no answer on the virtual GPU")

    return refuse


def host_bytes(source: Any, nbytes: int, *, write: bool = False) -> np.ndarray:
    """uint8 view of host memory, given as an address or as an object with a buffer (bytes, ndarray)."""
    if hasattr(source, "__int__") and not isinstance(source, np.ndarray):
        return host_view(int(source), nbytes)
    view = np.frombuffer(memoryview(source).cast("B"), np.uint8)
    if write and not view.flags.writeable:
        raise EmulatorError(f"copy of {nbytes} bytes into a read-only {type(source).__name__}")
    return view[:nbytes]


class Answers:
    """Answers shared by driver and runtime: memory, time, graphs."""

    def __init__(self, gpu: VirtualGpu, module: Any):
        """`module`: the cuda-python module that defines the types of the answers."""
        self.gpu, self.module = gpu, module
        self.times: dict[int, float] = {}

    def do(self, action: Callable[[], None]) -> Answer:
        """Runs device work now, or adds it to the graph that is being captured."""
        if self.gpu.graph is not None:
            self.gpu.graph.actions.append(action)
        else:
            action()
        return (self.ok,)

    @property
    def ok(self) -> Any:
        """The success code, or the code of a launch failure after a kernel failed."""
        return self.failure if self.gpu.failed else self.success

    success: Any
    failure: Any

    def nothing(self, *args: Any, **kwargs: Any) -> Answer:
        """Answers a call that needs no work, because launches are over when they return."""
        return (self.ok,)

    def accept(self, *args: Any, **kwargs: Any) -> Answer:
        """Answers a call that even a faulted device accepts."""
        return (self.success,)

    def copy(self, to: Any, source: Any, nbytes: int, *rest: Any) -> Answer:
        """Copies between any two kinds of memory."""
        target, data = host_bytes(to, nbytes, write=True), host_bytes(source, nbytes)

        def run() -> None:
            target[:] = data

        return self.do(run)

    def fill(self, address: Any, value: int, count: int, item_bytes: int) -> Answer:
        """Sets `count` items of 1, 2, or 4 bytes."""
        view = host_view(int(address), count * item_bytes)
        pattern = np.frombuffer(int(value).to_bytes(4, "little")[:item_bytes], np.uint8)

        def run() -> None:
            view.reshape(-1, item_bytes)[:] = pattern

        return self.do(run)

    def now(self, event: Any) -> Answer:
        """Notes the host time of an event."""
        self.times[int(event)] = time.perf_counter()
        return (self.ok,)

    def milliseconds(self, start: Any, end: Any) -> Answer:
        """Returns the host time between two events."""
        return self.ok, 1e3 * (self.times[int(end)] - self.times[int(start)])

    def begin_capture(self, *args: Any) -> Answer:
        """Begins a stream capture. It captures every stream, because there is only one."""
        self.gpu.begin_capture(Graph())
        return (self.ok,)

    def end_capture(self, *args: Any) -> Answer:
        """Ends a stream capture. Returns the graph."""
        return self.ok, self.gpu.end_capture()

    def graph_nodes(self, graph: Graph, *args: Any) -> Answer:
        """Returns the nodes of a graph, one per launch, copy, or fill."""
        return self.ok, list(graph.actions), len(graph.actions)

    def instantiate(self, graph: Graph, *args: Any) -> Answer:
        """Returns the graph itself, which is executable."""
        return self.ok, graph

    def replay(self, graph: Graph, *args: Any) -> Answer:
        """Runs a graph."""
        graph.replay()
        return (self.ok,)

    def limit(self, number: Any) -> Answer:
        """Returns a limit of the device; raises for an unknown one, with its name."""
        if int(number) not in self.gpu.limits:
            raise EmulatorError(f"{getattr(number, 'name', number)} has no value on the virtual GPU")
        return self.success, self.gpu.limits[int(number)]

    def set_limit(self, number: Any, value: int) -> Answer:
        """Changes a limit, which has no effect here."""
        self.limit(number)
        self.gpu.limits[int(number)] = int(value)
        return (self.success,)

    def put_uuid(self, found: Any) -> None:
        """Writes the identity of the device into a structure whose bytes cuda-python can only read."""
        ctypes.memmove(found.getPtr(), self.gpu.uuid.bytes, 16)

    def priorities(self) -> Answer:
        """Returns the priorities of streams: least, greatest."""
        return self.success, 0, -5

    def zero(self, *args: Any) -> Answer:
        """Returns 0: flags, a priority, or access to another device."""
        return self.success, 0

    def host_function(self, stream: Any, function: Any, data: Any, *args: Any) -> Answer:
        """Calls a function of the host in order with device work."""
        return self.do(lambda: function(data))

    def bus_id(self, length: int, device: Any) -> Answer:
        """Returns a bus address of the device."""
        return self.success, b"0000:00:00.0"[: length - 1].ljust(length, b"\0")

    def same_address(self, address: Any, *args: Any) -> Answer:
        """Returns the device's address of host memory, which is the host's."""
        return self.success, int(address)

    def error_name(self, error: Any) -> Answer:
        """Returns the name of an error code."""
        return self.success, error.name.encode()


class Driver(Answers):
    """Answers for cuda.bindings.driver."""

    @property
    def success(self) -> Any:
        """CUDA_SUCCESS."""
        return self.module.CUresult.CUDA_SUCCESS

    @property
    def failure(self) -> Any:
        """Returns the error of a faulted device."""
        return self.module.CUresult.CUDA_ERROR_LAUNCH_FAILED

    cuInit = cuCtxSetCurrent = cuCtxPushCurrent = cuCtxDestroy = Answers.accept
    cuCtxSynchronize = Answers.nothing
    cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxReset = cuDevicePrimaryCtxSetFlags = Answers.nothing
    cuStreamDestroy = cuStreamSynchronize = cuStreamQuery = cuStreamWaitEvent = Answers.nothing
    cuEventDestroy = cuEventSynchronize = cuEventQuery = cuProfilerStart = cuProfilerStop = Answers.nothing
    cuFuncSetAttribute = cuKernelSetAttribute = cuLibraryUnload = cuModuleUnload = Answers.nothing
    cuGraphDestroy = cuGraphExecDestroy = cuGraphUpload = cuMemPrefetchAsync = Answers.nothing
    cuMemcpy = cuMemcpyAsync = cuMemcpyHtoD = cuMemcpyHtoDAsync = cuMemcpyDtoH = Answers.copy
    cuMemcpyDtoHAsync = cuMemcpyDtoD = cuMemcpyDtoDAsync = Answers.copy
    cuGetErrorName = cuGetErrorString = Answers.error_name
    cuCtxGetLimit, cuCtxSetLimit, cuCtxGetStreamPriorityRange = (
        Answers.limit,
        Answers.set_limit,
        Answers.priorities,
    )
    cuStreamGetPriority = cuStreamGetFlags = cuCtxGetFlags = cuDeviceCanAccessPeer = Answers.zero
    cuMemHostRegister = cuMemHostUnregister = cuMemAdvise = cuCtxResetPersistingL2Cache = Answers.nothing
    cuMemHostGetDevicePointer, cuDeviceGetPCIBusId = Answers.same_address, Answers.bus_id
    cuLaunchHostFunc = Answers.host_function
    cuEventElapsedTime = Answers.milliseconds
    cuStreamBeginCapture, cuStreamEndCapture = Answers.begin_capture, Answers.end_capture
    cuGraphGetNodes, cuGraphInstantiate, cuGraphLaunch = (
        Answers.graph_nodes,
        Answers.instantiate,
        Answers.replay,
    )

    def cuDriverGetVersion(self) -> Answer:
        """Returns the stated version."""
        return self.success, CUDA_VERSION

    def cuDeviceGetCount(self) -> Answer:
        """Returns 1."""
        return self.success, 1

    def cuDeviceGet(self, ordinal: int) -> Answer:
        """Returns the device, if the ordinal is 0."""
        if int(ordinal) != 0:
            return self.module.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return self.success, self.module.CUdevice(0)

    def cuDeviceGetName(self, length: int, device: Any) -> Answer:
        """Returns the product name, padded with zeros as by the driver."""
        return self.success, self.gpu.product.name.encode()[: length - 1].ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Answer:
        """Returns a device attribute; raises if the virtual device has no value for it."""
        return self.success, self.gpu.attribute(int(attribute))

    def cuDeviceComputeCapability(self, device: Any) -> Answer:
        """Returns the compute capability."""
        return self.success, *self.gpu.device.capability

    def cuDeviceTotalMem(self, device: Any) -> Answer:
        """Returns the bytes of device memory."""
        return self.success, self.gpu.product.memory_bytes

    def cuDeviceGetUuid(self, device: Any) -> Answer:
        """Returns the identity of the device."""
        found = self.module.CUuuid()
        self.put_uuid(found)
        return self.success, found

    def cuDevicePrimaryCtxGetState(self, device: Any) -> Answer:
        """Returns flags, and whether the context is active."""
        return self.success, 0, 1

    def cuMemGetInfo(self) -> Answer:
        """Returns free and total bytes."""
        return self.success, self.gpu.product.memory_bytes, self.gpu.product.memory_bytes

    def cuCtxGetCurrent(self, *args: Any) -> Answer:
        """Returns the only context."""
        return self.success, self.module.CUcontext(1)

    cuCtxCreate = cuCtxPopCurrent = cuDevicePrimaryCtxRetain = cuCtxGetCurrent

    def cuCtxGetDevice(self) -> Answer:
        """Returns the only device."""
        return self.success, self.module.CUdevice(0)

    def cuStreamCreate(self, *args: Any) -> Answer:
        """Returns a new stream; all streams are in order."""
        return self.ok, self.module.CUstream(self.gpu.new_handle())

    cuStreamCreateWithPriority = cuStreamCreate

    def cuStreamIsCapturing(self, *args: Any) -> Answer:
        """Returns whether a capture is under way."""
        status = self.module.CUstreamCaptureStatus
        active = self.gpu.graph is not None
        return (
            self.ok,
            status.CU_STREAM_CAPTURE_STATUS_ACTIVE if active else status.CU_STREAM_CAPTURE_STATUS_NONE,
        )

    def cuEventCreate(self, *args: Any) -> Answer:
        """Returns a new event."""
        return self.ok, self.module.CUevent(self.gpu.new_handle())

    def cuEventRecord(self, event: Any, *args: Any) -> Answer:
        """Notes the time of an event."""
        return self.now(event)

    def cuMemAlloc(self, nbytes: int, *args: Any) -> Answer:
        """Allocates device memory."""
        return self.ok, self.module.CUdeviceptr(self.gpu.allocate(int(nbytes)))

    cuMemAllocAsync = cuMemAllocManaged = cuMemAlloc

    def cuMemAllocHost(self, nbytes: int, *args: Any) -> Answer:
        """Allocates host memory that the device can also access."""
        return self.ok, self.gpu.allocate(int(nbytes))

    cuMemHostAlloc = cuMemAllocHost

    def cuMemFree(self, address: Any, *args: Any) -> Answer:
        """Frees memory."""
        self.gpu.free(int(address))
        return (self.ok,)

    cuMemFreeAsync = cuMemFreeHost = cuMemFree

    def cuMemsetD8(self, address: Any, value: int, count: int, *args: Any) -> Answer:
        """Sets bytes."""
        return self.fill(address, value, count, 1)

    def cuMemsetD16(self, address: Any, value: int, count: int, *args: Any) -> Answer:
        """Sets 16-bit words."""
        return self.fill(address, value, count, 2)

    def cuMemsetD32(self, address: Any, value: int, count: int, *args: Any) -> Answer:
        """Sets 32-bit words."""
        return self.fill(address, value, count, 4)

    cuMemsetD8Async, cuMemsetD16Async, cuMemsetD32Async = cuMemsetD8, cuMemsetD16, cuMemsetD32


class Runtime(Answers):
    """Answers for cuda.bindings.runtime."""

    @property
    def success(self) -> Any:
        """cudaSuccess."""
        return self.module.cudaError_t.cudaSuccess

    @property
    def failure(self) -> Any:
        """Returns the runtime's error of a faulted device."""
        return self.module.cudaError_t.cudaErrorLaunchFailure

    cudaSetDevice = Answers.accept
    cudaDeviceSynchronize = cudaDeviceReset = cudaFuncSetAttribute = Answers.nothing
    cudaStreamDestroy = cudaStreamSynchronize = cudaStreamQuery = cudaStreamWaitEvent = Answers.nothing
    cudaEventDestroy = cudaEventSynchronize = cudaEventQuery = Answers.nothing
    cudaProfilerStart = cudaProfilerStop = cudaLibraryUnload = Answers.nothing
    cudaGetLastError = cudaPeekAtLastError = cudaGraphUpload = Answers.nothing
    cudaGraphDestroy = cudaGraphExecDestroy = Answers.nothing
    cudaMemcpy = cudaMemcpyAsync = Answers.copy
    cudaGetErrorName = cudaGetErrorString = Answers.error_name
    cudaDeviceGetLimit, cudaDeviceSetLimit = Answers.limit, Answers.set_limit
    cudaDeviceGetStreamPriorityRange = Answers.priorities
    cudaStreamGetPriority = cudaStreamGetFlags = cudaGetDeviceFlags = cudaDeviceCanAccessPeer = Answers.zero
    cudaHostRegister = cudaHostUnregister = cudaMemAdvise = cudaMemPrefetchAsync = Answers.nothing
    cudaInitDevice = cudaSetDeviceFlags = cudaCtxResetPersistingL2Cache = Answers.accept
    cudaHostGetDevicePointer, cudaDeviceGetPCIBusId = Answers.same_address, Answers.bus_id
    cudaLaunchHostFunc = Answers.host_function
    cudaEventElapsedTime = Answers.milliseconds
    cudaStreamBeginCapture, cudaStreamEndCapture = Answers.begin_capture, Answers.end_capture
    cudaGraphGetNodes, cudaGraphInstantiate, cudaGraphLaunch = (
        Answers.graph_nodes,
        Answers.instantiate,
        Answers.replay,
    )

    def cudaGetDeviceCount(self) -> Answer:
        """Returns 1, the number of devices."""
        return self.success, 1

    def cudaGetDevice(self) -> Answer:
        """Returns 0, the ordinal of the device."""
        return self.success, 0

    def cudaRuntimeGetVersion(self) -> Answer:
        """Returns the stated version of the runtime."""
        return self.success, CUDA_VERSION

    cudaDriverGetVersion = cudaRuntimeGetVersion

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> Answer:
        """Returns a device attribute; raises if the virtual device lacks it."""
        return self.success, self.gpu.attribute(int(attribute))

    def cudaGetDeviceProperties(self, device: int) -> Answer:
        """Returns properties that follow from the device's attributes, and zeros for all others."""
        gpu, numbers, found = self.gpu, self.gpu.device.attributes(), self.module.cudaDeviceProp()
        found.name = gpu.product.name.encode().ljust(256, b"\0")
        self.put_uuid(found.uuid)
        found.major, found.minor = gpu.device.capability
        found.totalGlobalMem, found.l2CacheSize = gpu.product.memory_bytes, gpu.product.l2_bytes
        for name, number in PROPERTIES.items():
            setattr(found, name, gpu.attribute(number))
        found.maxThreadsDim = [numbers[2], numbers[3], numbers[4]]
        found.maxGridSize = [numbers[5], numbers[6], numbers[7]]
        return self.success, found

    def cudaStreamIsCapturing(self, *args: Any) -> Answer:
        """Returns whether a stream capture is under way."""
        status = self.module.cudaStreamCaptureStatus
        active = self.gpu.graph is not None
        return (
            self.ok,
            status.cudaStreamCaptureStatusActive if active else status.cudaStreamCaptureStatusNone,
        )

    def cudaMemGetInfo(self) -> Answer:
        """Returns free and total bytes of device memory."""
        return self.success, self.gpu.product.memory_bytes, self.gpu.product.memory_bytes

    def cudaStreamCreate(self, *args: Any) -> Answer:
        """Returns a new stream; every stream runs in order."""
        return self.ok, self.module.cudaStream_t(self.gpu.new_handle())

    cudaStreamCreateWithFlags = cudaStreamCreateWithPriority = cudaStreamCreate

    def cudaEventCreate(self, *args: Any) -> Answer:
        """Returns a new, unrecorded event."""
        return self.ok, self.module.cudaEvent_t(self.gpu.new_handle())

    cudaEventCreateWithFlags = cudaEventCreate

    def cudaEventRecord(self, event: Any, *args: Any) -> Answer:
        """Notes the host time of the event."""
        return self.now(event)

    def cudaMalloc(self, nbytes: int, *args: Any) -> Answer:
        """Allocates bytes of device memory."""
        return self.ok, self.gpu.allocate(int(nbytes))

    cudaMallocAsync = cudaMallocManaged = cudaMallocHost = cudaHostAlloc = cudaMalloc

    def cudaFree(self, address: Any, *args: Any) -> Answer:
        """Frees device memory."""
        self.gpu.free(int(address))
        return (self.ok,)

    cudaFreeAsync = cudaFreeHost = cudaFree

    def cudaMemset(self, address: Any, value: int, nbytes: int, *args: Any) -> Answer:
        """Sets bytes of device memory."""
        return self.fill(address, value & 0xFF, nbytes, 1)

    cudaMemsetAsync = cudaMemset

"""A virtual GPU for a process: an Emulator with memory, streams, graphs, properties, and a log of launches.

The shims (torch_shim, cuda_shim, dsl_shim) answer a script's queries from it.
"""

import copy
import dataclasses
import itertools
import mmap
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.cubin import MachineCode
from nvfp4_cute.emulator.fronts.driver import Dim3, Emulator
from nvfp4_cute.emulator.record.device_images import KernelStore
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.recorder import Clock
from nvfp4_cute.emulator.state import Launch, Stats
from nvfp4_cute.emulator.targets import ptx_arch
from nvfp4_cute.errors import EmulatorError

GIB = 1 << 30
MIB = 1 << 20
LOWEST_ADDRESS = 1 << 46
"""Tensor maps of ragged tensors (QuACK, Triton) begin up to 2^30 rows below their tensor, and must not begin below 0."""

ALLOCATION_ALIGN = 512
"""Alignment of device memory in bytes, equal to that of torch's CUDA allocator; kernels rely on it (tensor maps: 128)."""

POISON = 0xFF
"""Byte that fills memory which a driver call allocated: NaN in every float format."""


LIMITS = {0: 1024, 1: MIB, 2: 8 * MIB, 3: 2, 4: 2048, 6: 0}
"""Numbers of cudaLimit and their values on a fresh device (CUDA runtime API, cudaDeviceSetLimit).

In order: stack per thread, buffer of printf, heap, depth of synchronization and pending launches of device-side launches,
bytes of L2 set aside.
"""

FREED_BYTES = 64 * MIB
"""Amount of freed memory that stays accessible by default. A GPU's caching allocator keeps all its memory."""


@dataclass(frozen=True)
class Product:
    """Reported properties of an architecture's device: name, SMs, bytes of memory and of L2, clock in kHz."""

    name: str
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    clock_khz: int


PRODUCTS = {
    "sm_80": Product("NVIDIA A100-SXM4-80GB", 108, 80 * GIB, 40 * MIB, 1_410_000),
    "sm_86": Product("NVIDIA A10", 72, 24 * GIB, 6 * MIB, 1_695_000),
    "sm_89": Product("NVIDIA L40S", 142, 48 * GIB, 96 * MIB, 2_520_000),
    "sm_90a": Product("NVIDIA H200", 132, 141 * GIB, 50 * MIB, 1_980_000),
    "sm_100a": Product("NVIDIA B200", 148, 180 * GIB, 126 * MIB, 1_965_000),
    "sm_103a": Product("NVIDIA B300", 148, 270 * GIB, 126 * MIB, 2_032_000),
    "sm_110a": Product("NVIDIA Thor", 20, 128 * GIB, 32 * MIB, 1_575_000),
    "sm_120a": Product("NVIDIA RTX PRO 6000 Blackwell", 188, 96 * GIB, 128 * MIB, 2_617_000),
    "sm_121a": Product("NVIDIA GB10", 48, 128 * GIB, 24 * MIB, 2_418_000),
}
"""Data-sheet values. The emulator's results do not depend on them, except for grids that a script sizes by SM count."""


@dataclass(frozen=True)
class Resources:
    """SM resources of a kernel's CTA.

    Attributes:
        threads: threads per CTA.
        shared_bytes: static and dynamic shared memory per CTA.
        dynamic_shared_bytes: the part of it that the launch requests, which a cubin does not state.
        ctas_per_sm: CTAs that an SM holds at a time.
        code: the kernel's machine code; None if only its PTX is known.
    """

    threads: int
    shared_bytes: int
    dynamic_shared_bytes: int
    ctas_per_sm: int
    code: MachineCode | None


@dataclass
class LaunchRow:
    """One launch, and its executed work so far.

    Attributes:
        timing: its modelled time (`timing.result.Timing`), if one was requested and the launch has ended.
    """

    kernel: str
    grid: Dim3
    cluster: Dim3
    ctas: int
    resources: Resources
    work: Stats = dataclasses.field(default_factory=Stats)
    finished: bool = False
    timing: Any = None


class Watcher(Protocol):
    """An observer of launches."""

    def begin(self, row: LaunchRow) -> None:
        """Called when a launch starts."""
        ...

    def progress(self, row: LaunchRow, done: int, total: int) -> None:
        """Called when `done` of `total` CTAs are finished."""
        ...

    def end(self, row: LaunchRow) -> None:
        """Called when the launch is over, finished or failed."""
        ...


MemoryRange = tuple[str, int, int]
"""Name, address, size in bytes."""


class Graph:
    """Captured work, in order. Every replay runs it once."""

    def __init__(self) -> None:
        """Starts without work."""
        self.actions: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Runs the captured work once."""
        for action in self.actions:
            action()


class VirtualGpu(Emulator):
    """The only GPU of this process.

    Attributes:
        product: its reported properties.
        uuid: its identity, equal in every process.
        limits: answers of `cudaDeviceGetLimit`, by number.
        launches: every launch that ran, in order.
        graph: the graph that is being captured, or None.
        store: PTX of exported objects, or None.
        freed_bytes: amount of memory of deleted tensors that kernels may still access; 0 makes every use after free an
            error.
        memory_sources: callables that list the live device memory besides that of `allocate`; called before each
            launch.
        torch_memory: torch's device storages (`torch_memory.DeviceMemory`), while torch is emulated.
    """

    def __init__(
        self,
        arch: str,
        sm_count: int | None = None,
        watcher: Watcher | None = None,
        *,
        mode: str = "eager",
        check: bool = False,
        count_banks: bool = False,
        timing: Clock | None = None,
        store: KernelStore | None = None,
    ):
        """Makes the GPU of an architecture. Other arguments: see `Emulator`.

        Args:
            sm_count: number of SMs; by default that of the architecture's product.
            store: stores PTX of exported objects, and finds it when one is loaded.

        Raises:
            EmulatorError: unknown architecture.
        """
        if arch not in PRODUCTS:
            raise EmulatorError(f"no virtual GPU for `{arch}`; choose one of {', '.join(PRODUCTS)}")
        product = PRODUCTS[arch]
        self.product = dataclasses.replace(product, sm_count=sm_count or product.sm_count)
        super().__init__(
            arch,
            self.product.sm_count,
            self._progress,
            mode=mode,
            check=check,
            count_banks=count_banks,
            timing=timing,
        )
        # Numbers of cudaDeviceAttr: clock, L2, concurrent kernels, unified addressing, cooperative launch, memory pools.
        self._attributes |= {13: product.clock_khz, 38: product.l2_bytes, 31: 1, 41: 1, 95: 1, 115: 1}
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, self.product.name)
        self.limits = dict(LIMITS)
        self.launches: list[LaunchRow] = []
        self.graph: Graph | None = None
        self.freed_bytes = FREED_BYTES
        self.store = store
        self.memory_sources: list[Callable[[], Iterable[MemoryRange]]] = []
        self.torch_memory: Any = None
        self._watcher = watcher
        self._allocations: dict[int, np.ndarray] = {}
        self._handles = itertools.count(1)

    def runs(self, ptx: str) -> bool:
        """Whether a PTX text is for this device's architecture."""
        target = re.search(r"^\.target\s+(\S+)", ptx, re.MULTILINE)
        return target is not None and ptx_arch(target.group(1)) == self.device.arch

    def recover(self, image: bytes) -> bool:
        """Registers the PTX of an object that another process exported, if it was kept."""
        found = self.store.find(image) if self.store else None
        if found is None:
            return False
        if not self.runs(found[0]):
            target = re.search(r"^\.target\s+(\S+)", found[0], re.MULTILINE)
            raise EmulatorError(
                f"an object that is loaded was exported for {target.group(1) if target else 'another target'}, and this "
                f"GPU is {self.device.arch}: give its cache another folder for each architecture, or empty it"
            )
        self.register(*found)
        return True

    # ---- launches ------------------------------------------------------------------------------
    def run(self, launch: Launch) -> None:
        """Runs a launch, or stores it if a graph is being captured.

        Raises:
            EmulatorError: a failure of the kernel.
        """
        if self.graph is not None:
            self.graph.actions.append(lambda: self._run_now(launch))
        else:
            self._run_now(launch)

    def _run_now(self, launch: Launch) -> None:
        x, y, z = launch.grid
        needs = Resources(
            launch.threads,
            launch.shared_bytes,
            launch.smem_bytes,
            launch.resident_ctas(1),
            launch.machine_code,
        )
        row = LaunchRow(launch.code.entry.name, launch.grid, launch.cluster, x * y * z, needs)
        self.launches.append(row)
        self.clear_ranges()
        for name, address, nbytes in self.live_memory():
            self.add_range(name, address, nbytes)
        before = copy.deepcopy(self.stats)
        self._before = before
        if self._watcher:
            self._watcher.begin(row)
        try:
            super().run(launch)
            row.finished = True
        finally:
            row.work = difference(self.stats, before)
            if self._watcher:
                self._watcher.end(row)

    def other_work(self) -> None:
        """Notes that an operation of torch ran on the device between launches."""
        if self.machine.checker is not None:
            self.machine.checker.dependencies.other_work()

    def recorded(self, trace: LaunchTrace) -> None:
        """Stores the modelled time of a launch that has ended in its row."""
        super().recorded(trace)
        self.launches[-1].timing = self.timings[-1]

    def _progress(self, done: int, total: int) -> None:
        row = self.launches[-1]
        row.work = difference(self.stats, self._before)
        if self._watcher:
            self._watcher.progress(row, done, total)

    @property
    def failed(self) -> BaseException | None:
        """Error that stopped a launch. From then on the device answers every launch with an error, like hardware."""
        return self._error

    def take_failure(self) -> BaseException | None:
        """Returns the error that stopped a launch, once. Afterwards the device runs launches again, as in a new process."""
        failure, self._error = self._error, None
        return failure

    def begin_capture(self, graph: Graph) -> None:
        """Stores launches in `graph` until `end_capture`.

        Raises:
            EmulatorError: a capture is already under way.
        """
        if self.graph is not None:
            raise EmulatorError("a graph capture began while another one was going on")
        self.graph = graph

    def end_capture(self) -> Graph:
        """Ends the capture and returns its graph.

        Raises:
            EmulatorError: no capture is under way.
        """
        graph, self.graph = self.graph, None
        if graph is None:
            raise EmulatorError("a graph capture ended that had not begun")
        return graph

    # ---- memory --------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, aligned and poisoned."""
        view = self.new_bytes(nbytes)
        view[:] = POISON
        address = int(view.ctypes.data)
        self._allocations[address] = view
        return address

    def new_bytes(self, nbytes: int) -> np.ndarray:
        """Returns uninitialised memory, uint8, for tensors and allocations. Subclasses choose its place."""
        return aligned_bytes(nbytes)

    def free(self, address: int) -> None:
        """Frees memory.

        Raises:
            EmulatorError: the address was not allocated here.
        """
        if address and self._allocations.pop(address, None) is None:
            raise EmulatorError(f"free of {address:#x}, which no driver call allocated")

    def live_memory(self) -> Iterator[MemoryRange]:
        """Yields all memory that kernels may access."""
        for address, view in self._allocations.items():
            yield f"driver allocation of {view.size} bytes", address, view.size
        for source in self.memory_sources:
            yield from source()

    def new_handle(self) -> int:
        """Returns a number for a stream, an event, or a graph. It is never zero, which means the default stream."""
        return next(self._handles)

    def new_stream(self) -> int:
        """Returns a number for a new stream."""
        return self.new_handle()


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Returns uninitialised host memory, uint8, aligned like device memory, and not below LOWEST_ADDRESS."""
    raw = np.empty(max(nbytes, 1) + ALLOCATION_ALIGN, np.uint8)
    if raw.ctypes.data < LOWEST_ADDRESS:  # the heap of an interpreter linked to a fixed address
        raw = np.frombuffer(mmap.mmap(-1, raw.size), np.uint8)
    start = -raw.ctypes.data % ALLOCATION_ALIGN
    return raw[start : start + max(nbytes, 1)]


def difference(now: Stats, before: Stats) -> Stats:
    """Returns the counts between two readings."""
    fields = [field.name for field in dataclasses.fields(Stats)]
    return Stats(**{name: getattr(now, name) - getattr(before, name) for name in fields})


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Context manager that replaces attributes of a module or class, and restores (or removes) them at the end."""
    missing = object()
    saved = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Context manager that removes an attribute, if there is one."""
    if name not in vars(owner):
        yield
        return
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)

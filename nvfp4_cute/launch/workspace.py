"""Device memory between the launches of one call: dequantized tokens, and partial sums that CTAs exchange.

Calls on a stream share it, because each call's first launch waits for the previous call's last one. Each thread has its own,
because launches of two threads may alternate. It grows by doubling and is kept, so repeated calls allocate nothing. Outgrown
memory returns to torch, which reuses it only on that stream, after the launches that use it. While a graph is captured, memory
comes from the graph's own pool.

Some kernels have counters in memory, which are 0 before and after a launch. Clearing them per launch would take a launch of its
own. Launches of a stream, and those of a capture on a stream, therefore share counters, which are cleared once.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import NamedTuple

import numpy as np
import torch

from nvfp4_cute import private_api
from nvfp4_cute.compile.compiler import CompiledKernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.planning.arch import has_counters as formats_have_counters
from nvfp4_cute.planning.arch.warp_mma import COUNTER_BYTES

# Largest number of captures whose counters are cleared once. Later captures clear theirs in every launch of their graph.
MOST_CAPTURES = 4096
# Captures that one tensor has counters for. Another is allocated, outside of captures, when fewer are left.
CAPTURES_OF_TENSOR = 256


class Workspace(NamedTuple):
    """Device memory, to be held until the launches that use it are enqueued. counters: their address, or 0."""

    memory: torch.Tensor
    address: int
    nbytes: int
    counters: int = 0


@dataclass(frozen=True)
class CapturedCounters:
    """Counters of a device for graphs, kept while the process lives, because a graph may be replayed at any time.

    Attributes:
        memory: tensors of ``CAPTURES_OF_TENSOR`` times ``COUNTER_BYTES``.
        places: (number of a capture, stream) -> index of its counters.
    """

    memory: list[torch.Tensor] = field(default_factory=list)
    places: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        """Captures that still find counters."""
        return len(self.memory) * CAPTURES_OF_TENSOR - len(self.places)

    @property
    def should_grow(self) -> bool:
        """Whether few are left, and more are allowed."""
        return self.num_left < CAPTURES_OF_TENSOR and len(self.memory) * CAPTURES_OF_TENSOR < MOST_CAPTURES

    def of_current(self, stream: int) -> int:
        """Returns the address for the current capture on a stream; 0 if none are left or the capture has no number."""
        number = private_api.capture_id(stream)
        if number is None:
            return 0
        key = number, stream
        with _lock:
            if key not in self.places and self.num_left:
                self.places[key] = len(self.places)
        if key not in self.places:
            return 0
        tensor, place = divmod(self.places[key], CAPTURES_OF_TENSOR)
        return self.memory[tensor].data_ptr() + place * COUNTER_BYTES

    def grow(self, index: int) -> None:
        """Allocates and clears counters for more captures."""
        size, device = CAPTURES_OF_TENSOR * COUNTER_BYTES, torch.device("cuda", index)

        def make() -> torch.Tensor:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
            torch.cuda.current_stream(index).synchronize()
            return memory

        self.memory.append(private_api.outside_of_pools(index, make))


_lock = Lock()
_captured: dict[int, CapturedCounters] = defaultdict(CapturedCounters)
# Key: device, stream, thread, and whether it has counters.
_in_use: dict[tuple[int | None, int, int, bool], Workspace] = {}


def has_counters(kernel: CompiledKernel) -> bool:
    """Returns whether launches of a kernel need counters."""
    key = kernel.key
    return isinstance(key, KernelKey) and formats_have_counters((key.a_format, key.b_format))


def needed_bytes(kernel: CompiledKernel, table: np.ndarray) -> int:
    """Returns the bytes that a launch with this table needs; 0 if the kernel is one launch."""
    key = kernel.key
    if not isinstance(key, KernelKey):
        return 0
    groups, num_cta = table.reshape(-1, NUM_COLUMNS)[1:], int(table.reshape(-1)[Header.NUM_CTA])
    rows = groups[:, Group.M] * groups[:, Group.A_BATCH]
    return key.workspace_bytes(rows, groups[:, Group.K], num_cta)


def take(index: int | None, stream: int, nbytes: int, counters: bool = False) -> Workspace:
    """Returns memory for the next launches on a stream.

    Args:
        index: index of the current CUDA device; None for the CPU.
        stream: handle of its current stream.
        nbytes: smallest size in bytes.
        counters: whether it has counters, which are 0 (:func:`has_counters`).
    """
    if index is not None and torch.cuda.is_current_stream_capturing():
        address = _captured[index].of_current(stream) if counters else 0
        return (
            allocate(index, nbytes)._replace(counters=address)
            if address
            else allocate(index, nbytes, counters)
        )
    key = (index, stream, get_ident(), counters)
    found = _in_use.get(key)
    if counters and index is not None and _captured[index].should_grow:
        _captured[index].grow(index)
    if found is None or found.nbytes < nbytes:
        if found is not None:
            nbytes = max(nbytes, 2 * found.nbytes)
        found = _in_use[key] = _allocate_to_keep(index, nbytes, counters)
    return found


def allocate(index: int | None, nbytes: int, counters: bool = False) -> Workspace:
    """Allocates separate memory on the CUDA device ``index``, or on the CPU. ``counters``: see :func:`take`."""
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    memory = torch.empty(nbytes + counters * COUNTER_BYTES, dtype=torch.uint8, device=device)
    address = memory.data_ptr()
    if not counters:
        return Workspace(memory, address, nbytes)
    memory[:COUNTER_BYTES].zero_()
    return Workspace(memory, address + COUNTER_BYTES, nbytes, address)


def _allocate_to_keep(index: int | None, nbytes: int, counters: bool) -> Workspace:
    """Allocates memory from torch's common pool for the current stream."""
    if index is None:
        return allocate(index, nbytes, counters)
    return private_api.outside_of_pools(index, lambda: allocate(index, nbytes, counters))


def attach(kernel: CompiledKernel, table: np.ndarray, device: torch.device, stream: int) -> Workspace | None:
    """Writes the address of the workspace into the launch table if the kernel needs one. Arguments: see :func:`take`.

    Returns:
        The memory, to be held until the kernel is launched; None if it needs none.
    """
    nbytes = needed_bytes(kernel, table)
    if not nbytes:
        return None
    found = take(device.index, stream, nbytes, has_counters(kernel))
    table.reshape(-1)[[Header.WORKSPACE, Header.COUNTERS]] = found.address, found.counters
    return found

"""Device memory in which one launch of a call leaves what the next one reads, decoded tokens, and CTAs what others add up.

Calls that follow each other on a stream share it, since the first launch of one waits for the last of the one before. Each
thread has its own: launches of two threads may alternate. It grows, by doubling, and is kept, so that repeated calls
allocate nothing; what it has outgrown goes back to torch, which hands it out again on that stream alone, behind the launches
that use it. In a graph that is being captured it is the graph's own, from the pool of that.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import NamedTuple

import numpy as np
import torch

from nvfp4_cute.compile.compiler import CompiledKernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.weight_only_keys import WeightOnlyKey
from nvfp4_cute.launch_table import NUM_COLUMNS, Group, Header
from nvfp4_cute.planning.arch import family_of
from nvfp4_cute.planning.arch.warp_mma import COUNTER_BYTES


class Workspace(NamedTuple):
    """Device memory. To be held until the launches that use it are enqueued."""

    memory: torch.Tensor
    address: int
    nbytes: int


# By device, stream, thread, and whether it begins with counters.
_in_use: dict[tuple[int | None, int, int, bool], Workspace] = {}


def has_counters(kernel: CompiledKernel) -> bool:
    """Whether what a launch needs begins with counters: 0 before and after it. Nothing else may write there."""
    return isinstance(kernel.key, WeightOnlyKey)


def needed_bytes(kernel: CompiledKernel, table: np.ndarray) -> int:
    """What a launch with this table needs; 0 where the kernel is one launch."""
    key = kernel.key
    if isinstance(key, WeightOnlyKey):
        return key.workspace_bytes(int(table.reshape(-1)[Header.NUM_CTA]))
    if not isinstance(key, KernelKey):
        return 0
    groups, num_cta = table.reshape(-1, NUM_COLUMNS)[1:], int(table.reshape(-1)[Header.NUM_CTA])
    rows = groups[:, Group.M] * groups[:, Group.A_BATCH]
    return family_of(key.arch, (key.a_format, key.b_format)).workspace_bytes(
        key.config, rows, groups[:, Group.K], num_cta
    )


def take(index: int | None, stream: int, nbytes: int, counters: bool = False) -> Workspace:
    """Memory for the next launches on a stream.

    Args:
        index: of the CUDA device, which is the current one, as the stream is its current stream; None for the CPU.
        stream: its handle.
        nbytes: the least number of bytes.
        counters: whether it begins with counters, which are 0 (:func:`has_counters`).
    """
    if index is not None and torch.cuda.is_current_stream_capturing():
        return allocate(index, nbytes, counters)
    key = (index, stream, get_ident(), counters)
    found = _in_use.get(key)
    if found is None or found.nbytes < nbytes:
        if found is not None:
            nbytes = max(nbytes, 2 * found.nbytes)
        found = _in_use[key] = _allocate_to_keep(index, nbytes, counters)
    return found


def allocate(index: int | None, nbytes: int, counters: bool = False) -> Workspace:
    """Memory of its own, on the CUDA device ``index``, or on the CPU. ``counters``: see :func:`take`."""
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if counters:
        memory[:COUNTER_BYTES].zero_()
    return Workspace(memory, memory.data_ptr(), nbytes)


def _allocate_to_keep(index: int | None, nbytes: int, counters: bool) -> Workspace:
    """Memory of torch's common pool for the current stream, allocated by another thread.

    What this thread allocates may be routed to a pool that ends before the memory does: inside ``torch.cuda.use_mem_pool``, and
    in the first runs of ``torch.compile(mode="reduce-overhead")``, which refuse what is left in theirs.
    """
    if index is None:
        return allocate(index, nbytes, counters)
    stream = torch.cuda.current_stream(index)

    def on_stream() -> Workspace:
        with torch.cuda.stream(stream):
            return allocate(index, nbytes, counters)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


def attach(kernel: CompiledKernel, table: np.ndarray, device: torch.device, stream: int) -> Workspace | None:
    """Write into the launch table where the kernel finds such memory, if it needs any. Arguments as of :func:`take`.

    Returns:
        The memory, to be held until the kernel was launched; None where it needs none.
    """
    nbytes = needed_bytes(kernel, table)
    if not nbytes:
        return None
    found = take(device.index, stream, nbytes, has_counters(kernel))
    table.reshape(-1)[Header.WORKSPACE] = found.address
    return found

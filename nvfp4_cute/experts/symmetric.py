"""Buffers into which the GPUs of all ranks of one host store: ``torch.distributed._symmetric_memory``.

A buffer has these parts, each beginning at a multiple of 128 bytes::

    | header, PeerHeader | ids, int32 [ranks, capacity, k] | rows [ranks, capacity, bytes] | results [capacity, k, H] |

In every buffer, token t of rank r has place [r, t] of ids and rows. Its results arrive at [t, k] of its home rank's buffer.
Nothing therefore has to be sorted before it is stored. One set of buffers serves all layers of the same sizes, one call after
the other. Every call makes two exchanges, tokens and results. In both, each rank waits for all ranks, so no rank stores into
memory that another rank still reads.
"""

import socket
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nvfp4_cute import private_api
from nvfp4_cute.errors import RankError
from nvfp4_cute.experts.dispatch import RowLayout
from nvfp4_cute.experts.exchange import gather, timeout_of
from nvfp4_cute.experts.signals import Inbox, Wait
from nvfp4_cute.launch_table import MAX_PEERS, PeerHeader

ALIGN_BYTES = 128
# Larger buffers are not made; the group's backend moves the rows instead.
MAX_BYTES = 2 << 30
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class BufferLayout:
    """Byte offsets of the parts of a buffer.

    Attributes:
        num_ranks, capacity, top_k: see ``moe``.
        rows: layout of a row, without ids.
    """

    num_ranks: int
    capacity: int
    top_k: int
    rows: RowLayout

    @property
    def num_rows(self) -> int:
        """Number of places for tokens."""
        return self.num_ranks * self.capacity

    @property
    def ids_at(self) -> int:
        """Offset of the ids in bytes."""
        return _aligned(4 * PeerHeader.WORDS)

    @property
    def rows_at(self) -> int:
        """Offset of the rows in bytes."""
        return _aligned(self.ids_at + 4 * self.num_rows * self.top_k)

    @property
    def results_at(self) -> int:
        """Offset of the results in bytes."""
        return _aligned(self.rows_at + self.num_rows * self.rows.row_bytes)

    @property
    def nbytes(self) -> int:
        """Size of a buffer in bytes."""
        return self.results_at + self.capacity * self.top_k * self.rows.hidden * self.rows.dtype.itemsize


@dataclass(frozen=True, eq=False)
class PeerBuffers:
    """The buffers of all ranks, as one rank accesses them.

    Attributes:
        layout: layout of each buffer.
        peers: uint8 [nbytes] per rank, including this one.
        rank: rank of this process.
        seconds: longest time that a launch waits for other ranks.
        host_fault: int32 [1] in host memory that the device may write: 0, or 1 + the number of a late rank.
        held: objects that own the memory of ``peers``.
    """

    layout: BufferLayout
    peers: tuple[torch.Tensor, ...]
    rank: int
    seconds: float
    host_fault: torch.Tensor
    held: Any = None

    @cached_property
    def ids(self) -> torch.Tensor:
        """Ids that arrive in this rank's buffer, int32 [ranks * capacity, k]."""
        layout = self.layout
        flat = self._part(layout.ids_at, 4 * layout.num_rows * layout.top_k)
        return flat.view(torch.int32).view(layout.num_rows, layout.top_k)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Rows that arrive in this rank's buffer, uint8 [ranks * capacity, bytes]."""
        layout = self.layout
        flat = self._part(layout.rows_at, layout.num_rows * layout.rows.row_bytes)
        return flat.view(layout.num_rows, layout.rows.row_bytes)

    @cached_property
    def results(self) -> torch.Tensor:
        """Results that return to this rank, [capacity * k, H]."""
        layout = self.layout
        flat = self._part(layout.results_at, layout.nbytes - layout.results_at)
        return flat.view(layout.rows.dtype).view(-1, layout.rows.hidden)

    @cached_property
    def inbox(self) -> Inbox:
        """Where other ranks' signals arrive."""
        header = self._part(0, 4 * PeerHeader.WORDS).view(torch.int32)
        return Inbox(
            header, self.host_fault, Wait(self.rank, self.layout.num_ranks, round(self.seconds * 1e9))
        )

    def _part(self, start: int, length: int) -> torch.Tensor:
        return self.peers[self.rank][start : start + length]

    def check(self) -> None:
        """Raises RankError if a rank was late in an earlier call, after which the counters can no longer match."""
        lost = int(self.host_fault)
        if lost:
            raise RankError(
                f"rank {self.rank}: rank {lost - 1} of {self.layout.num_ranks} stopped, or did not come within {self.seconds:g} "
                "s (init_process_group(timeout=...)), and results since then are NaN; make a new group"
            )


# None for groups whose ranks cannot have such buffers.
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[BufferLayout, PeerBuffers | None]]" = WeakKeyDictionary()


def buffers_of(group: dist.ProcessGroup, layout: BufferLayout, device: torch.device) -> PeerBuffers | None:
    """Returns the buffers for a layout, or None if the GPUs cannot access each other's memory.

    All ranks make the first call.
    """
    made = _made.setdefault(group, {})
    if layout not in made:
        made[layout] = _make(group, layout, device)
    return made[layout]


def check_ranks(group: dist.ProcessGroup) -> None:
    """Raises RankError if a rank was late in a call, or in a replay of a CUDA graph, that has ended.

    Every call makes this check when it begins. A replay does not, so call this function after it, when its results are
    complete.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; pass the torch.distributed.ProcessGroup of the layer")
    for buffers in _made.get(group, {}).values():
        if buffers is not None:
            buffers.check()


def _make(group: dist.ProcessGroup, layout: BufferLayout, device: torch.device) -> PeerBuffers | None:
    is_possible = (
        device.type == "cuda" and 1 < layout.num_ranks <= MAX_PEERS and layout.nbytes <= MAX_BYTES
    )  # the same on every rank
    if not is_possible or len(set(_told(group, device, _host()))) > 1:
        return None
    peers: Sequence[torch.Tensor] = ()
    held = None
    try:
        peers, held = private_api.symmetric_memory(layout.nbytes, device, group)
        peers[dist.get_rank(group)].zero_()
        torch.cuda.synchronize(device)
    except (RuntimeError, ImportError, AttributeError) as reason:
        warnings.warn(f"rows go through the group's backend: no symmetric memory ({reason})", stacklevel=2)
        peers = ()
    if not all(_told(group, device, len(peers))):
        return None
    seconds = timeout_of(group, device).total_seconds()
    host_fault = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return PeerBuffers(layout, tuple(peers), dist.get_rank(group), seconds, host_fault, held)


def _told(group: dist.ProcessGroup, device: torch.device, number: int) -> list[int]:
    """Returns the numbers that all ranks pass."""
    table = gather(group, torch.tensor([number], device=device))
    return [int(value) for value in table[:, 0]]


def _host() -> int:
    """Returns a number that identifies this host and its boot."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    return zlib.crc32((socket.gethostname() + boot).encode())


def _aligned(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES

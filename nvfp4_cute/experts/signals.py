"""What a rank waits for when other ranks store into its memory: counters that grow, a time limit, and what is left behind it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from nvfp4_cute.launch_table import PeerHeader

POLL_SECONDS = 50e-6


@dataclass(frozen=True)
class Wait:
    """Of a launch that waits until all ranks have signalled.

    Attributes:
        rank: this one. num_ranks: of the group. timeout_ns: how long it waits.
    """

    rank: int
    num_ranks: int
    timeout_ns: int

    def numbers(self, columns: Any) -> Mapping[IntEnum, int]:
        """Entries of a launch table with such columns."""
        return {
            columns.RANK: self.rank,
            columns.NUM_RANKS: self.num_ranks,
            columns.TIMEOUT_NS: self.timeout_ns,
        }

    def reference(self, first: PeerHeader, header: torch.Tensor, host_fault: torch.Tensor) -> bool:
        """Wait as the kernel does; first: of the header's counters. Returns whether a rank did not come."""
        end = time.monotonic_ns() + self.timeout_ns
        counters = header[first : first + self.num_ranks]
        while not header[PeerHeader.FAULT]:
            missing = (counters[self.rank] - counters) > 0
            if not missing.any():
                return False
            if time.monotonic_ns() > end:
                lost = int(missing.nonzero()[0]) + 1
                header[PeerHeader.FAULT], host_fault[0] = lost, lost
            time.sleep(POLL_SECONDS)
        return True


@dataclass(frozen=True, eq=False)
class Inbox:
    """Where other ranks' signals come.

    Attributes:
        header: int32 [PeerHeader.WORDS], the beginning of this rank's buffer.
        host_fault: int32 [1] in memory of the host that the device writes, too: as ``PeerHeader.FAULT``.
        wait: of launches that wait for them.
    """

    header: torch.Tensor
    host_fault: torch.Tensor
    wait: Wait


def fields_of(inbox: Inbox | None) -> tuple[torch.Tensor | None, torch.Tensor | None, Wait | None]:
    """``host_fault``, ``header`` and ``wait``, of a task that may wait."""
    return (None, None, None) if inbox is None else (inbox.host_fault, inbox.header, inbox.wait)

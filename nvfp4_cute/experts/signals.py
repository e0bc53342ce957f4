"""How a rank waits for others to store into its memory: growing counters, a time limit, and a record of a late rank."""

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
    """A launch's wait for signals of all ranks.

    Attributes:
        rank: this rank.
        num_ranks: ranks of the group.
        timeout_ns: longest wait in nanoseconds.
    """

    rank: int
    num_ranks: int
    timeout_ns: int

    def numbers(self, columns: Any) -> Mapping[IntEnum, int]:
        """Returns the entries of a launch table with these columns."""
        return {
            columns.RANK: self.rank,
            columns.NUM_RANKS: self.num_ranks,
            columns.TIMEOUT_NS: self.timeout_ns,
        }

    def reference(self, first: PeerHeader, header: torch.Tensor, host_fault: torch.Tensor) -> bool:
        """Waits like the kernel, for the header's counters from ``first`` on. Returns whether a rank did not signal in time."""
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
    """Where signals of other ranks arrive.

    Attributes:
        header: int32 [PeerHeader.WORDS], the beginning of this rank's buffer.
        host_fault: int32 [1] in host memory that the device can write; same values as ``PeerHeader.FAULT``.
        wait: parameters of launches that wait for the signals.
    """

    header: torch.Tensor
    host_fault: torch.Tensor
    wait: Wait


def fields_of(inbox: Inbox | None) -> tuple[torch.Tensor | None, torch.Tensor | None, Wait | None]:
    """Returns ``host_fault``, ``header`` and ``wait`` for a task that may wait; None each without an inbox."""
    return (None, None, None) if inbox is None else (inbox.host_fault, inbox.header, inbox.wait)

"""Bank conflicts: cycles that each instruction's accesses take in the banks of shared memory.

Shared memory has 32 banks of 4 bytes (CUDA C++ programming guide, shared memory). It serves a warp's access in passes
of at most 128 bytes: 32 lanes of up to 4 bytes, 16 lanes of 8, 8 lanes of 16, and one pass for each 8-row matrix of
ldmatrix and stmatrix. A pass takes one cycle per different word in its most loaded bank; lanes that address one word
share it. A conflict-free pass takes one cycle.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BANKS, WORD_BYTES, PASS_BYTES = 32, 4, 128


@dataclass(frozen=True)
class Accesses:
    """Accesses to shared memory by one instruction, over all warps.

    Attributes:
        count: accesses, one per warp that executes the instruction.
        passes: cycles without conflicts.
        cycles: cycles with conflicts.
        ways: cycles of the worst pass; 1 is conflict-free.
    """

    count: int = 0
    passes: int = 0
    cycles: int = 0
    ways: int = 0

    def __add__(self, other: "Accesses") -> "Accesses":
        """Returns the sum of both counts; the worst pass is that of the worse one."""
        return Accesses(
            self.count + other.count,
            self.passes + other.passes,
            self.cycles + other.cycles,
            max(self.ways, other.ways),
        )

    def __sub__(self, other: "Accesses") -> "Accesses":
        """Returns the counts without those of `other`; `ways` stays."""
        return Accesses(
            self.count - other.count, self.passes - other.passes, self.cycles - other.cycles, self.ways
        )


class BankUse(dict[str, Accesses]):
    """Accesses to shared memory by instruction (``PTX line 55 `ld.shared...` (file.py:12)``)."""

    def count(self, place: str, accesses: Accesses) -> None:
        """Counts more accesses of the instruction at `place`."""
        self[place] = self.get(place, Accesses()) + accesses

    def __add__(self, other: "BankUse") -> "BankUse":
        """Returns the accesses of both counters, by instruction."""
        total = BankUse(self)
        for place, accesses in other.items():
            total.count(place, accesses)
        return total

    def __sub__(self, earlier: "BankUse") -> "BankUse":
        """Returns the accesses since an earlier state of this counter."""
        new = {place: accesses - earlier.get(place, Accesses()) for place, accesses in self.items()}
        return BankUse({place: accesses for place, accesses in new.items() if accesses.count})

    def conflicts(self) -> "BankUse":
        """Returns the instructions with a pass of more than one cycle."""
        return BankUse({place: accesses for place, accesses in self.items() if accesses.ways > 1})

    def table(self) -> str:
        """Returns one line per instruction with conflicts, in the order of the first accesses, and one for all others."""
        found = [(f"{use.ways}-way conflicts: {place}", use) for place, use in self.conflicts().items()]
        free = [use for use in self.values() if use.ways == 1]
        if free:
            found.append(
                (f"conflict-free: {len(free)} instruction{'s' * (len(free) > 1)}", sum(free, Accesses()))
            )
        lines = [f"{'accesses':>12} {'cycles':>12} {'without conflicts':>18}  instruction"]
        lines += [f"{use.count:>12,} {use.cycles:>12,} {use.passes:>18,}  {text}" for text, use in found]
        return "\n".join(lines)


def cycles_of(offsets: np.ndarray, nbytes: int) -> Accesses:
    """Counts one access of a warp.

    Args:
        offsets: byte offsets in shared memory that the active lanes address, aligned to the access.
        nbytes: bytes per lane.
    """
    start = int(offsets.min()) // PASS_BYTES * PASS_BYTES
    return _cycles((offsets - start).astype(np.int64).tobytes(), nbytes)


@lru_cache(maxsize=1 << 16)
def _cycles(pattern: bytes, nbytes: int) -> Accesses:
    offsets = np.frombuffer(pattern, np.int64)
    lanes = PASS_BYTES // max(nbytes, WORD_BYTES)
    loads = []
    for first in range(0, len(offsets), lanes):
        lane_words = (
            offsets[first : first + lanes, None] // WORD_BYTES + np.arange(max(nbytes // WORD_BYTES, 1))[None]
        )
        loads.append(int(np.bincount(np.unique(lane_words) % BANKS).max()))
    return Accesses(1, len(loads), sum(loads), max(loads))

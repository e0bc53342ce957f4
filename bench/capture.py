"""A kernel launch in a file: code, parameters, and the tensors that its addresses point into.

Device addresses in parameters and in small tensors are 64-bit words; whoever loads a capture says where each tensor lies
now, and the words move along. Large tensors come without contents: their data decides no control flow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CARRIED_BYTES = 1 << 16
"""Tensors up to this size hold sizes and addresses rather than data: a capture keeps their contents."""


@dataclass(frozen=True)
class Capture:
    """A launch.

    Attributes:
        kernel: entry name.  ptx, cubin: its module.  params: parameter buffer.  smem_bytes: dynamic shared memory.
        grid, block, cluster: launch shape.
        ranges: (address, bytes) of every tensor when it was captured.  contents: of the small ones, by number.
    """

    kernel: str
    ptx: str
    cubin: bytes
    params: np.ndarray
    smem_bytes: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    contents: dict[int, np.ndarray]

    def save(self, path: Path) -> None:
        """Write an .npz."""
        np.savez_compressed(
            path,
            kernel=np.array(self.kernel),
            ptx=np.frombuffer(self.ptx.encode(), np.uint8),
            cubin=np.frombuffer(self.cubin, np.uint8),
            params=self.params,
            smem_bytes=np.array(self.smem_bytes),
            shape=np.array([self.grid, self.block, self.cluster]),
            ranges=np.array(self.ranges),
            **{f"contents{i}": data for i, data in self.contents.items()},  # type: ignore[arg-type]
        )

    @classmethod
    def load(cls, path: Path) -> "Capture":
        """Read an .npz."""
        data = np.load(path)
        shape = [tuple(map(int, row)) for row in data["shape"]]
        return cls(
            str(data["kernel"]),
            data["ptx"].tobytes().decode(),
            data["cubin"].tobytes(),
            data["params"],
            int(data["smem_bytes"]),
            *shape,
            tuple((int(address), int(nbytes)) for address, nbytes in data["ranges"]),
            {int(key[8:]): data[key] for key in data.files if key.startswith("contents")},
        )

    def moved(self, data: np.ndarray, bases: Sequence[int]) -> np.ndarray:
        """Bytes in which every aligned 64-bit word that is an address in tensor i now points into `bases[i]`."""
        moved = data.copy()
        old = data[: len(data) // 8 * 8].view(np.uint64)
        new = moved[: len(data) // 8 * 8].view(np.uint64)
        for (start, nbytes), base in zip(self.ranges, bases, strict=True):
            inside = (old >= start) & (old < start + nbytes)
            new[inside] = old[inside] - np.uint64(start) + np.uint64(base)
        return moved

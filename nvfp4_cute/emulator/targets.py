"""Attributes that the emulated device reports to host code."""

import re
from dataclasses import dataclass

from nvfp4_cute.errors import EmulatorError

KIB = 1024
FIRST_CLUSTERS = 9
"""Lowest major compute capability with clusters."""


@dataclass(frozen=True)
class Limits:
    """Limits by compute capability (CUDA programming guide, table of limits).

    Attributes:
        shared_bytes: shared memory that a CTA may opt in to.
        threads: threads per SM.
        blocks: CTAs per SM.
    """

    shared_bytes: int
    threads: int
    blocks: int


LIMITS = {
    (8, 0): Limits(163 * KIB, 2048, 32),
    (8, 6): Limits(99 * KIB, 1536, 16),
    (8, 9): Limits(99 * KIB, 1536, 24),
    (9, 0): Limits(227 * KIB, 2048, 32),
    (10, 0): Limits(227 * KIB, 2048, 32),
    (10, 3): Limits(227 * KIB, 2048, 32),
    (11, 0): Limits(227 * KIB, 2048, 32),
    (12, 0): Limits(99 * KIB, 1536, 24),
    (12, 1): Limits(99 * KIB, 1536, 24),
}

OLD_NAMES = {"sm_101": "sm_110"}
"""The compiler still writes this older name of the Thor architecture into PTX for sm_110."""


def ptx_arch(target: str) -> str:
    """Returns the architecture of a ``.target`` directive under its current name."""
    name = target.split(",")[0].strip()
    return next((new + name[len(old) :] for old, new in OLD_NAMES.items() if name.startswith(old)), name)


@dataclass(frozen=True)
class Device:
    """An emulated device: architecture name such as ``sm_100a`` and number of SMs."""

    arch: str
    sm_count: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor).

        Raises:
            EmulatorError: the name does not belong to a modelled architecture.
        """
        match = re.fullmatch(r"sm_(\d+)(\d)[af]?", self.arch)
        found = (int(match.group(1)), int(match.group(2))) if match else None
        if found not in LIMITS:
            raise EmulatorError(
                f"unknown architecture `{self.arch}`; use a name such as sm_100a, sm_120a, sm_90a, or sm_80"
            )
        return found

    @property
    def shared_bytes(self) -> int:
        """Largest shared memory of a CTA, in bytes."""
        return LIMITS[self.capability].shared_bytes

    @property
    def has_clusters(self) -> bool:
        """Whether CTAs form clusters."""
        return self.capability[0] >= FIRST_CLUSTERS

    def attributes(self) -> dict[int, int]:
        """Returns a map from cudaDeviceAttr number to value."""
        (major, minor), limits = self.capability, LIMITS[self.capability]
        return {
            1: 1024,  # threads per block
            2: 1024, 3: 1024, 4: 64,  # block dimensions
            5: 2**31 - 1, 6: 65535, 7: 65535,  # grid dimensions
            8: 48 * KIB,  # shared memory per block without opting in
            10: 32,  # warp size
            12: 65536,  # registers per block
            16: self.sm_count,
            39: limits.threads,  # threads per SM
            75: major, 76: minor,
            81: self.shared_bytes + KIB,  # shared memory per SM
            82: 65536,  # registers per SM
            97: self.shared_bytes,
            106: limits.blocks,  # blocks per SM
            111: KIB,  # shared memory reserved per block
            120: int(self.has_clusters),  # cluster launch
        }  # fmt: skip

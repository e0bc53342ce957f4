"""What the emulated device answers when host code asks for its attributes."""

import re
from dataclasses import dataclass

from nvfp4_cute.errors import EmulatorError

KIB = 1024
OPT_IN_SHARED_BYTES = {9: 227 * KIB, 10: 227 * KIB, 11: 227 * KIB, 12: 99 * KIB}
"""Shared memory that a CTA may opt in to, by major compute capability (CUDA programming guide, table of limits)."""


OLD_NAMES = {"sm_101": "sm_110"}
"""The compiler still writes the older name of the Thor architecture into PTX for sm_110."""


def ptx_arch(target: str) -> str:
    """Architecture of a ``.target`` directive, under its current name."""
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
            EmulatorError: the name is not that of a modelled architecture.
        """
        match = re.fullmatch(r"sm_(\d+)(\d)[af]?", self.arch)
        if match is None or int(match.group(1)) not in OPT_IN_SHARED_BYTES:
            raise EmulatorError(
                f"unknown architecture `{self.arch}`; use a name such as sm_100a, sm_120a, or sm_90a"
            )
        return int(match.group(1)), int(match.group(2))

    @property
    def shared_bytes(self) -> int:
        """Most shared memory of a CTA, in bytes."""
        return OPT_IN_SHARED_BYTES[self.capability[0]]

    def attributes(self) -> dict[int, int]:
        """cudaDeviceAttr number -> value."""
        major, minor = self.capability
        return {
            1: 1024,  # threads per block
            2: 1024, 3: 1024, 4: 64,  # block dimensions
            5: 2**31 - 1, 6: 65535, 7: 65535,  # grid dimensions
            8: 48 * KIB,  # shared memory per block without opting in
            10: 32,  # warp size
            12: 65536,  # registers per block
            16: self.sm_count,
            39: 1536 if major == 12 else 2048,  # threads per SM
            75: major, 76: minor,
            81: self.shared_bytes + KIB,  # shared memory per SM
            82: 65536,  # registers per SM
            97: self.shared_bytes,
            106: 24 if major == 12 else 32,  # blocks per SM
            111: KIB,  # shared memory reserved per block
            120: 1,  # cluster launch
        }  # fmt: skip

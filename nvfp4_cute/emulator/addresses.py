"""Windows of the generic address space, and how an address of a cluster's shared memory is made."""

import platform


def user_address_end(machine: str) -> int:
    """Where addresses of a process end on a kind of machine, as ``platform.machine()`` names it.

    Linux gives a process 2**47 bytes on x86-64. On 64-bit Arm it gives 2**48, and 2**52 where the kernel was built so.
    """
    return 1 << (47 if machine in ("x86_64", "AMD64") else 52)


USER_END = user_address_end(platform.machine())

RANK_SHIFT = 24
"""A shared::cluster address is ``rank << 24 | offset``."""

OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW = 0x7E00_0000_0000_0000
"""Base of shared memory in the generic address space: no host address lies there."""

LOCAL_WINDOW = 0x7D00_0000_0000_0000
"""Base of per-lane local memory in the generic address space."""

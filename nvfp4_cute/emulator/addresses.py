"""Windows of the generic address space, and the addresses of a cluster's shared memory."""

import platform


def user_address_end(machine: str) -> int:
    """Returns the end of a process's address space on a kind of machine, named as by ``platform.machine()``.

    Linux gives a process 2**47 bytes on x86-64. On 64-bit Arm it gives 2**48 bytes, or 2**52 if the kernel was built
    with them.
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

"""Windows of the generic address space, and how an address of a cluster's shared memory is made."""

RANK_SHIFT = 24
"""A shared::cluster address is ``rank << 24 | offset``."""

OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW = 0x7E00_0000_0000_0000
"""Base of shared memory in the generic address space: no host address lies there."""

LOCAL_WINDOW = 0x7D00_0000_0000_0000
"""Base of per-lane local memory in the generic address space."""

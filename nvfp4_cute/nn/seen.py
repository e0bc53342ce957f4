"""Which tensors something was made of: what a layer works out of its tensors once is worked out anew when they have changed."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Place = tuple[Mapping[str, torch.Tensor | None], str]
"""The dict of a module's buffers or parameters, and a name in it."""


class Seen:
    """Tensors in their places: another one there is told by identity, one that was written by torch's count of writes.

    Torch does not count what is written to inference tensors, or through ``tensor.data``, and it is not seen here. A copy, and
    what is read from a file, has seen nothing.

    Args:
        places: of tensors, which are held. shared: of tensors in whose memory is what was made of them: only their addresses
            count.
    """

    def __init__(self, places: Iterable[Place] = (), shared: Iterable[Place] = ()):
        self._seen = [(where, name, where.get(name), _writes(where.get(name))) for where, name in places]
        self._shared = [(where, name, where.get(name), _address(where.get(name))) for where, name in shared]

    def is_current(self) -> bool:
        """Whether each place has the tensor that it had, as it was. False where nothing was seen."""
        for where, name, tensor, writes in self._seen:
            if where.get(name) is not tensor or (writes >= 0 and tensor._version != writes):  # type: ignore[union-attr]
                return False
        for where, name, tensor, address in self._shared:
            if where.get(name) is not tensor or (address and tensor.data_ptr() != address):  # type: ignore[union-attr]
                return False
        return bool(self._seen)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it is stored or copied."""
        return {"_seen": [], "_shared": []}


def _writes(tensor: torch.Tensor | None) -> int:
    """-1 where they are not counted, or nothing is there."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor | None) -> int:
    """0 where nothing is there."""
    return 0 if tensor is None else tensor.data_ptr()

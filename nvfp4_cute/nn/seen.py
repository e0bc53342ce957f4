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
        places: of tensors, which are held. moved: of those whose ``data`` may be set to others, too: their addresses count.
        shared: of tensors in whose memory is what was made of them: neither writes nor addresses count.
    """

    def __init__(
        self, places: Iterable[Place] = (), moved: Iterable[Place] = (), shared: Iterable[Place] = ()
    ):
        moved = [*moved]
        written = [(where, name, where.get(name)) for where, name in (*places, *moved)]
        self._written = [(*place, _writes(place[-1])) for place in written]
        self._moved = [(where.get(name), _address(where.get(name))) for where, name in moved]
        self._shared = [(where, name, where.get(name)) for where, name in shared]

    def is_current(self) -> bool:
        """Whether each place has the tensor that it had, as it was. False where nothing was seen."""
        try:
            for where, name, tensor in self._shared:
                if where[name] is not tensor:
                    return False
            for where, name, tensor, writes in self._written:
                if where[name] is not tensor or (writes >= 0 and tensor._version != writes):  # type: ignore[union-attr]
                    return False
        except KeyError:  # as of parametrizations
            return False
        for tensor, address in self._moved:
            if tensor is not None and tensor.data_ptr() != address:
                return False
        return bool(self._written)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it is stored or copied."""
        return vars(Seen())


def _writes(tensor: torch.Tensor | None) -> int:
    """-1 where they are not counted, or nothing is there."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor | None) -> int:
    """0 where nothing is there."""
    return 0 if tensor is None else tensor.data_ptr()

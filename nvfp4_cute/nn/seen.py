"""Detects changes of tensors, so that layers recompute cached results only when their sources have changed."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Place = tuple[Mapping[str, torch.Tensor | None], str]
"""The dict of a module's buffers or parameters, and a name in it."""


class Seen:
    """Remembers tensors and their places. A replaced tensor is detected by identity, a written one by torch's version counter.

    Writes to inference tensors and through ``tensor.data`` are not counted by torch, and not detected. Copies and unpickled
    objects remember nothing.

    Args:
        places: where the tensors are; holds references to them.
        moved: places of tensors whose ``data`` may be replaced, so that their addresses are compared as well.
        shared: places of tensors whose memory holds the cached result; neither writes nor addresses are compared.
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
        """Returns whether every place still has its tensor, unchanged. False if nothing is remembered."""
        try:
            for where, name, tensor in self._shared:
                if where[name] is not tensor:
                    return False
            for where, name, tensor, writes in self._written:
                if where[name] is not tensor or (writes >= 0 and tensor._version != writes):  # type: ignore[union-attr]
                    return False
        except KeyError:  # a parametrization removed it
            return False
        for tensor, address in self._moved:
            if tensor is not None and tensor.data_ptr() != address:
                return False
        return bool(self._written)

    def __getstate__(self) -> dict[str, Any]:
        """Stores nothing, so copies remember nothing."""
        return vars(Seen())


def _writes(tensor: torch.Tensor | None) -> int:
    """Returns the version counter; -1 without a counter or a tensor."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor | None) -> int:
    """Returns the address; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()

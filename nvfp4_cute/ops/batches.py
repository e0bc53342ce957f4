"""Batches along a last extent L, as an operation over groups takes them."""

from typing import Any

import torch


def split_batches(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A view of every batch."""
    return [tensor] if tensor.ndim == 2 else list(tensor.unbind(2))


def as_alphas(name: str, alpha: torch.Tensor | float | None, batches: int) -> Any:
    """A factor a batch."""
    if alpha is None:
        return None
    if not isinstance(alpha, torch.Tensor):
        return [alpha] * batches
    if alpha.numel() not in (1, batches):
        raise ValueError(f"{name} has shape {list(alpha.shape)}; expected one element, or [{batches}]")
    return alpha.reshape(-1).expand(batches).contiguous()

"""Batches along a last extent L, as an operation over groups takes them."""

from collections.abc import Mapping
from typing import Any

import torch

from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.operands.tensor_checks import check_quantized_columns
from nvfp4_cute.problem import new_quantized_data, new_quantized_scale


def check_batched_shapes(named: Mapping[str, torch.Tensor | None], expected: str) -> None:
    """All that are given are matrices, or all of them matrices with the same last extent L, as the first of them is.

    Raises:
        ValueError: another number of dimensions, or another L; the message says what is ``expected``.
    """
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    first, model = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.ndim not in (2, 3) or tensor.ndim != model.ndim or tensor.shape[2:] != model.shape[2:]:
            beside = "" if name == first else f" and {first} {list(model.shape)}"
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}{beside}; pass {expected}, or all of them with one more extent L"
            )


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


def quantized_result(out: Any, lead: tuple[int, ...], n: int, device: torch.device) -> NVFP4Tensor:
    """What NVFP4 results [*lead, N] are written to: the caller's ``out``, or new where it is None.

    Raises:
        TypeError: ``out`` is no NVFP4Tensor. ValueError: its shape is another, or its batches' scales are apart.
    """
    check_quantized_columns("N", n)
    shape = (*lead, n)
    if out is None:
        data = new_quantized_data(shape, device)
        return NVFP4Tensor(data, new_quantized_scale(lead, n, device), None, shape)
    if not isinstance(out, NVFP4Tensor):
        raise TypeError(f'out is a {type(out).__name__}; with out_dtype="nvfp4" pass an NVFP4Tensor')
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {list(out.shape)}; expected {list(shape)}")
    if not out.scale.is_contiguous():
        raise ValueError(f"scale of out has strides {out.scale.stride()}; it has to be contiguous")
    return out


def split_quantized(tensor: NVFP4Tensor) -> list[NVFP4Tensor]:
    """A view of every batch of [M, N] or [L, M, N]."""
    if len(tensor.shape) == 2:
        return [tensor]
    parts = zip(tensor.data, tensor.scale, strict=True)
    return [NVFP4Tensor(data, scale, None, tensor.shape[1:], tensor.scale_layout) for data, scale in parts]


def one_factor(name: str, factor: torch.Tensor | float | None, batches: int, device: torch.device) -> Any:
    """float32 [L] of one factor that all batches share, or None."""
    factor = as_factor(factor, device)
    return as_alphas(name, as_alphas(name, factor, 1), batches)


def as_factor(factor: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    """A number as float32 [1]; all else as it is."""
    if isinstance(factor, int | float):
        return numbers_on(device, [factor])
    return factor

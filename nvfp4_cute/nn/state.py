"""State dicts of NVFP4 layers: what they say about themselves, and what is refused or taken as bits when they are loaded."""

import json
from collections.abc import Callable
from typing import Any

import torch

VERSION = 1
# Torch's key for what is no tensor of a module by itself.
EXTRA = "_extra_state"
# e2m1 pairs, block scales, global scales.
FIXED_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float32)
DESCRIPTION = {"format": "nvfp4", "global_scale": "multiplies", "version": VERSION}


def description() -> torch.Tensor:
    """Format, convention and version, as bytes of JSON: files of tensors can hold it."""
    return torch.frombuffer(bytearray(json.dumps(DESCRIPTION).encode()), dtype=torch.uint8)


def take_as_bits(state: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Replace a tensor of another 8-bit dtype by a view of ``dtype``: converting numbers would change the bits."""
    tensor = state.get(name)
    if isinstance(tensor, torch.Tensor) and tensor.dtype != dtype and tensor.dtype.itemsize == dtype.itemsize:
        state[name] = tensor.view(dtype)


def faults(state: dict[str, Any], prefix: str) -> list[str]:
    """What makes a state dict another one than these layers write, as messages.

    A state dict with the description is of this convention. One without is of an earlier version, or of something else: a
    global scale over 1 is then a reciprocal one, for weights stay below 2688.
    """
    stored = state.get(prefix + EXTRA)
    found = []
    if stored is not None:
        given = json.loads(bytes(stored.cpu().tolist()))
        if given != DESCRIPTION:
            found.append(f"{prefix}{EXTRA} says {given}; this version reads {DESCRIPTION}")
    for name in ("weight_global_scale", "input_global_scale"):
        scale = state.get(prefix + name)
        if not isinstance(scale, torch.Tensor) or scale.is_meta:
            continue
        values = scale.detach().float()
        if not bool(((values > 0) & torch.isfinite(values)).all()):
            found.append(
                f"{prefix}{name} is {values.reshape(-1)[:4].tolist()}; a scale is finite and positive"
            )
        elif stored is None and bool((values > 1).any()):
            found.append(
                f"{prefix}{name} is {values.max().item():g}, and here it multiplies, amax / 2688: this one is a reciprocal, as "
                "compressed-tensors stores it. Load the folder with nvfp4_cute.models.checkpoints.Checkpoint, or store 1 / it"
            )
    return found


def keeping_dtype(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What ``.to``, ``.cuda``, ``to_empty`` and the like do with a tensor whose dtype is fixed: the device changes alone."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        if moved.dtype == tensor.dtype:
            return moved
        if tensor.is_meta:
            return torch.empty_like(tensor, device=moved.device)
        return tensor.to(moved.device)

    return move


def moving(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn`` for 16-bit tensors; for those of ``FIXED_DTYPES`` the same without a change of dtype."""
    keep = keeping_dtype(fn)
    return lambda tensor: keep(tensor) if tensor.dtype in FIXED_DTYPES else fn(tensor)

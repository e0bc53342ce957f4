"""Checks that the operations of ``kernels/simt`` share. None reads tensor data, so none waits for the GPU."""

from collections.abc import Iterable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import DATA_DTYPES, ScaleLayout, check_is_tensor
from nvfp4_cute.formats.scale_layout import SCALE_DTYPES, as_blocked_batches, num_k_blocks, to_blocked
from nvfp4_cute.operands.numbers_on_device import numbers_on

# A lane reads 16 bytes at once.
ALIGN_BYTES = 16
# Offsets are 32 bits wide: into the scales of one row of atoms, and over the 128 rows of an atom.
MAX_PITCH = 2**24
MAX_K = 2 * MAX_PITCH
MAX_BATCHES = 65535
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensors(
    named: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})
) -> torch.device:
    """All are tensors, on one device, without gradients; returns the device. Those that are ``optional`` may be None."""
    tensors = {**named, **{name: tensor for name, tensor in optional.items() if tensor is not None}}
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedProblem(
                f"{name} has requires_grad=True; there is no backward pass: pass .detach() or use torch.no_grad()"
            )
    devices = {name: tensor.device for name, tensor in tensors.items()}
    first, device = next(iter(devices.items()))
    for name, other in devices.items():
        if other != device:
            raise ValueError(f"{name} is on {other} and {first} on {device}; move all operands to one device")
    return device


def check_choice(name: str, value, choices: Iterable) -> None:
    """One of a few values; TypeError for dtypes, ValueError for the rest."""
    if value not in choices:
        error = TypeError if isinstance(value, torch.dtype) else ValueError
        raise error(f"{name}={value!r} is not supported; use {' or '.join(map(repr, choices))}")


def check_k(k: int) -> int:
    """K of an operand: a positive multiple of 16 that 32-bit offsets reach."""
    num_k_blocks(k)
    if k > MAX_K:
        raise UnsupportedProblem(f"K={k} exceeds {MAX_K}, what 32-bit offsets reach; split the sum")
    return k


def check_extent(name: str, extent: int, most: int) -> int:
    """A number of rows or batches that an index or the grid can hold."""
    if extent > most:
        raise UnsupportedProblem(f"{name}={extent} exceeds {most}; split the problem")
    return extent


def check_aligned(name: str, tensor: torch.Tensor, *, pitches: Iterable[int] = ()) -> None:
    """Base address and byte pitches are multiples of 16."""
    if not tensor.numel():
        return
    if tensor.data_ptr() % ALIGN_BYTES:
        raise ValueError(
            f"{name} starts at address 0x{tensor.data_ptr():x}, not a multiple of {ALIGN_BYTES} bytes (vector load); "
            "use a view that starts on such a boundary, or .clone()"
        )
    for pitch in pitches:
        if pitch % ALIGN_BYTES:
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())}: rows {pitch} bytes apart, not a multiple of "
                f"{ALIGN_BYTES} (vector load); keep rows in a buffer of {-(-pitch // ALIGN_BYTES) * ALIGN_BYTES} bytes "
                "each and pass a slice of it"
            )


def fp4_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The uint8 view of packed e2m1 values."""
    if tensor.dtype not in DATA_DTYPES:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; expected uint8 or float4_e2m1fn_x2 (two e2m1 a byte)"
        )
    return tensor.view(torch.uint8)


def batched_scales(
    name: str, scale: torch.Tensor, rows: int, k: int, batches: int, layout: ScaleLayout
) -> torch.Tensor:
    """Blocked scales as uint8 [L, bytes]; row-major ones, [rows, K/16(, L)], are converted, which allocates."""
    if layout == "blocked":
        try:
            blocked = as_blocked_batches(scale, rows, k, batches)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        check_aligned(name, blocked, pitches=[blocked.stride(0)] if batches > 1 else [])
        return blocked
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {scale.dtype}; expected float8_e4m3fn or uint8 (e4m3 codes)")
    expected = (rows, k // 16, batches)
    matrix = scale.view(torch.uint8)
    if batches == 1 and tuple(matrix.shape) == expected[:2]:
        matrix = matrix.unsqueeze(2)
    if tuple(matrix.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}; row-major scales of {batches} batches of {rows} rows and K={k} have "
            f"shape {expected}{f' or {expected[:2]}' if batches == 1 else ''}"
        )
    return to_blocked(matrix.permute(2, 0, 1)).view(batches, -1)


def check_overlap(out: torch.Tensor, inputs: dict[str, torch.Tensor | None], label: str = "out") -> None:
    """No input lies between the first and the last byte of ``out``, which is called ``label``."""
    start, stop = _span(out)
    for name, tensor in inputs.items():
        if tensor is None or not tensor.numel() or not out.numel():
            continue
        low, high = _span(tensor)
        if start < high and low < stop:
            raise ValueError(f"{label} overlaps {name} in memory; give it memory of its own")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def as_alpha(
    alpha: torch.Tensor | float | None, batches: int, device: torch.device, of: str = "batch"
) -> tuple[torch.Tensor | None, int]:
    """Factors as a float32 tensor on the device, and how many bytes lie between those of two batches (0: one for all).

    ``of`` is what the caller's message calls a batch.
    """
    if alpha is None:
        return None, 0
    if not isinstance(alpha, torch.Tensor | Real):
        raise TypeError(f"alpha={alpha!r} is neither a number nor a float32 tensor")
    if not isinstance(alpha, torch.Tensor):
        return numbers_on(device, [float(alpha)]), 0
    if alpha.dtype != torch.float32:
        raise TypeError(f"alpha has dtype {alpha.dtype}; expected float32: alpha.float()")
    if alpha.numel() == 1:
        return alpha.reshape(1), 0
    if tuple(alpha.shape) != (batches,) or not alpha.is_contiguous():
        raise ValueError(
            f"alpha has shape {tuple(alpha.shape)} and strides {tuple(alpha.stride())}; expected one number, or "
            f"contiguous [{batches}], one a {of}"
        )
    return alpha, alpha.element_size()

"""The float32 global scale of an NVFP4 tensor: how a caller may give it, and which values are refused."""

import math
from typing import Any, Literal

import torch

from nvfp4_cute import private_api
from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.codecs import FLOAT32_MIN_NORMAL

# |x| <= GLOBAL_SCALE_DIVISOR * global_scale is representable: largest element times largest block scale.
GLOBAL_SCALE_DIVISOR = NVFP4.global_scale_divisor
# The word for a global scale per row.
PER_ROW: Literal["per_row"] = "per_row"
# Accepted kinds of values, for messages.
KINDS = {
    "global_scale": 'a number, a tensor, "auto", "per_batch", "per_row" or None',
    "global_scale_inv": "a number, a tensor or None",
}


def is_per_row(global_scale: Any) -> bool:
    """Returns whether ``global_scale`` is the word for one per row."""
    return isinstance(global_scale, str) and global_scale == PER_ROW


def check_has_global_scale(format: BlockFormat, *given: Any) -> None:
    """Raises ValueError if a global scale other than None is given to a format without one."""
    if not format.has_global_scale and any(factor is not None for factor in given):
        raise ValueError(f"{format.title} has no global scale; leave it out, or scale x")


def resolve_global_scale(
    values: torch.Tensor, given: Any, inverse: Any, format: BlockFormat = NVFP4
) -> torch.Tensor | None:
    """Returns the global scale as a float32 tensor on the device of ``values``, or None.

    It has no dimensions, is [batches...], or for "per_row" [batches..., M].

    Args:
        values: values to quantize, float [batches..., M, K]; only words read them.
        given: ``global_scale`` of :func:`quantize`.
        inverse: ``global_scale_inv`` of :func:`quantize`.
        format: format of the quantized values, for words.

    Raises:
        ValueError: both are given, one is not positive and normal, or there is neither one number nor one per batch.
        TypeError: a value is not a number, a tensor or one of the words.
    """
    if inverse is not None:
        if given is not None:
            raise ValueError("global_scale and global_scale_inv are both given; pass the one that you have")
        inverse = _numbers(inverse, "global_scale_inv", values)
        return check_factor(torch.ones_like(inverse) / inverse, "1 / global_scale_inv")
    if given is None:
        return None
    if isinstance(given, str):
        if given not in ("auto", "per_batch", PER_ROW):
            raise ValueError(f"global_scale={given!r} is not {KINDS['global_scale']}")
        dims: tuple[int, ...] | None = (-2, -1) if given == "per_batch" and values.ndim > 2 else None
        dims = (-1,) if given == PER_ROW else dims
        return _auto_global_scale(values, dims, format.global_scale_divisor)
    return check_factor(_numbers(given, "global_scale", values), "global_scale")


def _auto_global_scale(values: torch.Tensor, dims: tuple[int, ...] | None, divisor: float) -> torch.Tensor:
    """Computes the finite amax / ``divisor`` over ``dims``, or over all values; 1 where the amax is 0.

    Uses as few launches as torch allows, because each of them costs time on the host.
    """
    if not values.numel():
        shape = () if dims is None else values.shape[: -len(dims)]
        return torch.ones(shape, dtype=torch.float32, device=values.device)
    values = values.float() if values.dtype == torch.float64 else values
    finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    amax = torch.linalg.vector_norm(finite, ord=math.inf, dim=dims, dtype=torch.float32)
    divisors = torch.full((), divisor, dtype=torch.float32, device=values.device)
    scale = torch.threshold_(amax, 0.0, divisor).div_(divisors)
    return scale.clamp_(min=FLOAT32_MIN_NORMAL)


def _numbers(given: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Converts given numbers to float32 on the device of ``values``, without dimensions or [batches...]."""
    try:
        own = given.device if isinstance(given, torch.Tensor) else "cpu"  # whatever the default device is
        tensor = torch.as_tensor(given, dtype=torch.float32, device=own).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}={given!r} is not {KINDS[name]}") from error
    device, batches = values.device, values.shape[:-2]
    if tensor.is_meta and device.type != "meta":
        raise ValueError(f"{name} is on meta and x on {device}; pass one that has data")
    if tensor.numel() != 1:
        if tensor.shape != batches:
            each = f", or one for each batch, {list(batches)}" if batches else ""
            raise ValueError(f"{name} has shape {list(tensor.shape)}; pass one number{each}")
        if isinstance(given, torch.Tensor) and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and x on {device}; move it there")
        return tensor.to(device)
    tensor = tensor.reshape(())
    if tensor.device.type == "cpu" and device.type == "cuda" and not private_api.is_traced():
        # Fills on the device: a copy from the host would wait, and fail while a CUDA graph is captured.
        return torch.full((), check_factor(tensor, name).item(), dtype=torch.float32, device=device)
    return tensor.to(device)


def first_wrong(scales: torch.Tensor) -> int | None:
    """Returns the index of the first scale that is not a positive, normal float32 number, or None if there is none.

    Such a scale would make divisors vanish or overflow. Returns None also on a GPU, where reading would wait, and under
    torch.compile, which has no values to read.
    """
    if scales.device.type != "cpu" or private_api.is_traced():
        return None
    numbers = scales.flatten().tolist()
    return next((i for i, x in enumerate(numbers) if not FLOAT32_MIN_NORMAL <= x < math.inf), None)


def check_factor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Returns global scales, and raises ValueError unless those on the CPU are positive, normal float32 numbers."""
    index = first_wrong(tensor)
    if index is not None:
        raise ValueError(
            f"{name}={tensor.flatten()[index].item():g} is not a positive, normal float32 number; "
            'pass amax / 2688 (or its inverse as global_scale_inv), or global_scale="auto"'
        )
    return tensor

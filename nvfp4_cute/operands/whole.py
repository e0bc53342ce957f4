"""Block-scaled tensors that a call is given whole, without scales beside them: their parts, and the factor that they stand for.

Nothing is copied from the host: factors are multiplied on the device.
"""

from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, ScaleLayout
from nvfp4_cute.operands.numbers_on_device import numbers_on


def parts(given: Any, scale: Any, layout: ScaleLayout) -> tuple[Any, Any, torch.Tensor | None]:
    """Data, scale in a layout, and global scale of a whole tensor; else what was given, and None.

    Whole tensors are those without a ``scale`` beside them. Of lists, each entry's, and global scales float32 [G].
    """
    if scale is not None:
        return given, scale, None
    for x in given if isinstance(given, list | tuple) else (given,):
        if isinstance(x, BlockScaledTensor) and x.format is not NVFP4:
            raise UnsupportedProblem(
                f"an operand is {x.format.title}; there are kernels for NVFP4 operands: dequantize it, and quantize anew"
            )
    if isinstance(given, NVFP4Tensor):
        return given.data, given.with_scale_layout(layout).scale, given.global_scale
    if isinstance(given, list | tuple) and given and all(isinstance(x, NVFP4Tensor) for x in given):
        factors = [x.global_scale for x in given]
        if all(factor is None for factor in factors):
            stacked = None
        else:
            device = given[0].data.device
            stacked = torch.stack([torch.ones((), device=device) if f is None else f for f in factors])
        return [x.data for x in given], [x.with_scale_layout(layout).scale for x in given], stacked
    return given, scale, None


def batched_parts(given: Any, scale: Any, layout: ScaleLayout) -> tuple[Any, Any, torch.Tensor | None]:
    """The same of a matrix, or of batches [L, rows, K], whose data become [rows, K/2, L] as operations on batches take them."""
    data, blocked, factor = parts(given, scale, layout)
    if isinstance(given, NVFP4Tensor) and scale is None and data.ndim == 3:
        data = data.permute(1, 2, 0)
        blocked = blocked if layout == "blocked" else blocked.permute(1, 2, 0)
    return data, blocked, factor


def times(alpha: Any, *factors: torch.Tensor | None) -> Any:
    """``alpha`` (a number, numbers, a tensor, or None for 1) times the factors that there are, on their device.

    Raises ValueError where alpha is not one a group.
    """
    there = [factor for factor in factors if factor is not None]
    if not there:
        return alpha
    product = there[0]
    for factor in there[1:]:
        product = product * factor
    if isinstance(alpha, list | tuple):
        if product.ndim and len(alpha) != len(product):
            raise ValueError(
                f"alpha has {len(alpha)} entries for {len(product)} groups; pass one number a group"
            )
        alpha = numbers_on(product.device, alpha)
    return product if alpha is None else product * alpha

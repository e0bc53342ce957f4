"""Helpers of graphs that ``torch.compile`` traces: allocate the results of custom ops, and refuse what graphs cannot do."""

from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.operands.grouped import new_device_results
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import RESULT_FORMATS, OutDtype, new_quantized_data, new_quantized_scale


def refuse_config(config: KernelConfig | None) -> None:
    """Raises UnsupportedProblem for a config, which a graph cannot hold."""
    if config is not None:
        raise UnsupportedProblem(
            "config under torch.compile, or a mode that records calls: leave it out, or call outside of it"
        )


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raises UnsupportedProblem if any tensor requires a gradient."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


def torch_dtype(out_dtype: OutDtype) -> torch.dtype | None:
    """Returns the custom op's ``out_dtype``: None for quantized results, whose format's name is a separate argument."""
    return out_dtype if isinstance(out_dtype, torch.dtype) else None


def format_name(out_dtype: OutDtype) -> str | None:
    """Returns the custom op's ``out_format``: None for results in a dtype of torch."""
    return None if isinstance(out_dtype, torch.dtype) else out_dtype


def new_group_results(
    a: Any, b: Any, num_groups: int | None, parts: int, dtype: OutDtype
) -> list[torch.Tensor]:
    """Allocates the results of a grouped operation as the flat list that a launch writes (``results``).

    Args:
        a, b: operands, lists in list form.
        num_groups: number of groups where sizes are on the device; None in list form.
        parts: rows of ``b`` per column of the result, 2 where ``b`` holds both projections.
        dtype: dtype or format of the results.
    """
    if num_groups is not None:
        return new_device_results((*a.shape[:-1], b.shape[1] // parts), num_groups, dtype, a.device)
    device, shapes = a[0].device, [(x.shape[0], y.shape[0] // parts) for x, y in zip(a, b, strict=True)]
    if isinstance(dtype, torch.dtype):
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    format = RESULT_FORMATS[dtype]
    data = [new_quantized_data(shape, device, format) for shape in shapes]
    return data + [new_quantized_scale((m,), n, device, format) for m, n in shapes]

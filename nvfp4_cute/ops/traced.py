"""What a graph that ``torch.compile`` traces does for a custom op (``ops.library``), which only writes: allocate, and refuse."""

from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.operands.grouped import new_device_results
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import RESULT_FORMATS, OutDtype, new_quantized_data, new_quantized_scale


def refuse_config(config: KernelConfig | None) -> None:
    """Raise UnsupportedProblem for a config, which a graph cannot hold."""
    if config is not None:
        raise UnsupportedProblem(
            "config under torch.compile, or a mode that records calls: leave it out, or call outside of it"
        )


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedProblem where a gradient would be asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


def torch_dtype(out_dtype: OutDtype) -> torch.dtype | None:
    """``out_dtype`` of a custom op: None of quantized results, whose format has a name beside it."""
    return out_dtype if isinstance(out_dtype, torch.dtype) else None


def format_name(out_dtype: OutDtype) -> str | None:
    """``out_format`` of a custom op: None of a dtype of torch."""
    return None if isinstance(out_dtype, torch.dtype) else out_dtype


def new_group_results(
    a: Any, b: Any, num_groups: int | None, parts: int, dtype: OutDtype
) -> list[torch.Tensor]:
    """Results of an operation over groups, flat as a launch writes them (``results``).

    Args:
        a, b: operands, lists in list form.
        num_groups: of the forms whose sizes are on the device; None in list form.
        parts: rows of ``b`` that make a column.
        dtype: of the results.
    """
    if num_groups is not None:
        return new_device_results((*a.shape[:-1], b.shape[1] // parts), num_groups, dtype, a.device)
    device, shapes = a[0].device, [(x.shape[0], y.shape[0] // parts) for x, y in zip(a, b, strict=True)]
    if isinstance(dtype, torch.dtype):
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    format = RESULT_FORMATS[dtype]
    data = [new_quantized_data(shape, device, format) for shape in shapes]
    return data + [new_quantized_scale((m,), n, device, format) for m, n in shapes]

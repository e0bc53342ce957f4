"""What a graph that ``torch.compile`` traces does for a custom op (``ops.library``), which only writes: allocate, and refuse."""

from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.ops.device_checks import new_device_results
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, OutDtype, new_quantized_data, new_quantized_scale


def refuse_config(config: KernelConfig | None) -> None:
    """Raise UnsupportedProblem for a config, which a graph cannot hold."""
    if config is not None:
        raise UnsupportedProblem("config under torch.compile: leave it out, or call outside of the graph")


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedProblem where a gradient would be asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("there is no backward pass: pass .detach() or use torch.no_grad()")


def as_factors(given: Any, groups: Any) -> torch.Tensor | None:
    """Numbers as float32 on the device of ``groups``, a tensor or a list of them; all else as it is."""
    if not isinstance(given, list | tuple):
        return given
    return numbers_on(groups[0].device, given)


def new_group_results(
    a: Any, b: Any, num_groups: int | None, parts: int, is_ragged: bool, dtype: OutDtype
) -> list[torch.Tensor]:
    """Results of an operation over groups, flat as a launch writes them (``results``).

    Args:
        a, b: operands, lists in list form.
        num_groups: of the forms whose sizes are on the device; None in list form.
        parts: rows of ``b`` that make a column.
        is_ragged: whether the rows of all groups follow each other.
        dtype: of the results.
    """
    if num_groups is None:
        leads, columns = [x.shape[:1] for x in a], [y.shape[0] // parts for y in b]
        device = a[0].device
    else:
        leads, columns, device = [a.shape[:-1]], [b.shape[1] // parts], a.device
    shapes = list(zip(leads, columns, strict=True))
    if dtype != NVFP4:
        return [torch.empty((*lead, n), dtype=dtype, device=device) for lead, n in shapes]
    if num_groups is None:
        data = [new_quantized_data((*lead, n), device) for lead, n in shapes]
        return data + [new_quantized_scale(lead, n, device) for lead, n in shapes]
    ((lead, n),) = shapes
    return list(new_device_results((*lead, n), num_groups, is_ragged, device))

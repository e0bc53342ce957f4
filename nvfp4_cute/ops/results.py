"""Results as a caller sees them, and as the flat list of tensors that a launch writes.

Flat: a tensor a group, or one of all groups. NVFP4: all data, then all scales.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.formats.scale_layout import ATOM_SHAPE, SF_VEC_SIZE, atom_counts
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.problem import GroupedOperands, GroupedProblem


def flat_outputs(out: Any, is_list: bool, is_quantized: bool) -> list[torch.Tensor]:
    """The tensors of a caller's ``out``. Raises TypeError or AttributeError where it is of another kind."""
    if not is_list:
        return [*out] if is_quantized else [out]
    return [t.data for t in out] + [t.scale for t in out] if is_quantized else [*out]


def new_outputs(problem: GroupedProblem, operands: GroupedOperands) -> list[torch.Tensor]:
    """The tensors that the checks allocated for a list."""
    if operands.out_scales is None:
        return list(operands.out)
    shapes = [atom_counts(m, problem.out_columns(n) // SF_VEC_SIZE) for m, n, _ in problem.sizes]
    scales = zip(operands.out_scales.scale, shapes, strict=True)
    return [*operands.out, *(scale.view(*atoms, *ATOM_SHAPE) for scale, atoms in scales)]


def as_results(
    outs: list[torch.Tensor], is_list: bool, is_quantized: bool, global_scale: torch.Tensor | None
) -> Any:
    """What the operation returns for what it wrote."""
    if not is_quantized:
        return outs if is_list else outs[0]
    if not is_list:
        data, scale = outs
        return data, scale.view(torch.float8_e4m3fn)
    num_groups = len(outs) // 2
    factors = [None] * num_groups if global_scale is None else global_scale.unbind()
    return [
        NVFP4Tensor(data, scale.view(torch.float8_e4m3fn), factor, (*data.shape[:-1], 2 * data.shape[-1]))
        for data, scale, factor in zip(outs[:num_groups], outs[num_groups:], factors, strict=True)
    ]


def global_scales(given: torch.Tensor | Sequence[float] | None, groups: Any) -> torch.Tensor | None:
    """``out_global_scale`` as a tensor; numbers go to the device of ``groups``, which has an entry a group.

    Raises ValueError where numbers are not one a group.
    """
    if given is None or isinstance(given, torch.Tensor):
        return given
    if len(given) != len(groups):
        raise ValueError(
            f"out_global_scale has {len(given)} entries for {len(groups)} groups; pass one number a group"
        )
    device = groups.device if isinstance(groups, torch.Tensor) else groups[0].device
    return numbers_on(device, given)

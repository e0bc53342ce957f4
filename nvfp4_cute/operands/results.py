"""Results as a caller sees them, and as the flat list of tensors that a launch writes.

Flat: a tensor a group, or one of all groups. NVFP4: all data, then all scales.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat, ScaleLayout
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.problem import GroupedProblem


def flat_outputs(outs: Sequence[Any], is_quantized: bool) -> list[Any]:
    """The tensors of a caller's outputs, NVFP4Tensors where results are quantized; none where an output is None."""
    if any(out is None for out in outs):
        return []
    if not is_quantized:
        return [*outs]
    return [getattr(t, "data", None) for t in outs] + [getattr(t, "scale", None) for t in outs]


def new_outputs(problem: GroupedProblem, operands: GroupedOperands) -> list[torch.Tensor]:
    """The tensors that the checks allocated for a list."""
    if not operands.out_scale:
        return list(operands.out)
    shapes = [NVFP4_FORMAT.scale_shape(m, problem.out_columns(n)) for m, n, _ in problem.sizes]
    scales = zip(operands.out_scale, shapes, strict=True)
    return [*operands.out, *(scale.view(shape) for scale, shape in scales)]


def as_results(
    outs: list[torch.Tensor], is_list: bool, is_quantized: bool, global_scale: torch.Tensor | None
) -> Any:
    """What the operation returns for what it wrote. ``global_scale``: an entry a group."""
    if not is_quantized:
        return outs if is_list else outs[0]
    if not is_list:
        return outs[0], as_e4m3(outs[1])
    num_groups = len(outs) // 2
    factors: Sequence[torch.Tensor | None] = [None] * num_groups
    if global_scale is not None:
        factors = global_scale.unbind()
    return [
        block_scaled_tensor(
            data, as_e4m3(scale), factor, (*data.shape[:-1], NVFP4_FORMAT.elements(data.shape[-1]))
        )
        for data, scale, factor in zip(outs[:num_groups], outs[num_groups:], factors, strict=True)
    ]


def one_result(outs: list[torch.Tensor], is_quantized: bool, global_scale: torch.Tensor | None) -> Any:
    """What an operation on one pair of operands returns, all of whose batches have one global scale."""
    if not is_quantized:
        return outs[0]
    data, scale = outs
    if global_scale is not None and global_scale.ndim:
        global_scale = global_scale[0]
    shape = (*data.shape[:-1], NVFP4_FORMAT.elements(data.shape[-1]))
    return block_scaled_tensor(data, as_e4m3(scale), global_scale, shape)


def as_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Bytes of scales as what they are."""
    return scale if scale.dtype == torch.float8_e4m3fn else scale.view(torch.float8_e4m3fn)


def block_scaled_tensor(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, ...],
    scale_layout: ScaleLayout = "blocked",
    format: BlockFormat = NVFP4_FORMAT,
) -> BlockScaledTensor:
    """A tensor of what a launch writes, whose parts fit each other: without the checks, which take as long as a launch.

    A graph that is traced has them: torch before 2.13 traces constructors alone.
    """
    if torch.compiler.is_compiling():
        if format == NVFP4_FORMAT:
            return NVFP4Tensor(data, scale, global_scale, shape, scale_layout)
        return BlockScaledTensor(data, scale, global_scale, shape, scale_layout, format=format)
    made = object.__new__(NVFP4Tensor if format == NVFP4_FORMAT else BlockScaledTensor)
    parts = {"data": data, "scale": scale, "global_scale": global_scale, "shape": shape}
    vars(made).update(parts, scale_layout=scale_layout)
    if format != NVFP4_FORMAT:  # of NVFP4 the class says it
        vars(made).update(format=format)
    return made

"""Converts results between the caller's form and the flat list of tensors that a launch writes.

The flat list has one tensor per group, or one for all groups. For quantized results it has all data, then all scales.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat, NumberType, ScaleLayout
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, NVFP4Tensor, quantized_tensor
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.problem import RESULT_FORMATS, GroupedProblem, result_scale_dtype


def flat_outputs(outs: Sequence[Any], is_quantized: bool) -> list[Any]:
    """Flattens a caller's outputs, BlockScaledTensors if quantized; returns an empty list if an output is None."""
    if any(out is None for out in outs):
        return []
    if not is_quantized:
        return [*outs]
    return [getattr(t, "data", None) for t in outs] + [getattr(t, "scale", None) for t in outs]


def new_outputs(problem: GroupedProblem, operands: GroupedOperands) -> list[torch.Tensor]:
    """Returns the tensors that the checks allocated for a list, in the dtypes of results."""
    format = problem.out_format
    if format is None:
        return list(operands.out)
    shapes = [format.scale_shape(m, problem.out_columns(n)) for m, n, _ in problem.sizes]
    scales = zip(operands.out_scale, shapes, strict=True)
    dtype = result_scale_dtype(format)
    return as_stored([*operands.out, *(scale.view(dtype).view(shape) for scale, shape in scales)], format)


def as_stored(outs: list[torch.Tensor], format: BlockFormat | None) -> list[torch.Tensor]:
    """Views new outputs, all data and then all scales, in the dtypes of results; repeated calls allocate them without views."""
    if format is None:
        return outs
    count = len(outs) // 2
    return [*_stored(outs[:count], format.element), *_stored(outs[count:], format.scale)]


def as_results(
    outs: list[torch.Tensor], is_list: bool, format: BlockFormat | None, global_scale: torch.Tensor | None
) -> Any:
    """Returns an operation's result from the tensors that it wrote.

    Args:
        outs: the tensors.
        is_list: whether the result is a list.
        format: format of quantized results; None for others.
        global_scale: one entry per group.
    """
    if format is None:
        return outs if is_list else outs[0]
    if not is_list:
        return _stored(outs[:1], format.element)[0], _stored(outs[1:], format.scale)[0]
    num_groups = len(outs) // 2
    factors: Sequence[torch.Tensor | None] = [None] * num_groups
    if global_scale is not None:
        factors = global_scale.unbind()
    return _results(outs[:num_groups], outs[num_groups:], factors, format)


def own_outputs(out: Any, is_list: bool) -> Any:
    """Converts ``out`` for the operations on parts: data and scale if one tensor holds all groups' quantized results."""
    return (out.data, out.scale) if not is_list and isinstance(out, BlockScaledTensor) else out


def group_tensor(
    parts: tuple[torch.Tensor, torch.Tensor], out: Any, out_dtype: Any, global_scale: Any
) -> BlockScaledTensor:
    """Returns all groups' quantized results, [rows, N] or [G, M_max, N], as one tensor: the caller's ``out`` if there is one."""
    if out is not None:
        return out
    data, scale = parts
    format = RESULT_FORMATS[out_dtype]
    if isinstance(global_scale, list | tuple):
        global_scale = numbers_on(data.device, global_scale).clone()
    layout = group_layout(data.ndim, format)
    shape = (*data.shape[:-1], format.elements(data.shape[-1]))
    return block_scaled_tensor(data, scale, global_scale, shape, layout, format)


def group_layout(ndim: int, format: BlockFormat) -> ScaleLayout:
    """Returns the layout of the scales of groups; blocked scales of ragged rows are padded per group."""
    return "ragged" if ndim == 2 and format.scale_layout == "blocked" else format.scale_layout


def one_result(
    outs: list[torch.Tensor], format: BlockFormat | None, global_scale: torch.Tensor | None
) -> Any:
    """Returns the result of an operation on one pair of operands, whose batches share one global scale."""
    if format is None:
        return outs[0]
    data, scale = outs
    if global_scale is not None and global_scale.ndim:
        global_scale = global_scale[0]
    return _results([data], [scale], [global_scale], format)[0]


def _results(
    data: list[torch.Tensor],
    scales: list[torch.Tensor],
    factors: Sequence[torch.Tensor | None],
    format: BlockFormat,
) -> list[BlockScaledTensor]:
    """Makes tensors of quantized rows in bytes and their scales. All data share one dtype, and so do all scales."""
    if scales and (scales[0].dtype is torch.uint8 or format.element.bits == 8):
        data, scales = _stored(data, format.element), _stored(scales, format.scale)
    return _tensors(data, scales, factors, None, format.scale_layout, format)


@lru_cache(maxsize=4096)
def _shape_of(data: torch.Size, per_byte: int) -> tuple[int, ...]:
    """Returns the shape of a tensor with data of this shape. Remembered, because it costs as much as the rest of a tensor."""
    return (*data[:-1], data[-1] * per_byte)


def _stored(tensors: list[torch.Tensor], number: NumberType) -> list[torch.Tensor]:
    """Views bytes in the dtype that quantization returns. Other dtypes are unchanged; all tensors share one."""
    if not tensors or tensors[0].dtype != torch.uint8 or number.quantized_dtype == "uint8":
        return tensors
    dtype = getattr(torch, number.quantized_dtype)
    return [tensor.view(dtype) for tensor in tensors]


def block_scaled_tensor(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, ...],
    scale_layout: ScaleLayout = "blocked",
    format: BlockFormat = NVFP4_FORMAT,
) -> BlockScaledTensor:
    """Makes a tensor from the parts that a launch wrote, without the checks, which take as long as a launch.

    Traced graphs run the checks, because torch before 2.13 can only trace constructors.
    """
    return _tensors([data], [scale], [global_scale], shape, scale_layout, format)[0]


def _tensors(
    data: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor | None],
    shape: tuple[int, ...] | None,
    scale_layout: ScaleLayout,
    format: BlockFormat,
) -> list[BlockScaledTensor]:
    """Implements :func:`block_scaled_tensor` for many tensors, without a Python call for each of them.

    shape: that of the only tensor; None where it follows from the data.
    """
    per_byte, found = 8 // format.element.bits, []
    if torch.compiler.is_compiling():
        for one, scale, factor in zip(data, scales, factors, strict=True):
            own = shape or (*one.shape[:-1], one.shape[-1] * per_byte)
            found.append(quantized_tensor(one, scale, factor, own, format, scale_layout))
        return found
    is_nvfp4 = format is NVFP4_FORMAT or format.stored == NVFP4_FORMAT
    kind, new = NVFP4Tensor if is_nvfp4 else BlockScaledTensor, object.__new__
    for one, scale, factor in zip(data, scales, factors, strict=True):
        made = new(kind)
        fields = made.__dict__
        fields["data"], fields["scale"], fields["global_scale"] = one, scale, factor
        fields["shape"], fields["scale_layout"] = shape or _shape_of(one.shape, per_byte), scale_layout
        if not is_nvfp4:  # of NVFP4 the class says it
            fields["format"] = format
        found.append(made)
    return found

"""Converts results between the caller's form and the flat list of tensors that a launch writes.

The flat list has one tensor per group, or one for all groups. For quantized results it has all data, then all scales.
"""

from collections.abc import Callable, Sequence
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
    data, scales = _stored(data, format.element), _stored(scales, format.scale)
    make, per_byte = _maker(format.scale_layout, format), format.elements(1)
    shape_of = _shape_of.__wrapped__ if torch.compiler.is_compiling() else _shape_of
    return [
        make(one, scale, factor, shape_of(one.shape, per_byte))
        for one, scale, factor in zip(data, scales, factors, strict=True)
    ]


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
    return _maker(scale_layout, format)(data, scale, global_scale, shape)


def _maker(scale_layout: ScaleLayout, format: BlockFormat) -> Callable[..., BlockScaledTensor]:
    """Returns a function of data, scale, global scale and shape that makes a tensor; see :func:`block_scaled_tensor`."""
    if torch.compiler.is_compiling():
        return lambda data, scale, factor, shape: quantized_tensor(
            data, scale, factor, shape, format, scale_layout
        )
    is_nvfp4 = format is NVFP4_FORMAT or format.stored == NVFP4_FORMAT
    kind = NVFP4Tensor if is_nvfp4 else BlockScaledTensor

    def make(
        data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, shape: tuple[int, ...]
    ) -> BlockScaledTensor:
        made = object.__new__(kind)
        fields = made.__dict__
        fields["data"], fields["scale"], fields["global_scale"] = data, scale, global_scale
        fields["shape"], fields["scale_layout"] = shape, scale_layout
        if not is_nvfp4:  # of NVFP4 the class says it
            fields["format"] = format
        return made

    return make

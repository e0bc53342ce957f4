"""Splits block-scaled tensors, given whole without separate scales, into their parts and a factor.

Nothing is copied from the host: factors are multiplied on the device.
"""

from typing import Any, NamedTuple

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import INT8, NVFP4, BlockFormat, as_format
from nvfp4_cute.formats.block_scaled import BLOCK_SCALED, BlockScaledTensor, ScaleLayout
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_formats
from nvfp4_cute.problem import OutDtype, check_early_weights


class Parts(NamedTuple):
    """Parts of one operand.

    Attributes:
        data, scale, format: data, block scales and format.
        global_scale: float32 factor, or [G] for a list; None without.
        row_scale: instead of it, a global scale per row, [rows] or [batches, rows], or a list of them; None without.
    """

    data: Any
    scale: Any
    global_scale: torch.Tensor | None
    format: BlockFormat
    row_scale: Any = None


def parts(given: Any, scale: Any, layout: ScaleLayout, format: BlockFormat = NVFP4) -> Parts:
    """Returns the parts of a whole tensor, with its scale in ``layout``, or the given parts, which have format ``format``.

    A tensor without a ``scale`` argument is whole. A list of whole tensors has one format. Raises ValueError if it does not, or
    if ``format`` is given and differs.
    """
    if scale is not None:
        return Parts(given, scale, None, format)
    if isinstance(given, BlockScaledTensor):
        if format is not NVFP4:
            _check_own_format(given, format)
        of_all = given.data, _scale_of(given, layout)
        if given.has_row_scales:
            return Parts(*of_all, None, given.format, _row_scale(given))
        return Parts(*of_all, given.global_scale, given.format)
    if isinstance(given, list | tuple) and given and BLOCK_SCALED.issuperset(map(type, given)):
        other = next((g for g, x in enumerate(given) if x.format != given[0].format), None)
        if other is not None:
            raise ValueError(
                f"group 0 is {given[0].format.title} and group {other} {given[other].format.title}; the groups of a call have "
                "one format: quantize them alike, or make two calls"
            )
        _check_own_format(given[0], format)
        scales = [_scale_of(x, layout) for x in given]
        if any(x.has_row_scales for x in given):
            without = next((g for g, x in enumerate(given) if not x.has_row_scales), None)
            if without is not None:
                raise ValueError(
                    f"group {without} has no global scale per row, and others have; the groups of a call are quantized alike"
                )
            return Parts([x.data for x in given], scales, None, given[0].format, [*map(_row_scale, given)])
        factors = [x.global_scale for x in given]
        if all(factor is None for factor in factors):
            stacked = None
        else:
            device = given[0].data.device
            stacked = torch.stack(
                [torch.ones((), dtype=torch.float32, device=device) if f is None else f for f in factors]
            )
        return Parts([x.data for x in given], scales, stacked, given[0].format)
    return Parts(given, scale, None, format)


def _row_scale(given: BlockScaledTensor) -> torch.Tensor | None:
    """Returns the global scales per row, of a ragged tensor without its last dimension."""
    found = given.global_scale
    return found[:, 0] if found is not None and given.scale_layout == "ragged" else found


def refuse_row_scales(name: str, *operands: Parts) -> None:
    """Raises UnsupportedProblem for weights with a global scale per row."""
    if any(one.row_scale is not None for one in operands):
        raise UnsupportedProblem(
            f'{name} has a global scale per row (global_scale="per_row"), which only a may have: quantize weights with '
            '"auto", or "per_batch" for those of several experts'
        )


def _check_own_format(whole: BlockScaledTensor, format: BlockFormat) -> None:
    format = as_format("format", format)
    check_formats(format=whole.format, takes_rows=True)
    is_default = format.name == NVFP4.name
    if not is_default and format.name != whole.format.name:
        raise ValueError(
            f"{format.title} is given as the format of a whole tensor, which is {whole.format.title}; a whole tensor has its "
            "own: leave a_format and b_format out"
        )


def check_rows_format(name: str, rows: Any, scale: Any, format: BlockFormat) -> None:
    """Raises ValueError if a format is given for 16-bit rows, which have no ``scale`` and no format."""
    format = as_format(f"{name}_format", format)
    first = rows[0] if isinstance(rows, list | tuple) and rows else rows
    is_plain = scale is None and isinstance(first, torch.Tensor) and first.dtype in ACTIVATION_DTYPES
    if is_plain and format.name != NVFP4.name:
        raise ValueError(
            f"{name}_format={format.title} with {first.dtype} {name}: values of 16 bits have no format; leave it out, or "
            f"quantize(x, format={format.record})"
        )


def scale_or_room(scale: Any, data: Any, out_dtype: OutDtype, format: BlockFormat, k_axis: int = 1) -> Any:
    """Returns ``scale``, or unused memory for one if it is None and results are sums of integers, which read no scale.

    Args:
        scale: the given scale.
        data: data of one operand, or a list.
        out_dtype: dtype of the results.
        format: format of the operand.
        k_axis: dimension of K in a tensor with three dimensions.
    """
    if scale is not None or out_dtype != torch.int32 or format != INT8:
        return scale
    if isinstance(data, list | tuple):
        return [scale_or_room(None, x, out_dtype, format) for x in data]
    if not isinstance(data, torch.Tensor) or data.ndim < 2:
        return None
    shape = list(data.shape)
    shape[k_axis] = 1
    return torch.empty(shape, dtype=torch.float32, device=data.device)


def _scale_of(given: BlockScaledTensor, layout: ScaleLayout) -> torch.Tensor:
    """Returns the scale in ``layout`` if the format has several layouts."""
    if given.scale_layout in (layout, "ragged"):
        return given.scale
    return (given if given.format.scale_layout == "rowmajor" else given.with_scale_layout(layout)).scale


def early_weights_beside(early_weights: Any, layout: ScaleLayout, *weights: Any) -> bool:
    """Returns ``early_weights``, or False if ``parts`` converts scales of whole weights in the launch before.

    Raises TypeError unless it is a bool.
    """
    if early_weights is False:
        return False
    check_early_weights(early_weights)
    whole = (x for given in weights for x in (given if isinstance(given, list | tuple) else (given,)))
    return early_weights and not any(
        isinstance(x, BlockScaledTensor) and x.format.scale_layout == "blocked" and x.scale_layout != layout
        for x in whole
    )


def batched_parts(given: Any, scale: Any, layout: ScaleLayout, format: BlockFormat = NVFP4) -> Parts:
    """Returns the parts of a matrix, or of batches [L, rows, K], whose data become [rows, K/2, L] for batched operations."""
    found = parts(given, scale, layout, format)
    if isinstance(given, BlockScaledTensor) and scale is None and found.data.ndim == 3:
        is_blocked = "blocked" == layout == found.format.scale_layout
        stored = found.scale if is_blocked else found.scale.permute(1, 2, 0)
        return found._replace(data=found.data.permute(1, 2, 0), scale=stored)
    return found


def same_format(first: Parts, second: Parts, given_second: Any) -> BlockFormat:
    """Returns the format of both weights of a dual GEMM; the second may be absent. Raises ValueError if they differ."""
    if given_second is not None and first.format != second.format:
        raise ValueError(
            f"b1 is {first.format.title} and b2 {second.format.title}; both weights have one format: quantize them alike"
        )
    return first.format


def times(alpha: Any, *factors: torch.Tensor | None) -> Any:
    """Multiplies ``alpha`` (a number, numbers, a tensor, or None for 1) by the factors that are not None, on their device.

    Raises ValueError unless alpha has one value per group.
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

"""Splits block-scaled tensors, given whole without separate scales, into their parts and a factor.

Nothing is copied from the host: factors are multiplied on the device.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import INT8, NVFP4, BlockFormat, as_format
from nvfp4_cute.formats.block_scaled import BLOCK_SCALED, BlockScaledTensor, ScaleLayout
from nvfp4_cute.operands.numbers_on_device import numbers_on
from nvfp4_cute.operands.rules import ACTIVATION_DTYPES, check_formats
from nvfp4_cute.problem import Form, OutDtype


class Parts(NamedTuple):
    """One operand of the operations on parts, or one of every group as lists.

    Attributes:
        data: bytes of the elements; 16-bit values where there is no ``scale``.
        scale: block scales.
        format: format of data and scales; 16-bit values have none.
        row_scale: a global scale per row, [rows] or [batches, rows], or a list of them; only rows ``a`` may have one.
        global_scale: float32 factor of the results, or [G] for a list.
    """

    data: Any
    scale: Any = None
    format: BlockFormat = NVFP4
    row_scale: Any = None
    global_scale: torch.Tensor | None = None


ABSENT = Parts(None)
# map() over this makes no Python call per tensor.
_fields = attrgetter("data", "scale", "global_scale", "scale_layout", "format")
Split = Callable[[Any, ScaleLayout], Parts]


def parts(given: Any, layout: ScaleLayout) -> Parts:
    """Returns the parts of a whole tensor or of a list of them, with scales in ``layout``; given parts as they are.

    16-bit values are data alone. Raises ValueError if the tensors of a list differ in format.
    """
    if type(given) is Parts:
        return given
    if isinstance(given, BlockScaledTensor):
        of_all = given.data, _scale_of(given, layout), given.format
        if given.has_row_scales:
            return Parts(*of_all, _row_scale(given))
        return Parts(*of_all, None, given.global_scale)
    if isinstance(given, list | tuple) and given and BLOCK_SCALED.issuperset(map(type, given)):
        return _listed(given, layout)
    return Parts(given)


def _listed(given: Sequence[BlockScaledTensor], layout: ScaleLayout) -> Parts:
    """Returns the parts of one whole tensor per group."""
    data, scales, factors, layouts, formats = zip(*map(_fields, given), strict=True)
    first = formats[0]
    if formats.count(first) < len(formats):
        other = next(g for g, format in enumerate(formats) if format != first)
        raise ValueError(
            f"group 0 is {first.title} and group {other} {formats[other].title}; the groups of a call have "
            "one format: quantize them alike, or make two calls"
        )
    is_stored = layouts.count(layout) == len(layouts)
    of_all = [*data], [*scales] if is_stored else [_scale_of(x, layout) for x in given], first
    if {*map(type, factors)} == {type(None)}:
        return Parts(*of_all)
    if any(x.has_row_scales for x in given):
        without = next((g for g, x in enumerate(given) if not x.has_row_scales), None)
        if without is not None:
            raise ValueError(
                f"group {without} has no global scale per row, and others have; the groups of a call are quantized alike"
            )
        return Parts(*of_all, [*map(_row_scale, given)])
    one = torch.ones((), dtype=torch.float32, device=given[0].data.device)
    return Parts(*of_all, None, torch.stack([one if f is None else f for f in factors]))


def _row_scale(given: BlockScaledTensor) -> torch.Tensor | None:
    """Returns the global scales per row, of a ragged tensor without its last dimension."""
    found = given.global_scale
    return found[:, 0] if found is not None and given.scale_layout == "ragged" else found


def in_form(form: Form, a: Parts, *weights: Parts) -> list[Parts]:
    """Returns operands of a list of groups in another form.

    Groups have one N and one K; "masked" and "batched" ones also one M.
    """
    if form == "list":
        return [a, *weights]
    first = _joined(a, torch.cat if form == "ragged" else torch.stack)
    sides = [first, *(_joined(b, torch.stack) for b in weights)]
    if form != "batched":
        return sides
    # Blocked scales have more dimensions, and their batches stay first.
    batches_last = lambda t: t if t is None or t.ndim > 3 else t.permute(1, 2, 0)
    return [x._replace(data=batches_last(x.data), scale=batches_last(x.scale)) for x in sides]


def _joined(side: Parts, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Parts:
    scale = None if side.scale is None else join([*side.scale])
    return side._replace(data=join([*side.data]), scale=scale)


def operands_of(
    layout: ScaleLayout, out_dtype: OutDtype, a: Any, b: Any, b2: Any = None, *, split: Split = parts
) -> tuple[Parts, Parts, Parts]:
    """Returns the parts of a product's operands.

    Args:
        layout: layout of block scales.
        out_dtype: dtype of the results. Sums of integers read no scales: ``a`` and ``b`` may have none.
        a: rows.
        b: weights.
        b2: second weights of a dual GEMM, or None.
        split: :func:`parts` or :func:`batched_parts`.

    Raises:
        ValueError: both weights, or the groups of one, differ in format, or 16-bit values have a format.
        UnsupportedProblem: weights have a global scale per row.
    """
    rows, first, second = split(a, layout), split(b, layout), ABSENT if b2 is None else split(b2, layout)
    if first.row_scale is not None or second.row_scale is not None:
        raise UnsupportedProblem(
            f'{"b" if b2 is None else "w"} has a global scale per row (global_scale="per_row"), which only a may have: '
            'quantize weights with "auto", or "per_batch" for those of several experts'
        )
    if b2 is not None and first.format is not second.format and first.format != second.format:
        raise ValueError(
            f"b1 is {first.format.title} and b2 {second.format.title}; both weights have one format: quantize them alike"
        )
    if rows.scale is None and rows.format is not NVFP4:
        rows = _without_scale(rows, out_dtype, split)
    if first.scale is None and first.format is not NVFP4:
        first = _without_scale(first, out_dtype, split)
    if not (isinstance(rows.format, BlockFormat) and isinstance(first.format, BlockFormat)):
        check_formats(takes_rows=True, a_format=rows.format, b_format=first.format)
    return rows, first, second


def _without_scale(side: Parts, out_dtype: OutDtype, split: Split) -> Parts:
    """Returns INT8 values with unused memory for scales if results are sums of integers, and other operands unchanged.

    Raises ValueError for 16-bit values, which have no format.
    """
    first = side.data[0] if isinstance(side.data, list | tuple) and side.data else side.data
    format = as_format("format", side.format)
    if isinstance(first, torch.Tensor) and first.dtype in ACTIVATION_DTYPES:
        raise ValueError(
            f"{format.title} values of {first.dtype}: values of 16 bits have no format; leave it out, or "
            f"quantize(x, format={format.record})"
        )
    if out_dtype != torch.int32 or format != INT8:
        return side
    if isinstance(side.data, list | tuple):
        return side._replace(scale=[_unused_scale(x, 1) for x in side.data])
    return side._replace(scale=_unused_scale(side.data, 1 if split is batched_parts else -1))


def _unused_scale(data: Any, k_axis: int) -> torch.Tensor | None:
    """Returns memory for the scales of INT8 rows, with one value along ``k_axis``; None for other values."""
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


def is_converted(layout: ScaleLayout, *weights: Any) -> bool:
    """Returns whether :func:`parts` converts scales of whole weights in the launch before."""
    whole = (x for given in weights for x in (given if type(given) in (list, tuple) else (given,)))
    return any(
        isinstance(x, BlockScaledTensor) and x.format.scale_layout == "blocked" and x.scale_layout != layout
        for x in whole
    )


def batched_parts(given: Any, layout: ScaleLayout) -> Parts:
    """Returns the parts of a matrix, or of batches [L, rows, K], whose data become [rows, K/2, L] for batched operations."""
    if type(given) is Parts:
        return given
    found = parts(given, layout)
    if isinstance(given, BlockScaledTensor) and found.data.ndim == 3:
        is_blocked = "blocked" == layout == found.format.scale_layout
        stored = found.scale if is_blocked else found.scale.permute(1, 2, 0)
        return found._replace(data=found.data.permute(1, 2, 0), scale=stored)
    return found


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

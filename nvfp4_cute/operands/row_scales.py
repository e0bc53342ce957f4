"""Attaches global scales per row of ``a`` to checked operands."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.operands.overlap import check_overlap
from nvfp4_cute.operands.products import Product
from nvfp4_cute.problem import GroupedProblem

NAME = "global_scale of a"


def with_row_scales(
    problem: GroupedProblem, operands: GroupedOperands, given: Any
) -> tuple[GroupedProblem, GroupedOperands]:
    """Returns the problem and its operands with a global scale per row of ``a``.

    Args:
        problem, operands: the checked call.
        given: float32 [rows] for ragged groups, [G, M_max] for masked ones, a list of [M_g] for lists.

    Raises:
        TypeError, ValueError, UnsupportedProblem: a tensor breaks a rule; the message names rule, value and fix.
    """
    each = given if isinstance(given, list | tuple) else [given]
    a = scaled_rows(operands.a, each)
    outs = {f"out[{i}]": out for i, out in enumerate((*operands.out, *operands.out_scale))}
    check_overlap(outs, {f"{NAME}[{g}]": scale for g, scale in enumerate(each)})
    return replace(problem, has_row_scales=True), replace(operands, a=a)


def scaled_rows(operands: Sequence[Operand], scales: Sequence[Any]) -> tuple[Operand, ...]:
    """Returns operands with a global scale per row. Raises what :func:`with_row_scales` raises."""
    if len(operands) != len(scales):
        raise ValueError(
            f"{NAME} has {len(scales)} entries and a {len(operands)}; every list needs one a group"
        )
    rules.check_tensors({f"{NAME}[{g}]": scale for g, scale in enumerate(scales)})
    for x, scale in zip(operands, scales, strict=True):
        if not x.format.has_global_scale:
            raise UnsupportedProblem(
                f"{NAME} with a of {x.format.title}, which has no global scale; leave it out"
            )
        if scale.dtype != torch.float32 or scale.numel() != x.batches * x.rows or not scale.is_contiguous():
            raise ValueError(
                f"{NAME} is {scale.dtype} {list(scale.shape)} with strides {list(scale.stride())}; expected contiguous "
                f"torch.float32, one number for each of {x.batches * x.rows} rows"
            )
        if scale.device != x.device:
            raise ValueError(f"{NAME} is on {scale.device} and a on {x.device}; move it there")
    return tuple(replace(x, row_scale=scale) for x, scale in zip(operands, scales, strict=True))


def scaled_product(product: Product, given: Any) -> Product:
    """Returns the product with a global scale per row of ``a``, [M] or [L, M]. Raises as above."""
    (a,) = scaled_rows([product.a], [given])
    check_overlap({"out": product.out}, {NAME: given})
    return replace(product, a=a)

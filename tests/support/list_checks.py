"""Calls the list-form argument checks with the arguments of the operations."""

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.operands.grouped import Result, Weights, check_lists, dual_weights
from nvfp4_cute.problem import Gate


def check_list_operands(
    a, b, a_scale, b_scale, alpha=None, out=None, *, out_dtype=torch.bfloat16, out_global_scale=None,
    scale_layout="blocked", a_format=NVFP4, b_format=NVFP4,
):  # fmt: skip
    """Returns the problem and the operands of a ``grouped_gemm`` of lists."""
    weights = [Weights("b", b, b_scale, "alpha", alpha, b_format)]
    result = Result(out, out_dtype, out_global_scale)
    return check_lists(a, a_scale, weights, result, scale_layout, a_format=a_format)


def check_dual_operands(
    a, b1, b2, a_scale, b1_scale, b2_scale, alpha1=None, alpha2=None, out=None, *, activation="silu", limit=None,
    weight_layout="separate", out_dtype=torch.bfloat16, out_global_scale=None, scale_layout="blocked",
):  # fmt: skip
    """Returns the problem and the operands of a ``grouped_dual_gemm`` of lists."""
    gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
    first, second = (
        Weights("b1", b1, b1_scale, "alpha1", alpha1),
        Weights("b2", b2, b2_scale, "alpha2", alpha2),
    )
    weights = dual_weights(first, second, [1.0] * len(a))
    return check_lists(a, a_scale, weights, Result(out, out_dtype, out_global_scale), scale_layout, gate)

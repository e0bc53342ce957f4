"""Dual GEMMs on parts: C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T), dense or grouped."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.grouped import Result, Weights, dual_weights
from nvfp4_cute.operands.numbers_on_device import numbers_of
from nvfp4_cute.operands.results import as_results, as_stored, flat_outputs, one_result
from nvfp4_cute.operands.whole import (
    batched_parts,
    check_rows_format,
    early_weights_beside,
    parts,
    refuse_row_scales,
    same_format,
    times,
)
from nvfp4_cute.ops.parts import composed_dual
from nvfp4_cute.ops.parts.grouped_gemm import (
    flat_inputs,
    flat_operands,
    flat_rows,
    group_outputs,
    grouped_task,
)
from nvfp4_cute.ops.traced import (
    format_name,
    new_group_results,
    refuse_config,
    refuse_gradients,
    torch_dtype,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Activation, DualWeights, Gate, OutDtype, check_early_weights, result_format


def grouped_dual_gemm(
    a: Any,
    b1: Any,
    b2: Any = None,
    a_scale: Any = None,
    b1_scale: Any = None,
    b2_scale: Any = None,
    alpha1: Any = None,
    alpha2: Any = None,
    *,
    offs: torch.Tensor | None = None,
    masked_m: torch.Tensor | None = None,
    row_scale: Any = None,
    bias: torch.Tensor | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
    b_format: BlockFormat = NVFP4_FORMAT,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: DualWeights = "separate",
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    early_weights: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Computes :func:`nvfp4_cute.grouped_dual_gemm` of operands given as data and scales; without scales, of whole tensors.

    Formats with float32 scales need "separate" or "concatenated" weights. The pair FP8_1x128 and FP8_128x128 has a fused kernel
    on every GPU. For INT8, two launches compute the products in float32; torch operations, with torch's exponential, do the rest.

    Args:
        a, a_scale, offs, masked_m, row_scale, out, scale_layout, early_weights: as for ``parts.grouped_gemm``.
        b1, b2: weights of the gate and of the up projection, [N_g, K/2] each; ragged and masked: [G, N, K/2]. With another
            ``weight_layout``, ``b1`` and ``b1_scale`` hold the rows of both, and ``b2`` and ``b2_scale`` are None.
        b1_scale, b2_scale: scales of the weights in the layouts of ``a_scale``.
        alpha1, alpha2: one factor per group for each product.
        bias: [G, 2 N], added to both products before the activation: one number per row of the weights in their layout; of
            separate weights the gate's, then up's. Ragged and masked forms of weights whose scales are in blocks, outside traced
            graphs.
        activation, limit, weight_layout: fields of ``Activation`` and ``GateUp``.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    is_list, out_format = offs is None and masked_m is None, result_format(out_dtype)
    if a_scale is None or b1_scale is None or (b2_scale is None and b2 is not None):
        early_weights = early_weights_beside(early_weights, scale_layout, b1, b2)
        a, a_scale, factor_a, a_format, own = parts(a, a_scale, scale_layout, a_format)
        row_scale = own if row_scale is None else row_scale
        check_rows_format("a", a, a_scale, a_format)
        given = ((b1, b1_scale), (b2, b2_scale))
        first, second = (parts(b, scale, scale_layout, b_format) for b, scale in given)
        refuse_row_scales("w", first, second)
        b_format = same_format(first, second, b2)
        (b1, b1_scale, factor1, *_), (b2, b2_scale, factor2, *_) = first, second
        alpha1, alpha2 = _dual_alphas((alpha1, alpha2), (factor_a, factor1, factor2), b2 is None)
    if bias is not None and (is_list or private_api.is_traced() or b_format.scale_layout == "rowmajor"):
        raise UnsupportedProblem(
            f"bias with {b_format.title} weights in a list, with float32 scales or in a traced graph: add it in activate"
        )
    if private_api.is_traced():
        check_early_weights(early_weights)
        given = (a, b1, a_scale, b1_scale) + (() if b2 is None else (b2, b2_scale))
        choices = (activation, limit, weight_layout)
        return _traced(given, (alpha1, alpha2), row_scale, (offs, masked_m), choices, out, out_dtype, out_global_scale,
                       config, (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    alpha1 = numbers_of(alpha1, a, offs, masked_m)
    alpha2 = numbers_of(alpha2, a, offs, masked_m)
    if out_global_scale is not None:
        out_global_scale = numbers_of(out_global_scale, a, offs, masked_m, is_in_result=True)
    sides: tuple[Any, ...] = (a, b1, b1_scale) if a_scale is None else (a, b1, a_scale, b1_scale)
    sides = sides if row_scale is None else (*sides, row_scale)
    counts, inputs = flat_inputs(sides, offs, masked_m)
    others: list[Any] = []
    if b2 is not None:
        more, others = flat_inputs((b2, b2_scale), None, None) if is_list else ((), [b2, b2_scale])
        counts = (counts, more)
    inputs += [x for x in (alpha1, *others, alpha2, bias, out_global_scale) if x is not None]

    absent = (
        a_scale is None, row_scale is None, alpha1 is None, alpha2 is None, bias is None, out_global_scale is None,
    )  # fmt: skip
    choices, formats = (activation, limit, weight_layout), (a_format, b_format)

    def check() -> tuple[Task, list[torch.Tensor]]:
        gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
        weights = dual_weights(
            Weights("b1", b1, b1_scale, "alpha1", alpha1, b_format),
            Weights("b2", b2, b2_scale, "alpha2", alpha2, b_format),
            [1.0] * len(a) if is_list else 1.0,
        )
        result, how = (
            Result(out, out_dtype, out_global_scale),
            (scale_layout, gate, config, backend, early_weights),
        )
        return grouped_task(
            a, a_scale, a_format, weights, (offs, masked_m), result, *how, row_scale=row_scale, bias=bias
        )

    is_composed = composed_dual.is_composed(a_scale, formats, backend, a, b1)
    if a_scale is None and config is None and is_list and len(a) == len(b1) == 1:
        is_composed |= composed_dual.dequantizes_first(
            a[0], b1[0], b_format, weight_layout, out_dtype, backend
        )
    if is_composed:
        _, outs = check()
        composed_dual.compute(
            (a, b1, b2, a_scale, b1_scale, b2_scale), (alpha1, alpha2), (offs, masked_m),
            Gate(activation, limit, weight_layout), outs, a_format=a_format, b_format=b_format,
            scale_layout=scale_layout, early_weights=early_weights, backend=backend, config=config,
        )  # fmt: skip
    else:
        settings = (
            "grouped_dual_gemm", counts, absent, choices, out_dtype, scale_layout, config, formats, early_weights,
        )  # fmt: skip
        outs = call(backend, settings, inputs, group_outputs(out, is_list, out_format), check)
    return as_results(outs, is_list, out_format, out_global_scale)


def _dual_alphas(alphas: tuple[Any, Any], factors: tuple[Any, Any, Any], has_both: bool) -> tuple[Any, Any]:
    """Multiplies each alpha by the global scales of ``a`` and of its weights. ``has_both``: ``b1`` holds both weights."""
    of_a, *of_weights = factors
    if all(factor is None for factor in factors):
        return alphas
    first, second = of_weights[0], of_weights[0] if has_both else of_weights[1]
    return times(alphas[0], of_a, first), times(alphas[1], of_a, second)


def _traced(
    operands, alphas, row_scale, sizes, choices, out, out_dtype, global_scale, config, settings
) -> Any:
    """Calls the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
    refuse_config(config)
    is_list, out_format = all(x is None for x in sizes), result_format(out_dtype)
    a, b1 = operands[:2]
    groups: Any = a if is_list else next(x for x in sizes if x is not None)
    *alphas, factors = (numbers_of(x, groups) for x in (*alphas, global_scale))
    if out is not None:
        outs = group_outputs(out, is_list, out_format)
    else:
        separate = 1 if choices[2] == "separate" else 2
        outs = new_group_results(a, b1, None if is_list else len(groups), separate, out_dtype)
    flat, rows = flat_operands(operands, is_list), flat_rows(row_scale)
    refuse_gradients(*flat, *rows, *alphas, factors)
    torch.ops.nvfp4_cute.grouped_dual_gemm_out(
        flat, len(a) if is_list else None, *alphas, rows, *sizes, *choices, outs,
        torch_dtype(out_dtype), factors, *settings, out_format=format_name(out_dtype),
    )  # fmt: skip
    return as_results(outs, is_list, out_format, factors)


def dual_gemm(
    a: Any,
    b1: Any,
    b2: Any = None,
    a_scale: torch.Tensor | None = None,
    b1_scale: torch.Tensor | None = None,
    b2_scale: torch.Tensor | None = None,
    alpha1: Any = None,
    alpha2: Any = None,
    *,
    row_scale: torch.Tensor | None = None,
    a_format: BlockFormat = NVFP4_FORMAT,
    b_format: BlockFormat = NVFP4_FORMAT,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: DualWeights = "separate",
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: Any = None,
    scale_layout: ScaleLayout = "blocked",
    early_weights: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Computes :func:`nvfp4_cute.dual_gemm` of operands given as data and scales; without scales, of whole tensors.

    Operands and their scales are shaped as for ``parts.gemm``; the weights are those of :func:`grouped_dual_gemm`.

    Raises what the public operation raises. Nothing is written to ``out`` when a check fails.
    """
    if a_scale is None or b1_scale is None or b2_scale is None:
        early_weights = early_weights_beside(early_weights, scale_layout, b1, b2)
        a, a_scale, factor_a, a_format, own = batched_parts(a, a_scale, scale_layout, a_format)
        row_scale = own if row_scale is None else row_scale
        check_rows_format("a", a, a_scale, a_format)
        first, second = (
            batched_parts(b, scale, scale_layout, b_format) for b, scale in ((b1, b1_scale), (b2, b2_scale))
        )
        refuse_row_scales("w", first, second)
        b_format = same_format(first, second, b2)
        (b1, b1_scale, factor1, *_), (b2, b2_scale, factor2, *_) = first, second
        alpha1, alpha2 = _dual_alphas((alpha1, alpha2), (factor_a, factor1, factor2), b2 is None)
    alpha1, alpha2 = products.for_batches(alpha1, a), products.for_batches(alpha2, a)
    out_global_scale = products.for_batches(out_global_scale, a, is_in_result=True)

    out_format, formats = result_format(out_dtype), (a_format, b_format)

    def split() -> Any:
        """Splits the batches into groups: lists of ``a`` and ``a_scale``, weights, outputs, and the tensors written."""
        weights = [
            Weights("b1", b1, b1_scale, "alpha1", _vector(alpha1), b_format),
            Weights("b2", b2, b2_scale, "alpha2", _vector(alpha2), b_format),
        ]
        parts = 1 if weight_layout == "separate" else 2
        return products.split_dual_gemm(a, a_scale, weights, a_format, out, out_dtype, scale_layout, parts)

    is_composed = composed_dual.is_composed(a_scale, formats, backend, a, b1)
    has_batches = isinstance(a, torch.Tensor) and products.num_batches(a) > 1
    if a_scale is None and config is None and not has_batches:
        is_composed |= composed_dual.dequantizes_first(a, b1, b_format, weight_layout, out_dtype, backend)
    if private_api.is_traced() or has_batches or is_composed:
        rows, scales, (gates, ups), parts, results = split()
        grouped_dual_gemm(
            rows, gates.data, ups.data, scales, gates.scale, ups.scale, gates.alpha, ups.alpha,
            row_scale=None if row_scale is None else [*row_scale.view(len(rows), -1)], a_format=a_format,
            b_format=b_format, activation=activation, limit=limit, weight_layout=weight_layout, out=parts,
            out_dtype=out_dtype, out_global_scale=_vector(out_global_scale), scale_layout=scale_layout,
            early_weights=early_weights, backend=backend, config=config,
        )  # fmt: skip
        return one_result(results, out_format, _vector(out_global_scale))

    def check() -> tuple[Task, list[torch.Tensor]]:
        gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
        rows, scales, (gates, ups), parts, results = split()
        weights, result = dual_weights(gates, ups, [1.0]), Result(parts, out_dtype, _vector(out_global_scale))
        how = (scale_layout, gate, config, backend, early_weights, row_scale)
        task, _ = grouped_task(rows, scales, a_format, weights, (None, None), result, *how)
        return task, results if out is not None else as_stored(results, out_format)

    order = (a, b1, a_scale, b1_scale, row_scale, alpha1, b2, b2_scale, alpha2, out_global_scale)
    choices = (activation, limit, weight_layout, out_dtype, scale_layout, config, formats, early_weights)
    settings = ("dual_gemm", *[x is None for x in order], *choices)
    inputs = [x for x in order if x is not None]
    outs = call(backend, settings, inputs, flat_outputs([out], out_format is not None), check)
    return one_result(outs, out_format, out_global_scale)


def _vector(factor: Any) -> Any:
    """Returns a tensor without dimensions as [1], and anything else unchanged."""
    return factor.reshape(1) if isinstance(factor, torch.Tensor) and factor.ndim == 0 else factor

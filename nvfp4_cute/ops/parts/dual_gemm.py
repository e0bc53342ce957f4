"""Dual GEMMs on parts: C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T), dense or grouped."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.formats.block_format import NVFP4 as NVFP4_FORMAT
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.block_scaled import ScaleLayout
from nvfp4_cute.launch.task import Task
from nvfp4_cute.operands import products
from nvfp4_cute.operands.grouped import Result, Weights, dual_weights
from nvfp4_cute.operands.numbers_on_device import numbers_of
from nvfp4_cute.operands.results import as_results, flat_outputs, one_result
from nvfp4_cute.operands.whole import (
    batched_parts,
    check_rows_format,
    early_weights_beside,
    parts,
    same_format,
    times,
)
from nvfp4_cute.ops.parts import composed_dual
from nvfp4_cute.ops.parts.grouped_gemm import flat_inputs, flat_operands, group_outputs, grouped_task
from nvfp4_cute.ops.traced import (
    format_name,
    new_group_results,
    refuse_config,
    refuse_gradients,
    torch_dtype,
)
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Activation, DualWeights, Gate, OutDtype, result_format


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
    """Computes the first half of every group's gated layer in one launch.

    ``C_g = activation(alpha1_g A_g B1_g^T) * (alpha2_g A_g B2_g^T)``, where ``b1`` holds the gate's weights and ``b2`` those of
    the up projection. Both products stay on the chip until they are combined; only C is written. Groups come in the three forms
    of ``grouped_gemm``; the shapes below are those of the list form.

    Formats with float32 scales need "separate" or "concatenated" weights, and their results have 16 or 32 bits or are
    FP8_1x128. The pair FP8_1x128 and FP8_128x128 has a fused kernel on every GPU. For INT8, two launches compute the products
    in float32; torch operations, with torch's exponential, do the rest.

    ``grouped_dual_gemm(a, b1, b2)`` without scales takes whole BlockScaledTensors, as ``grouped_gemm`` does, or float16 or
    bfloat16 ``a`` without ``a_scale``. Formats are given as for ``grouped_gemm``; both weights have the same one.

    Args:
        a: one tensor per group: uint8 or float4_e2m1fn_x2 [M_g, K_g/2] (or [M_g, K_g/2, 1]), K-major, two e2m1 values per byte,
            the low nibble first; K a multiple of 16, rows a multiple of 16 bytes apart. M_g may be 0.
        b1, b2: weights in the same layout: [N_g, K_g/2] each; ragged and masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8). Either 128x4 blocked (flat, [rm, rk, 32, 4, 4],
            or the (32, 4, rm, 4, rk, 1) view; not copied), or [M_g, K_g/16] with ``scale_layout="rowmajor"`` (converted, which
            allocates).
        b1_scale, b2_scale: scales of the weights in the same layouts.
        alpha1, alpha2: one factor per group for each product: float32 [G] on the operands' device, numbers, or None for 1.
        a_format, b_format: formats of ``a`` and of both weights, such as ``nvfp4_cute.MXFP4``.
        offs, masked_m: group sizes of the ragged and the masked form; operands, scales, ``out`` and results are then shaped as
            in ``grouped_gemm``.
        activation: "silu": x * sigmoid(x). "gelu_tanh": x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2. "relu2": max(x,
            0)^2. "swiglu_oai" (gpt-oss): x * sigmoid(1.702 x), times the other product plus 1.
        limit: clamps the gate's product (after alpha1) to at most ``limit`` and the other (after alpha2) to [-limit, limit].
        weight_layout: "separate", or the order in which ``b1`` [2 N, K/2] and ``b1_scale`` hold the rows of both projections;
            ``b2`` and ``b2_scale`` are then None. "concatenated": [gate; up], 2 N a multiple of 256. "interleaved_64_up_first":
            64 rows of up, 64 of the gate and so on. "interleaved_32_gate_first": 32 rows of the gate, 32 of up and so on. The
            weights are never copied.
        out: [M_g, N_g] (or [M_g, N_g, 1]) per group, written in place, all with contiguous rows or all with contiguous columns.
            None allocates. Quantized: one BlockScaledTensor per group, whose data and scale are written.
        out_dtype: float16, bfloat16, float32, or the name of a format for results quantized for the next layer, as in
            ``grouped_gemm``: "nvfp4", "mxfp4", "mxfp8_e4m3" or "mxfp8_e5m2"; for FP8 operands "fp8_1x128".
        out_global_scale: global scales of "nvfp4" results, one per group as in ``quantize``: float32 [G] on the operands'
            device, or numbers.
        scale_layout: "blocked" or "rowmajor".
        early_weights, backend: see ``grouped_gemm``.
        config: tile shape and pipeline depths. None uses what ``tune`` found for the problem, else an estimate.

    Returns:
        C, one tensor per group. Both products accumulate in fp32. Factors, activation and the final product are fp32, with the
        GPU's approximate exponential and reciprocal (``reference.grouped_dual_gemm_reference`` bounds the error). C is rounded
        once, to ``out_dtype``, to nearest even. Quantized: one BlockScaledTensor per group (NVFP4Tensor for "nvfp4") with the
        bits of ``formats.quantize`` of the fp32 results; padding rows of the scales are not written.

    Example:
        >>> a, gate, up = ([quantize(torch.randn(rows, 512)) for rows in group] for group in ((40, 7), (256,) * 2, (256,) * 2))
        >>> data, scales = ([[getattr(x, name) for x in side] for side in (a, gate, up)] for name in ("data", "scale"))
        >>> [tuple(h.shape) for h in grouped_dual_gemm(*data, *scales)]
        [(40, 256), (7, 256)]

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: the GPU has no kernel.
        ConfigError: ``config`` cannot be built.

    Nothing is written to ``out`` when a check fails.
    """
    is_list, out_format = offs is None and masked_m is None, result_format(out_dtype)
    early_weights = early_weights_beside(early_weights, scale_layout, b1, b2)
    a, a_scale, factor_a, a_format = parts(a, a_scale, scale_layout, a_format)
    check_rows_format("a", a, a_scale, a_format)
    first, second = (parts(b, scale, scale_layout, b_format) for b, scale in ((b1, b1_scale), (b2, b2_scale)))
    b_format = same_format(first, second, b2)
    (b1, b1_scale, factor1, _), (b2, b2_scale, factor2, _) = first, second
    alpha1, alpha2 = _dual_alphas((alpha1, alpha2), (factor_a, factor1, factor2), b2 is None)
    if private_api.is_traced():
        given = (a, b1, a_scale, b1_scale) + (() if b2 is None else (b2, b2_scale))
        choices = (activation, limit, weight_layout)
        return _traced(given, (alpha1, alpha2), (offs, masked_m), choices, out, out_dtype, out_global_scale,
                       config, (scale_layout, backend, a_format.name, b_format.name))  # fmt: skip
    alpha1, alpha2 = (x if x is None else numbers_of(x, a, offs, masked_m) for x in (alpha1, alpha2))
    if out_global_scale is not None:
        out_global_scale = numbers_of(out_global_scale, a, offs, masked_m, is_in_result=True)
    sides = (a, b1, b1_scale) if a_scale is None else (a, b1, a_scale, b1_scale)
    counts, inputs = flat_inputs(sides, offs, masked_m)
    others: list[Any] = []
    if b2 is not None:
        more, others = flat_inputs((b2, b2_scale), None, None) if is_list else ((), [b2, b2_scale])
        counts = (counts, more)
    inputs += [x for x in (alpha1, *others, alpha2, out_global_scale) if x is not None]

    absent = tuple(x is None for x in (a_scale, alpha1, alpha2, out_global_scale))
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
        return grouped_task(a, a_scale, a_format, weights, (offs, masked_m), result, *how)

    if composed_dual.is_composed(a_scale, formats, backend, first_tensor(a, b1).device):
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


def _traced(operands, alphas, sizes, choices, out, out_dtype, global_scale, config, settings) -> Any:
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
    flat = flat_operands(operands, is_list)
    refuse_gradients(*flat, *alphas, factors)
    torch.ops.nvfp4_cute.grouped_dual_gemm_out(
        flat, len(a) if is_list else None, *alphas, *sizes, *choices, outs,
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
    """Computes a gated layer's first half in one launch: ``C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T)``.

    ``dual_gemm(x, gate, up)`` without scales takes whole BlockScaledTensors [M, K] or [L, M, K]. Their global scales multiply
    the products, in addition to the alphas, on the device. ``a`` may hold float16 or bfloat16 values, [M, K] or [M, K, L],
    without ``a_scale``.

    Args:
        a: [M, K/2] or [M, K/2, L]; otherwise operands and scales are as in :func:`grouped_dual_gemm`.
        b1, b2: [N, K/2] or [N, K/2, L].
        a_scale: for one batch as in :func:`grouped_dual_gemm`. For L batches: [L, rm, rk, 32, 4, 4], the (32, 4, rm, 4, rk, L)
            view, or [M, K/16, L] with ``scale_layout="rowmajor"``.
        b1_scale, b2_scale: scales of the weights in the same layouts.
        alpha1, alpha2: factor of each product: a number, or float32 on the operands' device with one element or [L].
        a_format, b_format, activation, limit, weight_layout, out_dtype, scale_layout, early_weights, backend, config: see
        :func:`grouped_dual_gemm`.
        out: [M, N] or [M, N, L], written in place; a BlockScaledTensor for quantized results. None allocates.
        out_global_scale: global scale of "nvfp4" results, for all batches: a number, or a tensor with one element.

    Returns:
        C: [M, N], or [M, N, L] where ``a`` has batches, rounded as in :func:`grouped_dual_gemm`. Quantized: a BlockScaledTensor
            of [M, N] or [L, M, N], as in ``gemm``.

    Example:
        >>> x, gate, up = (quantize(torch.randn(rows, 512)) for rows in (40, 256, 256))
        >>> dual_gemm(x.data, gate.data, up.data, x.scale, gate.scale, up.scale).shape
        torch.Size([40, 256])

    Raises what :func:`grouped_dual_gemm` raises.
    """
    if a_scale is None or b1_scale is None or b2_scale is None:
        early_weights = early_weights_beside(early_weights, scale_layout, b1, b2)
        a, a_scale, factor_a, a_format = batched_parts(a, a_scale, scale_layout, a_format)
        check_rows_format("a", a, a_scale, a_format)
        first, second = (
            batched_parts(b, scale, scale_layout, b_format) for b, scale in ((b1, b1_scale), (b2, b2_scale))
        )
        b_format = same_format(first, second, b2)
        (b1, b1_scale, factor1, _), (b2, b2_scale, factor2, _) = first, second
        alpha1, alpha2 = _dual_alphas((alpha1, alpha2), (factor_a, factor1, factor2), b2 is None)
    alpha1, alpha2 = products.for_batches(alpha1, a), products.for_batches(alpha2, a)
    out_global_scale = products.for_batches(out_global_scale, a)

    out_format, formats = result_format(out_dtype), (a_format, b_format)

    def split() -> Any:
        """Splits the batches into groups: lists of ``a`` and ``a_scale``, weights, outputs, and the tensors written."""
        weights = [
            Weights("b1", b1, b1_scale, "alpha1", _vector(alpha1), b_format),
            Weights("b2", b2, b2_scale, "alpha2", _vector(alpha2), b_format),
        ]
        parts = 1 if weight_layout == "separate" else 2
        return products.split_dual_gemm(a, a_scale, weights, a_format, out, out_dtype, scale_layout, parts)

    is_composed = composed_dual.is_composed(a_scale, formats, backend, first_tensor(a, b1).device)
    has_batches = isinstance(a, torch.Tensor) and products.num_batches(a) > 1
    if private_api.is_traced() or has_batches or is_composed:
        rows, scales, (gates, ups), parts, results = split()
        grouped_dual_gemm(
            rows, gates.data, ups.data, scales, gates.scale, ups.scale, gates.alpha, ups.alpha, a_format=a_format,
            b_format=b_format, activation=activation, limit=limit, weight_layout=weight_layout, out=parts,
            out_dtype=out_dtype, out_global_scale=_vector(out_global_scale), scale_layout=scale_layout,
            early_weights=early_weights, backend=backend, config=config,
        )  # fmt: skip
        return one_result(results, out_format, _vector(out_global_scale))

    def check() -> tuple[Task, list[torch.Tensor]]:
        gate = Gate.checked(activation, limit, weight_layout, (b2, b2_scale))
        rows, scales, (gates, ups), parts, results = split()
        weights, result = dual_weights(gates, ups, [1.0]), Result(parts, out_dtype, _vector(out_global_scale))
        how = (scale_layout, gate, config, backend, early_weights)
        return grouped_task(rows, scales, a_format, weights, (None, None), result, *how)[0], results

    order = (a, b1, a_scale, b1_scale, alpha1, b2, b2_scale, alpha2, out_global_scale)
    choices = (activation, limit, weight_layout, out_dtype, scale_layout, config, formats, early_weights)
    settings = ("dual_gemm", *(x is None for x in order), *choices)
    inputs = [x for x in order if x is not None]
    outs = call(backend, settings, inputs, flat_outputs([out], out_format is not None), check)
    return one_result(outs, out_format, out_global_scale)


def first_tensor(*sides: Any) -> torch.Tensor:
    """Returns the first tensor among operands that are tensors or lists; an empty CPU tensor where there is none."""
    for side in sides:
        for tensor in side if isinstance(side, list | tuple) else (side,):
            if isinstance(tensor, torch.Tensor):
                return tensor
    return torch.empty(0)


def _vector(factor: Any) -> Any:
    """Returns a tensor without dimensions as [1], and anything else unchanged."""
    return factor.reshape(1) if isinstance(factor, torch.Tensor) and factor.ndim == 0 else factor

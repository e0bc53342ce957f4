"""dual_gemm and grouped_dual_gemm: C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T) over block-scaled operands."""

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
    """Gate every group's up projection in one launch: ``C_g = activation(alpha1_g A_g B1_g^T) * (alpha2_g A_g B2_g^T)``.

    The first half of a SwiGLU layer, for every expert: ``b1`` is the gate's weights, ``b2`` the up projection's. Both
    products stay on the chip until they are combined; nothing is written but C. Groups are told in the three forms of
    ``grouped_gemm``; below, what is said of a group's tensors is said of the list form.

    Of formats with float32 scales, weights are "separate" or "concatenated", and results have 16 or 32 bits, or are of
    FP8_1x128. FP8_1x128 with FP8_128x128 has such a kernel on every GPU. Of INT8 two launches compute the products in float32,
    and torch's operations the rest, with its exponential.

    ``grouped_dual_gemm(a, b1, b2)`` takes BlockScaledTensors whole, their scales left out, as ``grouped_gemm`` does, and ``a``
    of float16 or bfloat16 values without ``a_scale``. Formats are told as to ``grouped_gemm``, one of both weights.

    Args:
        a: a tensor a group: uint8 or float4_e2m1fn_x2 [M_g, K_g/2] (or [M_g, K_g/2, 1]), K-major, two e2m1 values a byte,
            the low nibble first; K a multiple of 16, rows a multiple of 16 bytes apart. M_g may be 0.
        b1, b2: the same of the weights: [N_g, K_g/2] each; ragged and masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked (flat, [rm, rk, 32, 4, 4],
            or the (32, 4, rm, 4, rk, 1) view, zero-copy), or [M_g, K_g/16] with ``scale_layout="rowmajor"`` (converted,
            which allocates).
        b1_scale, b2_scale: the same of the weights.
        alpha1, alpha2: a factor a group for each product: float32 [G] on the operands' device, or numbers, or None for 1.
        a_format, b_format: what the parts of ``a``, and of both weights, stand for, such as ``nvfp4_cute.MXFP4``.
        offs, masked_m: of the ragged and the masked form, with operands, scales, ``out`` and results as of ``grouped_gemm``.
        activation: "silu": x * sigmoid(x). "gelu_tanh": x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2.
            "relu2": max(x, 0)^2. "swiglu_oai", of gpt-oss: x * sigmoid(1.702 x), times the other product plus 1.
        limit: cuts the gate's product, after alpha1, to at most this, and the other, after alpha2, to this on both sides.
        weight_layout: "separate", or how ``b1`` [2 N, K/2] and ``b1_scale`` hold the rows of both, ``b2`` and ``b2_scale``
            being None: "concatenated", [gate; up], 2 N a multiple of 256; "interleaved_64_up_first", 64 rows of up, 64 of
            the gate and so on; "interleaved_32_gate_first", 32 rows of the gate, 32 of up and so on. The weights are
            read as they lie, without a copy.
        out: [M_g, N_g] (or [M_g, N_g, 1]) a group, written in place, rows contiguous or, in all of them, columns; None
            allocates. Quantized: a BlockScaledTensor a group, whose data and scale are written.
        out_dtype: float16, bfloat16, float32, or the name of a format, "nvfp4", "mxfp4", "mxfp8_e4m3" or "mxfp8_e5m2", of FP8
            "fp8_1x128": results quantized for the next layer, as of ``grouped_gemm``.
        out_global_scale: with "nvfp4", one factor a group as of ``quantize``, float32 [G] on the operands' device, or
            numbers.
        scale_layout: "blocked" or "rowmajor".
        early_weights: as of ``grouped_gemm``.
        backend: as of ``grouped_gemm``.
        config: tile shape and pipeline depths; None takes what ``tune`` found for the problem, else chooses by estimate.

    Returns:
        C, a tensor a group. Both products accumulate in fp32; factors, activation and product are fp32, with the GPU's
        approximate exponential and reciprocal (``reference.grouped_dual_gemm_reference`` bounds the error); one rounding
        to ``out_dtype``, to nearest even. Quantized a BlockScaledTensor a group: what ``formats.quantize`` makes of the fp32
        results, with "nvfp4" an NVFP4Tensor; padding rows of the scales are not written.

    Example:
        >>> a, gate, up = ([quantize(torch.randn(rows, 512)) for rows in group] for group in ((40, 7), (256,) * 2, (256,) * 2))
        >>> data, scales = ([[getattr(x, name) for x in side] for side in (a, gate, up)] for name in ("data", "scale"))
        >>> [tuple(h.shape) for h in grouped_dual_gemm(*data, *scales)]
        [(40, 256), (7, 256)]

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: no kernel for the GPU. ConfigError: ``config`` cannot be built.
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
        """The task, and what it writes."""
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
    """Factors of both products: alphas times global scales, of ``a`` and of the weights, of which ``b1`` may have both."""
    of_a, *of_weights = factors
    if all(factor is None for factor in factors):
        return alphas
    first, second = of_weights[0], of_weights[0] if has_both else of_weights[1]
    return times(alphas[0], of_a, first), times(alphas[1], of_a, second)


def _traced(operands, alphas, sizes, choices, out, out_dtype, global_scale, config, settings) -> Any:
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
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
    """``C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T)`` in one launch: a SwiGLU layer's first half.

    ``dual_gemm(x, gate, up)`` takes BlockScaledTensors whole, their scales left out: [M, K] or [L, M, K]. Their global scales are
    factors of the products, beside the alphas, and multiplied on the device. ``a`` may have float16 or bfloat16 values,
    [M, K] or [M, K, L], and no ``a_scale``.

    Args:
        a: [M, K/2] or [M, K/2, L], operands and scales otherwise as in :func:`grouped_dual_gemm`.
        b1, b2: [N, K/2] or [N, K/2, L].
        a_scale: of one batch as in :func:`grouped_dual_gemm`; of L: [L, rm, rk, 32, 4, 4], the (32, 4, rm, 4, rk, L) view,
            or [M, K/16, L] with ``scale_layout="rowmajor"``.
        b1_scale, b2_scale: the same of the weights.
        alpha1, alpha2: a factor for each product: a number, or float32 on the operands' device: one element, or [L].
        a_format, b_format, activation, limit, weight_layout, out_dtype, scale_layout, early_weights, backend, config: as of
            :func:`grouped_dual_gemm`.
        out: [M, N] or [M, N, L], written in place, or quantized a BlockScaledTensor; None allocates.
        out_global_scale: with "nvfp4": a number, or a tensor of one element, for all batches.

    Returns:
        C, [M, N], or [M, N, L] where ``a`` has batches; rounded as in :func:`grouped_dual_gemm`. Quantized
        a BlockScaledTensor of [M, N] or [L, M, N], as of ``gemm``.

    Example:
        >>> x, gate, up = (quantize(torch.randn(rows, 512)) for rows in (40, 256, 256))
        >>> dual_gemm(x.data, gate.data, up.data, x.scale, gate.scale, up.scale).shape
        torch.Size([40, 256])

    Raises:
        As :func:`grouped_dual_gemm`.
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
        """Of a group a batch: lists of a and of a_scale, weights, a list of outputs; and what is written."""
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
        """The task, and what it writes."""
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
    """One of the operands, each of which is a tensor or a list; on the CPU an empty one where there is none."""
    for side in sides:
        for tensor in side if isinstance(side, list | tuple) else (side,):
            if isinstance(tensor, torch.Tensor):
                return tensor
    return torch.empty(0)


def _vector(factor: Any) -> Any:
    """A tensor without dimensions as [1]."""
    return factor.reshape(1) if isinstance(factor, torch.Tensor) and factor.ndim == 0 else factor

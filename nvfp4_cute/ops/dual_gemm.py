"""dual_gemm and grouped_dual_gemm: C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T) over NVFP4 operands."""

from collections.abc import Sequence
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_scaled import ScaleLayout, check_is_tensor
from nvfp4_cute.formats.scale_layout import as_blocked_batches
from nvfp4_cute.launch import prepared
from nvfp4_cute.operands.list_form import check_dual_operands
from nvfp4_cute.ops.batches import (
    as_alphas,
    check_batched_shapes,
    one_factor,
    quantized_result,
    split_batches,
    split_quantized,
)
from nvfp4_cute.ops.device_checks import check_dual_device_groups
from nvfp4_cute.ops.repeated import keep_list, keep_task
from nvfp4_cute.ops.results import as_results, flat_outputs, global_scales, new_outputs
from nvfp4_cute.ops.traced import new_group_results, refuse_config, refuse_gradients
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import NVFP4, Activation, DualWeights, OutDtype


def grouped_dual_gemm(
    a: Any,
    b1: Any,
    b2: Any,
    a_scale: Any,
    b1_scale: Any,
    b2_scale: Any,
    alpha1: torch.Tensor | Sequence[float] | None = None,
    alpha2: torch.Tensor | Sequence[float] | None = None,
    *,
    offs: torch.Tensor | None = None,
    masked_m: torch.Tensor | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: DualWeights = "separate",
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | Sequence[float] | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """Gate every group's up projection in one launch: ``C_g = activation(alpha1_g A_g B1_g^T) * (alpha2_g A_g B2_g^T)``.

    The first half of a SwiGLU layer, for every expert: ``b1`` is the gate's weights, ``b2`` the up projection's. Both
    products stay on the chip until they are combined; nothing is written but C. Groups are told in the three forms of
    ``grouped_gemm``; below, what is said of a group's tensors is said of the list form.

    Args:
        a: a tensor a group: uint8 or float4_e2m1fn_x2 [M_g, K_g/2] (or [M_g, K_g/2, 1]), K-major, two e2m1 values a byte,
            the low nibble first; K a multiple of 16, rows a multiple of 16 bytes apart. M_g may be 0.
        b1, b2: the same of the weights: [N_g, K_g/2] each; ragged and masked: [G, N, K/2].
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked (flat, [rm, rk, 32, 4, 4],
            or the (32, 4, rm, 4, rk, 1) view, zero-copy), or [M_g, K_g/16] with ``scale_layout="rowmajor"`` (converted,
            which allocates).
        b1_scale, b2_scale: the same of the weights.
        alpha1, alpha2: a factor a group for each product: float32 [G] on the operands' device, or numbers, or None for 1.
        offs, masked_m: of the ragged and the masked form, with operands, scales, ``out`` and results as of ``grouped_gemm``.
        activation: "silu": x * sigmoid(x). "gelu_tanh": x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2.
            "relu2": max(x, 0)^2. "swiglu_oai", of gpt-oss: x * sigmoid(1.702 x), times the other product plus 1.
        limit: cuts the gate's product, after alpha1, to at most this, and the other, after alpha2, to this on both sides.
        weight_layout: "separate", or how ``b1`` [2 N, K/2] and ``b1_scale`` hold the rows of both, ``b2`` and ``b2_scale``
            being None: "concatenated", [gate; up], 2 N a multiple of 256; "interleaved_64_up_first", 64 rows of up, 64 of
            the gate and so on; "interleaved_32_gate_first", 32 rows of the gate, 32 of up and so on. The weights are
            read as they lie, without a copy.
        out: [M_g, N_g] (or [M_g, N_g, 1]) a group, written in place, rows contiguous or, in all of them, columns; None
            allocates. With "nvfp4": an NVFP4Tensor a group, whose data and scale are written.
        out_dtype: float16, bfloat16, float32, or "nvfp4": results quantized for the next layer, N a multiple of 16.
        out_global_scale: with "nvfp4", one factor a group as of ``quantize``, float32 [G] on the operands' device, or
            numbers.
        scale_layout: "blocked" or "rowmajor".
        backend: as of ``grouped_gemm``.
        config: tile shape and pipeline depths; None takes what ``tune`` found for the problem, else chooses by estimate.

    Returns:
        C, a tensor a group. Both products accumulate in fp32; factors, activation and product are fp32, with the GPU's
        approximate exponential and reciprocal (``reference.grouped_dual_gemm_reference`` bounds the error); one rounding
        to ``out_dtype``, to nearest even. With "nvfp4" an NVFP4Tensor a group: what ``formats.quantize`` makes of the fp32
        results; padding rows of the scales are not written.

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
    if torch.compiler.is_compiling():
        given = (a, b1, a_scale, b1_scale) + (() if b2 is None else (b2, b2_scale))
        choices = (activation, limit, weight_layout)
        return _traced(given, (alpha1, alpha2), (offs, masked_m), choices, out, out_dtype, out_global_scale,
                       config, (scale_layout, backend))  # fmt: skip
    is_list, is_quantized = offs is None and masked_m is None, out_dtype == NVFP4
    sizes = masked_m if offs is None else offs
    factors = global_scales(out_global_scale, a if is_list else sizes)
    first: Sequence[Any] = (a, b1, a_scale, b1_scale)
    second: Sequence[Any] = () if b2 is None else (b2, b2_scale)
    # Concatenated weights are split on the way, and a factor that only one product has is made up for the other.
    is_unusual = (alpha1 is None) != (alpha2 is None) or weight_layout == "concatenated"
    counts: tuple[int, ...] = (offs is None, masked_m is None, b2 is None)
    try:
        outs = [] if out is None else flat_outputs(out, is_list, is_quantized)
        if is_list:
            counts += tuple(len(side) for side in (*first, *second))
            first, second = ([t for side in sides for t in side] for sides in (first, second))
        inputs = [
            *first,
            *([] if is_list else [sizes]),
            *_given(alpha1),
            *second,
            *_given(alpha2),
            *_given(factors),
        ]
    except (TypeError, AttributeError):  # the checks will say what is wrong
        is_unusual, inputs, outs = True, [], []
    tensors: list[Any] = [None] if is_unusual else inputs + outs
    key, call = prepared.lookup(
        tensors,
        "dual",
        counts,
        alpha1 is None,
        alpha2 is None,
        factors is None,
        len(outs),
        (activation, limit, weight_layout),
        out_dtype,
        scale_layout,
        backend,
        config,
    )
    launched = None if call is None else call.try_launch(inputs, outs)
    if launched is not None:
        return as_results(launched, is_list, is_quantized, factors)
    if not is_list:
        task, outs = check_dual_device_groups(
            a, b1, b2, a_scale, b1_scale, b2_scale, offs, masked_m, alpha1, alpha2, out, out_dtype, scale_layout,
            backend, config, activation=activation, limit=limit, weight_layout=weight_layout,
            out_global_scale=factors,
        )  # fmt: skip
        backends.run_task(backend, task)
        keep_task(key, backend, task, inputs, outs)
        return as_results(outs, False, is_quantized, factors)
    problem, operands = check_dual_operands(
        a,
        b1,
        b2,
        a_scale,
        b1_scale,
        b2_scale,
        alpha1,
        alpha2,
        out,
        activation=activation,
        limit=limit,
        weight_layout=weight_layout,
        out_dtype=out_dtype,
        out_global_scale=factors,
        scale_layout=scale_layout,
    )
    backends.run_problem(backend, problem, operands, config)
    outs = outs or new_outputs(problem, operands)
    keep_list(key, backend, problem, operands, config, inputs, outs)
    return as_results(outs, True, is_quantized, factors)


def _given(x: Any) -> list[Any]:
    return [] if x is None else [x]


def _traced(operands, alphas, sizes, choices, out, out_dtype, global_scale, config, settings) -> Any:
    """The call as the custom op (``ops.library``) that a traced graph keeps; the graph allocates the results."""
    refuse_config(config)
    is_list, is_quantized = all(x is None for x in sizes), out_dtype == NVFP4
    a, b1 = operands[:2]
    groups: Any = a if is_list else next(x for x in sizes if x is not None)
    *alphas, factors = (global_scales(x, groups) for x in (*alphas, global_scale))
    if out is not None:
        outs = flat_outputs(out, is_list, is_quantized)
    else:
        parts = 1 if choices[2] == "separate" else 2
        outs = new_group_results(
            a, b1, None if is_list else len(groups), parts, sizes[0] is not None, out_dtype
        )
    flat = [tensor for group in operands for tensor in group] if is_list else list(operands)
    refuse_gradients(*flat, *alphas, factors)
    torch.ops.nvfp4_cute.grouped_dual_gemm_out(
        flat, len(a) if is_list else None, *alphas, *sizes, *choices, outs,
        None if is_quantized else out_dtype, factors, *settings,
    )  # fmt: skip
    return as_results(outs, is_list, is_quantized, factors)


def dual_gemm(
    a: torch.Tensor,
    b1: torch.Tensor,
    b2: torch.Tensor | None,
    a_scale: torch.Tensor,
    b1_scale: torch.Tensor,
    b2_scale: torch.Tensor | None,
    alpha1: torch.Tensor | float | None = None,
    alpha2: torch.Tensor | float | None = None,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    weight_layout: DualWeights = "separate",
    out: Any = None,
    out_dtype: OutDtype = torch.bfloat16,
    out_global_scale: torch.Tensor | float | None = None,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> Any:
    """``C = activation(alpha1 * A @ B1^T) * (alpha2 * A @ B2^T)`` in one launch: a SwiGLU layer's first half.

    Args:
        a: [M, K/2] or [M, K/2, L], operands and scales otherwise as in :func:`grouped_dual_gemm`.
        b1, b2: [N, K/2] or [N, K/2, L].
        a_scale: of one batch as in :func:`grouped_dual_gemm`; of L: [L, rm, rk, 32, 4, 4], the (32, 4, rm, 4, rk, L) view,
            or [M, K/16, L] with ``scale_layout="rowmajor"``.
        b1_scale, b2_scale: the same of the weights.
        alpha1, alpha2: a factor for each product: a number, or float32 on the operands' device: one element, or [L].
        activation, limit, weight_layout, out_dtype, scale_layout, backend, config: as of :func:`grouped_dual_gemm`.
        out: [M, N] or [M, N, L], written in place, or with "nvfp4" an NVFP4Tensor; None allocates.
        out_global_scale: with "nvfp4": a number, or a tensor of one element, for all batches.

    Returns:
        C, [M, N], or [M, N, L] where ``a`` has batches; rounded as in :func:`grouped_dual_gemm`. With "nvfp4" an
        NVFP4Tensor of [M, N] or [L, M, N], as of ``gemm``.

    Example:
        >>> x, gate, up = (quantize(torch.randn(rows, 512)) for rows in (40, 256, 256))
        >>> dual_gemm(x.data, gate.data, up.data, x.scale, gate.scale, up.scale).shape
        torch.Size([40, 256])

    Raises:
        As :func:`grouped_dual_gemm`.
    """
    options: dict[str, Any] = {
        "activation": activation,
        "limit": limit,
        "weight_layout": weight_layout,
        "out_dtype": out_dtype,
        "scale_layout": scale_layout,
        "backend": backend,
        "config": config,
    }
    operands = {"a": a, "b1": b1} | ({} if b2 is None else {"b2": b2})
    operands |= {} if out is None or out_dtype == NVFP4 else {"out": out}
    for name, tensor in operands.items():
        if isinstance(tensor, list | tuple):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; pass a torch.Tensor, or call grouped_dual_gemm"
            )
        check_is_tensor(name, tensor)
    check_batched_shapes(operands, "a [M, K/2], b1 and b2 [N, K/2] and out [M, N]")
    batches = a.shape[2] if a.ndim == 3 else 1
    n = len(b1) if weight_layout == "separate" else len(b1) // 2
    lead = (*a.shape[2:], len(a))
    factors = one_factor("out_global_scale", out_global_scale, batches, a.device)
    result = out
    if out_dtype == NVFP4:
        result = quantized_result(out, lead, n, a.device)
    elif result is None:
        result = torch.empty((*lead, n), dtype=out_dtype, device=a.device)
        result = result.permute(1, 2, 0) if a.ndim == 3 else result
    grouped_dual_gemm(
        split_batches(a),
        split_batches(b1),
        b2 if b2 is None else split_batches(b2),
        _scale_batches("a_scale", a_scale, a, scale_layout),
        _scale_batches("b1_scale", b1_scale, b1, scale_layout),
        b2_scale
        if b2 is None or b2_scale is None
        else _scale_batches("b2_scale", b2_scale, b2, scale_layout),
        as_alphas("alpha1", alpha1, batches),
        as_alphas("alpha2", alpha2, batches),
        out=split_quantized(result) if out_dtype == NVFP4 else split_batches(result),
        out_global_scale=factors,
        **options,
    )
    if out_dtype != NVFP4:
        return result
    shared = None if factors is None else factors[:1]
    return as_results([result.data, result.scale], True, True, shared)[0]


def _scale_batches(
    name: str, scale: torch.Tensor, operand: torch.Tensor, layout: ScaleLayout
) -> list[torch.Tensor]:
    """A view of every batch of ``operand``'s scales."""
    if operand.ndim == 2 or operand.shape[2] == 1:
        return [scale]
    if layout == "rowmajor":
        if scale.ndim != 3 or scale.shape[2] != operand.shape[2]:
            raise ValueError(
                f"{name} has shape {list(scale.shape)}; expected [rows, K/16, {operand.shape[2]}] (row-major)"
            )
        return split_batches(scale)
    rows, row_bytes, batches = operand.shape
    try:
        return list(as_blocked_batches(scale, rows, 2 * row_bytes, batches))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
